"""A GPU's record as tables, for the document and the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from benchmarks.floors import Rates, prompts_s, shape_of, step_s
from benchmarks.gpu import predict
from benchmarks.markdown import columns, cpus, link, milliseconds, table
from benchmarks.measures import figure
from benchmarks.models import SHAPES
from benchmarks.workloads import Lengths

if TYPE_CHECKING:
    from benchmarks.gpu.sizes import Sizes

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
NO_GPU = (
    "**This ran on a CPU**, to show that the command works. Nothing here is a figure of a GPU, or "
    "of anything else."
)
LEAST_SHOWN = 0.01
"""The smallest share of a step's time for which a kernel is shown; the record has more of them."""
STATES = {
    "complete": "",
    "quick": "",
    "running": " It was ended while it ran.",
    "out of time": " Its time was over before all was measured.",
    "failed": " **It failed.**",
    "left out": " It was left out.",
}


def render(record: dict[str, Any], name: str) -> str:
    """Return the text of one record: the device, then all available parts."""
    device = record["device"]
    facts = [
        f"{device[key]}{unit}" if unit else f"{words} {device[key]}"
        for key, words, unit in (
            ("capability", "compute capability", ""),
            ("multiprocessors", "", " multiprocessors"),
            ("driver", "driver", ""),
        )
        if device.get(key) is not None
    ]
    if device.get("memory_bytes"):
        facts.append(f"{device['memory_bytes'] / 2**30:.0f} GiB")
    about = f" ({', '.join(facts)})" if facts else ""
    system = record["machine"]["system"]
    text = f"{device['name']}{about}; {cpus(record)}, {system}. {link(name)}"
    parts = [text] if device["type"] == "cuda" else [NO_GPU, text]
    parts += [render_part(part, found) for part, found in record["parts"].items()]
    return "\n\n".join(parts) + "\n"


def render_part(name: str, part: dict[str, Any]) -> str:
    """Return the text of one part: how it was run, its table, and what was left out."""
    model = f"{part['model']} in {part['dtype']}, " if part["model"] else ""
    versions = ", ".join(f"{package} {version}" for package, version in part["versions"].items())
    head = (
        f"**{name}**: {model}{part['date'][:10]}, commit {part['commit'] or 'unknown'}; {versions}."
        + STATES[part["state"]]
    )
    lines = _TABLES.get(name.partition("-")[0], _compared)(part["rows"])
    out = [f"- Left out: {text}." for text in part["left_out"]]
    return "\n\n".join(["\n".join(block) for block in ([head], lines, out) if block])


def _checks(rows: list[Row]) -> list[str]:
    return columns(
        rows,
        ("check", itemgetter("key")),
        ("result", itemgetter("state")),
        ("of", lambda row: row["detail"].replace("|", "/")),
    )


