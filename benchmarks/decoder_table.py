"""The tables of a record of `benchmarks.decoder`: this checkout compared with an older one.

They are separate from the code that makes the record, because reports are also written without
torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.measures import figure

KIND = "decoder"
OURS, BASELINE = "ours", "baseline"
LIBRARY = "generate-batch"
_TITLES = {
    "families": "**Decoding by family**, true widths at reduced depth, output tokens a second.",
    "experts": "**Decoding by mixtures of experts**, as above.",
    "more": "**Decoding by other families**, as above.",
}


def render(record: dict[str, Any], name: str) -> str:
    """Return the record as text for a document. name: the name of its file."""
    cases = record["cases"]
    parts = [_heading(record, name)]
    for part, title in _TITLES.items():
        if part in cases:
            parts.append(_families(title, cases[part]))
    if "shapes" in cases:
        title = "**Workloads** in bfloat16, output tokens a second."
        parts.append(_rows(title, cases["shapes"], BASELINE, (OURS,)))
    if "ready" in cases:
        title = "**A server of the 0.6B shape**, started anew in each turn."
        parts.append(_rows(title, cases["ready"], BASELINE, (OURS,)))
    if "float32" in cases:
        title = "**The demo model in float32**, output tokens a second."
        parts.append(_rows(title, cases["float32"], LIBRARY, (OURS, BASELINE)))
    return "\n\n".join(parts) + "\n"


def spread(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the smallest and the largest of the turns' ratios."""
    ratios = [one / other for one, other in zip(ours, others, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _heading(record: dict[str, Any], name: str) -> str:
    machine = record["machine"]
    cases = [case for part in record["cases"].values() for case in part.values()]
    found = [case["machine"] for case in cases if "machine" in case]
    text = (
        f"{_several(case['date'][:10] for case in cases)}, {record['threads']} threads; "
        f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}"
    )
    if found:
        bandwidths, loads = (sorted(one[key] for one in found) for key in ("bandwidth", "load"))
        text += (
            f"; memory read at {bandwidths[0] / 1e9:.1f} to {bandwidths[-1] / 1e9:.1f} GB/s, load "
            f"average {loads[0]:.1f} to {loads[-1]:.1f} before the cases"
        )
    return (
        f"{text}. Commit {_several(case['commit'] for case in cases)}, baseline "
        f"{_several(case['baseline'] for case in cases)}. Record: [`{name}`](../{name})."
    )


def _several(values: Any) -> str:
    return ", ".join(sorted({str(value) for value in values}))


def _families(title: str, cases: dict[str, Any]) -> str:
    lines = [
        title,
        "",
        "| family | shape | 1 request: ours, baseline | ratio | 16 requests: ours, baseline "
        "| ratio | wanted |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in dict.fromkeys(name.partition(",")[0] for name in cases):
        both = [cases.get(f"{family}, {requests}") for requests in (1, 16)]
        about = next(case["about"] for case in both if case)
        aims = {f"{case['aim']:g}" for case in both if case and "aim" in case}
        cells = [cell for case in both for cell in _pair(case, OURS, BASELINE)]
        lines.append(f"| {' | '.join([family, about, *cells, ', '.join(aims)])} |")
    return "\n".join(lines)


def _rows(title: str, cases: dict[str, Any], reference: str, systems: Sequence[str]) -> str:
    """Return a table. systems: those that are compared with the reference; each has a row per
    case.
    """
    lines = [
        f"{title} Beside {reference}.",
        "",
        f"| what | | system: it, {reference} | ratio | wanted |",
        "|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        unit = case.get("unit", "")
        for system in systems:
            aim = case.get("aim")
            wanted = "" if aim is None or system == BASELINE else f"{aim:g}"
            figures, ratio = _pair(case, system, reference)
            if "failure" in case and system != systems[0]:
                continue  # it is told once
            what = f"{name}, {unit}" if unit else name
            cells = [what, case["about"], f"{system}: {figures}", ratio, wanted]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(case: dict[str, Any] | None, system: str, reference: str) -> tuple[str, str]:
    """Return the medians of two systems, and their ratio, in bold if it misses the target."""
    if case is None:
        return "", ""
    if "failure" in case:
        return case["failure"].replace("|", "/"), ""
    ours, others = case["turns"][system], case["turns"][reference]
    middle, least, most = spread(ours, others)
    ratio = f"{middle:.2f} ({least:.2f}–{most:.2f}, {len(ours)} turns)"
    is_below = case["aim"] is not None and system != BASELINE and middle < case["aim"]
    return (
        f"{figure(statistics.median(ours))}, {figure(statistics.median(others))}",
        f"**{ratio}**" if is_below else ratio,
    )
