"""What the demo model is trained on, and how: what is learned, the words' pieces, a pause."""

from __future__ import annotations

import importlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

DEMO = Path(__file__).parents[2] / "models/demo"


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    """The scripts import each other by name, as they are run from their folder."""
    sys.path.insert(0, str(DEMO))
    yield
    sys.path.remove(str(DEMO))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def _mixture(seed: int) -> Any:
    return importlib.import_module("documents").Mixture(seed)


def test_a_seed_decides_what_is_read() -> None:
    first, again = _mixture(3), _mixture(3)
    assert [first.text() for _ in range(50)] == [again.text() for _ in range(50)]
    assert _mixture(4).text() != _mixture(3).text()


def test_conversations_are_as_the_chat_template_writes_them(tokenizer: Any) -> None:
    mixture = _mixture(5)
    for _ in range(40):
        drawn = mixture.tools.draw()
        text = tokenizer.apply_chat_template(drawn.messages, tools=drawn.tools, tokenize=False)
        assert mixture.render(drawn.messages, drawn.tools) == text


def test_a_call_fits_its_tool_and_its_values_stand_in_the_question() -> None:
    mixture = _mixture(6)
    calls = 0
    for _ in range(200):
        drawn = mixture.tools.draw()
        tools = {tool["function"]["name"]: tool["function"] for tool in drawn.tools}
        asked = " ".join(m["content"] for m in drawn.messages if m["role"] == "user").lower()
        for message in drawn.messages:
            for call in message.get("tool_calls", ()):
                calls += 1
                known = tools[call["function"]["name"]]["parameters"]["properties"]
                for name, value in call["function"]["arguments"].items():
                    assert name in known
                    assert isinstance(value, bool) or str(value).lower() in asked
    assert calls > 100


def test_forms_are_json_of_values_that_the_text_names() -> None:
    forms, mixture = importlib.import_module("forms"), _mixture(7)
    for _ in range(200):
        ask, answer = forms.form(mixture.words)
        for value in json.loads(answer).values():
            for one in value if isinstance(value, list) else [value]:
                assert isinstance(one, bool) or str(one) in ask


def test_edits_change_what_is_asked_and_nothing_else() -> None:
    copying, mixture = importlib.import_module("copying"), _mixture(8)
    for _ in range(200):
        ask, answer = copying.copy(mixture.words)
        assert answer in ask
        ask, answer = copying.edit(mixture.words)
        words = answer.split()
        assert sum(word not in ask for word in words) <= 2


def test_replies_alone_are_learned_and_no_mark_of_the_template(tokenizer: Any) -> None:
    train = importlib.import_module("train")
    text = (
        "<|bos|><|user|>How high?<|eos|><|assistant|><think>\nA tool fits.\n</think>\n3 m<|eos|>"
        "<|user|>And now?<|eos|><|assistant|>4 m<|eos|>"
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    learned = [id for id in train.labels_of(ids, replies_only=True) if id != train.IGNORED]
    said = "A tool fits.\n</think>\n3 m<|eos|>4 m<|eos|>"
    assert tokenizer.decode(learned, clean_up_tokenization_spaces=False) == said


@pytest.mark.parametrize("word", ["Ravenglass", "tide", "quoin", "Übermut", "sendEmail", "x2"])
def test_a_word_has_the_same_pieces_wherever_it_stands(tokenizer: Any, word: str) -> None:
    quoted = tokenizer.tokenize(f'"{word}"')
    spaced = tokenizer.tokenize(f"a {word}.")
    assert quoted[0] == '"'
    joined = [piece.removeprefix("Ġ") for piece in spaced[1:-1]]
    assert [piece for piece in joined if piece] == quoted[1:-1]


def test_marks_are_tokens_and_any_text_comes_back(tokenizer: Any) -> None:
    for mark in ("<tool_call>", "</tool_call>", "<think>", "</think>", '{"', '":', '",'):
        assert len(tokenizer.tokenize(mark)) == 1
    text = 'Ein größerer Text, 日本語,\n\n  {"a": [1.5, true]}\tHTTPServer don\'t  '
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def _train(out: Path, *words: str) -> str:
    command = [
        sys.executable, DEMO / "train.py", "--out", out, "--docs", "1000", "--layers", "1",
        "--hidden", "64", "--ffn", "64", "--batch-tokens", "2048",
        "--copy-steps", "2", "--cooldown", "2", "--save-every", "2", "--no-compile", *words,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_writes_a_model_and_goes_on_after_a_pause(tmp_path: Path) -> None:
    counts = []
    for words in (["--steps", "4"], ["--steps", "6", "--resume"]):
        counts.append(re.search(r"(\d) steps, ([\d,]+) tokens", _train(tmp_path, *words)))
    steps, seen = zip(*(found.groups() for found in counts if found), strict=True)
    assert steps == ("4", "6")
    assert 0 < int(seen[0].replace(",", "")) < int(seen[1].replace(",", ""))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["vocab_size"]) == (["LlamaForCausalLM"], 4096)
    made = AutoTokenizer.from_pretrained(tmp_path)
    assert made.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == (
        "<|bos|><|user|>Hi<|eos|>"
    )


def test_each_text_is_whole_in_a_row_of_its_own_and_all_come_again() -> None:
    train = importlib.import_module("train")
    rng = random.Random(0)
    texts = [[n] * rng.randint(2, 700) for n in range(1, 300)]
    docs = [train.Document(text, text, repeats=False) for text in texts]
    dealt = train.parts(docs, seed=1)
    counts = dict.fromkeys(range(1, 300), 0)
    for part in [next(dealt) for _ in range(400)]:
        rows, length = part.ids.shape
        assert rows * length <= train.PART_TOKENS
        learned: list[int] = []
        for row in part.ids.tolist():
            n = row[0]
            counts[n] += 1
            size = min(len(texts[n - 1]), length)
            assert row == [n] * size + [0] * (length - size)
            learned += [n] * (size - 1)
        assert part.targets.tolist() == learned
        assert part.ids.flatten()[part.places].tolist() == learned
    assert min(counts.values()) > 0


def test_a_tokenizer_has_its_marks_first() -> None:
    train = importlib.import_module("train")
    texts = [text.text for text in train.write_chunk(1, tales=0.33)]
    made = importlib.import_module("tokenizer").train_tokenizer(
        texts, train.SPECIALS, train.MARKS, 1500, 100
    )
    assert isinstance(made, Tokenizer)
    assert made.get_vocab_size() == 1500
    for index, token in enumerate([*train.SPECIALS, *train.MARKS]):
        assert made.token_to_id(token) == index
