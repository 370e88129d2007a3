"""Tables in the documents, written from records.

    <!-- benchmark: benchmarks/results/demo.json -->
    … written by `python -m benchmarks report` …
    <!-- end of benchmark -->

A block names the record that it shows; nothing between the marks is written by hand.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.markdown import cpus, link, memory, span, table
from benchmarks.measures import figure
from benchmarks.records import read_record

MODULES = {
    "gpu": "benchmarks.gpu.tables",
    "plan": "benchmarks.plans",
    "first-try": "benchmarks.first_try",
    "decoder": "benchmarks.decoder",
    "languages": "benchmarks.languages.document",
    "proxies": "benchmarks.proxies.document",
    "speculation": "benchmarks.speculation",
}
"""What renders a kind of record; imported when it is needed. Records of `run` have no kind."""


def rewrite(text: str, read: Callable[[str], dict[str, Any] | None]) -> str:
    """Return a document with its blocks rewritten. read: returns the record of the name in a block,
    or None if there is none yet.
    """

    def tell(name: str) -> str:
        record = read(name)
        return "Not measured yet.\n" if record is None else render(record, name)

    return re.sub(
        r"(<!-- benchmark: (\S+) -->\n).*?(<!-- end of benchmark -->)",
        lambda match: f"{match[1]}\n{tell(match[2])}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def update(document: Path, root: Path, *, check: bool = False) -> bool:
    """Write a document's blocks. Returns whether they were already up to date.

    Args:
        document: the file.
        root: the folder to which the names of records are relative.
        check: do not write.

    Raises:
        ValueError: a record has another format.
    """
    old = document.read_text()
    new = rewrite(old, lambda name: read_record(root / name))
    if new != old and not check:
        document.write_text(new)
    return new == old


def render(record: dict[str, Any], name: str) -> str:
    """Return the text of one record: what was run and where, a table for each case, the systems,
    and the checks.
    """
    if "kind" in record:
        rendered: str = importlib.import_module(MODULES[record["kind"]]).render(record, name)
        return rendered
    plot = name.removesuffix(".json") + ".svg"
    parts = [_heading(record, name), f"![Output tokens per second](../{plot})"]
    parts += [_case(record, case) for case in record["cases"]]
    parts.append(_systems(record))
    return "\n\n".join(parts) + "\n"


def _heading(record: dict[str, Any], name: str) -> str:
    machine = record["machine"]
    rates = [rate for case in record["cases"] for rate in case["machine"]]
    bandwidths = [rate["bandwidth"] / 1e9 for rate in rates]
    matrix = [rate["matrix"] / 1e12 for rate in rates]
    loads = [rate["load_average"] for rate in rates]
    found = machine.get("instructions")
    by_hand = " chosen by hand" if machine.get("instructions_chosen") else ""
    instructions = f", {found}{by_hand}" if found else ""
    return (
        f"{record['date'][:10]}, model `{record['model']}` in {record['dtype']}, "
        f"{record['threads']} threads; {cpus(record, instructions)}, {memory(record)}, "
        f"{machine['system']}; memory read at {span(bandwidths, '.1f')} GB/s, matrices multiplied "
        f"at {span(matrix, '.2f')} TFLOP/s, load average {span(loads, '.1f')} before the turns. "
        f"Commit {record['commit']}. {link(name)}"
    )


def _case(record: dict[str, Any], case: dict[str, Any]) -> str:
    reference = record["reference"]
    turns = len(case["machine"])
    title = f"**{case['workload']}, {_load(case['load'])}**: "
    if case["requests"] == 1:
        title += case["meaning"]
    else:
        title += f"{case['requests']} requests ({case['meaning']})"
    title += f"; {turns} turn{'s' if turns > 1 else ''}."
    floor = case["floor"]
    if floor is not None:
        seconds = floor["prefill_s"] + floor["decode_s"]
        title += (
            f" Floor: {floor['output_rate']:,.0f} tok/s ({figure(seconds)} s, of which prefill "
            f"{floor['prefill_s'] / seconds:.0%})."
        )
    rows = [_row(case, name) for name in case["median"]]
    rows += [[name, why, *[""] * 7] for name, why in case["failures"].items()]
    columns = f"system | output tok/s | total tok/s | of the floor | {reference} / it"
    columns += " | TTFT p50, p99 ms | TPOT ms | ITL p50, p90, p99 ms | greedy tokens"
    return "\n".join([title, "", *table(columns, rows)])


def _row(case: dict[str, Any], name: str) -> list[str]:
    median = case["median"][name]
    share = case["of_floor"].get(name)
    ratio = case["ratio"].get(name)
    return [
        name,
        figure(median["output_rate"]),
        figure(median["total_rate"]),
        "" if share is None else f"{share:.0%}",
        "" if ratio is None else f"{ratio:.2f}",
        _milliseconds(median, "ttft_p50_s", "ttft_p99_s"),
        _milliseconds(median, "tpot_s"),
        _milliseconds(median, "itl_p50_s", "itl_p90_s", "itl_p99_s"),
        _verdict(case["check"].get(name)),
    ]


def _systems(record: dict[str, Any]) -> str:
    rows = []
    for name, system in record["systems"].items():
        versions = ", ".join(f"{key} {value}" for key, value in system["versions"].items())
        figures = [f"{system['start_s']:.1f}", f"{system['peak_rss_bytes'] / 2**30:.2f}"]
        rows.append([name, *figures, f"{versions}, Python {system['python']}"])
    rows += [[name, why, "", ""] for name, why in record["left_out"].items()]
    return "\n".join(table("system | start s | peak RSS GiB | versions", rows))


def _verdict(check: dict[str, Any] | None) -> str:
    """Return the judge's verdict for a table cell."""
    if check is None:
        return "not checked"
    mark = "" if check["is_right"] else "**below**: "
    if "equal_requests" in check:
        return f"{mark}{check['equal_requests']} of {check['requests']} requests equal"
    return (
        f"{mark}{check['best']:.1%} best, {check['near']:.1%} near, worst {check['worst_gap']:.3f}"
    )


def _load(name: str) -> str:
    kind, _, number = name.partition(":")
    if kind == "closed":
        return f"{number} at a time"
    return f"{number} requests/s (Poisson)" if kind == "poisson" else "all at once"


def _milliseconds(median: dict[str, float], *names: str) -> str:
    return ", ".join(figure(median[name] * 1e3) for name in names if name in median)
