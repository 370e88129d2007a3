"""The command: checks, then parts, each with a time limit. The record is saved continuously.

python -m benchmarks gpu                          everything
python -m benchmarks gpu --part smoke             the first ten minutes with a device
python -m benchmarks gpu --predict                what steps should take; needs no device
python -m benchmarks gpu --part checks,floors     some of it; the record keeps the rest
python -m benchmarks gpu --device cpu --model tiny    whether the command itself works
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.adapters.loop import versions
from benchmarks.floors import shape_of
from benchmarks.gpu import predict
from benchmarks.gpu.checking import bars, failures, lacking, pytest_checks, quick_checks
from benchmarks.gpu.parts import MEASURING, Measuring
from benchmarks.gpu.record import (
    COMPLETE,
    FAILED,
    LEFT_OUT,
    OUT_OF_TIME,
    QUICK,
    Part,
    Provenance,
    Record,
)
from benchmarks.gpu.session import CPU_SIZES, DTYPE, GPU_SIZES, OutOfTime, Session, Sizes
from benchmarks.gpu.tables import predictions, render_part
from benchmarks.models import SHAPES
from benchmarks.processes import System, SystemFailure
from benchmarks.records import commit, read_record
from benchmarks.rig.measurement import MODELS, RESULTS, end_by_signals, option
from benchmarks.rig.systems import MACHINE, Systems

CHECKS = "checks"
PARTS = (CHECKS, *MEASURING)


OPTIONS = (
    option("part", "all", f"all, or of {', '.join(PARTS)}, with commas"),
    option("minutes", 8.0, "for each part: what is not done by then is left out (default 8)"),
    option(
        "output",
        None,
        "the record's folder (default benchmarks/results, of a CPU benchmarks/results/local)",
        type=Path,
    ),
    option("device", "cuda", "cuda, cuda:N, or cpu (default cuda)"),
    option("model", None, "in place of every part's own (random weights)", choices=sorted(SHAPES)),
    option("batches", None, "requests at once of the decode parts, with commas"),
    option("turns", None, "turns that count (default 3, on a CPU 1)", type=int),
    option(
        "predict",
        False,
        "no measurement: estimates of what steps take, beside the floor and the records",
    ),
    option("resume", False, "keep what the record has of the same sources"),
    option("commit", None, "what the sources are, where there is no git repository to ask"),
    MODELS,
)
"""The command's options."""


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Ends the process with exit code 1 if a check or a part has failed."""
    try:
        names = _names(arguments)
        sizes = _sizes(arguments)
    except ValueError as error:
        sys.exit(f"benchmarks gpu: {error}")
    if arguments.predict:
        _predict(arguments.output or RESULTS, sizes)
        return
    end_by_signals()
    try:
        has_failed = Run(arguments, names, sizes, lambda line: print(line, flush=True)).run()
    except (SystemFailure, ValueError) as failure:
        sys.exit(f"benchmarks gpu: {failure}")
    if has_failed:
        sys.exit(1)


def _predict(folder: Path, sizes: Sizes) -> None:
    """Print estimates for the devices that have records, or for an H200 if none has."""
    records = [read_record(path) for path in sorted(folder.glob("gpu-*.json"))]
    known = [one for one in records if one is not None and one["device"]["type"] == "cuda"]
    if not known:
        print("\n".join(predictions(sizes, predict.H200, {})))
    for record in known:
        print(f"{record['device']['name']}\n")
        print("\n".join(predictions(sizes, predict.rates_of(record), predict.steps_of(record))))


def _names(arguments: argparse.Namespace) -> list[str]:
    """Return the parts in order. Raises ValueError."""
    if arguments.part == "all":
        # With one model for all, a part that differs by its model alone would be run twice.
        return [name for name in PARTS if not (arguments.model and name == "decode-4b")]
    asked = arguments.part.split(",")
    for name in asked:
        if name not in PARTS:
            raise ValueError(f"{name!r} is no part; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in asked]


def _sizes(arguments: argparse.Namespace) -> Sizes:
    """Return how much is measured. Raises ValueError."""
    sizes = CPU_SIZES if arguments.device == "cpu" else GPU_SIZES
    if arguments.batches is not None:
        batches = tuple(int(text) for text in arguments.batches.split(","))
        if min(batches) < 1:
            raise ValueError("--batches: each must be at least 1")
        sizes = dataclasses.replace(sizes, batches=batches)
    if arguments.turns is not None:
        if arguments.turns < 1:
            raise ValueError("--turns must be at least 1")
        sizes = dataclasses.replace(sizes, turns=arguments.turns)
    return sizes


class Run:
    """Runs the parts of one call."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        names: list[str],
        sizes: Sizes,
        say: Callable[[str], None],
    ) -> None:
        self._arguments = arguments
        self._names = names
        self._sizes = sizes
        self._say = say
        self._device: str = arguments.device
        self._seconds = 60.0 * arguments.minutes
        self._logs: Path = arguments.cache / "logs"

    def run(self) -> bool:
        """Run the parts. Returns whether one has failed. Raises SystemFailure if the device does
        not exist.
        """
        with Systems(self._logs) as systems:
            machine = systems.start_machine(MACHINE, device=self._device, dtype=DTYPE, threads=1)
            record = self._record(machine)
            self._say(f"{record.data['device']['name']}; the record is {record.path}")
            if self._device != "cpu":
                for line in lacking(self._names):
                    self._say(f"not here: {line}")
            failed = self._check(record)
            states = [
                self._part(record, systems, name, MEASURING[name], failed)
                for name in self._names
                if name != CHECKS
            ]
        return bool(failed) or FAILED in states

    def _record(self, machine: System) -> Record:
        device = {**machine.ready["settings"], "driver": _driver(self._device)}
        found = {
            "python": platform.python_version(),
            **versions("transformers", "triton"),
            **machine.ready["versions"],
        }
        provenance = Provenance(self._arguments.commit or commit(), found)
        default = RESULTS / "local" if self._device == "cpu" else RESULTS
        return Record(self._arguments.output or default, device, provenance)

    def _check(self, record: Record) -> list[dict[str, Any]]:
        """Run the requested checks, and the quick ones unless the record says that these sources
        passed. Returns the rows of those that failed.
        """
        about = {"model": None, "dtype": "float32"}
        has_passed = record.is_current(CHECKS, about) and record.state(CHECKS) in (
            COMPLETE,
            OUT_OF_TIME,
            QUICK,
        )
        if CHECKS not in self._names and has_passed:
            self._say("checks: passed before, of these sources")
            return []
        self._say(CHECKS)
        began = time.monotonic()
        part = record.begin(CHECKS, about, resume=False)
        quick_checks(part, self._device, self._logs, self._seconds)
        if CHECKS in self._names:
            left = self._seconds - (time.monotonic() - began)
            pytest_checks(part, self._device, self._logs, left)
        self._show(part)
        return failures(part)

    def _part(
        self,
        record: Record,
        systems: Systems,
        name: str,
        spec: Measuring,
        failed: list[dict[str, Any]],
    ) -> str:
        """Run a part unless a check that it needs has failed. Returns its state."""
        model = self._arguments.model or spec.model
        sizes = spec.sizes(self._sizes)
        shape = shape_of(SHAPES[model])
        about = {
            "model": model,
            "dtype": DTYPE,
            "weight_bytes": shape.weight_bytes(DTYPE),
            "kv_bytes_per_token": shape.kv_bytes(DTYPE),
            "sizes": _as_json(sizes),
        }
        is_done = record.is_current(name, about) and record.state(name) == COMPLETE
        if self._arguments.resume and is_done:
            self._say(f"{name}: complete before")
            return COMPLETE
        self._say(f"{name}: {spec.meaning} ({model})")
        part = record.begin(name, about, resume=self._arguments.resume)
        if (why := bars(spec.needs, failed)) is not None:
            self._say(f"  not measured: {why}")
            part.leave_out(name, why)
            part.end(LEFT_OUT)
            return LEFT_OUT
        session = Session(
            part,
            model=model,
            shape=shape,
            device=self._device,
            sizes=sizes,
            systems=systems,
            seconds=min(self._seconds, spec.most_s),
            say=self._say,
        )
        state = COMPLETE
        try:
            spec.run(session, *([self._arguments.cache] if spec.needs_cache else []))
            if not part.data["rows"]:
                state = LEFT_OUT
        except OutOfTime as late:
            minutes = min(self._seconds, spec.most_s) / 60.0
            part.leave_out(str(late), f"out of time ({minutes:g} minutes)")
            state = OUT_OF_TIME
        except SystemFailure as failure:
            # A system that is silent until the part's time is over has not failed.
            is_late = session.left_s() <= 0
            part.leave_out("the rest", str(failure).splitlines()[0])
            self._say(f"  {failure}")
            state = OUT_OF_TIME if is_late else FAILED
        finally:
            session.close()
        part.end(state)
        self._show(part)
        return state

    def _show(self, part: Part) -> None:
        self._say(f"\n{render_part(part.name, part.data)}\n")


def _as_json(sizes: Sizes) -> dict[str, object]:
    """Convert a value to what a record returns for it after a JSON round trip."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(sizes).items()
    }


def _driver(device: str) -> str | None:
    """Return the version of NVIDIA's driver; None if it is unknown."""
    if device == "cpu":
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(found.stdout.split()), None)
