"""Writes docs/trust.md from the records and the text below: `python -m tests.campaign.document`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.processes import ROOT
from tests.campaign.campaign import RESULTS
from tests.campaign.parts import Part
from tests.campaign.record import Record, Run, is_wrong
from tests.campaign.registry import PARTS

DOCUMENT = ROOT / "docs" / "trust.md"
PROMISES = ROOT / "docs" / "promises.md"
Records = Mapping[str, Sequence[Run]]
"""The runs of each part, the last one first."""

_PROMISE = re.compile(r"^\| (\d+) \| (.+?) \|", re.MULTILINE)
_LINK = re.compile(r" ?\(\[[^\]]*\]\([^)]*\)\)")
_INTRO = """\
# Trust

`make trust` attacks what [promises.md](promises.md) promises, and this page is written from the
records that it makes (`make trust-report`). Do not edit it: its text is in
`tests/campaign/document.py`. Whoever doubts a line can run it again:

    make trust                     # all parts: up to three hours
    make trust PART=ends SEED=7    # one part, with another seed
    make trust-cut                 # the few minutes of it that CI runs

The record is [`tests/campaign/trust.json`](../tests/campaign/trust.json). After Ctrl-C the same
command goes on from it. A part begins with a calm minute, in which a witness looks at a server that
nobody else uses: what it waits for then is the machine's doing. The part `bytes` counts what code
its inputs reach if Atheris is there (`.venv/bin/pip install -c constraints.txt -e '.[fuzz]'`); else
it goes by chance alone.
"""

NOTES = {
    ("ends", "ea0d6cc", "pipe cut"): (
        "One of the 268 did not come into its state: the campaign waited for a step that had "
        "passed already, which has been mended since. All 268 were played again at commit 68161a2: "
        "held."
    ),
    ("storms", "834a43f", "calls at once"): (
        "While the storm lasts, its client takes a part of the two CPUs: places come free at a "
        "third of the rate at which they do afterwards, and advice goes by what was measured."
    ),
}
"""Notes on single verdicts, by part, commit and row; shown while that run is in the record."""
REMARKS = {
    ("bytes", "454f311"): (
        "Two more targets were tried on 2026-11-23 at commit 68161a2, for 540 s each: `callers` "
        "(3,176,648 files under Atheris, 7 ms of CPU time for an input at most) held; `http2` "
        "(535,372 connections) lost and broke nothing, but with two other busy processes on the "
        "two CPUs the witness waited up to 0.87 s, where 0.47 s were allowed. Two more on "
        "2026-11-28 at commit 80028d9e, for 600 s each beside much other work: `quantised-heads` "
        "(69,346 inputs under Atheris, 32 ms of CPU time for an input at most) and `gguf-heads` "
        "(70,132, 64 ms) held."
    ),
    ("ends", "ea0d6cc"): (
        "Every cell that the table does not mark as impossible comes about on the scripted engine, "
        "so none was left for the demo model."
    ),
}
"""Remarks on a run, by part and commit; shown while that run is in the record."""


def update(path: Path, *, check: bool) -> bool:
    """Write the document from the file of the records, unless it is only checked. Returns whether
    it was already up to date. Raises SystemFailure if the file has another format.
    """
    text = render(PROMISES.read_text(), list(PARTS.values()), Record(path).parts)
    old = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    if text != old and not check:
        DOCUMENT.write_text(text)
    return text == old


def render(promises: str, parts: Sequence[Part], records: Records) -> str:
    """Return the document's text. `promises`: the text of docs/promises.md."""
    sections = [_INTRO, _by_promise(promises, records)]
    for part in parts:
        sections.append(_part(part, records.get(part.name, ())))
    return "\n".join(sections)


def _by_promise(promises: str, records: Records) -> str:
    lines = []
    for number, text in _PROMISE.findall(promises):
        tried, count, wrong = [], 0, []
        for name, (run, *_) in records.items():
            rows = {key: row for key, row in run["rows"].items() if int(number) in row["promises"]}
            if not rows:
                continue
            tried.append(f"[{name}](#{name}) ({len(rows)})")
            count += sum(row["count"] for row in rows.values())
            wrong += [f"{name}/{key}" for key, row in rows.items() if is_wrong(row)]
        what = _LINK.sub("", text).partition(". ")[0].rstrip(".")
        told = ", ".join(tried) or "not tried"
        lines.append([number, what, told, f"{count:,}", ", ".join(wrong) or "—"])
    head = "# | promise | tried, by part | how often | not as promised"
    return "\n".join(["## By promise", "", *table(head, lines)]) + "\n"


def _part(part: Part, runs: Sequence[Run]) -> str:
    lines = [f"## {part.name}", "", f"{part.meaning[0].upper()}{part.meaning[1:]}.", ""]
    if not runs:
        return "\n".join([*lines, "Not run yet.", ""])
    run, *others = runs
    remark = REMARKS.get((part.name, run["commit"]), "")
    lines += [f"{_heading(part, run)} {remark}".rstrip(), ""]
    rows = (_row(name, row) for name, row in run["rows"].items())
    lines += table(["", "what was tried", "promises", "how often", "worst", ""], rows)
    wrong = [(name, row["wrong"]) for name, row in run["rows"].items() if row["wrong"]]
    if wrong:
        lines += ["", "Not as promised:", ""]
        for name, found in wrong:
            note = NOTES.get((part.name, run["commit"], name), "")
            lines.append(f"- **{name}**: {_cell('; '.join(found))} {note}".rstrip())
    lines += ["", *(_again(run, other) for other in others)]
    return "\n".join(lines).rstrip() + "\n"


def _heading(part: Part, run: Run) -> str:
    machine, calm = run["machine"], run["calm"]
    length = "The cut" if run["is_cut"] else "The whole"
    state = "" if run["is_whole"] else " It was stopped before its end."
    words = (
        f"{length}, {run['date'][:10]}, commit {run['commit']}, seed {run['seed']}: "
        f"{run['seconds'] / 60:.0f} minutes on {machine['cpus']} CPUs.{state}"
    )
    if calm is not None:
        words += (
            f" Calm, for {calm['seconds']:.0f} s: worst gap between tokens "
            f"{calm['gap_s'] * 1e3:.0f} ms, health {calm['health_s'] * 1e3:.0f} ms, the witness's "
            f"own lag {calm['lag_s'] * 1e3:.0f} ms."
        )
    return words


def _row(name: str, row: Mapping[str, Any]) -> list[str]:
    verdict = "**not held**" if is_wrong(row) else "held"
    if row["not_judged"]:
        verdict = f"not judged: {row['not_judged']}"
    promises = ", ".join(map(str, row["promises"]))
    cells = [name, row["what"], promises, f"{row['count']:,}", row["worst"], verdict]
    return list(map(_cell, cells))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _again(run: Run, other: Run) -> str:
    ours, theirs = run["rows"], other["rows"]
    both = [name for name in ours if name in theirs]
    differ = [name for name in both if is_wrong(ours[name]) != is_wrong(theirs[name])]
    told = f"{len(both)} rows in common, "
    told += f"other verdicts: {', '.join(differ)}" if differ else "the same verdicts"
    return (
        f"A run with seed {other['seed']}, {other['date'][:10]}, commit {other['commit']}: {told}."
    )


if __name__ == "__main__":
    told = "as it should be" if update(RESULTS, check=False) else "written"
    print(f"{DOCUMENT}: {told}")
