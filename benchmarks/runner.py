"""A run: systems are loaded once, then take turns on each case; what comes out is one record.

Turn 0 of a case warms up and does not count: the same prompts, few tokens. The machine's rates are
measured before every turn. A system that fails is left out of its case, and the record says so.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.floors import Rates, Shape, ideal, read_shape
from benchmarks.measures import medians, paired_ratio, turn_figures
from benchmarks.plot import draw
from benchmarks.processes import ROOT, System, SystemFailure
from benchmarks.report import FORMAT
from benchmarks.systems import MAX_REQUESTS, SystemSpec
from benchmarks.workloads import Lengths, Load, Workload, make_prompts

WARMUP_TOKENS = 8
MACHINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """A workload and how its requests arrive."""

    workload: Workload
    load: Load

    @property
    def name(self) -> str:
        """Both."""
        return f"{self.workload.name} {self.load.name}"

    def lengths(self) -> list[Lengths]:
        """Its requests."""
        return self.workload.lengths(self.load.count(self.workload))

    def most_at_once(self) -> int:
        """How many of its requests a system may have to run at once."""
        return min(MAX_REQUESTS, self.load.concurrency or len(self.lengths()))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        model_name, model: a checkpoint's name and directory.
        systems: the first is the one that the others are compared with.
        pythons: the interpreter of each system.
        peers: the environments of peers.
        check: how many requests of each system are judged in each case.
        minutes: no turn is begun after so many.
        turn_s: the longest turn, seconds.
        folder: for logs and what adapters make of the model.
    """

    model_name: str
    model: Path
    dtype: str
    threads: int
    cases: list[Case]
    systems: list[SystemSpec]
    pythons: dict[str, str]
    peers: dict[str, Path]
    turns: int
    check: int
    minutes: float | None
    turn_s: float
    folder: Path


@dataclass(slots=True)
class _Found:
    """What a case gave so far."""

    case: Case
    lengths: list[Lengths]
    turns: dict[str, list[dict[str, float]]]
    failures: dict[str, str] = field(default_factory=dict)
    machine: list[dict[str, float]] = field(default_factory=list)
    last: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)


