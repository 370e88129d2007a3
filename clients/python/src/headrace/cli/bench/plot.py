"""Draws the measurements: the distribution of times, and the output over time.

The SVG is written directly, because a plotting library would be larger than the client. Its colours
follow the reader's light or dark mode.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from headrace.cli.bench.measures import Histogram
from headrace.cli.bench.report import Report, told

_WIDTH = 820
_LEFT = 80
_RIGHT = 20
_PANEL = 130  # the height of a panel's bars
_STEP = 205  # from panel to panel
_TOP = 92
_BARS = 48
_STYLE = """\
.back { fill: #ffffff } text { fill: #24292f } .faint { fill: #57606a }
.bar { fill: #1b6ca8 } .axis { stroke: #8c959f } .mark { stroke: #b3541e } .told { fill: #8f3f10 }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117 } text { fill: #e6edf3 } .faint { fill: #9198a1 }
.bar { fill: #4c9fd1 } .axis { stroke: #656c76 } .mark { stroke: #f0a35e } .told { fill: #f0b27a }
}"""


def draw(report: Report) -> str:
    """Returns the SVG."""
    tally = report.tally
    height = _TOP + 3 * _STEP
    title = f"{report.card.name}: {report.meaning}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{height}"/>',
        _text(8, 22, f"{report.card.name} at {report.target}", weight="bold"),
        _text(8, 40, f"{report.meaning}; {tally.seconds:,.1f} s", style="faint"),
        *_distribution(_TOP, "Time to first token", "requests", tally.ttft),
        *_distribution(_TOP + _STEP, "From token to token", "tokens", tally.itl),
        *_over_time(_TOP + 2 * _STEP, tally.timeline.cells, tally.timeline.cell_seconds),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _distribution(top: int, title: str, unit: str, times: Histogram) -> list[str]:
    """Draws how many requests took how long, on a logarithmic time scale."""
    if not times.count:
        return _empty(top, title)
    least, greatest = (max(one, 1e-6) for one in (times.least, times.greatest))
    ends = (math.log(least) - 0.05, math.log(greatest) + 0.05)
    bars = [0] * _BARS
    for lower, upper, count in times.buckets():
        share = (math.log(math.sqrt(lower * upper)) - ends[0]) / (ends[1] - ends[0])
        bars[min(max(int(share * _BARS), 0), _BARS - 1)] += count
    parts = [
        _text(_LEFT, top - 22, title, weight="bold"),
        *_bars(top, [float(bar) for bar in bars]),
        _text(_LEFT - 6, top + 10, f"{max(bars):,}", anchor="end", style="faint"),
        _text(_LEFT - 6, top + 24, unit, anchor="end", style="faint"),
        _text(_LEFT, top + _PANEL + 16, told(least), style="faint"),
        _text(_WIDTH - _RIGHT, top + _PANEL + 16, told(greatest), anchor="end", style="faint"),
    ]
    for place, percent in enumerate((50, 90, 99)):
        value = times.percentile(percent)
        if value is None:
            continue
        share = (math.log(max(value, 1e-6)) - ends[0]) / (ends[1] - ends[0])
        x = _LEFT + min(max(share, 0.0), 1.0) * _inner()
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + _PANEL}" '
            'stroke-dasharray="4 2"/>'
        )
        # Each on a line of its own where there is always room: percentiles may be close together.
        words = f"p{percent} {told(value)}"
        parts.append(_text(_LEFT + 200 + 160 * place, top - 22, words, style="told"))
    return parts


def _over_time(top: int, cells: list[int], cell_seconds: float) -> list[str]:
    """Draws the output tokens per second over time."""
    title = "Output tokens per second"
    if not any(cells):
        return _empty(top, title)
    rates = [cell / cell_seconds for cell in cells]
    return [
        _text(_LEFT, top - 22, title, weight="bold"),
        *_bars(top, rates),
        _text(_LEFT - 6, top + 10, f"{max(rates):,.0f}", anchor="end", style="faint"),
        _text(_LEFT, top + _PANEL + 16, "0 s", style="faint"),
        _text(
            _WIDTH - _RIGHT,
            top + _PANEL + 16,
            f"{len(cells) * cell_seconds:,.4g} s",
            anchor="end",
            style="faint",
        ),
    ]


def _bars(top: int, heights: list[float]) -> list[str]:
    """Draws bars over the whole width. The highest bar is as high as the panel."""
    most, width = max(heights), _inner() / len(heights)
    parts = [
        f'<rect class="bar" x="{_LEFT + place * width:.2f}" '
        f'y="{top + _PANEL * (1 - height / most):.2f}" '
        f'width="{max(width - 0.6, 0.6):.2f}" height="{_PANEL * height / most:.2f}"/>'
        for place, height in enumerate(heights)
        if height
    ]
    floor = top + _PANEL
    line = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"'
    return [*parts, f'<line class="axis" {line}/>']


def _empty(top: int, title: str) -> list[str]:
    return [
        _text(_LEFT, top - 22, title, weight="bold"),
        _text(_LEFT, top + 20, "nothing was measured", style="faint"),
    ]


def _inner() -> int:
    return _WIDTH - _LEFT - _RIGHT


def _text(
    x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", style: str = ""
) -> str:
    named = f' class="{style}"' if style else ""
    return (
        f'<text{named} x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
