"""What speculation gains: the same requests in turns, with `--speculation off` and with `auto`.

    python -m benchmarks speculation --cases 'bfloat16 own*,smollm2 copying*'

    … own output N% changed     W3, predicted by its own output with so many tokens exchanged or
                                left out; and W1, of which half is predicted so
    … W1, W2, W3                the workloads as they are
    … JSON by schema            of random weights, too
    smollm2 copying, chat       benchmarks/prompts, with SmolLM2-135M-Instruct
    smollm2 edits               those of `headrace bench`

Both servers of a model run, and one has requests. Turn 0 warms them up, with fewer requests, and
does not count. Greedy tokens are compared; in bfloat16 they may differ without speculation, too:
when others come decides in which chunks a prompt is computed. `--resume` measures what the record
does not have.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fnmatch
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.instructions import ENVIRONMENTS
from benchmarks.markdown import cpus, link, table
from benchmarks.measures import compared, ratio_span, turn_figures
from benchmarks.models import find_model
from benchmarks.records import Record
from benchmarks.rig.load import play
from benchmarks.rig.measurement import MODELS, THREADS, Measurement, in_turns, option
from benchmarks.rig.serving import Process, serve
from benchmarks.speculation_cases import CASES, SHAPE, Case

OFF, AUTO = "off", "auto"
SMOLLM2 = Path.home() / ".cache" / "headrace" / "smollm2-135m-instruct-q4_1"
_WARMING = 8
"""The requests of turn 0, if no outputs are wanted."""


def figures(replies: Sequence[dict[str, Any]], steps: int) -> dict[str, float]:
    """Return the figures of some requests of a turn that took so many steps."""
    usages = [reply["usage"] for reply in replies]
    prompts = [usage.prompt_tokens for usage in usages]
    found = turn_figures(prompts, [reply for reply in replies if reply["times"]])
    return {
        **{name: found[name] for name in ("wall_s", "tpot_s", "itl_p99_s")},
        "steps": steps,
        "drafts": sum(usage.draft_tokens for usage in usages),
        "right": sum(usage.accepted_draft_tokens for usage in usages),
    }


def run(
    case: Case, servers: Mapping[str, Process], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Run a case's turns. Returns those of both servers, by part."""
    specs, began = case.requests()[: options.requests], time.perf_counter()
    if case.changed is not None:
        outputs, _ = asyncio.run(play(servers[OFF], specs, case.at_once))
        case.predict(specs, [reply["tokens"] for reply in outputs])
    parts = case.parts(len(specs))
    found: dict[str, dict[str, Any]] = {
        name: {"aim": aim, OFF: [], AUTO: []} for name, aim, _ in parts
    }
    had: dict[str, list[list[list[int]]]] = {OFF: [], AUTO: []}  # by turn, each request's tokens
    for number, kind in in_turns((OFF, AUTO), min(options.turns, case.turns)):
        is_late = time.perf_counter() - began > options.case_seconds
        if is_late and number > 1 and len(had[OFF]) == len(had[AUTO]):
            break
        asked = specs if number else specs[:_WARMING]
        replies, steps = asyncio.run(play(servers[kind], asked, case.at_once))
        if number:
            had[kind].append([reply["tokens"] for reply in replies])
            for name, _, numbers in parts:
                found[name][kind].append(figures([replies[one] for one in numbers], steps))
    for name, _, numbers in parts:
        found[name]["differ"] = _differ(zip(had[OFF], had[AUTO], strict=True), numbers)
        found[name]["differ_without"] = _differ(itertools.pairwise(had[OFF]), numbers)
    return found


def _differ(
    turns: Iterable[tuple[list[list[int]], list[list[int]]]], numbers: Sequence[int]
) -> int:
    return sum(one[number] != other[number] for one, other in turns for number in numbers)


def measure(options: argparse.Namespace, record: Record) -> None:
    """Measure what is chosen and not in the record."""
    chosen = [
        case
        for name, case in CASES.items()
        if name not in record.data.get("cases", {})
        and any(fnmatch.fnmatch(name, pattern) for pattern in options.cases.split(","))
    ]
    for model in dict.fromkeys(case.model for case in chosen):
        folder = options.smollm2 if model == "smollm2" else find_model(options.model, options.cache)
        flags = ["--quantization", "int8"] if model == "int8" else []
        flags += ["--dtype", "bfloat16", "--device", "cpu", "--threads", str(options.threads)]
        flags += ["--num-blocks", "512", "--no-prefix-cache", "--log-level", "warning"]
        flags.append("--speculation")
        with contextlib.ExitStack() as stack:
            servers = {
                kind: stack.enter_context(
                    serve(*flags, kind, model=folder, instructions=options.instructions)
                )
                for kind in (OFF, AUTO)
            }
            for case in (one for one in chosen if one.model == model):
                name = f"{model} {case.name}"
                found = run(case, servers, options)
                record.put(found, "cases", name)
                print(row(name, *next(iter(found.items()))), flush=True)


def row(name: str, part: str, found: Mapping[str, Any]) -> list[str]:
    """Return a part of a case as a row of the table."""
    off, auto = found[OFF], found[AUTO]
    whole, token, gap = (
        ratio_span(compared(one, other, figure)["ratios"], ".2f")
        for one, other, figure in (
            (off, auto, "wall_s"),
            (off, auto, "tpot_s"),
            (auto, off, "itl_p99_s"),
        )
    )
    steps = f"{off[-1]['steps']:,} → {auto[-1]['steps']:,}"
    drafts = f"{auto[-1]['right']:,} of {auto[-1]['drafts']:,}"
    aim = "" if found["aim"] is None else f"≥ {found['aim']}"
    what = f"{name}: {part}" if part else name
    differ = f"{found['differ']}, {found['differ_without']}"
    return [what, aim, whole, token, steps, drafts, gap, str(len(off)), differ]


def render(record: Mapping[str, Any], name: str) -> str:
    options = record["options"]
    rows = [
        row(case, part, found)
        for case, parts in record.get("cases", {}).items()
        for part, found in parts.items()
    ]
    columns = "requests | aim | whole time, off / auto | time a token, off / auto | steps | drafts"
    columns += " that were right | p99 between tokens, auto / off | turns"
    columns += " | outputs that differ: from off, and off from turn to turn"
    head = (
        f"{record['date'][:10]}, {options['threads']} threads, "
        f"{options['instructions'] or 'all'} instructions; {cpus(record)}, load average "
        f"{record['load_average'][0]:.1f} at the start. Medians of the turns, the least and the "
        f"most. Commit {record['commit']}. {link(name)}"
    )
    return "\n".join([head, "", *table(columns, rows)]) + "\n"


MEASUREMENT = Measurement(
    measure=measure,
    render=render,
    options=(
        option("cases", "*", "names of cases, or patterns, with commas"),
        option("model", SHAPE, "random weights"),
        option(
            "smollm2",
            SMOLLM2,
            "the model's directory, as scripts/real_model.py makes it, or its file",
        ),
        *(THREADS, MODELS),
        option("instructions", None, "a smaller set than the processor's", choices=ENVIRONMENTS),
        option("requests", 40, "of a case, at most"),
        option("turns", 5, "that count, at most"),
        option("case_seconds", 100.0, "after which a case begins no turn"),
    ),
    quick={"turns": 1, "requests": 2, "case_seconds": 1.0},
    resumes=("commit", "model", "threads", "instructions", "requests"),
)
