"""The remaining request fields with hostile values: both sides of each limit, NaN and infinity, and
the largest number of everything.
"""

from __future__ import annotations

import math
from typing import Any

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from benchmarks.hostile.inputs.kinds import OK, Case, Group, by_cases, invalid, lacking
from benchmarks.hostile.sending import GENERATION, Sender

GENERATE = GENERATION + "Generate"
MOST_32, MOST_64 = 2**32 - 1, 2**63 - 1
TINY = 1e-45
"""The smallest float32 above zero."""
_LONG = {"max_tokens": 8, "ignore_eos": True}


def _generate(spec: dict[str, Any]) -> rpc.GenerateRequest:
    return rpc.GenerateRequest(
        spec={"text": {"text": "Once upon a time"}, "stop": {"max_tokens": 1}, **spec}
    )


def _case(*answers: str, each: bool = False, **spec: Any) -> Case:
    return Case(GENERATE, lambda s: _generate(spec), answers or (OK,), each)


def _wrong(field: str, **spec: Any) -> Case:
    return _case(*invalid(f"spec.{field}"), **spec)


def _wrong_sampling(name: str, *values: Any) -> list[Case]:
    return [_wrong(f"sampling.{name}", sampling={name: value}) for value in values]


def _wrong_stop(name: str, *values: Any) -> list[Case]:
    return [_wrong(f"stop.{name}", stop={name: value}) for value in values]


def _wrong_output(name: str, *values: Any) -> list[Case]:
    return [_wrong(f"output.{name}", output={name: value}) for value in values]


def _all_choices(sampling: dict[str, Any]) -> Case:
    """Return a case that asks for the largest allowed number of choices."""
    spec = {"sampling": sampling, "stop": _LONG}
    return Case(GENERATE, lambda s: _generate({**spec, "n": s.card.choices}))


def _biased(s: Sender) -> rpc.GenerateRequest:
    """Return a request with as many extreme logit biases as allowed."""
    ids = range(min(s.card.logit_bias, s.card.vocabulary))
    bias = {number: -100.0 if number % 2 else 100.0 for number in ids}
    return _generate({"sampling": {"logit_bias": bias}, "stop": _LONG, "n": s.card.choices})


def _too_many_biases(s: Sender) -> rpc.GenerateRequest:
    return _generate({"sampling": {"logit_bias": dict.fromkeys(range(16_000), 1.0)}})


def _overlapping(s: Sender) -> rpc.GenerateRequest:
    """Return a request whose stop strings partially match at every character of the output."""
    most = s.card.stop_string_bytes
    strings = ["a" * (most - 1 - n) + "b" for n in range(s.card.stop_strings)]
    return _generate(
        {
            "stop": {"max_tokens": 24, "stop_strings": strings, "include_stop": True},
            "structured_output": {"regex": "a{260,}"},
            "n": s.card.choices,
        }
    )


def _logprob_ids(s: Sender) -> rpc.GenerateRequest:
    """Return a request with as many logprob token ids as allowed, one of them repeated."""
    ids = [*range(127), 5]
    return _generate(
        {
            "output": {"logprob_token_ids": ids, "record_timestamps": True},
            "stop": _LONG,
            "n": s.card.choices,
        }
    )


def _salted(s: Sender) -> rpc.GenerateRequest:
    """Return a request with a new cache salt, a prompt of several blocks and a grammar."""
    salt = f"{s.source.getrandbits(256):064x}"
    return _generate(
        {
            "text": {"text": "Once upon a time there was a river. " * 8},
            "cache": {"salt": salt},
            "structured_output": {"regex": "[a-z ]{1,20}"},
        }
    )


def _labels(number: int, name: str = "n", value: str = "v") -> list[dict[str, str]]:
    return [{"name": f"{name}{n}", "value": value} for n in range(number)]