class Runner:
    """Carries a plan out."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._shape = read_shape(plan.model)
        self._systems: dict[str, System] = {}
        self._verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, Any]] = {}
        self._began = time.monotonic()
        self._logs = plan.folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def run(self) -> dict[str, Any]:
        """The record. Raises SystemFailure if the reference system, or all others, cannot start."""
        plan = self._plan
        try:
            machine = self._start_helper("machine")
            for spec in plan.systems:
                self._start(spec)
            if plan.systems[0].name not in self._systems:
                raise SystemFailure(f"{plan.systems[0].name} does not start; see above")
            found = [self._measure(case, machine) for case in self._fitting()]
            self._note(found)
            about = {
                name: {
                    "start_s": system.start_s,
                    "peak_rss_bytes": system.peak_bytes,
                    "settings": system.ready.get("settings", {}),
                    "versions": system.ready.get("versions", {}),
                    "python": system.ready.get("python"),
                }
                for name, system in self._systems.items()
                if system is not machine
            }
            for system in self._systems.values():
                system.end()
            checks = self._check(found)
        finally:
            for system in self._systems.values():
                system.end()
        return {
            "format": FORMAT,
            "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "model": plan.model_name,
            "dtype": plan.dtype,
            "weight_bytes": self._shape.weight_bytes(plan.dtype),
            "kv_bytes_per_token": self._shape.kv_bytes(plan.dtype),
            "threads": plan.threads,
            "machine": _machine(),
            "reference": plan.systems[0].name,
            "systems": about,
            "cases": [
                _case_record(one, plan, self._shape, checks[index])
                for index, one in enumerate(found)
                if one.machine
            ],
        }

    # ---- the systems ---------------------------------------------------------------------------

    def _start(self, spec: SystemSpec) -> None:
        self._say(f"loading {spec.name}")
        try:
            system = System(
                spec.name,
                spec.module,
                self._plan.pythons[spec.name],
                self._logs / f"{spec.name}.log",
                spec.variables(
                    self._plan.peers.get(spec.name), sorted(psutil.Process().cpu_affinity() or [])
                ),
            )
        except OSError as error:
            self._say(f"  {spec.name} is left out: {error}")
            return
        self._systems[spec.name] = system
        try:
            system.load(self._order(spec), timeout=900.0)
        except SystemFailure as failure:
            self._say(f"  {spec.name} is left out: {failure}")
            self._drop(spec.name)
            return
        system.park()
        self._say(f"  ready after {system.start_s:.1f} s")

    def _drop(self, name: str) -> None:
        self._systems.pop(name).end()

    def _start_helper(self, module: str) -> System:
        """The machine's or the judge's process."""
        plan = self._plan
        helper = System(
            module,
            f"benchmarks.adapters.{module}",
            plan.pythons[plan.systems[0].name],
            self._logs / f"{module}.log",
            {},
        )
        self._systems[f"({module})"] = helper
        helper.load(
            {"model": str(plan.model), "dtype": plan.dtype, "threads": plan.threads}, MACHINE_S
        )
        helper.park()
        return helper

    def _order(self, spec: SystemSpec) -> dict[str, Any]:
        plan = self._plan
        cases = self._fitting()
        needs = [
            sum(sorted((one.total for one in case.lengths()), reverse=True)[: case.most_at_once()])
            for case in cases
        ]
        every = [one for case in cases for one in case.lengths()]
        return {
            "model": str(plan.model),
            "dtype": plan.dtype,
            "threads": plan.threads,
            "cache": str(plan.folder),
            "options": dict(spec.options),
            "limits": {
                "kv_tokens": max(needs) * 5 // 4,
                "kv_bytes": max(needs) * 5 // 4 * self._shape.kv_bytes(plan.dtype),
                "max_requests": max(case.most_at_once() for case in cases),
                "max_request_tokens": max(one.total for one in every),
                "max_prompt_tokens": max(one.prompt for one in every),
            },
        }

    def _fitting(self) -> list[Case]:
        """The cases whose requests the model's context takes."""
        longest = self._shape.max_tokens
        return [
            case for case in self._plan.cases if max(one.total for one in case.lengths()) <= longest
        ]

    # ---- the turns -----------------------------------------------------------------------------

    def _measure(self, case: Case, machine: System) -> _Found:
        names = [spec.name for spec in self._plan.systems if spec.name in self._systems]
        found = _Found(case, case.lengths(), {name: [] for name in names})
        if case.load.rate is not None:
            for spec in self._plan.systems:
                if not spec.is_online and spec.name in found.turns:
                    del found.turns[spec.name]
                    found.failures[spec.name] = "takes no requests while it runs"
        self._say(f"{case.name}: {case.workload.meaning}; {len(found.lengths)} requests")
        for turn in range(self._plan.turns + 1):
            if self._is_late():
                self._say("  out of time: no more turns")
                break
            prompts = make_prompts(found.lengths, self._shape.vocab_size, seed=1000 + turn)
            if turn:
                rates: dict[str, float] = machine.run({"requests": []}, MACHINE_S)
                found.machine.append({**rates, "load_average": os.getloadavg()[0]})
                found.prompts = prompts
            for name in list(found.turns):
                self._turn(found, name, turn, prompts)
        return found

    def _turn(self, found: _Found, name: str, turn: int, prompts: list[list[int]]) -> None:
        """One system's turn; if it fails it is out of the case, if it ended out of the run."""
        case = found.case
        arrivals = case.load.arrivals(len(prompts), seed=turn)
        outputs = [one.output if turn else min(WARMUP_TOKENS, one.output) for one in found.lengths]
        order = {
            "requests": [
                {"prompt": prompt, "max_tokens": output, "at": at}
                for prompt, output, at in zip(prompts, outputs, arrivals, strict=True)
            ],
            "concurrency": case.load.concurrency,
        }
        try:
            replies = self._systems[name].run(order, self._plan.turn_s)
        except SystemFailure as failure:
            self._say(f"  {name} is left out: {failure}")
            found.failures[name] = str(failure).splitlines()[0]
            del found.turns[name]
            self._drop(name)
            return
        if not turn:
            return
        figures = turn_figures([len(prompt) for prompt in prompts], replies)
        found.turns[name].append(figures)
        found.last[name] = replies
        self._say(
            f"  turn {turn}: {name:20} {figures['output_rate']:8.1f} tok/s"
            f"   TTFT {figures['ttft_p50_s'] * 1e3:7.1f} ms"
            f"   TPOT {figures.get('tpot_s', 0.0) * 1e3:7.2f} ms"
        )

    def _is_late(self) -> bool:
        minutes = self._plan.minutes
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def _note(self, found: list[_Found]) -> None:
        for case in self._plan.cases:
            if case not in self._fitting():
                self._say(f"{case.name} is left out: longer than the model's context")
        if not any(one.machine for one in found):
            raise SystemFailure("nothing was measured")

    # ---- the tokens ----------------------------------------------------------------------------

    def _check(self, found: list[_Found]) -> list[dict[str, dict[str, Any]]]:
        """For each case and system, what the judge says of the last turn's tokens."""
        if not self._plan.check:
            return [{} for _ in found]
        self._say("checking the tokens against transformers in float32")
        self._systems.clear()
        judge = self._start_helper("judge")
        return [
            {name: self._judge(judge, one, replies) for name, replies in one.last.items()}
            for one in found
        ]

    def _judge(self, judge: System, found: _Found, replies: list[dict[str, Any]]) -> dict[str, Any]:
        count = min(self._plan.check, len(replies))
        verdicts = []
        for prompt, reply in list(zip(found.prompts, replies, strict=True))[:count]:
            key = (tuple(prompt), tuple(reply["tokens"]))
            if key not in self._verdicts:  # most systems say the same
                order = {"requests": [{"prompt": prompt, "tokens": reply["tokens"]}]}
                [self._verdicts[key]] = judge.run(order, self._plan.turn_s)
            verdicts.append(self._verdicts[key])
        tokens = sum(verdict["tokens"] for verdict in verdicts)
        summary = {
            "requests": count,
            "tokens": tokens,
            "best": sum(verdict["best"] for verdict in verdicts) / tokens,
            "near": sum(verdict["near"] for verdict in verdicts) / tokens,
            "worst_gap": max(verdict["worst_gap"] for verdict in verdicts),
            "distinct": sum(verdict["distinct"] for verdict in verdicts) / tokens,
        }
        if "equal" in verdicts[0]:
            summary["equal_requests"] = sum(verdict["equal"] for verdict in verdicts)
            summary["is_right"] = summary["equal_requests"] == count
        else:
            summary["is_right"] = summary["best"] >= 0.98 and summary["near"] == 1.0
        return summary


