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
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.adapters.loop import versions
from benchmarks.floors import shape_of
from benchmarks.gpu import predict
from benchmarks.gpu.checking import bars, failures, lacking, pytest_checks, quick_checks
from benchmarks.gpu.parts import DTYPE, MEASURING, Measuring, Session
from benchmarks.gpu.record import (
    COMPLETE,
    FAILED,
    LEFT_OUT,
    OUT_OF_TIME,
    QUICK,
    Part,
    record_name,
)
from benchmarks.gpu.sizes import CPU_SIZES, GPU_SIZES, Sizes
from benchmarks.gpu.tables import predictions, render, render_part  # noqa: F401 - `report` renders
from benchmarks.models import SHAPES
from benchmarks.processes import System, SystemFailure
from benchmarks.records import Record, commit, read_record
from benchmarks.rig.bench import Bench, OutOfTime, TimeLimit, machine_process, say
from benchmarks.rig.measurement import MODELS, RESULTS, Measurement, option

CHECKS = "checks"
PARTS = (CHECKS, *MEASURING)
LEAST_S = 20.0
"""If less time is left, nothing is begun."""


def measure(options: argparse.Namespace, record: Record) -> None:
    """Run the command. Raises SystemFailure if the device does not exist, or a check or a part has
    failed.
    """
    names, sizes = _names(options), _sizes(options)
    folder, record.path = record.path, None
    if options.predict:
        _predict(folder or RESULTS, sizes)
        return
    about = {"device": options.device, "dtype": DTYPE, "threads": 1}
    with machine_process(options.cache / "logs" / "machine.log", **about) as machine:
        device = {**machine.ready["settings"], "driver": _driver(options.device)}
        default = RESULTS / "local" if options.device == "cpu" else RESULTS
        record.path = (folder or default) / record_name(device)
        record.go_on(device=device)
        record.data.setdefault("parts", {})
        say(f"{device['name']}; the record is {record.path}")
        if options.device != "cpu":
            for line in lacking(names):
                say(f"not here: {line}")
        provenance = {
            "commit": options.commit or commit(),
            "versions": {
                "python": platform.python_version(),
                **versions("transformers", "triton"),
                **machine.ready["versions"],
            },
        }
        run = Run(options, record, machine, sizes, provenance)
        failed = run.check(is_asked=CHECKS in names)
        states = {
            name: run.measure(name, MEASURING[name], failed) for name in names if name != CHECKS
        }
    broken = [*([CHECKS] if failed else []), *(name for name in states if states[name] == FAILED)]
    if broken:
        raise SystemFailure(f"{', '.join(broken)}: failed; the record says why")


def _predict(folder: Path, sizes: Sizes) -> None:
    """Print estimates for the devices that have records, or for an H200 if none has."""
    records = [read_record(path) for path in sorted(folder.glob("gpu-*.json"))]
    known = [one for one in records if one is not None and one["device"]["type"] == "cuda"]
    if not known:
        print("\n".join(predictions(sizes, predict.H200, {})))
    for record in known:
        print(f"{record['device']['name']}\n")
        print("\n".join(predictions(sizes, predict.rates_of(record), predict.steps_of(record))))


