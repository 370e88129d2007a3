"""Forms through the whole engine: a random model that would write anything, and the demo model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel, from_model, load
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import InvalidRequestError, UnsupportedFeatureError
from engine.contract.outputs import FinishReason, RequestOutput, StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import GrammarKind, GrammarParams, SamplingParams, StopParams
from engine.contract.types import RequestId, TokenId
from engine.process.local_client import LocalEngineClient
from engine.text import Tokenizer
from tests.engine.structured.conftest import DEMO, form
from tests.tiny_models import make_model

WAIT = 30.0
CONFIG = ContinuousBatchingConfig(
    block_size=8,
    num_blocks=160,
    max_batch_tokens=64,
    max_requests_per_batch=8,
    per_request_processors=True,
)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "size": {"enum": ["small", "large"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 20},
        },
        "required": ["name", "size", "count"],
        "additionalProperties": False,
    }
)
CHOICES = ("yes", "no", "maybe, or not")


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"name", "size", "count"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and value["size"] in ("small", "large")
        and type(value["count"]) is int
        and 1 <= value["count"] <= 20
    )


CASES: list[tuple[GrammarParams, Callable[[str], object]]] = [
    (form(GrammarKind.JSON_SCHEMA, SCHEMA), fits_schema),
    (form(GrammarKind.JSON_OBJECT), lambda text: isinstance(json.loads(text), dict)),
    (
        form(GrammarKind.REGEX, r"[a-z]{3,9}( [0-9]{2}|é)"),
        lambda text: re.fullmatch(r"[a-z]{3,9}( [0-9]{2}|é)", text),
    ),
    (
        form(GrammarKind.LARK, 'start: pair ("," pair){0,2}\npair: /[a-z]{1,3}/ "=" /[0-9]{1,2}/'),
        lambda text: re.fullmatch(r"[a-z]{1,3}=\d{1,2}(,[a-z]{1,3}=\d{1,2}){0,2}", text),
    ),
    (form(GrammarKind.CHOICE, CHOICES), lambda text: text in CHOICES),
]


@pytest.fixture(scope="module")
def random_model() -> LoadedModel:
    tokenizer = Tokenizer.load(DEMO)
    eos = tokenizer.token_id(tokenizer.eos_token or "")
    model = make_model(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=eos,
            pad_token_id=0,
        )
    )
    model.config.name_or_path = str(DEMO)
    return from_model(model, CONFIG)


@pytest.fixture(scope="module")
def demo_model() -> LoadedModel:
    return load(str(DEMO), CONFIG, dtype="float32", threads=1)


class Outputs:
    """Collects every request's outputs, and tells when all have ended."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}

    def take(self, output: RequestOutput) -> None:
        key = (output.request_id, output.choice)
        self.tokens.setdefault(key, []).extend(output.token_ids)
        if output.finish is not None:
            self.reasons[key] = output.finish.reason


@pytest.fixture
def manager(random_model: LoadedModel) -> Iterator[ContinuousBatchingManager]:
    yield from _started(random_model)


@pytest.fixture
def demo_manager(demo_model: LoadedModel) -> Iterator[ContinuousBatchingManager]:
    yield from _started(demo_model)


def _started(model: LoadedModel) -> Iterator[ContinuousBatchingManager]:
    manager = model.init_continuous_batching(None, CONFIG)
    manager.start()
    yield manager
    manager.stop(hard_stop=True, timeout=WAIT)
    assert not manager.is_running()


