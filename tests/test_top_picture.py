"""docs/top.svg, the picture in README.md, is one of today's `headrace top`."""

from __future__ import annotations

import html
import re

from headrace.v1 import control_service_pb2 as pb

from tests.draw_top import CALLERS, drawn
from tests.service.readme import README, ROOT

FOUND = pb.Statistics(
    model="demo",
    phase=pb.SERVER_PHASE_READY,
    startup_phases=[pb.StartupPhase(name="weights")],
    engine=pb.EngineStatistics(
        blocks_total=10,
        host_blocks_total=10,
        prefix_queries=10,
        callers=[pb.CallerStatistics(caller=name) for name in CALLERS],
    ),
    rates=pb.EngineRates(steps=1.0),
)


def labels(svg: str) -> list[str]:
    """What stands at the beginning of its lines, down to the callers."""
    found: dict[float, tuple[float, str]] = {}
    for x, y, text in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', svg):
        if text.strip() and float(y) not in found:
            found[float(y)] = (float(x), html.unescape(text).replace("\xa0", " ").strip())
    lines = [text for _, (x, text) in sorted(found.items()) if x == 0.0]
    return [line.split("  ")[0] for line in lines[3 : lines.index("callers") + 1]]


def test_the_committed_picture_has_the_rows_of_today() -> None:
    committed = (ROOT / "docs" / "top.svg").read_text(encoding="utf-8")
    assert labels(committed) == labels(drawn(FOUND))
    assert "KV cache" in labels(committed)
    assert "(docs/top.svg)" in README.read_text(encoding="utf-8")


def test_it_loads_nothing_from_elsewhere() -> None:
    assert not re.search(r"url\(\"?http|<image|<script|@import|@font-face", drawn(FOUND))
