"""Draws a record: for each case, a bar for each system, and the floor. The SVG is written here,
because a plotting library would be the largest dependency of the project's tools.
"""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

WIDTH = 820
LABEL = 190
BAR = 16
GAP = 6
HEAD = 30
COLOURS = ("#1b6ca8", "#4c9fd1", "#8cc3e6", "#c7e1f3", "#8a8a8a", "#b3b3b3", "#d08c3c", "#e3b878")


def draw(record: dict[str, Any]) -> str:
    """Return the SVG: output tokens per second, with a separate scale for each case."""
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(record["systems"])}
    parts: list[str] = []
    y = HEAD
    for case in record["cases"]:
        y = _case(case, colours, parts, y)
    title = f"{record['model']}, {record['dtype']}: output tokens per second"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
            f'viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{y}" fill="white"/>',
            _text(8, 18, title, weight="bold"),
            *parts,
            "</svg>",
            "",
        ]
    )


def _case(case: dict[str, Any], colours: dict[str, str], parts: list[str], y: int) -> int:
    """Draw one case from y on. Returns where the next one starts."""
    floor = case["floor"]
    rates = {name: figures["output_rate"] for name, figures in case["median"].items()}
    most = max([*rates.values(), *([floor["output_rate"]] if floor else [])])
    scale = (WIDTH - LABEL - 80) / most
    y += 14
    parts.append(_text(8, y, f"{case['workload']} {case['load']}", weight="bold"))
    y += GAP
    top = y
    for name, rate in rates.items():
        middle = y + BAR - 4
        parts.append(_text(LABEL - 8, middle, name, anchor="end"))
        parts.append(
            f'<rect x="{LABEL}" y="{y}" width="{rate * scale:.1f}" height="{BAR}" '
            f'fill="{colours[name]}"/>'
        )
        parts.append(_text(round(LABEL + rate * scale) + 5, middle, f"{rate:,.0f}"))
        y += BAR + GAP
    if floor:
        x = LABEL + floor["output_rate"] * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 2}" y2="{y - 2}" stroke="#b03030" '
            'stroke-width="1.5" stroke-dasharray="4 2"/>'
        )
        parts.append(
            _text(round(x) + 4, top - 6, f"floor {floor['output_rate']:,.0f}", colour="#b03030")
        )
    return y + GAP


def _text(
    x: int, y: int, text: str, anchor: str = "start", weight: str = "normal", colour: str = "#222"
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
