"""A measurement as a command: its options, what it measures, its table, and its record.

    python -m benchmarks NAME …

runs the `MEASUREMENT` of the module of this name.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from benchmarks.adapters.loop import versions
from benchmarks.measures import figure
from benchmarks.models import CACHE, DEMO, SHAPES
from benchmarks.processes import ROOT, SystemFailure
from benchmarks.records import Record, commit, machine_record, now

RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("headrace-server", "grpcio", "protobuf", "torch", "transformers")
_NOT_TOLD = ("command", "list", "output", "cache", "quick", "resume")
MODULES = {"gpu": "gpu.command", "languages": "languages.turns", "proxies": "proxies.trying"}
"""Where measurements of several files are."""
System = TypeVar("System")
Turns = dict[str, list[Mapping[str, float]]]
"""The figures of each system's turns."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option: its name without dashes, and what `add_argument` is told of it."""

    name: str
    more: Mapping[str, Any]


def option(name: str, default: Any, text: str = "", **more: Any) -> Option:
    """Return an option of the type of its default. more: for `add_argument`."""
    if isinstance(default, bool):
        more = {"action": "store_true", **more}
    elif not {"type", "nargs", "action"} & more.keys() and default is not None:
        more = {"type": type(default), **more}
    return Option(name, {"default": default, "help": text, **more})


MODEL = option("model", str(DEMO), "a model's directory")
NAMED_MODEL = option("model", "demo", f"demo, {', '.join(SHAPES)}, or a directory")
DTYPE = option("dtype", "float32", choices=["float32", "bfloat16"])
THREADS = option("threads", len(os.sched_getaffinity(0)))
MODELS = option("cache", CACHE, f"for models (default {CACHE})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What is measured, and how it is told.

    Attributes:
        measure: measures; it is given the options, and the record to put results in. Its module's
            text describes it, and the help has the first line.
        name: the kind of its record, and the name of its file; empty: its module's.
        table: returns a record as Markdown.
        render: the same for a document, given the name of the record's file. If there is neither,
            what is put in the record is printed instead.
        options: its options. One of the name "output" replaces the usual one.
        quick: the values of options with --quick, for a look; empty: there is no such option.
        packages: whose versions the record has, besides the usual ones.
        resumes: the options, and "commit", that must be the same for --resume to go on with a
            record; empty: there is no such option.
    """

    measure: Callable[[argparse.Namespace, Record], None]
    name: str = ""
    table: Callable[[Mapping[str, Any]], str] | None = None
    render: Callable[[Mapping[str, Any], str], str] | None = None
    options: Sequence[Option] = ()
    quick: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ()
    resumes: Sequence[str] = ()

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the options. words: None for those of this process.

        One that takes any number of words, and by default none, is named without dashes.
        """
        about = self.measure.__globals__["__doc__"]  # type: ignore[attr-defined]
        parser = argparse.ArgumentParser(description=about.partition("\n")[0])
        for one in self.options:
            dashes = "" if one.more.get("nargs") == "*" and not one.more["default"] else "--"
            parser.add_argument(dashes + one.name.replace("_", "-"), **one.more)
        if not any(one.name == "output" for one in self.options):
            default = RESULTS / f"{self.kind}.json"
            parser.add_argument("--output", type=Path, default=default, help="the record's file")
        if self.quick:
            parser.add_argument("--quick", action="store_true", help="a little of it, for a look")
        if self.resumes:
            parser.add_argument("--resume", action="store_true", help="go on with the record")
        found = parser.parse_args(words)
        for name, value in self.quick.items() if self.quick and found.quick else ():
            setattr(found, name, value)
        return found

    def run(self, words: Sequence[str] | None = None) -> Mapping[str, Any]:
        """Run it as a command of its own. Returns the record's content. Ends the process if a
        system fails.
        """
        if words is None:  # else the signals are the caller's
            end_by_signals()
        options = self.parse(words)
        began = time.monotonic()
        about = {
            "date": now(),
            "commit": commit(),
            "machine": machine_record(),
            "load_average": list(os.getloadavg()),
            "versions": versions(*_PACKAGES, *self.packages),
            "options": {
                name: _told(value) for name, value in vars(options).items() if name not in _NOT_TOLD
            },
        }
        is_told = self.table is None and self.render is None
        try:
            record = Record(options.output, self.kind, about, is_told=is_told)
            if self.resumes and options.resume and not record.resume(self.resumes):
                sys.exit(f"{record.path} is of another commit, or of other options")
            self.measure(options, record)
        except SystemFailure as failure:
            sys.exit(f"{self.kind}: {failure}")
        if self.table is not None:
            print(f"\n{self.table(record.data)}\n")
        if self.render is not None:
            name = f"{self.kind}.json" if record.path is None else record.path.name
            print(f"\n{self.render(record.data, name)}\n")
        record.save()
        if record.path is not None:
            print(f"written to {record.path}; {time.monotonic() - began:.0f} s")
        return record.data

    @property
    def kind(self) -> str:
        return self.name or self.measure.__module__.rpartition(".")[2]


def module_of(name: str) -> ModuleType:
    """Import the module of a measurement: its command, and the `render` of its records."""
    return importlib.import_module(f"benchmarks.{MODULES.get(name, name)}")


def in_turns(systems: Sequence[System], count: int) -> Iterator[tuple[int, System]]:
    """Yield each system in each turn, with the turn's number. Turn 0 warms up and does not count.
    Each turn begins with another system, since a machine's speed drifts.
    """
    for number in range(count + 1):
        yield from ((number, one) for one in rotated(systems, number))


def rotated(systems: Sequence[System], number: int) -> Sequence[System]:
    """Return the order in which systems have the turn of this number."""
    shift = number % len(systems)
    return (*systems[shift:], *systems[:shift])


def paired(
    names: Sequence[str],
    count: int,
    run: Callable[[str], Mapping[str, float]],
    save: Callable[[Turns], None] = lambda turns: None,
) -> Turns:
    """Let systems take turns (`in_turns`), so many of each, and print each turn's figures. Returns
    those that count. save: is given what there is so far, after each turn that counts.
    """
    turns: Turns = {name: [] for name in names}
    for number, name in in_turns(names, count):
        found = run(name)
        if number:
            turns[name].append(found)
            told = ", ".join(f"{what} {figure(value)}" for what, value in found.items())
            print(f"  turn {number}: {name}: {told}", flush=True)
            save(turns)
    return turns


def end_by_signals() -> None:
    """Let SIGTERM and SIGHUP end this process as an exception does, so that it ends its systems."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))


def _told(value: object) -> object:
    """Return an option's value for the record, without the folders of this machine."""
    if isinstance(value, Path) or (isinstance(value, str) and os.sep in value):
        return Path(value).name
    if isinstance(value, list | tuple):
        return [_told(one) for one in value]
    return value
