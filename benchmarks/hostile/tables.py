"""A record of hostile inputs as tables, in a document."""

from __future__ import annotations

from collections import Counter
from typing import Any

ANSWERS_SHOWN = 3


def render(record: dict[str, Any], name: str) -> str:
    """The text of one record: what and where, an input a line, what went wrong."""
    inputs = record["inputs"]
    parts = [_heading(record, name), _table(inputs)]
    wrong = [
        f"- **{key}**: {'; '.join(one['faults'])}."
        for key, one in inputs.items()
        if one["verdict"] == "failed"
    ]
    if wrong:
        parts.append("Beyond the criterion:\n\n" + "\n".join(wrong))
    if record["discarded"]:
        times = Counter(one["input"] for one in record["discarded"])
        told = ", ".join(f"{key} ({number})" for key, number in times.items())
        parts.append(
            f"Discarded runs, because the witness itself was late within the worst wait: {told}. "
            "The record has them."
        )
    return "\n\n".join(parts) + "\n"


def _heading(record: dict[str, Any], name: str) -> str:
    machine = record["machine"]
    verdicts = Counter(one["verdict"] for one in record["inputs"].values())
    held, judged = verdicts["held"], sum(verdicts.values()) - verdicts["told"]
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    return (
        f"**Model {record['model']}**: {held} of {judged} inputs held, {verdicts['told']} are not "
        f"judged. {record['date'][:10]}; {machine['cpus']} CPUs ({machine['cpu']}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}. Commit "
        f"{record['commit']}; {versions}. Record: [`{name}`](../{name})."
    )


def _table(inputs: dict[str, Any]) -> str:
    lines = [
        "| input | what is sent | answers | worst gap ms (calm) | health's worst ms (calm) | "
        "front end, engine MB | |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, one) for name, one in inputs.items()]
    return "\n".join(lines)


def _row(name: str, one: dict[str, Any]) -> str:
    verdict = {"told": "not judged", "failed": "**failed**"}.get(one["verdict"], one["verdict"])
    growth = ", ".join(f"{one['growth_bytes'][key] / 1e6:+.0f}" for key in ("front_end", "engine"))
    cells = [
        name,
        one["meaning"],
        _answers(one["answers"]),
        _wait(one, "gap_s"),
        _wait(one, "health_s"),
        growth,
        verdict,
    ]
    return f"| {' | '.join(cells)} |"


def _wait(one: dict[str, Any], key: str) -> str:
    return f"{one['seen'][key] * 1e3:.0f} ({one['calm'][key] * 1e3:.0f})"


def _answers(answers: dict[str, int]) -> str:
    """The most frequent ones."""
    shown = sorted(answers.items(), key=lambda pair: -pair[1])
    told = [f"{number:,} {what}" for what, number in shown[:ANSWERS_SHOWN]]
    if len(shown) > ANSWERS_SHOWN:
        rest = sum(number for _, number in shown[ANSWERS_SHOWN:])
        told.append(f"{rest:,} others")
    return ", ".join(told).replace("|", "\\|") or "none"
