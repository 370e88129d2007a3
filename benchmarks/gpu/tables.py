"""A GPU's record as tables, for the document and the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.floors import Rates, prompts_s, shape_of, step_s
from benchmarks.gpu import predict
from benchmarks.markdown import cpus, link, table
from benchmarks.measures import figure
from benchmarks.models import SHAPES
from benchmarks.workloads import Lengths

if TYPE_CHECKING:
    from benchmarks.gpu.session import Sizes

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


def _checks(rows: list[dict[str, Any]]) -> list[str]:
    cells = [[row["key"], row["state"], row["detail"].replace("|", "/")] for row in rows]
    return table("check | result | of", cells)


def _floors(rows: list[dict[str, Any]]) -> list[str]:
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
    cells = [
        [
            row["model"],
            str(row["requests"]),
            str(row["context"]),
            figure(row["step_s"] * 1e3),
            figure(row["decode_rate"]),
            figure(row["prefill_rate"]),
        ]
        for row in rows
        if row["key"] != "rates"
    ]
    head = "model | requests | context | least ms a step | at most tok/s | prefill at most tok/s"
    return lines + table(head, cells)


def _decode(rows: list[dict[str, Any]]) -> list[str]:
    found = {row["key"]: row for row in rows}
    cells = []
    for row in rows:
        if not row["key"].startswith("decode at"):
            continue
        end = row["key"].removeprefix("decode")
        busy = found.get(f"busy{end}")
        cells.append(
            [
                end.removeprefix(" at "),
                _rate(row, "decode_rate"),
                _share(row, "decode_rate"),
                _milliseconds(row["median"], "step_s"),
                _milliseconds(row["floor"], "step_s"),
                _predicted(row),
                figure(row["median"]["output_rate"]),
                *_latencies(row),
                "" if busy is None else f"{busy['busy_share']:.1%}",
                str(len(row["turns"])),
            ]
        )
    head = "requests | decode tok/s | of the floor | ms a step | least | predicted | output tok/s"
    lines = table(f"{head} | {_LATENCIES} | GPU busy | turns", cells)
    if "prefill" in found:
        row = found["prefill"]
        lines += [
            "",
            f"Prefill of {row['requests']} prompts of {row['prompt']} tokens: "
            f"{figure(row['median']['prefill_rate'])} tok/s, {_share(row, 'prefill_rate')} of the "
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


def _smoke(rows: list[dict[str, Any]]) -> list[str]:
    """Return the decode table, and the kernels that take the most time in a step."""
    lines = _decode(rows)
    for row in rows:
        if not row["key"].startswith("busy at"):
            continue
        steps, span = row["steps"], row["span_s"]
        cells = [
            [
                f"`{kernel['name'].replace('|', '/')}`",
                f"{kernel['count'] / steps:.1f}",
                f"{kernel['seconds'] / kernel['count'] * 1e6:.1f}",
                f"{kernel['seconds'] / span:.1%}",
            ]
            for kernel in row["kernels"]
            if kernel["seconds"] >= LEAST_SHOWN * span
        ]
        lines += [
            "",
            f"A step at {row['key'].removeprefix('busy at ')}: {row['launches'] / steps:.0f} "
            f"kernels and copies in {span / steps * 1e3:.2f} ms; the device is busy for "
            f"{row['busy_share']:.1%} of that time.",
            "",
            *table("kernel | a step | µs each | of the time", cells),
        ]
    return lines


def _compared(rows: list[dict[str, Any]]) -> list[str]:
    cells = []
    for row in rows:
        ratio = row.get("ratio", {})
        cells.append(
            [
                row["system"],
                str(row["requests"]),
                figure(row["median"]["output_rate"]),
                figure(row["reference"]["median"]["output_rate"]),
                _ratio(ratio, "output_rate"),
                _rate(row, "decode_rate"),
                _share(row, "decode_rate"),
                _share(row["reference"], "decode_rate"),
                _ratio(ratio, "decode_rate"),
                *_latencies(row),
            ]
        )
    head = "system | requests | output tok/s | headrace | headrace / it | decode tok/s"
    head += " | of the floor | headrace's share | headrace / it"
    return table(f"{head} | {_LATENCIES}", cells)


def _itl(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [
            row["system"],
            row["load"],
            str(row["requests"]),
            figure(row["median"]["output_rate"]),
            *_latencies(row),
        ]
        for row in rows
    ]
    return table(f"system | load | requests | output tok/s | {_LATENCIES}", cells)


def predictions(
    sizes: Sizes, rates: Rates, measured: Mapping[str, Mapping[int, float]]
) -> list[str]:
    """Return the expected times of steps, with the floor and the measured times, as lines of text.

    Args:
        sizes: which steps.
        rates: the device's rates.
        measured: the seconds of a decode step, by model and requests, where known.
    """
    least, most = (each * 1e6 for each in predict.LAUNCH_S)
    cells, context = [], sizes.prompt + sizes.output // 2
    for model in ("qwen3-8b", "qwen3-4b", "qwen3-0.6b"):
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
        "each launch in a graph. Launches are counted by the trace.",
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


def _predicted(row: dict[str, Any]) -> str:
    found = row.get("predicted")  # a row without steady steps has none
    if found is None:
        return ""
    return f"{figure(found['least_s'] * 1e3)} to {figure(found['most_s'] * 1e3)}"


_TABLES = {"checks": _checks, "smoke": _smoke, "floors": _floors, "decode": _decode, "itl": _itl}
_LATENCIES = "TTFT p50, p90, p99 ms | TPOT ms | ITL p50, p90, p99 ms"


def _latencies(row: dict[str, Any]) -> list[str]:
    median = row["median"]
    return [
        _milliseconds(median, *(f"ttft_p{percent}_s" for percent in (50, 90, 99))),
        _milliseconds(median, "tpot_s"),
        _milliseconds(median, *(f"itl_p{percent}_s" for percent in (50, 90, 99))),
    ]


def _milliseconds(figures: dict[str, float], *names: str) -> str:
    return ", ".join(figure(figures[name] * 1e3) for name in names if name in figures)


def _rate(row: dict[str, Any], name: str) -> str:
    return figure(row["median"][name]) if name in row["median"] else ""


def _share(row: dict[str, Any], name: str) -> str:
    return f"{row['of_floor'][name]:.0%}" if name in row["of_floor"] else ""


def _ratio(ratios: dict[str, float], name: str) -> str:
    return f"{ratios[name]:.2f}" if name in ratios else ""