def _names(options: argparse.Namespace) -> list[str]:
    """Return the parts in order. Raises SystemFailure if there is no such part."""
    if options.part == "all":
        # With one model for all, a part that differs by its model alone would be run twice.
        again = ("decode-4b", "decode-moe") if options.model else ()
        return [name for name in PARTS if name not in again]
    asked = options.part.split(",")
    for name in asked:
        if name not in PARTS:
            raise SystemFailure(f"{name!r} is no part; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in asked]


def _sizes(options: argparse.Namespace) -> Sizes:
    """Return how much is measured. Raises SystemFailure if it is nothing."""
    sizes = CPU_SIZES if options.device == "cpu" else GPU_SIZES
    if options.batches is not None:
        batches = tuple(int(text) for text in options.batches.split(","))
        if min(batches) < 1:
            raise SystemFailure("--batches: each must be at least 1")
        sizes = dataclasses.replace(sizes, batches=batches)
    if options.turns is not None:
        if options.turns < 1:
            raise SystemFailure("--turns must be at least 1")
        sizes = dataclasses.replace(sizes, turns=options.turns)
    return sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Runs the parts of one call.

    Attributes:
        machine: the process that measures its rates.
        provenance: the sources' commit and the packages' versions.
    """

    options: argparse.Namespace
    record: Record
    machine: System
    sizes: Sizes
    provenance: dict[str, Any]

    def check(self, *, is_asked: bool) -> list[dict[str, Any]]:
        """Run the quick checks unless the record says that these sources passed, and the others if
        they are asked for. Returns the rows of those that failed.
        """
        part = self._part(CHECKS, model=None, dtype="float32")
        has_passed = part.is_current() and part.data["state"] in (COMPLETE, OUT_OF_TIME, QUICK)
        if has_passed and not is_asked:
            say("checks: passed before, of these sources")
            return []
        say(CHECKS)
        began, seconds = time.monotonic(), 60.0 * self.options.minutes
        logs, device = self.options.cache / "logs", self.options.device
        part.begin(resume=False)
        quick_checks(part, device, logs, seconds)
        if is_asked:
            pytest_checks(part, device, logs, seconds - (time.monotonic() - began))
        _show(part)
        return failures(part)

    def measure(self, name: str, spec: Measuring, failed: list[dict[str, Any]]) -> str:
        """Run a part unless a check that it needs has failed. Returns its state."""
        options, sizes = self.options, spec.sizes(self.sizes)
        model: str = options.model or spec.model
        shape = shape_of(SHAPES[model])
        part = self._part(
            name,
            model=model,
            dtype=DTYPE,
            weight_bytes=shape.weight_bytes(DTYPE),
            kv_bytes_per_token=shape.kv_bytes(DTYPE),
            sizes=json.loads(json.dumps(dataclasses.asdict(sizes))),  # as the record has them
        )
        if options.resume and part.is_current() and part.data["state"] == COMPLETE:
            say(f"{name}: complete before")
            return COMPLETE
        say(f"{name}: {spec.meaning} ({model})")
        part.begin(resume=options.resume)
        if (why := bars(spec.needs, failed)) is not None:
            say(f"  not measured: {why}")
            part.leave_out(name, why)
            part.end(LEFT_OUT)
            return LEFT_OUT
        seconds = min(60.0 * options.minutes, spec.most_s)
        about = {"model": model, "build": model, "device": options.device, "dtype": DTYPE}
        bench = Bench(
            machine=self.machine,
            logs=options.cache / "logs",
            about={**about, "threads": 1, "cache": ""},
            vocab_size=shape.vocab_size,
            say=lambda line: say(f"  {line}"),
            time=TimeLimit(seconds, LEAST_S),
            environment={"HF_HUB_OFFLINE": "1"},
            log=f"{name}-",
        )
        device, cache = options.device, options.cache
        state = COMPLETE
        try:
            spec.run(Session(part, bench, model, shape, device, sizes, cache))
            if not part.data["rows"]:
                state = LEFT_OUT
        except OutOfTime as late:
            part.leave_out(str(late), f"out of time ({seconds / 60.0:g} minutes)")
            state = OUT_OF_TIME
        except SystemFailure as failure:
            # A system that is silent until the part's time is over has not failed.
            state = OUT_OF_TIME if bench.time.left_s() <= 0 else FAILED
            part.leave_out("the rest", str(failure).splitlines()[0])
            say(f"  {failure}")
        finally:
            bench.close()
        part.end(state)
        _show(part)
        return state

    def _part(self, name: str, **about: Any) -> Part:
        return Part(self.record, name, {**self.provenance, **about})


def _show(part: Part) -> None:
    say(f"\n{render_part(part.name, part.data)}\n")


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


MEASUREMENT = Measurement(
    name="gpu",
    measure=measure,
    options=(
        option("part", "all", f"all, or of {', '.join(PARTS)}, with commas"),
        option("minutes", 8.0, "for each part: what is not done by then is left out (default 8)"),
        option(
            "output",
            None,
            "the record's folder (default benchmarks/results, of a CPU benchmarks/results/local)",
            type=Path,
        ),
        option("device", "cuda", "cuda, cuda:N, or cpu (default cuda)"),
        option(
            "model", None, "in place of every part's own (random weights)", choices=sorted(SHAPES)
        ),
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
    ),
)