def run_all(
    manager: ContinuousBatchingManager, model: LoadedModel, prompt: list[int], seeds: range
) -> set[str]:
    """Run every case with every seed; returns the kinds of which an output was whole."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    names: dict[str, Callable[[str], object]] = {}
    for index, (grammar, fits) in enumerate(CASES):
        for seed in seeds:
            name = f"{index}-{seed}"
            names[name] = fits
            manager.add_request(
                prompt,
                name,
                max_new_tokens=150,
                grammar=grammar,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                seed=seed,
            )
    whole = set()
    for _ in names:
        output = manager.get_result(timeout=WAIT)
        assert output is not None
        assert output.error is None
        if len(output.generated_tokens) < 150:
            text = tokenizer.decode(output.generated_tokens)
            assert names[output.request_id](text), text
            whole.add(CASES[int(output.request_id[0])][0].kind.value)
    return whole


def test_a_random_model_keeps_to_every_form(
    manager: ContinuousBatchingManager, random_model: LoadedModel
) -> None:
    whole = run_all(manager, random_model, [5, 6, 7], range(12))
    assert whole >= {"json_schema", "regex", "grammar", "choice"}


def test_the_demo_model_keeps_to_every_form(
    demo_manager: ContinuousBatchingManager, demo_model: LoadedModel
) -> None:
    tokenizer = demo_model.tokenizer
    assert tokenizer is not None
    whole = run_all(demo_manager, demo_model, tokenizer.encode("The answer is "), range(4))
    assert whole >= {"regex", "grammar", "choice"}


def test_neighbours_without_a_form_give_what_they_give_alone(
    manager: ContinuousBatchingManager,
) -> None:
    prompts = [[11, 12, 13], [400, 401, 402, 403, 404]]

    def greedy(tag: str) -> list[list[int]]:
        for index, prompt in enumerate(prompts):
            manager.add_request(prompt, f"{tag}{index}", max_new_tokens=24, eos_token_id=-1)
        found = []
        for index in range(len(prompts)):
            output = manager.get_result(f"{tag}{index}", timeout=WAIT)
            assert output is not None
            found.append(list(output.generated_tokens))
        return found

    alone = greedy("alone")
    for index, (grammar, _) in enumerate(CASES):
        manager.add_request([9, 8, 7], f"form{index}", max_new_tokens=40, grammar=grammar)
    assert greedy("beside") == alone


def test_without_ending_ids_a_complete_output_ends_all_the_same(
    manager: ContinuousBatchingManager, random_model: LoadedModel
) -> None:
    assert random_model.tokenizer is not None
    manager.add_request(
        [4, 5],
        "r",
        max_new_tokens=50,
        eos_token_id=-1,
        grammar=form(GrammarKind.CHOICE, ("one", "two")),
    )
    output = manager.get_result("r", timeout=WAIT)
    assert output is not None
    assert output.error is None
    assert random_model.tokenizer.decode(output.generated_tokens) in ("one", "two")


def test_a_form_cut_by_max_tokens_is_no_error(manager: ContinuousBatchingManager) -> None:
    manager.add_request([4], "r", max_new_tokens=2, grammar=form(GrammarKind.CHOICE, ("x" * 50,)))
    output = manager.get_result("r", timeout=WAIT)
    assert output is not None
    assert output.error is None
    assert len(output.generated_tokens) == 2


def test_a_refused_form_leaves_nothing_behind(manager: ContinuousBatchingManager) -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar\.regex"):
        manager.add_request([4], "r", max_new_tokens=2, grammar=form(GrammarKind.REGEX, "(a"))
    manager.add_request([4], "r", max_new_tokens=2)
    assert manager.get_result("r", timeout=WAIT) is not None


def test_a_form_that_the_other_options_leave_no_token_for_fails_alone(
    manager: ContinuousBatchingManager, random_model: LoadedModel
) -> None:
    tokenizer = random_model.tokenizer
    assert tokenizer is not None
    banned = tuple(
        TokenId(i) for i in range(tokenizer.vocab_size) if b"z" in tokenizer.token_bytes(i)
    )
    manager.add_request(
        [4],
        "none",
        max_new_tokens=5,
        banned_token_ids=banned,
        grammar=form(GrammarKind.REGEX, "z+"),
    )
    manager.add_request([4], "other", max_new_tokens=5, eos_token_id=-1)
    failed = manager.get_result("none", timeout=WAIT)
    assert failed is not None
    assert failed.error is not None
    assert failed.error.startswith(
        "grammar.regex: allows no token that sampling.banned_token_ids would leave after 0 tokens; "
        "change one of them"
    )
    other = manager.get_result("other", timeout=WAIT)
    assert other is not None
    assert other.error is None


def test_a_form_that_becomes_too_complex_ends_its_own_request_alone(
    manager: ContinuousBatchingManager, random_model: LoadedModel
) -> None:
    """Of three requests of one form in one batch: what the first does to their lexer, which it
    takes to its limit, is not felt by the second, nor by one that comes later.
    """
    tokenizer = random_model.tokenizer
    assert tokenizer is not None
    q = tokenizer.encode("q", add_special_tokens=False)
    assert len(q) == 1
    pattern = r"q{40}(([^q]|q){1,100}[^0-9]){1,100}x|[a-z]{600}[.!]"
    grammar = form(GrammarKind.REGEX, pattern)
    other = {"grammar": grammar, "max_new_tokens": 160, "banned_token_ids": (TokenId(q[0]),)}
    manager.add_request([5], "beside", **other)
    manager.add_request(
        [4], "costly", max_new_tokens=160, grammar=grammar, logit_bias={q[0]: 100.0}
    )
    failed = manager.get_result("costly", timeout=WAIT)
    assert failed is not None
    assert failed.error is not None
    assert "too complex to be followed after" in failed.error
    manager.add_request([5], "later", **other)
    results = [manager.get_result(name, timeout=WAIT) for name in ("beside", "later")]
    for result in results:
        assert result is not None
        assert result.error is None
        assert re.fullmatch(r"[a-z]*[.!]?", tokenizer.decode(result.generated_tokens))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"allowed_token_ids": [4, 5]}, "sampling.allowed_token_ids would leave after 0"),
        ({"no_repeat_ngram_size": 1}, "sampling.no_repeat_ngram_size would leave after"),
    ],
)
def test_the_option_that_contradicts_a_form_is_named(
    manager: ContinuousBatchingManager, options: dict[str, Any], named: str
) -> None:
    manager.add_request(
        [4], "r", max_new_tokens=9, grammar=form(GrammarKind.REGEX, "(zq){9}"), **options
    )
    failed = manager.get_result("r", timeout=WAIT)
    assert failed is not None
    assert failed.error is not None
    assert failed.error.startswith("grammar.regex: allows no token that ")
    assert named in failed.error


def test_a_grammar_is_never_ignored(manager: ContinuousBatchingManager) -> None:
    request = GenerationRequest(
        request_id=RequestId("r"),
        prompt=(TokenId(4),),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=5),
        grammar=form(GrammarKind.JSON_OBJECT),
    )
    with pytest.raises(ValueError, match="compile_grammar"):
        manager._loop.submit(request)


def test_without_a_tokenizer_a_form_is_refused(loaded: Callable[[str], LoadedModel]) -> None:
    manager = loaded("llama").init_continuous_batching(None, CONFIG)
    manager.start()
    try:
        with pytest.raises(UnsupportedFeatureError, match=r"tokenizer\.json"):
            manager.add_request([4], max_new_tokens=2, grammar=form(GrammarKind.JSON_OBJECT))
    finally:
        manager.stop(hard_stop=True, timeout=WAIT)


async def test_the_services_client_compiles_and_waits(tmp_path: Path) -> None:
    outputs = Outputs()
    changed = asyncio.Event()

    def sink(step: StepOutputs) -> None:
        for output in step.outputs:
            outputs.take(output)
        changed.set()

    client = LocalEngineClient(str(DEMO), CONFIG, LoadConfig(dtype="float32", threads=1))
    info = await client.start(sink, lambda _: None)
    try:

        def request(name: str, grammar: GrammarParams) -> GenerationRequest:
            return GenerationRequest(
                request_id=RequestId(name),
                prompt=(TokenId(40), TokenId(41)),
                sampling=SamplingParams(temperature=1.0, seed=3),
                stop=StopParams(max_tokens=60, eos_token_ids=info.eos_token_ids),
                grammar=grammar,
                n=3,
            )

        with pytest.raises(InvalidRequestError, match="json_schema"):
            await client.submit(request("bad", form(GrammarKind.JSON_SCHEMA, "{")))
        left = asyncio.create_task(
            client.submit(request("left", form(GrammarKind.REGEX, "[a-z]{5,2000}")))
        )
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert not await client.cancel(RequestId("left"))
        await client.submit(request("good", form(GrammarKind.CHOICE, CHOICES)))
        async with asyncio.timeout(WAIT):
            while len(outputs.reasons) < 3:
                changed.clear()
                await changed.wait()
    finally:
        await client.close()
    tokenizer = Tokenizer.load(DEMO)
    assert set(outputs.reasons) == {("good", choice) for choice in range(3)}
    for key, reason in outputs.reasons.items():
        assert reason is FinishReason.STOP
        assert tokenizer.decode(outputs.tokens[key], skip_special_tokens=True) in CHOICES
