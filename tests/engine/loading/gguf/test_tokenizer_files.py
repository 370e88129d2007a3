"""Tokenizers made from metadata: the same ids as those that transformers makes of the same
vocabulary and merges, on text of all kinds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from engine.contract.errors import ModelRefusedError
from engine.loading.gguf.container import Container
from engine.loading.gguf.tokenizer_files import tokenizer_of

TEXTS: list[str | Path] = [
    "Hello, world! It's 12345 o'clock; they're late, I'LL wait.\n\n\t  x  \r\n y",
    "naïve café cafe\u0301 Ångström Å 你好，世界 🙂👍🏽 ١٢٣ ⅷ Ⅷ ½",
    "def f(x):\n    return x**2 # 100%\n\n\n  end   ",
    "<|start|>user\nwhat is <tool>7</tool>?<|end|><|start|>",
    "a<|end|>b <|endd|> <tool >  \u00a0\u2003mixed\u200bspace",
    " ",
    "",
    "\n \n  \n",
    *(Path(__file__).parents[4] / "docs" / name for name in ("promises.md", "operations.md")),
]
SPECIAL, USER = ["<|start|>", "<|end|>"], ["<tool>", "</tool>"]


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary with merges of words of these pages."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=1200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def texts() -> list[str]:
    return [one if isinstance(one, str) else one.read_text() for one in TEXTS]


def container(
    trained: tuple[dict[str, int], list[tuple[str, str]]], cut: str, **changes: Any
) -> Container:
    vocabulary, merges = trained
    tokens = [*vocabulary, *SPECIAL, *USER, "[PAD1]"]
    types = [1] * len(vocabulary) + [3] * len(SPECIAL) + [4] * len(USER) + [5]
    own = {
        "model": "gpt2",
        "pre": cut,
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": len(vocabulary),
        "eos_token_id": len(vocabulary) + 1,
        **changes,
    }
    metadata = {f"tokenizer.ggml.{key}": one for key, one in own.items() if one is not None}
    return Container((Path("model.gguf"),), metadata, {})


def make(found: Container) -> Tokenizer:
    count = len(found.metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    return Tokenizer.from_str(json.dumps(tokenizer_of(found, count)["tokenizer.json"]))


def theirs(trained: tuple[dict[str, int], list[tuple[str, str]]], cut: str) -> Tokenizer:
    vocabulary, merges = trained
    made: Tokenizer
    if cut == "qwen2":
        made = Qwen2Tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
    elif cut == "llama-bpe":
        made = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
        pattern = TikTokenConverter(vocab_file="x").pattern
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
    else:
        made = GPT2Tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
        if cut == "smollm":  # as its own tokenizer.json has it
            made.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), made.pre_tokenizer]
            )
    first = len(vocabulary)
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in USER])
    assert cut == "qwen2" or made.token_to_id(SPECIAL[0]) in (first, first + 1)
    return made


@pytest.mark.parametrize("cut", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_ids_are_those_of_transformers(
    cut: str, trained: tuple[dict[str, int], list[tuple[str, str]]]
) -> None:
    ours = make(container(trained, cut, add_bos_token=False))
    reference = theirs(trained, cut)
    names = {ours.token_to_id(one): reference.token_to_id(one) for one in (*SPECIAL, *USER)}
    for text in texts():
        ids, expected = ours.encode(text).ids, reference.encode(text).ids
        assert [names.get(one, one) for one in ids] == expected
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(
            expected, skip_special_tokens=False
        )


def test_the_order_of_merges_matters(
    trained: tuple[dict[str, int], list[tuple[str, str]]],
) -> None:
    """A planted fault: merges that are out of order give other ids."""
    vocabulary, merges = trained
    right = make(container(trained, "gpt-2"))
    wrong = make(container((vocabulary, merges[::-1]), "gpt-2"))
    assert any(right.encode(text).ids != wrong.encode(text).ids for text in texts())


@pytest.mark.parametrize(
    ("cut", "says", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False),
     ("qwen2", True, True)],
)  # fmt: skip
def test_the_first_token(
    cut: str,
    says: bool | None,
    begins: bool,
    trained: tuple[dict[str, int], list[tuple[str, str]]],
) -> None:
    tokenizer = make(container(trained, cut, add_bos_token=says))
    first = tokenizer.token_to_id(SPECIAL[0])
    ids = tokenizer.encode("Hello").ids
    assert (ids[0] == first) is begins
    assert first not in tokenizer.encode("Hello", add_special_tokens=False).ids


def test_unused_tokens_are_none(trained: tuple[dict[str, int], list[tuple[str, str]]]) -> None:
    assert make(container(trained, "qwen2")).token_to_id("[PAD1]") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, r"its tokenizer is not read here \('t5'\): put the tokenizer\.json"),
        ({"model": None}, "its tokenizer is not read here"),
        ({"pre": "tekken"}, "'gpt2', 'tekken'"),
        ({"pre": None}, "'gpt2', None"),
        ({"merges": []}, "no merges that can be read"),
        ({"merges": ["a b c"]}, "no merges that can be read"),
        ({"merges": None}, "no merges that can be read"),
        ({"token_type": np.array([1, 1], np.int32)}, "lack their types"),
        ({"add_eos_token": True}, "ends prompts by a token"),
    ],
)
def test_what_cannot_be_told_is_refused(
    changes: dict[str, Any],
    message: str,
    trained: tuple[dict[str, int], list[tuple[str, str]]],
) -> None:
    with pytest.raises(ModelRefusedError, match=message) as caught:
        make(container(trained, **{"cut": "qwen2", **changes}))
    assert "model.gguf" in str(caught.value)


RECORDED = Path(__file__).parent / "recorded" / "sentencepiece.json"
"""1,000 tokens that SentencePiece 0.2.3 has learnt from pages and text of all scripts (BPE with
tokens of bytes, split digits, no normalization), and the ids that it gives for some texts.
"""


def sentencepiece(**changes: Any) -> tuple[Container, list[tuple[str, list[int]]]]:
    recorded = json.loads(RECORDED.read_text())
    own = {
        "model": "llama",
        "tokens": [*recorded["tokens"], *SPECIAL, *USER],
        "scores": np.array([*recorded["scores"], *[-1e4] * 4], np.float32),
        "token_type": np.array([*recorded["types"], 3, 3, 4, 4], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    metadata = {f"tokenizer.ggml.{key}": one for key, one in own.items() if one is not None}
    return Container((Path("model.gguf"),), metadata, {}), recorded["texts"]


def test_ids_are_those_of_sentencepiece() -> None:
    found, recorded = sentencepiece()
    ours = make(found)
    assert len(recorded) > 80
    for text, ids in recorded:
        assert ours.encode(text).ids == [1, *ids]
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_text_behind_a_special_token_begins_with_a_blank() -> None:
    """As llama.cpp and transformers have it."""
    ours = make(sentencepiece(add_bos_token=False)[0])
    start, end = (ours.token_to_id(one) for one in SPECIAL)
    ids = ours.encode(f"{SPECIAL[0]}the model{SPECIAL[1]}").ids
    assert ids == [start, *ours.encode("the model").ids, end]
    plain = make(sentencepiece(add_bos_token=False, add_space_prefix=False)[0])
    assert plain.encode(" the model").ids == ours.encode("the model").ids
    assert plain.encode("the model").ids != ours.encode("the model").ids


def test_scores_out_of_order_are_found() -> None:
    """A planted fault."""
    scores = sentencepiece()[0].metadata["tokenizer.ggml.scores"]
    found, recorded = sentencepiece(scores=-scores)  # type: ignore[operator]
    ours = make(found)
    assert any(ours.encode(text).ids != [1, *ids] for text, ids in recorded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precompiled_charsmap": np.zeros(9, np.uint8)}, "text is normalized first"),
        ({"remove_extra_whitespaces": True}, "text is normalized first"),
        ({"scores": None}, "tokens lack their scores"),
        ({"scores": np.zeros(5, np.float32)}, "tokens lack their scores"),
        ({"scores": np.zeros(1004, np.float32)}, "scores do not say which"),
        ({"scores": np.full(1004, np.nan, np.float32)}, "scores do not say which"),
        ({"token_type": None}, "not tokens of all bytes"),
        ({"tokens": ["x" * 257, *map(str, range(1003))]}, "more than 256 characters"),
    ],
)
def test_sentencepiece_s_that_are_not_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelRefusedError, match=message) as caught:
        make(sentencepiece(**changes)[0])
    assert "put the tokenizer.json" in str(caught.value)


def test_a_vocabulary_shorter_than_the_embedding(
    trained: tuple[dict[str, int], list[tuple[str, str]]],
) -> None:
    with pytest.raises(ModelRefusedError, match=r"tokens for 5000 rows of the embedding"):
        tokenizer_of(container(trained, "qwen2"), 5000)
