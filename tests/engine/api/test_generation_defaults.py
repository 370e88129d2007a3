"""What a generation config leaves open is the model's own, then transformers' default: effective
parameters are those of `model.generate`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel, from_model
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.request import GenerationRequest
from engine.loading.model_defaults import default_sampling
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

SMALL = ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=64)
PROMPTS = make_prompts((20, 3))
OWN: dict[str, Any] = {"temperature": 5.0, "repetition_penalty": 1.5, "max_new_tokens": 9}

CASES: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({}, {}),
    ({}, {"do_sample": True}),
    ({}, {"do_sample": True, "top_k": 0}),
    (OWN, None),
    (OWN, {}),
    (OWN, {"max_new_tokens": 4}),
    (OWN, {"do_sample": True}),
    (OWN, {"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.0}),
    ({**OWN, "do_sample": True, "top_k": 20, "top_p": 0.8}, None),
    ({**OWN, "do_sample": True, "top_k": 20, "top_p": 0.8}, {"top_k": 5, "min_p": 0.1}),
    ({**OWN, "do_sample": True}, {"do_sample": False}),
    ({"do_sample": True, "typical_p": 0.7, "no_repeat_ngram_size": 3}, {"max_length": 40}),
    ({"max_length": 33}, {"do_sample": True}),
    ({"max_new_tokens": 7}, {"max_length": 40}),
    ({"suppress_tokens": [5, 9], "bad_words_ids": [[7]]}, {"max_new_tokens": 3}),
    ({"min_new_tokens": 2, "min_length": 30}, {"max_new_tokens": 3}),
    ({"num_return_sequences": 2, "do_sample": True}, {}),
    ({"eos_token_id": [4, 6]}, {}),
    ({"eos_token_id": [4, 6]}, {"eos_token_id": 8}),
]


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model(FAMILIES["llama"]())


@pytest.fixture
def whole(model: PreTrainedModel) -> LoadedModel:
    return from_model(model)


def _request(manager: ContinuousBatchingManager, **options: Any) -> GenerationRequest:
    return manager._builder.build("a", PROMPTS[0], None, None, options).spec


def _of_generate(
    model: PreTrainedModel, explicit: GenerationConfig | None, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The config that `generate` comes to, lengths included."""
    found: list[Any] = []

    class Stop(Exception):
        pass

    def catch(generation_config: Any, **others: Any) -> None:
        found.append(generation_config)
        raise Stop

    monkeypatch.setattr(model, "_get_logits_processor", catch)
    with pytest.raises(Stop):
        model.generate(torch.tensor([PROMPTS[0]]), generation_config=explicit)
    return found[0]


@pytest.mark.parametrize(("own", "explicit"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of transformers, on flags without sampling
def test_parameters_are_generates(
    own: dict[str, Any],
    explicit: dict[str, Any] | None,
    whole: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = None if explicit is None else GenerationConfig(**explicit)
    before = None if config is None else config.to_dict()
    whole.model.generation_config = GenerationConfig(pad_token_id=0, **{"eos_token_id": 2, **own})
    theirs = _of_generate(whole.model, config, monkeypatch)
    spec = _request(whole.init_continuous_batching(config, SMALL))
    ours = spec.sampling
    sampled = bool(theirs.do_sample)
    assert ours.temperature == (theirs.temperature if sampled else 0.0)
    if sampled:
        assert ours.top_k == theirs.top_k
        assert ours.top_p == theirs.top_p
        assert ours.min_p == (theirs.min_p or 0.0)
        assert ours.typical_p == theirs.typical_p
    assert ours.repetition_penalty == theirs.repetition_penalty
    assert ours.no_repeat_ngram_size == theirs.no_repeat_ngram_size
    banned = [*(theirs.suppress_tokens or ()), *(one for [one] in theirs.bad_words_ids or ())]
    assert ours.banned_token_ids == tuple(banned)
    assert spec.n == theirs.num_return_sequences
    assert spec.stop.max_tokens == theirs.max_length - len(PROMPTS[0])
    least = max(theirs.min_length - len(PROMPTS[0]), 0)
    assert spec.stop.min_tokens == min(least, spec.stop.max_tokens)
    ends = theirs.eos_token_id
    assert set(spec.stop.eos_token_ids) == set(ends if isinstance(ends, list) else [ends])
    assert config is None or config.to_dict() == before, "the caller's own is left alone"


@pytest.mark.parametrize("explicit", [None, GenerationConfig(max_new_tokens=8, eos_token_id=-1)])
def test_greedy_tokens_with_the_models_own_penalty(
    explicit: GenerationConfig | None, whole: LoadedModel
) -> None:
    plain = [greedy_reference(whole.model, prompt, 8) for prompt in PROMPTS]
    whole.model.generation_config = GenerationConfig(
        repetition_penalty=1.7, temperature=5.0, eos_token_id=-1, max_new_tokens=8
    )
    right = [greedy_reference(whole.model, prompt, 8) for prompt in PROMPTS]
    assert right != plain
    outputs = whole.generate_batch(
        PROMPTS, explicit, continuous_batching_config=SMALL, progress_bar=False
    )
    assert [output.generated_tokens for output in outputs.values()] == right


def test_a_requests_own_options_come_first(whole: LoadedModel) -> None:
    whole.model.generation_config = GenerationConfig(**OWN, do_sample=True, top_k=20)
    config = ContinuousBatchingConfig(num_blocks=64, block_size=8, per_request_processors=True)
    manager = whole.init_continuous_batching(GenerationConfig(temperature=0.5), config)
    assert _request(manager).sampling.temperature == 0.5
    assert _request(manager).sampling.top_k == 20
    own = _request(manager, temperature=0.25, top_k=0, repetition_penalty=1.0).sampling
    assert (own.temperature, own.top_k, own.repetition_penalty) == (0.25, 0, 1.0)
    assert _request(manager, do_sample=False).sampling.temperature == 0.0


def test_sampling_of_one_request_has_generates_top_k(whole: LoadedModel) -> None:
    config = ContinuousBatchingConfig(num_blocks=64, block_size=8, per_request_processors=True)
    manager = whole.init_continuous_batching(None, config)
    assert _request(manager, do_sample=True).sampling.top_k == 50
    assert _request(manager, temperature=0.5).sampling.top_k == 50
    assert _request(manager).sampling.top_k == 0


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"do_sample": True},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
        {"top_k": 20, "top_p": 0.8, "typical_p": 0.7, "no_repeat_ngram_size": 3},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of transformers, on flags without sampling
def test_a_service_samples_as_generate_does(
    own: dict[str, Any], model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2, **own)
    ours = default_sampling(model.generation_config)
    assert ours.is_greedy is not bool(own.get("do_sample"))
    # As a request does that says only that it is to be sampled.
    theirs = _of_generate(model, GenerationConfig(do_sample=True), monkeypatch)
    assert ours.top_k == theirs.top_k
    assert ours.top_p == theirs.top_p
    assert ours.min_p == (theirs.min_p or 0.0)
    assert ours.typical_p == theirs.typical_p
    assert ours.no_repeat_ngram_size == theirs.no_repeat_ngram_size


def test_a_kept_manager_is_of_the_models_config_too(whole: LoadedModel) -> None:
    explicit = GenerationConfig(max_new_tokens=3)

    def keep() -> ContinuousBatchingManager:
        manager = whole.init_continuous_batching(explicit, SMALL)
        manager.stop(keep_for_next_session=True)
        return manager

    first = keep()
    assert keep() is first
    whole.model.generation_config.repetition_penalty = 1.5
    assert keep() is not first
