"""Runs a plan: systems are loaded once, then take turns on each case. The result is one record.

Turn 0 of a case warms up and does not count: its prompts are shortened, and few tokens are
generated. The machine's rates are measured before every other turn. A system that fails is left out
of its case, and the record says so.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.floors import read_shape
from benchmarks.instructions import ENVIRONMENTS
from benchmarks.measures import turn_figures
from benchmarks.processes import System, SystemFailure
from benchmarks.records import FORMAT, Case, Found, Plan, case_record, commit, machine_record
from benchmarks.rig.systems import MACHINE_S, Systems, judged, turn_order
from benchmarks.systems import SystemSpec
from benchmarks.workloads import Lengths, make_prompts

WARMUP_PROMPT = 1024
WARMUP_TOKENS = 8
LOAD_S = 900.0
JUDGE = "benchmarks.adapters.judge"


class Runner:
    """Runs a plan."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._shape = read_shape(plan.model)
        self._systems: dict[str, System] = {}
        self._left_out: dict[str, str] = {}
        self._verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, Any]] = {}
        self._limits = ENVIRONMENTS.get(plan.instructions or "", {})
        self._began = time.monotonic()
        self._started = Systems(plan.folder / "logs")

    def run(self) -> dict[str, Any]:
        """Run the plan and return the record. Raises SystemFailure if the reference system, or all
        others, cannot start.
        """
        plan = self._plan
        with self._started:
            machine = self._started.start_machine(environment=self._limits, **self._about())
            for spec in plan.systems:
                self._start(spec)
            if plan.systems[0].name not in self._systems:
                raise SystemFailure(f"{plan.systems[0].name} does not start; see above")
            found = [self._measure(case) for case in self._fitting()]
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
            }
            self._started.close()
            checks = self._check(found)
        return {
            "format": FORMAT,
            "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "model": plan.model_name,
            "dtype": plan.dtype,
            "weight_bytes": self._shape.weight_bytes(plan.dtype),
            "kv_bytes_per_token": self._shape.kv_bytes(plan.dtype),
            "threads": plan.threads,
            "machine": machine_record()
            | {
                "instructions": machine.ready.get("settings", {}).get("instructions"),
                "instructions_chosen": plan.instructions is not None,
            },
            "reference": plan.systems[0].name,
            "systems": about,
            "left_out": self._left_out,
            "cases": [
                case_record(one, plan, self._shape, checks[index])
                for index, one in enumerate(found)
                if one.machine
            ],
        }

    # ---- the systems ---------------------------------------------------------------------------

    def _start(self, spec: SystemSpec) -> None:
        self._say(f"loading {spec.name}")
        plan, cpus = self._plan, sorted(psutil.Process().cpu_affinity() or [])
        try:
            system = self._started.start(
                spec.name,
                spec.module,
                self._order(spec),
                LOAD_S,
                python=plan.pythons[spec.name],
                environment=self._limits | spec.variables(plan.peers.get(spec.name), cpus),
            )
        except (OSError, SystemFailure) as failure:
            self._say(f"  {spec.name} is left out: {failure}")
            self._left_out[spec.name] = str(failure).splitlines()[0]
            return
        self._systems[spec.name] = system
        self._say(f"  ready after {system.start_s:.1f} s")

    def _about(self) -> dict[str, Any]:
        """Return what every process is told."""
        plan = self._plan
        return {
            "model": str(plan.model),
            "dtype": plan.dtype,
            "threads": plan.threads,
            "instructions": plan.instructions,
        }

    def _order(self, spec: SystemSpec) -> dict[str, Any]:
        plan = self._plan
        cases = self._fitting()
        needs = [
            sum(sorted((one.total for one in case.lengths()), reverse=True)[: case.most_at_once()])
            for case in cases
        ]
        every = [one for case in cases for one in case.lengths()]
        return {
            **self._about(),
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
        """Return the cases whose requests fit the model's context."""
        longest = self._shape.max_tokens
        return [
            case for case in self._plan.cases if max(one.total for one in case.lengths()) <= longest
        ]

    # ---- the turns -----------------------------------------------------------------------------

    def _measure(self, case: Case) -> Found:
        names = [spec.name for spec in self._plan.systems if spec.name in self._systems]
        found = Found(case, case.lengths(), {name: [] for name in names})
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
            seed = f"{case.name}, turn {turn}"
            prompts = make_prompts(found.lengths, self._shape.vocab_size, seed)
            if turn:
                found.machine.append({**self._started.rates(), "load_average": os.getloadavg()[0]})
                found.prompts = prompts
            for name in list(found.turns):
                self._turn(found, name, turn, prompts)
        return found

    def _turn(self, found: Found, name: str, turn: int, prompts: list[list[int]]) -> None:
        """Run one system's turn. If it fails, the system is ended and left out from then on."""
        load, lengths = found.case.load, found.lengths
        if not turn:
            prompts = [prompt[:WARMUP_PROMPT] for prompt in prompts]
            lengths = [Lengths(one.prompt, min(one.output, WARMUP_TOKENS)) for one in lengths]
        order = turn_order(
            prompts,
            lengths,
            arrivals=load.arrivals(len(prompts), seed=turn),
            concurrency=load.concurrency,
        )
        try:
            replies = self._systems[name].run(order, self._plan.turn_s)
        except SystemFailure as failure:
            self._say(f"  {name} is left out: {failure}")
            found.failures[name] = str(failure).splitlines()[0]
            del found.turns[name]
            self._started.drop(self._systems.pop(name))
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

    def _note(self, found: list[Found]) -> None:
        for case in self._plan.cases:
            if case not in self._fitting():
                self._say(f"{case.name} is left out: longer than the model's context")
        if not any(one.machine for one in found):
            raise SystemFailure("nothing was measured")

    # ---- the tokens ----------------------------------------------------------------------------

    def _check(self, found: list[Found]) -> list[dict[str, dict[str, Any]]]:
        """Return the judge's verdict on the tokens of the last turn, for each case and system."""
        if not self._plan.check:
            return [{} for _ in found]
        self._say("checking the tokens against transformers in float32")
        judge = self._started.start(
            "judge", JUDGE, self._about(), MACHINE_S, environment=self._limits
        )
        return [
            {name: self._judge(judge, one, replies) for name, replies in one.last.items()}
            for one in found
        ]

    def _judge(self, judge: System, found: Found, replies: list[dict[str, Any]]) -> dict[str, Any]:
        count = min(self._plan.check, len(replies))
        verdicts = []
        for prompt, reply in list(zip(found.prompts, replies, strict=True))[:count]:
            key = (tuple(prompt), tuple(reply["tokens"]))
            if key not in self._verdicts:  # most systems say the same
                order = {"requests": [{"prompt": prompt, "tokens": reply["tokens"]}]}
                [self._verdicts[key]] = judge.run(order, self._plan.turn_s)
            verdicts.append(self._verdicts[key])
        summary = judged(verdicts)
        distinct = sum(verdict["distinct"] for verdict in verdicts)
        summary["distinct"] = distinct / summary["tokens"]
        if "equal" in verdicts[0]:
            summary["equal_requests"] = sum(verdict["equal"] for verdict in verdicts)
            summary["is_right"] = summary["equal_requests"] == count
        else:
            summary["is_right"] = summary["best"] >= 0.98 and summary["near"] == 1.0
        return summary
