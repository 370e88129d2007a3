"""Reasoning before a form through the whole engine: random models, whose reasoning and form are as
wild as they may be, with tokenizers of several kinds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerFast

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel, from_model
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.sampling_params import GrammarKind, GrammarParams, ReasoningParams
from engine.text import Tokenizer
from tests.engine.structured.conftest import DEMO
from tests.engine.text.conftest import KINDS, SPECIAL
from tests.tiny_models import make_model

WAIT = 60.0
CONFIG = ContinuousBatchingConfig(
    block_size=8,
    num_blocks=200,
    max_batch_tokens=64,
    max_requests_per_batch=8,
    per_request_processors=True,
)
FORM = json.dumps(
    {
        "type": "object",
        "properties": {
            "size": {"enum": ["small", "large"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 20},
        },
        "required": ["size", "count"],
        "additionalProperties": False,
    }
)
SPECIAL_MARKS = {
    "demo": ("<|user|>", "<|assistant|>"),
    "byte_level": ("<|im_start|>", "<|im_end|>"),
    "llama_like": ("<unk>", "<s>"),
}


@pytest.fixture(scope="module", params=list(SPECIAL_MARKS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = DEMO
    if kind != "demo":
        directory = tmp_path_factory.mktemp(kind)
        whole = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), **SPECIAL[kind])
        whole.save_pretrained(directory)
    return random_model(directory)


def random_model(directory: Path) -> LoadedModel:
    tokenizer = Tokenizer.load(directory)
    model = make_model(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=512,
            bos_token_id=0,
            eos_token_id=tokenizer.token_id(tokenizer.eos_token or ""),
            pad_token_id=0,
        )
    )
    model.config.name_or_path = str(directory)
    return from_model(model, CONFIG)


@pytest.fixture
def manager(model: LoadedModel) -> Iterator[ContinuousBatchingManager]:
    manager = model.init_continuous_batching(None, CONFIG)
    manager.start()
    yield manager
    manager.stop(hard_stop=True, timeout=WAIT)
    assert not manager.is_running()


def generate(
    manager: ContinuousBatchingManager, requests: dict[str, tuple[int, dict[str, object]]]
) -> dict[str, list[int]]:
    """The tokens of requests, each with a seed and options; all must end by themselves, unless they
    have as many tokens as they may.
    """
    for name, (seed, options) in requests.items():
        manager.add_request(
            [5, 6, 7 + seed % 50],
            name,
            **{
                "max_new_tokens": 170,
                "do_sample": True,
                "temperature": 1.0,
                "top_k": 0,
                "top_p": 1.0,
                "seed": seed,
                **options,
            },  # type: ignore[arg-type]
        )
    found = {}
    for _ in requests:
        output = manager.get_result(timeout=WAIT)
        assert output is not None
        assert output.error is None
        found[output.request_id] = list(output.generated_tokens)
    return found


def spelled(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, tokens))


def check(
    tokenizer: Tokenizer, tokens: list[int], reasoning: ReasoningParams, *, is_special: bool
) -> None:
    """An output has at most so many tokens of reasoning, and then the form."""
    opening, closing = reasoning.opening.encode(), reasoning.closing.encode()
    eos = tokenizer.token_id(tokenizer.eos_token or "")
    tokens = [token for token in tokens if token != eos]
    if is_special:  # other tokens may spell the mark
        special = [tokenizer.token_id(reasoning.opening), tokenizer.token_id(reasoning.closing)]
        begin = 0 if reasoning.is_open or tokens[0] != special[0] else 1
        has_reasoning = reasoning.is_open or begin == 1
        end = tokens.index(special[1]) if has_reasoning else 0
        num_thoughts, rest = end - begin, tokens[end + has_reasoning :]
    else:
        text = spelled(tokenizer, tokens)
        has_reasoning = reasoning.is_open or text.startswith(opening)
        begin_bytes = 0 if reasoning.is_open or not has_reasoning else len(opening)
        place = text.index(closing, begin_bytes) if has_reasoning else 0
        sizes = [len(spelled(tokenizer, tokens[:count])) for count in range(len(tokens))]
        num_thoughts = sum(begin_bytes <= size < place for size in sizes)
        behind = place + len(closing) if has_reasoning else 0
        rest = [token for size, token in zip(sizes, tokens, strict=True) if size >= behind]
    assert reasoning.max_tokens is None or num_thoughts <= reasoning.max_tokens
    value = json.loads(spelled(tokenizer, rest))
    assert value.keys() == {"size", "count"}
    assert value["size"] in ("small", "large")
    assert 1 <= value["count"] <= 20


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 50])
def test_the_bound_is_never_exceeded_and_the_form_follows(
    manager: ContinuousBatchingManager, model: LoadedModel, kind: str, budget: int, is_special: bool
) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    opening, closing = SPECIAL_MARKS[kind] if is_special else ("<think>", "</think>")
    requests: dict[str, tuple[int, dict[str, object]]] = {}
    asked: dict[str, ReasoningParams] = {}
    for seed in range(8):
        for is_open in (False, True):
            name = f"{seed}-{is_open}"
            asked[name] = ReasoningParams(
                opening, closing, is_open=is_open, max_tokens=budget, forbidden=(opening,)
            )
            form = GrammarParams(kind=GrammarKind.JSON_SCHEMA, text=FORM, reasoning=asked[name])
            first = tokenizer.token_id(opening) if is_special else first_token(tokenizer, opening)
            bias = {} if is_open else {"logit_bias": {first: 100.0}}
            requests[name] = (seed, {"grammar": form, **bias})
    found = generate(manager, requests)
    for name, tokens in found.items():
        assert len(tokens) < 170
        check(tokenizer, tokens, asked[name], is_special=is_special)
    text = [spelled(tokenizer, tokens) for name, tokens in found.items() if "False" in name]
    assert all(one.startswith(opening.encode()[:1]) for one in text)


def first_token(tokenizer: Tokenizer, text: str) -> int:
    return next(
        token
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token) == text[:1].encode()
    )


def test_without_a_form_the_tokens_are_those_without_a_bound(
    manager: ContinuousBatchingManager, model: LoadedModel
) -> None:
    for is_open in (False, True):
        reasoning = ReasoningParams("<think>", "</think>", is_open=is_open, max_tokens=1000)
        free = GrammarParams(kind=GrammarKind.FREE, reasoning=reasoning)
        requests: dict[str, tuple[int, dict[str, object]]] = {}
        for seed in range(4):
            requests[f"{seed}-free"] = (seed, {"grammar": free, "max_new_tokens": 60})
            requests[f"{seed}-none"] = (seed, {"max_new_tokens": 60})
        found = generate(manager, requests)
        for seed in range(4):
            assert found[f"{seed}-free"] == found[f"{seed}-none"]


def test_without_a_form_the_bound_holds(
    manager: ContinuousBatchingManager, model: LoadedModel
) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    reasoning = ReasoningParams("<think>", "</think>", is_open=True, max_tokens=7)
    free = GrammarParams(kind=GrammarKind.FREE, reasoning=reasoning)
    options: dict[str, object] = {"grammar": free, "max_new_tokens": 40, "eos_token_id": -1}
    for tokens in generate(manager, {str(seed): (seed, options) for seed in range(8)}).values():
        text = spelled(tokenizer, tokens)
        place = text.index(b"</think>")
        sizes = [len(spelled(tokenizer, tokens[:count])) for count in range(len(tokens))]
        assert sum(size < place for size in sizes) <= 7
        assert len(tokens) == 40


def test_each_choice_reasons_by_itself(
    manager: ContinuousBatchingManager, model: LoadedModel
) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    reasoning = ReasoningParams("<think>", "</think>", is_open=True, max_tokens=5)
    form = GrammarParams(kind=GrammarKind.JSON_SCHEMA, text=FORM, reasoning=reasoning)
    manager.add_request(
        [5, 6], "r", max_new_tokens=150, grammar=form, n=3, do_sample=True, temperature=1.0, seed=4
    )
    for _ in range(3):
        output = manager.get_result(timeout=WAIT)
        assert output is not None
        assert output.error is None
        check(tokenizer, list(output.generated_tokens), reasoning, is_special=False)
