"""The remaining request fields with hostile values: those derived from the contract, both sides of
limits that depend on each other, and the largest number of everything.
"""

from __future__ import annotations

from typing import Any

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from tests.campaign.hostile.inputs.derived import MOST_32, MOST_63, of
from tests.campaign.hostile.inputs.kinds import OK, Case, Group, by_cases, invalid
from tests.campaign.hostile.sending import GENERATION, Sender

GENERATE = GENERATION + "Generate"
TINY = 1e-45
"""The smallest float32 above zero."""
_LONG = {"max_tokens": 8, "ignore_eos": True}


def _generate(spec: dict[str, Any]) -> rpc.GenerateRequest:
    return rpc.GenerateRequest(
        spec={"text": {"text": "Once upon a time"}, "stop": {"max_tokens": 1}, **spec}
    )


def _case(*answers: str, **spec: Any) -> Case:
    return Case(GENERATE, lambda s: _generate(spec), answers or (OK,))


def _wrong(field: str, **spec: Any) -> Case:
    return _case(*invalid(f"spec.{field}"), **spec)


def _all_choices(sampling: dict[str, Any]) -> Case:
    """Return a case that asks for the largest allowed number of choices."""
    spec = {"sampling": sampling, "stop": _LONG}
    return Case(GENERATE, lambda s: _generate({**spec, "n": s.card.choices}))


def _biased(s: Sender) -> rpc.GenerateRequest:
    """Return a request with as many extreme logit biases as allowed."""
    ids = range(min(s.card.logit_bias, s.card.vocabulary))
    bias = {number: -100.0 if number % 2 else 100.0 for number in ids}
    return _generate({"sampling": {"logit_bias": bias}, "stop": _LONG, "n": s.card.choices})


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
    inputs=[
        by_cases(
            "sampling-bounds",
            "sampling by numbers beyond the bounds, and by what is no number",
            *of("SamplingOptions"),
        ),
        by_cases(
            "sampling-extremes",
            "the least and the most of each way of sampling, with the most choices",
            _all_choices({"temperature": TINY, "top_k": MOST_32, "seed": MOST_63}),
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
            seconds=4.0,
        ),
        by_cases(
            "repeated-words",
            "no word twice in outputs that have to be of few words, with the most choices",
            _all_choices({"no_repeat_ngram_size": 1, "temperature": 1.0}),
            _all_choices({"no_repeat_ngram_size": 1024}),
            seconds=4.0,
        ),
        by_cases(
            "extreme-biases",
            "the most biases, of the largest values; too many; of no number; of ids that are not",
            Case(GENERATE, _biased),
            _wrong("sampling.logit_bias", sampling={"logit_bias": dict.fromkeys(range(16_000), 1)}),
            *of("SamplingOptions.logit_bias"),
            seconds=4.0,
        ),
        by_cases(
            "listed-ids",
            "ids that are not there among the allowed and the banned ones, and all of them banned",
            *of("SamplingOptions.allowed_token_ids", "SamplingOptions.banned_token_ids"),
            _wrong("sampling.banned_token_ids", sampling={"banned_token_ids": [MOST_32] * 200_000}),
            _case(
                *invalid("spec.sampling.allowed_token_ids", "spec.sampling.banned_token_ids"),
                sampling={"allowed_token_ids": [5], "banned_token_ids": [5]},
            ),
        ),
        by_cases(
            "overlapping-stops",
            "stop strings that nearly begin at every letter of an output of one letter",
            Case(GENERATE, _overlapping),
            seconds=4.0,
        ),
        by_cases(
            "token-counts",
            "counts of tokens beyond what there is, and least counts above the most",
            *of("StopOptions"),
            _wrong("stop.min_tokens", stop={"max_tokens": 4, "min_tokens": 5}),
            _case(
                stop={"max_tokens": MOST_32, "ignore_eos": True},
                scheduling={"time_limit": {"nanos": 200_000_000}},
            ),
        ),
        by_cases(
            "output-bounds",
            "more of each thing that comes back than there may be, and pieces that never fill",
            *of("OutputOptions"),
            _wrong("output.logprobs", output={"logprobs": 10_000}),
            _wrong("output.prompt_logprobs", output={"prompt_logprobs": 10_000}),
            _wrong("output.logprob_token_ids", output={"logprob_token_ids": [5] * 129}),
            _case(output={"min_tokens_per_delta": MOST_32}, stop=_LONG),
            _wrong(
                "stop.stop_strings",
                output={"omit_text": True},
                stop={"max_tokens": 1, "stop_strings": ["a"]},
            ),
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
            *of("Label"),
        ),
        by_cases(
            "model-names",
            "models and adapters of names that are not there: long, and of control characters",
            *of("GenerationSpec.model", "GenerationSpec.adapter"),
        ),
        by_cases(
            "predictions",
            "predictions: empty, too long, of no token, and such that they match everywhere",
            _wrong("prediction", prediction={}),
            _wrong("prediction.tokens.ids[]", prediction={"tokens": {"ids": [MOST_32]}}),
            _wrong("prediction.tokens.ids", prediction={"tokens": {"ids": [7] * 150_000}}),
            _wrong("prediction.text", prediction={"text": "a" * 900_000}),
            _case(prediction={"tokens": {"ids": [7] * 1000}}),
            _case(prediction={"text": "a b " * 200}),
        ),
        by_cases(
            "choice-counts",
            "more choices than there may be, and none",
            *of("GenerationSpec.n"),
        ),
        by_cases(
            "salts",
            "another salt each time, with a prompt of some blocks and a form; salts that are long",
            Case(GENERATE, _salted, each=True),
            _wrong("cache.salt", cache={"salt": "s" * 129}),
            _case(cache={"salt": "s", "bypass_prefix_cache": True}),
            *of("CacheOptions"),
            width=16,
        ),
        by_cases(
            "time-limits",
            "limits of time of nothing, below nothing, beyond all time, and of a nanosecond",
            *of("SchedulingOptions.time_limit"),
            _case(scheduling={"time_limit": {"seconds": 86_400}}),
            width=8,
        ),
        by_cases(
            "priorities",
            "priorities beyond the bounds",
            *of("SchedulingOptions.priority"),
        ),
        by_cases(
            "truncations",
            "inputs that are cut to nothing, to more than there is, and at no side",
            *of("TruncationOptions"),
            _case(truncation={"max_prompt_tokens": MOST_32, "side": pb.TRUNCATION_SIDE_RIGHT}),
        ),
        by_cases(
            "special-texts",
            "names of special tokens without and with the tokenizer's own, and no text",
            *(
                _case(text={"text": "<|bos|>" * 300, "add_special_tokens": special})
                for special in (True, False)
            ),
            *of("TextInput", "TokenInput"),
        ),
    ],
)