def _case_record(
    found: _Found, plan: Plan, shape: Shape, check: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """A case as the record has it."""
    load = found.case.load
    reference = plan.systems[0].name
    turns = {name: figures for name, figures in found.turns.items() if figures}
    rates = medians(found.machine)
    floor = None
    if load.rate is None:
        best = ideal(
            found.lengths,
            load.concurrency,
            shape,
            plan.dtype,
            Rates(rates["bandwidth"], rates["matrix"]),
        )
        output = sum(one.output for one in found.lengths)
        floor = {
            "prefill_s": best.prefill_s,
            "decode_s": best.decode_s,
            "steps": best.steps,
            "output_rate": output / best.total_s,
        }
    median = {name: medians(figures) for name, figures in turns.items()}
    return {
        "workload": found.case.workload.name,
        "meaning": found.case.workload.meaning,
        "load": load.name,
        "requests": len(found.lengths),
        "prompt_tokens": sum(one.prompt for one in found.lengths),
        "output_tokens": sum(one.output for one in found.lengths),
        "machine": found.machine,
        "floor": floor,
        "turns": turns,
        "median": median,
        "ratio": {
            name: paired_ratio(
                [turn["output_rate"] for turn in turns[reference]][: len(figures)],
                [turn["output_rate"] for turn in figures],
            )
            for name, figures in turns.items()
            if reference in turns
        },
        "of_floor": {}
        if floor is None
        else {
            name: figures["output_rate"] / floor["output_rate"] for name, figures in median.items()
        },
        "check": check,
        "failures": found.failures,
    }


def _machine() -> dict[str, Any]:
    name = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cpu": name,
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
    }


def _commit() -> str | None:
    """The repository's commit, with "+" if files differ from it; None outside a repository."""
    try:
        found = [
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return found[0].stdout.strip() + ("+" if found[1].stdout.strip() else "")


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record as JSON, and its plot beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(record), indent=1) + "\n")
    path.with_suffix(".svg").write_text(draw(record))


def _rounded(value: Any) -> Any:
    """Numbers with six significant digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return value
