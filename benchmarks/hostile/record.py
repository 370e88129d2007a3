"""The record of one model's campaign: a JSON file, written after each input. A campaign that ends
early has lost nothing.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from benchmarks.hostile.inputs import Group, Input
from benchmarks.hostile.judging import ENGINE, FRONT_END, Run, allowed_s, faults
from benchmarks.processes import ROOT
from benchmarks.records import commit, machine_record, rounded
from benchmarks.report import FORMAT, KIND_HOSTILE, read_record
from benchmarks.witness.report import Report

HELD, FAILED, TOLD, DISCARDED = "held", "failed", "told", "discarded"
"""Verdicts: within the criterion; beyond it; not judged; no run of it said anything."""
PACKAGES = ("torch", "transformers", "tokenizers", "grpcio", "llguidance", "headrace-server")


class Record:
    """A campaign's record.

    Attributes:
        path: where it is written.
        data: what is written.
    """

    def __init__(self, path: Path, model: str, *, keep: bool) -> None:
        """Begin it, or go on with the one that is there.

        Args:
            path: where it is written.
            model: "demo" or "long".
            keep: whether the inputs that are recorded there stay.

        Raises:
            ValueError: the file that is to be kept is of another format or model.
        """
        self.path = path
        kept = read_record(path) if keep else None
        if kept is not None and (kept.get("kind"), kept["model"]) != (KIND_HOSTILE, model):
            raise ValueError(f"{path} is no record of hostile inputs on the model {model}")
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "kind": KIND_HOSTILE,
            "date": "",
            "commit": None,
            "model": model,
            "machine": machine_record(),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            "inputs": kept["inputs"] if kept else {},
            "discarded": kept["discarded"] if kept else [],
        }

    @property
    def names(self) -> set[str]:
        """The inputs that are recorded."""
        return set(self.data["inputs"])

    def add(self, group: Group, one: Input, run: Run, tries: int) -> list[str]:
        """Record a run that says something; what was wrong in it."""
        wrong = faults(one, run)
        verdict = TOLD if one.informational else FAILED if wrong else HELD
        self._write(one, {**_entry(group, one, run), "verdict": verdict, "faults": wrong}, tries)
        return wrong

    def discard(self, group: Group, one: Input, run: Run, why: str) -> None:
        """Record a run that says nothing. If no later one does, this is all there is."""
        self.data["discarded"].append({"input": one.name, "date": _now(), "why": why})
        entry = {**_entry(group, one, run), "verdict": DISCARDED, "faults": [why]}
        self._write(one, entry, 0)

    def _write(self, one: Input, entry: dict[str, Any], tries: int) -> None:
        self.data["date"], self.data["commit"] = _now(), commit()
        entry |= {"date": self.data["date"], "commit": self.data["commit"], "tries": tries}
        self.data["inputs"][one.name] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(rounded(self.data), indent=1) + "\n")
        partial.replace(self.path)


def _entry(group: Group, one: Input, run: Run) -> dict[str, Any]:
    return {
        "group": group.name,
        "meaning": one.meaning,
        "is_stranger": one.stranger,
        "informational": one.informational,
        "seconds": run.seconds,
        "answers": dict(run.answers),
        "connections": run.connections,
        "calm": _waits(run.calm) | {"seconds": run.calm.seconds, "lag_s": run.calm.lag.worst_s},
        "allowed": {
            "gap_s": allowed_s(run.calm.gaps),
            "health_s": allowed_s(run.calm.health),
        },
        "seen": _waits(run.seen)
        | {
            "seconds": run.seen.seconds,
            "tokens": run.seen.tokens,
            "gap_p50_s": run.seen.gaps.p50_s,
            "gap_p99_s": run.seen.gaps.p99_s,
            "lag_s": run.seen.lag.worst_s,
            "wrong_tokens": run.seen.wrong_tokens,
            "lost_tokens": run.seen.lost_tokens,
            "wrong_texts": run.seen.wrong_texts,
            "not_serving": run.seen.not_serving,
            "refusals": dict(run.seen.refusals),
        },
        "growth_bytes": {name: run.growth(name) for name in (FRONT_END, ENGINE)},
        "own_growth_bytes": {name: memory.growth for name, memory in run.seen.memory.items()},
        "cache_bytes": run.cache_bytes,
        "log_bytes": run.log_bytes,
        "log": "" if run.secrets else run.log.replace(f"{ROOT}/", ""),
        "recovered_s": run.recovered_s,
    }


def _waits(report: Report) -> dict[str, float]:
    return {
        "gap_s": report.gaps.worst_s,
        "first_token_s": report.first_tokens.worst_s,
        "tokenize_s": report.tokenize.worst_s,
        "health_s": report.health.worst_s,
    }


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
