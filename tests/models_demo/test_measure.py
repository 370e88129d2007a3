"""`models/demo/measure.py` as a user runs it: on the demo model, with a server of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parents[2] / "models/demo"
TEXTS = ["Once upon a time, there was a little girl.", "The river is cold. It is — ä — deep."]


def _measure(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, DEMO / "measure.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def _rows(*, of_each: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (DEMO / "heldout.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["kind"], []).append(row)
    return [row for rows in found.values() for row in rows[:of_each]]


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_server_is_asked_and_texts_are_measured(tmp_path: Path) -> None:
    rows = _rows(of_each=1)
    rows[0] |= {"id": "refused", "max_tokens": -1}
    (tmp_path / "prompts").write_text(_lines(rows))
    (tmp_path / "texts").write_text(_lines([{"text": text} for text in TEXTS]))
    done = _measure(
        "--prompts", tmp_path / "prompts", "--stories", tmp_path / "texts", "--baseline", DEMO,
        "--failures", tmp_path / "wrong",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [[part.strip() for part in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    cells = {row[0]: row[1:] for row in told if row}
    assert cells["Calls the one right tool"] == ["1", "0.0%"]
    assert cells["Calls none where none fits"][0] == "1"
    assert len(cells["both"]) == 3
    assert "Texts to copy, in tokens of this model: of about 30: " in done.stdout
    loss = float(cells["this model"][0])
    assert loss == pytest.approx(_loss(), abs=1e-4)
    assert cells["the model to compare with"] == cells["this model"]
    assert "1 prompts were refused: " in done.stderr
    wrong = [json.loads(line) for line in (tmp_path / "wrong").read_text().splitlines()]
    assert wrong[0]["id"] == "refused"
    assert "max_tokens" in wrong[0]["error"]


def _loss() -> float:
    """By hand: each token's own probability, behind `<|bos|>`."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    nats = 0.0
    for text in TEXTS:
        ids = [1, *tokenizer.encode(text, add_special_tokens=False)]
        with torch.inference_mode():
            logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        nats -= sum(float(logs[place, token]) for place, token in enumerate(ids[1:]))
    return nats / sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--kinds", "copi"], 2, "'copi' is none of call, no_call, "),
        (["--kinds", "copy", "--write"], 2, "--write wants all parts: leave out --kinds"),
        (["--kinds", "copy", "--prompts", "/nowhere"], 1, "measure.py: [Errno 2] "),
        (["--kinds", "copy", "--target", "127.0.0.1:1"], 1, "cannot reach a Headrace server"),
        (["--kinds", "copy", "--model", "/nowhere"], 1, "of /nowhere ended at its start"),
    ],
)
def test_what_cannot_be_measured_is_said(words: list[str], code: int, told: str) -> None:
    done = _measure(*words)
    assert done.returncode == code
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(DEMO)
    import measure

    return measure


def test_figures_go_between_the_markers_of_the_card(measure: Any) -> None:
    card = "a\n<!-- measured -->\nold\n<!-- end of measured -->\nb\n"
    once = measure.rewritten(card, "| new |")
    assert once == "a\n<!-- measured -->\n| new |\n<!-- end of measured -->\nb\n"
    assert measure.rewritten(once, "| new |") == once
    with pytest.raises(measure.MeasureError, match="needs the lines <!-- measured -->"):
        measure.rewritten("a\n<!-- measured -->\nb\n", "| new |")
    assert measure.rewritten((DEMO / "README.md").read_text(), "| new |").count("| new |") == 1


def test_the_run_is_told(measure: Any) -> None:
    assert re.match(r"Measured on \d{4}-\d\d-\d\d, .+, \d+ CPUs, torch \d", measure.about_the_run())