OPTIONS = Group(
    "options",
    (
        by_cases(
            "sampling-bounds",
            "sampling by numbers beyond the bounds, and by what is no number",
            *_wrong_sampling("temperature", math.nan, math.inf, -1.0, 1e30),
            *_wrong_sampling("top_p", math.nan, 0.0, 1.5, -math.inf),
            *_wrong_sampling("min_p", math.nan, -0.1, 2.0),
            *_wrong_sampling("typical_p", math.nan, 0.0, 7.0),
            *_wrong_sampling("repetition_penalty", math.nan, 0.0, math.inf),
            *_wrong_sampling("presence_penalty", math.nan, 1e9),
            *_wrong_sampling("frequency_penalty", -math.inf, math.nan),
            *_wrong_sampling("no_repeat_ngram_size", MOST_32),
            *_wrong_sampling("seed", -1, -(2**63)),
            fields=[
                "SamplingOptions.temperature",
                "SamplingOptions.top_p",
                "SamplingOptions.min_p",
                "SamplingOptions.typical_p",
                "SamplingOptions.repetition_penalty",
                "SamplingOptions.presence_penalty",
                "SamplingOptions.frequency_penalty",
                "SamplingOptions.no_repeat_ngram_size",
                "SamplingOptions.seed",
            ],
        ),
        by_cases(
            "sampling-extremes",
            "the least and the most of each way of sampling, with the most choices",
            _all_choices({"temperature": TINY, "top_k": MOST_32, "seed": MOST_64}),
            _all_choices({"temperature": 100.0, "top_p": TINY, "min_p": 1.0, "typical_p": TINY}),
            _all_choices(
                {
                    "temperature": 1.0,
                    "repetition_penalty": 10.0,
                    "presence_penalty": 2.0,
                    "frequency_penalty": -2.0,
                }
            ),
            _all_choices({"temperature": 1.0, "repetition_penalty": TINY, "top_k": 1}),
            fields=[
                "SamplingOptions.temperature",
                "SamplingOptions.top_k",
                "SamplingOptions.repetition_penalty",
                "SamplingOptions.seed",
            ],
            width=2,
            seconds=4.0,
        ),
        by_cases(
            "repeated-words",
            "no word twice in outputs that have to be of few words, with the most choices",
            _all_choices({"no_repeat_ngram_size": 1, "temperature": 1.0}),
            _all_choices({"no_repeat_ngram_size": 1024}),
            fields=["SamplingOptions.no_repeat_ngram_size", "GenerationSpec.n"],
            width=2,
            seconds=4.0,
        ),
        by_cases(
            "extreme-biases",
            "the most biases, of the largest values; too many; of no number; of ids that are not",
            Case(GENERATE, _biased),
            Case(GENERATE, _too_many_biases, invalid("spec.sampling.logit_bias")),
            *(
                _case(*invalid("spec.sampling.logit_bias[]"), sampling={"logit_bias": bias})
                for bias in ({1: math.nan}, {1: math.inf}, {1: -101.0}, {MOST_32: 1.0})
            ),
            fields=["SamplingOptions.logit_bias"],
            width=2,
            seconds=4.0,
        ),
        by_cases(
            "listed-ids",
            "ids that are not there among the allowed and the banned ones, and all of them banned",
            _wrong("sampling.allowed_token_ids[]", sampling={"allowed_token_ids": [MOST_32]}),
            *_wrong_sampling("banned_token_ids", [MOST_32] * 200_000),
            Case(
                GENERATE,
                lambda s: _generate(
                    {"sampling": {"allowed_token_ids": [5], "banned_token_ids": [5]}}
                ),
                invalid("spec.sampling.allowed_token_ids", "spec.sampling.banned_token_ids"),
            ),
            fields=["SamplingOptions.allowed_token_ids", "SamplingOptions.banned_token_ids"],
        ),
        by_cases(
            "overlapping-stops",
            "stop strings that nearly begin at every letter of an output of one letter",
            Case(GENERATE, _overlapping),
            fields=["StopOptions.stop_strings", "StopOptions.include_stop"],
            width=2,
            seconds=4.0,
        ),
        by_cases(
            "token-counts",
            "counts of tokens beyond what there is, and least counts above the most",
            _wrong("stop.min_tokens", stop={"max_tokens": 4, "min_tokens": 5}),
            _wrong("stop.min_tokens", stop={"max_tokens": 4, "min_tokens": MOST_32}),
            _case(stop={"max_tokens": 0}),
            _case(
                stop={"max_tokens": MOST_32, "ignore_eos": True},
                scheduling={"time_limit": {"nanos": 200_000_000}},
            ),
            fields=[
                "StopOptions.min_tokens",
                "StopOptions.max_tokens",
                "StopOptions.ignore_eos",
                "SchedulingOptions.time_limit",
            ],
        ),
        by_cases(
            "output-bounds",
            "more of each thing that comes back than there may be, and pieces that never fill",
            *_wrong_output("delivery", 99),
            *_wrong_output("logprobs", 10_000, MOST_32),
            *_wrong_output("prompt_logprobs", 10_000, MOST_32),
            *_wrong_output("logprob_token_ids", [5] * 129, [5] * 100_000),
            _wrong("output.logprob_token_ids[]", output={"logprob_token_ids": [MOST_32]}),
            _case(output={"min_tokens_per_delta": MOST_32}, stop=_LONG),
            _wrong(
                "stop.stop_strings",
                output={"omit_text": True},
                stop={"max_tokens": 1, "stop_strings": ["a"]},
            ),
            fields=[
                "OutputOptions.delivery",
                "OutputOptions.logprobs",
                "OutputOptions.prompt_logprobs",
                "OutputOptions.logprob_token_ids",
                "OutputOptions.min_tokens_per_delta",
                "OutputOptions.omit_text",
            ],
        ),
        by_cases(
            "output-of-everything",
            "log-probabilities of as many ids as there may be, times, raw text, of each choice",
            Case(GENERATE, _logprob_ids),
            Case(
                GENERATE,
                lambda s: _generate(
                    {
                        "chat": {"messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}]},
                        "output": {
                            "raw_text": True,
                            "skip_special_tokens": False,
                            "token_details": True,
                            "echo": True,
                        },
                        "stop": _LONG,
                        "n": s.card.choices,
                    }
                ),
            ),
            fields=[
                "OutputOptions.logprob_token_ids",
                "OutputOptions.record_timestamps",
                "OutputOptions.raw_text",
                "OutputOptions.skip_special_tokens",
                "OutputOptions.token_details",
                "OutputOptions.echo",
            ],
            width=2,
            seconds=4.0,
        ),
        by_cases(
            "labels",
            "labels: the most, too many, twice the same, of control characters and large values",
            _case(labels=_labels(16, "n" * 62, "v" * 128)),
            _wrong("labels", labels=_labels(17)),
            _wrong("labels", labels=_labels(16_000)),
            _wrong("labels", labels=[{"name": "a"}] * 2),
            _wrong("labels", labels=[{"name": "a\n"}]),
            _wrong("labels", labels=[{"name": ""}]),
            _wrong("labels[a]", labels=[{"name": "a", "value": "\x1b[2J"}]),
            _wrong("labels[a]", labels=[{"name": "a", "value": "v" * 500_000}]),
            fields=["Label.name", "Label.value"],
        ),
        by_cases(
            "model-names",
            "models and adapters of names that are not there: long, and of control characters",
            _case("NOT_FOUND MODEL_NOT_FOUND", model="m" * 900_000),
            _case("NOT_FOUND MODEL_NOT_FOUND", model="\x00\n\x1b[2J../../etc/passwd"),
            _case(lacking("spec.adapter"), adapter="a" * 900_000),
            fields=["GenerationSpec.model", "GenerationSpec.adapter"],
        ),
        by_cases(
            "choice-counts",
            "more choices than there may be, and none",
            _wrong("n", n=MOST_32),
            _wrong("n", n=0),
            fields=["GenerationSpec.n"],
        ),
        by_cases(
            "salts",
            "another salt each time, with a prompt of some blocks and a form; salts that are long",
            Case(GENERATE, _salted, each=True),
            _wrong("cache.salt", cache={"salt": "s" * 129}),
            _wrong("cache.salt", cache={"salt": "\u20ac" * 300_000}),
            _case(cache={"salt": "s", "bypass_prefix_cache": True}),
            fields=["CacheOptions.salt", "CacheOptions.bypass_prefix_cache"],
            width=16,
        ),
        by_cases(
            "time-limits",
            "limits of time of nothing, below nothing, beyond all time, and of a nanosecond",
            *(
                _wrong("scheduling.time_limit", scheduling={"time_limit": limit})
                for limit in (
                    {},
                    {"seconds": -1},
                    {"nanos": -5},
                    {"seconds": MOST_64},
                    {"seconds": 315_576_000_000},
                    {"nanos": 2_000_000_000},
                )
            ),
            _case(scheduling={"time_limit": {"nanos": 1}}),
            _case(scheduling={"time_limit": {"seconds": 86_400}}),
            fields=["SchedulingOptions.time_limit"],
            width=8,
        ),
        by_cases(
            "priorities",
            "priorities beyond the bounds",
            *(
                _wrong("scheduling.priority", scheduling={"priority": number})
                for number in (101, -101, 2**31 - 1, -(2**31))
            ),
            fields=["SchedulingOptions.priority"],
        ),
        by_cases(
            "truncations",
            "inputs that are cut to nothing, to more than there is, and at no side",
            _wrong("truncation.max_prompt_tokens", truncation={"max_prompt_tokens": 0}),
            _wrong("truncation.side", truncation={"max_prompt_tokens": 1, "side": 99}),
            _case(truncation={"max_prompt_tokens": MOST_32, "side": pb.TRUNCATION_SIDE_RIGHT}),
            fields=["TruncationOptions.max_prompt_tokens", "TruncationOptions.side"],
        ),
        by_cases(
            "special-texts",
            "names of special tokens without and with the tokenizer's own, and no text",
            *(
                _case(
                    text={"text": "<|bos|>" * 300, "add_special_tokens": special},
                )
                for special in (True, False)
            ),
            _wrong("text.text", text={"text": "", "add_special_tokens": False}),
            _wrong("tokens.ids[]", tokens={"ids": [MOST_32]}),
            fields=["TextInput.add_special_tokens", "TextInput.text", "TokenInput.ids"],
        ),
    ),
)
