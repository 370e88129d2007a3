"""Generation configs and keywords come out as the engine's parameters, or are refused by name."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from engine.api.generation_options import _NEUTRAL, REQUEST_KEYS, GenerationDefaults
from engine.contract.errors import InvalidRequestError, UnsupportedFeatureError
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import (
    GrammarKind,
    GrammarParams,
    LogprobParams,
    SamplingParams,
    StopParams,
)
from engine.contract.types import CallerKey, RequestId, TokenId
from engine.sampling.random import derived_seed

EOS = (TokenId(2),)


def _defaults(
    config: GenerationConfig | None = None,
    *,
    drop_unsupported: bool = False,
    return_logprobs: bool = False,
    vocab_size: int | None = 100,
    seed: int | None = 7,
) -> GenerationDefaults:
    return GenerationDefaults(
        config,
        EOS,
        drop_unsupported=drop_unsupported,
        return_logprobs=return_logprobs,
        vocab_size=vocab_size,
        seed=seed,
    )


def _resolve(
    defaults: GenerationDefaults,
    *,
    prompt: int = 5,
    max_new_tokens: int | None = 50,
    eos_token_id: int | list[int] | None = None,
    **overrides: Any,
) -> GenerationRequest:
    spec, _ = defaults.resolve(
        "a",
        (TokenId(1),) * prompt,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        overrides=overrides,
    )
    return spec


def _field(options: GenerationRequest, name: str) -> object:
    for holder in (options, options.sampling, options.stop, options.logprobs):
        if hasattr(holder, name):
            return getattr(holder, name)
    raise AttributeError(name)


GRAMMAR = GrammarParams(kind=GrammarKind.REGEX, text="a+")

KEYWORDS: list[tuple[dict[str, Any], str, object]] = [
    ({"typical_p": 0.4}, "typical_p", 0.4),
    ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size", 3),
    ({"allowed_token_ids": [5, 9]}, "allowed_token_ids", (5, 9)),
    ({"allowed_token_ids": 5}, "allowed_token_ids", (5,)),
    ({"banned_token_ids": range(3)}, "banned_token_ids", (0, 1, 2)),
    ({"suppress_tokens": [4, 5]}, "banned_token_ids", (4, 5)),
    ({"bad_words_ids": [[4], [8]]}, "banned_token_ids", (4, 8)),
    ({"bad_words_ids": [[2], [8]]}, "banned_token_ids", (8,)),
    (
        {"banned_token_ids": [1], "suppress_tokens": [4, 1], "bad_words_ids": [[6]]},
        "banned_token_ids",
        (1, 4, 6),
    ),
    ({"n": 3}, "n", 3),
    ({"num_return_sequences": 3}, "n", 3),
    ({"n": 3, "num_return_sequences": 3}, "n", 3),
    ({"logprob_token_ids": [7, 8]}, "logprobs", LogprobParams(token_ids=(7, 8))),  # type: ignore[arg-type]
    ({"logprobs": 2, "logprob_token_ids": [7]}, "top_n", 2),
    ({"prompt_logprobs": 0}, "prompt_logprobs", 0),
    ({"grammar": GRAMMAR}, "grammar", GRAMMAR),
    ({"priority": -4}, "priority", -4),
    ({"time_limit_s": 3}, "time_limit_s", 3.0),
    ({"cache_salt": "ü"}, "cache_salt", b"\xc3\xbc"),
    ({"cache_salt": b"\xff"}, "cache_salt", b"\xff"),
    ({"bypass_prefix_cache": True}, "bypass_prefix_cache", True),
    ({"seed": 9}, "seed", 9),
    ({"seed": 0}, "seed", 0),
]


@pytest.mark.parametrize(("overrides", "name", "value"), KEYWORDS, ids=str)
def test_keywords_of_one_request(overrides: dict[str, Any], name: str, value: object) -> None:
    assert _field(_resolve(_defaults(), **overrides), name) == value


def test_every_keyword_is_known_and_none_is_neutral() -> None:
    assert {name for keywords, _, _ in KEYWORDS for name in keywords} < REQUEST_KEYS
    neutral = _resolve(_defaults(seed=1), **dict.fromkeys(REQUEST_KEYS))
    assert neutral == _resolve(_defaults(seed=1))
    assert neutral.sampling == SamplingParams(seed=derived_seed(1, 0))


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ({"do_sample": True, "typical_p": 0.4}, "typical_p", 0.4),
        ({"typical_p": None}, "typical_p", 1.0),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size", 3),
        ({"suppress_tokens": [4, -1, 100, 5]}, "banned_token_ids", (4, 5)),
        ({"bad_words_ids": [[4], [2], [100], [8]]}, "banned_token_ids", (4, 8)),
        ({"bad_words_ids": [[4], [2]], "eos_token_id": 4}, "banned_token_ids", (2,)),
        ({"num_return_sequences": 4, "do_sample": True}, "n", 4),
        ({"min_new_tokens": 4}, "min_tokens", 4),
        ({"min_length": 12}, "min_tokens", 7),
        ({"min_length": 3}, "min_tokens", 0),
        ({"min_length": 90}, "min_tokens", 50),
        ({"min_length": 30, "min_new_tokens": 4}, "min_tokens", 4),
        ({"renormalize_logits": True}, "sampling", SamplingParams(seed=derived_seed(7, 0))),
    ],
    ids=str,
)
def test_options_of_a_generation_config(config: dict[str, Any], name: str, value: object) -> None:
    assert _field(_resolve(_defaults(GenerationConfig(**config))), name) == value


def test_a_request_replaces_the_generation_configs_options() -> None:
    config = GenerationConfig(
        no_repeat_ngram_size=3,
        suppress_tokens=[4],
        num_return_sequences=2,
        do_sample=True,
        min_length=30,
    )
    options = _resolve(
        _defaults(config), no_repeat_ngram_size=0, suppress_tokens=[], n=1, min_new_tokens=1
    )
    assert options.sampling.no_repeat_ngram_size == 0
    assert options.sampling.banned_token_ids == ()
    assert options.n == 1
    assert options.stop.min_tokens == 1
    assert _resolve(_defaults(config), eos_token_id=4).sampling.banned_token_ids == (4,)


def test_a_bad_word_that_ends_a_request_is_not_banned() -> None:
    config = GenerationConfig(bad_words_ids=[[4], [5]])
    assert _resolve(_defaults(config), eos_token_id=[4]).sampling.banned_token_ids == (5,)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": "3"}, "n"),
        ({"n": 2, "num_return_sequences": 3}, "n"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"typical_p": "x"}, "typical_p"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"no_repeat_ngram_size": 2.0}, "no_repeat_ngram_size"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids"),
        ({"allowed_token_ids": b"12"}, "allowed_token_ids"),
        ({"allowed_token_ids": True}, "allowed_token_ids"),
        ({"banned_token_ids": [1, 2.5]}, r"banned_token_ids\[1\]"),
        ({"banned_token_ids": [0] * (1 << 18) + [1]}, None),
        ({"banned_token_ids": range(1 + (1 << 18))}, "banned_token_ids"),
        ({"bad_words_ids": [4]}, r"bad_words_ids\[0\]"),
        ({"bad_words_ids": [[4], []]}, r"bad_words_ids\[1\]"),
        ({"bad_words_ids": 4}, "bad_words_ids"),
        ({"logprob_token_ids": [1.5]}, r"logprob_token_ids\[0\]"),
        ({"logprob_token_ids": range(200)}, "logprob_token_ids"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"grammar": "a+"}, "grammar"),
        ({"priority": 1.0}, "priority"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"time_limit_s": float("nan")}, "time_limit_s"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"caller": 7}, "caller"),
        ({"weight": "2"}, "weight"),
        ({"bypass_prefix_cache": 1}, "bypass_prefix_cache"),
        ({"typical": 0.5}, "typical"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_name_the_keyword(options: dict[str, Any], field: str | None) -> None:
    if field is None:  # the same id many times is one entry
        assert _resolve(_defaults(), **options).sampling.banned_token_ids == (0, 1)
        return
    with pytest.raises(InvalidRequestError, match=field):
        _resolve(_defaults(), **options)


UNSUPPORTED: list[dict[str, Any]] = [
    {"bad_words_ids": [[4], [5, 6]]},
    {"epsilon_cutoff": 0.1},
    {"eta_cutoff": 0.1},
    {"remove_invalid_values": True},
    {"begin_suppress_tokens": [4]},
    {"encoder_no_repeat_ngram_size": 2},
    {"token_healing": True},
    {"max_time": 3.0},
]


@pytest.mark.parametrize("options", UNSUPPORTED, ids=str)
def test_what_is_not_done_is_dropped_with_a_warning_or_refused(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    name = next(iter(options))
    config = GenerationConfig(**options)
    with pytest.raises(UnsupportedFeatureError, match=name):
        _defaults(config)
    with caplog.at_level(logging.WARNING):
        dropped = _resolve(_defaults(config, drop_unsupported=True))
    assert name in caplog.text
    assert dropped.sampling.banned_token_ids == ((4,) if name == "bad_words_ids" else ())
    with pytest.raises(UnsupportedFeatureError, match=name):
        _resolve(_defaults(), **options)


def test_neutral_values_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    config = GenerationConfig(
        typical_p=1.0, no_repeat_ngram_size=0, num_return_sequences=1, epsilon_cutoff=0.0
    )
    with caplog.at_level(logging.WARNING):
        options = _resolve(_defaults(config, drop_unsupported=True))
    assert not caplog.records
    assert options == _resolve(_defaults())


class TestSeeds:
    """A request's own seed, else the next one that follows from the engine's."""

    def test_they_follow_from_the_engines_in_order(self) -> None:
        drawn = []
        for _ in range(2):
            defaults = _defaults(seed=42)
            drawn.append([_resolve(defaults).sampling.seed for _ in range(20)])
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) == 20
        assert drawn[0] != [_resolve(_defaults(seed=43)).sampling.seed for _ in range(20)]

    def test_a_seed_of_its_own_takes_none_away(self) -> None:
        defaults, other = _defaults(), _defaults()
        first = _resolve(defaults).sampling.seed
        assert _resolve(defaults, seed=5).sampling.seed == 5
        with pytest.raises(InvalidRequestError, match="time_limit_s"):
            _resolve(defaults, time_limit_s=-1)
        second = _resolve(defaults).sampling.seed
        assert [_resolve(other).sampling.seed for _ in range(2)] == [first, second]

    def test_a_generation_configs_seed(self) -> None:
        config = GenerationConfig()
        config.seed = 42
        drawn = [_resolve(_defaults(config, seed=seed)).sampling.seed for seed in (None, 42, 43)]
        assert drawn[0] == drawn[1] == derived_seed(42, 0)
        assert drawn[2] == derived_seed(43, 0)

    def test_without_one_they_come_from_the_system(self) -> None:
        assert len({_resolve(_defaults(seed=None)).sampling.seed for _ in range(5)}) == 5


def test_the_request_has_all_of_it() -> None:
    spec = _resolve(
        _defaults(),
        prompt=2,
        n=2,
        priority=3,
        grammar=GRAMMAR,
        cache_salt="s",
        bypass_prefix_cache=True,
        time_limit_s=4.5,
        caller="somebody",
        weight=2,
        prompt_logprobs=2,
        logprobs=1,
        temperature=0.5,
        seed=3,
        adapter="team-a",
    )
    assert spec == GenerationRequest(
        request_id=RequestId("a"),
        prompt=spec.prompt,
        sampling=SamplingParams(temperature=0.5, top_k=50, seed=3),
        stop=spec.stop,
        logprobs=LogprobParams(top_n=1),
        prompt_logprobs=2,
        grammar=GRAMMAR,
        n=2,
        priority=3,
        cache_salt=b"s",
        bypass_prefix_cache=True,
        time_limit_s=4.5,
        caller=CallerKey("somebody"),
        weight=2.0,
        adapter="team-a",
    )
    # Groups of callers are a gateway's; here each caller is one by itself. Who is refused is not
    # told when to come again. What is expected is said by the contract's callers alone.
    plain = GenerationRequest(
        request_id=spec.request_id,
        prompt=spec.prompt,
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=20),
    )
    left = {
        name for name in GenerationRequest.__slots__ if getattr(spec, name) == getattr(plain, name)
    }
    assert left == {"request_id", "prompt", "caller_group", "ticket", "prediction"}, (
        "no field is forgotten"
    )


def test_the_docs_name_each_option_that_is_not_done() -> None:
    text = (Path(__file__).parents[3] / "docs" / "offline.md").read_text()
    part = text.split("this engine does not do them:")[1].split("In a generation config")[0]
    assert set(re.findall(r"`(\w+)`", part)) - {"time_limit_s"} == {*_NEUTRAL, "bad_words_ids"}