def _floors(rows: list[Row]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        if row["key"] == "rates":
            median = row["median"]
            lines += [
                f"A copy within the memory moves {median['bandwidth'] / 1e12:.2f} TB/s (read and "
                f"written), a product in bfloat16 makes {median['matrix'] / 1e12:.0f} TFLOP/s; "
                f"medians of {len(row['turns'])}.",
                "",
            ]
    return lines + columns(
        [row for row in rows if row["key"] != "rates"],
        ("model", itemgetter("model")),
        ("requests", _count("requests")),
        ("context", _count("context")),
        ("least ms a step", lambda row: milliseconds(row, "step_s")),
        ("at most tok/s", lambda row: figure(row["decode_rate"])),
        ("prefill at most tok/s", lambda row: figure(row["prefill_rate"])),
    )


def _decode(rows: list[Row]) -> list[str]:
    found = {row["key"]: row for row in rows}

    def busy(row: Row) -> str:
        profile = found.get(row["key"].replace("decode", "busy", 1))
        return "" if profile is None else f"{profile['busy_share']:.1%}"

    lines = columns(
        [row for row in rows if row["key"].startswith("decode at")],
        ("requests", lambda row: row["key"].removeprefix("decode at ")),
        ("decode tok/s", _rate("decode_rate")),
        ("of the floor", _share("decode_rate")),
        ("ms a step", lambda row: milliseconds(row["median"], "step_s")),
        ("least", lambda row: milliseconds(row["floor"], "step_s")),
        ("predicted", _predicted),
        ("output tok/s", _rate("output_rate")),
        *_LATENCIES,
        ("GPU busy", busy),
        ("turns", lambda row: str(len(row["turns"]))),
    )
    if "prefill" in found:
        row = found["prefill"]
        lines += [
            "",
            f"Prefill of {row['requests']} prompts of {row['prompt']} tokens: "
            f"{figure(row['median']['prefill_rate'])} tok/s, {_share('prefill_rate')(row)} of the "
            f"floor ({figure(row['floor']['prefill_rate'])}).",
        ]
    if "tokens" in found:
        row = found["tokens"]
        lines += [
            "",
            f"Of {row['tokens']} tokens of {row['requests']} requests, {row['best']:.1%} are the "
            "ones that the same weights find most likely in float32. The logits of "
            f"{row['near']:.1%} are within 0.1 standard deviations of the largest logit; the worst "
            f"is {row['worst_gap']:.3f} standard deviations below it.",
        ]
    return lines


def _smoke(rows: list[Row]) -> list[str]:
    """Return the decode table, and the kernels that take the most time in a step."""
    lines = _decode(rows)
    for row in (row for row in rows if row["key"].startswith("busy at")):
        lines += ["", *_kernels(row["key"].removeprefix("busy at "), row)]
    return lines


def _kernels(requests: str, row: Row) -> list[str]:
    steps, span = row["steps"], row["span_s"]
    return [
        f"A step at {requests}: {row['launches'] / steps:.0f} kernels and copies in "
        f"{span / steps * 1e3:.2f} ms; the device is busy for {row['busy_share']:.1%} of that "
        "time.",
        "",
        *columns(
            [one for one in row["kernels"] if one["seconds"] >= LEAST_SHOWN * span],
            ("kernel", lambda one: f"`{one['name'].replace('|', '/')}`"),
            ("a step", lambda one: f"{one['count'] / steps:.1f}"),
            ("µs each", lambda one: f"{one['seconds'] / one['count'] * 1e6:.1f}"),
            ("of the time", lambda one: f"{one['seconds'] / span:.1%}"),
        ),
    ]


def _compared(rows: list[Row]) -> list[str]:
    return columns(
        rows,
        ("system", itemgetter("system")),
        ("requests", _count("requests")),
        ("output tok/s", _rate("output_rate")),
        ("headrace", lambda row: _rate("output_rate")(row["reference"])),
        ("headrace / it", _ratio("output_rate")),
        ("decode tok/s", _rate("decode_rate")),
        ("of the floor", _share("decode_rate")),
        ("headrace's share", lambda row: _share("decode_rate")(row["reference"])),
        ("headrace / it", _ratio("decode_rate")),
        *_LATENCIES,
    )


def _itl(rows: list[Row]) -> list[str]:
    return columns(
        rows,
        ("system", itemgetter("system")),
        ("load", itemgetter("load")),
        ("requests", _count("requests")),
        ("output tok/s", _rate("output_rate")),
        *_LATENCIES,
    )


def predictions(
    sizes: Sizes, rates: Rates, measured: Mapping[str, Mapping[int, float]]
) -> list[str]:
    """Return the expected times of steps, with the floor and the measured times, as lines of text.
    measured: the seconds of a decode step, by model and requests, where known.
    """
    least, most = (each * 1e6 for each in predict.LAUNCH_S)
    cells, context = [], sizes.prompt + sizes.output // 2
    for model in ("qwen3-8b", "qwen3-4b", "qwen3-0.6b", "qwen3-moe-13b"):
        shape = shape_of(SHAPES[model])
        for batch, draws in itertools.product(sizes.batches, (False, True)):
            found = predict.decode(model, batch, context, rates, draws=draws)
            floor_s = step_s(shape, "bfloat16", batch, context, rates)
            known = None if draws else measured.get(model, {}).get(batch)
            told = "" if known is None else f"{figure(known * 1e3)} ({floor_s / known:.0%})"
            step = f"decode of {batch}{', sampled' if draws else ''}"
            cells.append([model, step, *_estimate(found, floor_s, batch), told])
        found = predict.prompt(model, sizes.prompt, rates)
        floor_s = prompts_s(shape, [Lengths(sizes.prompt, 1)], rates)
        step = [model, f"a prompt of {sizes.prompt}"]
        cells.append([*step, *_estimate(found, floor_s, sizes.prompt), ""])
    head = "model | step | launches | least ms | predicted ms | predicted tok/s | of the floor"
    return [
        f"Estimates: {rates.bandwidth / 1e12:.3g} TB/s and {rates.matrix / 1e12:.0f} TFLOP/s, of "
        f"which products reach {_range(predict.RATE_SHARES)} and attention "
        f"{_range(predict.KV_SHARES)}, by the number of requests; {least:g} to {most:g} µs for "
        "each launch in a graph. Launches are counted by the trace. Experts' products are assumed "
        f"to reach {_range(dict(enumerate(predict.EXPERT_SHARES)))}.",
        "",
        *table(f"{head} | measured ms", cells),
    ]


def _range(shares: Mapping[int, float]) -> str:
    return f"{min(shares.values()):.0%} to {max(shares.values()):.0%}"


def _estimate(found: predict.Predicted, floor_s: float, tokens: int) -> list[str]:
    return [
        str(found.launches),
        figure(floor_s * 1e3),
        f"{figure(found.least_s * 1e3)} to {figure(found.most_s * 1e3)}",
        f"{figure(tokens / found.most_s)} to {figure(tokens / found.least_s)}",
        f"{floor_s / found.most_s:.0%} to {floor_s / found.least_s:.0%}",
    ]


def _predicted(row: Row) -> str:
    found = row.get("predicted")  # a row without steady steps has none
    if found is None:
        return ""
    return f"{figure(found['least_s'] * 1e3)} to {figure(found['most_s'] * 1e3)}"


_TABLES = {"checks": _checks, "smoke": _smoke, "floors": _floors, "decode": _decode, "itl": _itl}


def _count(name: str) -> Cell:
    return lambda row: str(row[name])


def _rate(name: str) -> Cell:
    return lambda row: figure(row["median"][name]) if name in row["median"] else ""


def _share(name: str) -> Cell:
    return lambda row: f"{row['of_floor'][name]:.0%}" if name in row["of_floor"] else ""


def _ratio(name: str) -> Cell:
    return lambda row: f"{row['ratio'][name]:.2f}" if name in row.get("ratio", {}) else ""


def _times(*names: str) -> Cell:
    return lambda row: milliseconds(row["median"], *names)


_LATENCIES = (
    ("TTFT p50, p90, p99 ms", _times("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")),
    ("TPOT ms", _times("tpot_s")),
    ("ITL p50, p90, p99 ms", _times("itl_p50_s", "itl_p90_s", "itl_p99_s")),
)
