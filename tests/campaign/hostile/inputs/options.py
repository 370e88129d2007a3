"""The remaining request fields with hostile values: those derived from the contract, both sides of
limits that depend on each other, and the largest number of everything.
"""

from __future__ import annotations

from typing import Any

from headrace.v1 import generation_pb2 as pb

from tests.campaign.hostile.inputs.derived import MOST_32, MOST_63, of
from tests.campaign.hostile.inputs.kinds import Case, Group, generates, invalid, refused
from tests.campaign.hostile.sending import Sender

TINY = 1e-45
"""The smallest float32 above zero."""
_LONG = {"max_tokens": 8, "ignore_eos": True}


def _choices(s: Sender) -> int:
    return s.limits.max_choices


def _all_choices(**sampling: Any) -> Case:
    return generates(sampling=sampling, stop=_LONG, n=_choices)


def _biases(s: Sender) -> dict[str, Any]:
    """Return as many extreme logit biases as allowed."""
    ids = range(min(s.limits.max_logit_bias, s.card.vocab_size))
    return {"logit_bias": {number: -100.0 if number % 2 else 100.0 for number in ids}}


def _overlapping(s: Sender) -> dict[str, Any]:
    """Return stop strings that partially match at every character of the output."""
    most = s.limits.max_stop_string_bytes
    strings = ["a" * (most - 1 - n) + "b" for n in range(s.limits.max_stop_strings)]
    return {"max_tokens": 24, "stop_strings": strings, "include_stop": True}


def _labels(number: int, name: str = "n", value: str = "v") -> list[dict[str, str]]:
    return [{"name": f"{name}{n}", "value": value} for n in range(number)]


OPTIONS = Group("options")
OPTIONS.tries(
    "sampling-bounds",
    "sampling by numbers beyond the bounds, and by what is no number",
    *of("SamplingOptions"),
)
OPTIONS.tries(
    "sampling-extremes",
    "the least and the most of each way of sampling, with the most choices",
    _all_choices(temperature=TINY, top_k=MOST_32, seed=MOST_63),
    _all_choices(temperature=100.0, top_p=TINY, min_p=1.0, typical_p=TINY),
    _all_choices(
        temperature=1.0,
        repetition_penalty=10.0,
        presence_penalty=2.0,
        frequency_penalty=-2.0,
    ),
    _all_choices(temperature=1.0, repetition_penalty=TINY, top_k=1),
    seconds=4.0,
)
OPTIONS.tries(
    "repeated-words",
    "no word twice in outputs that have to be of few words, with the most choices",
    _all_choices(no_repeat_ngram_size=1, temperature=1.0),
    _all_choices(no_repeat_ngram_size=1024),
    seconds=4.0,
)
OPTIONS.tries(
    "extreme-biases",
    "the most biases, of the largest values; too many; of no number; of ids that are not",
    generates(sampling=_biases, stop=_LONG, n=_choices),
    refused("sampling.logit_bias", sampling={"logit_bias": dict.fromkeys(range(16_000), 1)}),
    *of("SamplingOptions.logit_bias"),
    seconds=4.0,
)
OPTIONS.tries(
    "listed-ids",
    "ids that are not there among the allowed and the banned ones, and all of them banned",
    *of("SamplingOptions.allowed_token_ids", "SamplingOptions.banned_token_ids"),
    refused("sampling.banned_token_ids", sampling={"banned_token_ids": [MOST_32] * 200_000}),
    generates(
        *invalid("spec.sampling.allowed_token_ids", "spec.sampling.banned_token_ids"),
        sampling={"allowed_token_ids": [5], "banned_token_ids": [5]},
    ),
)
OPTIONS.tries(
    "overlapping-stops",
    "stop strings that nearly begin at every letter of an output of one letter",
    generates(stop=_overlapping, structured_output={"regex": "a{260,}"}, n=_choices),
    seconds=4.0,
)
OPTIONS.tries(
    "token-counts",
    "counts of tokens beyond what there is, and least counts above the most",
    *of("StopOptions"),
    refused("stop.min_tokens", stop={"max_tokens": 4, "min_tokens": 5}),
    generates(
        stop={"max_tokens": MOST_32, "ignore_eos": True},
        scheduling={"time_limit": {"nanos": 200_000_000}},
    ),
)
OPTIONS.tries(
    "output-bounds",
    "more of each thing that comes back than there may be, and pieces that never fill",
    *of("OutputOptions"),
    refused("output.logprob_token_ids", output={"logprob_token_ids": [5] * 129}),
    generates(output={"min_tokens_per_delta": MOST_32}, stop=_LONG),
    refused(
        "stop.stop_strings",
        output={"omit_text": True},
        stop={"max_tokens": 1, "stop_strings": ["a"]},
    ),
)
OPTIONS.tries(
    "output-of-everything",
    "log-probabilities of as many ids as there may be, times, raw text, of each choice",
    generates(
        output={"logprob_token_ids": [*range(127), 5], "record_timestamps": True},
        stop=_LONG,
        n=_choices,
    ),
    generates(
        chat={"messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}]},
        output={
            "raw_text": True,
            "skip_special_tokens": False,
            "token_details": True,
            "echo": True,
        },
        stop=_LONG,
        n=_choices,
    ),
    seconds=4.0,
)
OPTIONS.tries(
    "labels",
    "labels: the most, too many, twice the same, of control characters and large values",
    generates(labels=_labels(16, "n" * 62, "v" * 128)),
    refused("labels", labels=_labels(17)),
    refused("labels", labels=_labels(16_000)),
    refused("labels", labels=[{"name": "a"}] * 2),
    refused("labels", labels=[{"name": "a\n"}]),
    *of("Label"),
)
OPTIONS.tries(
    "model-names",
    "models and adapters of names that are not there: long, and of control characters",
    *of("GenerationSpec.model", "GenerationSpec.adapter"),
)
OPTIONS.tries(
    "predictions",
    "predictions: empty, too long, of no token, and such that they match everywhere",
    refused("prediction", prediction={}),
    refused("prediction.tokens.ids[]", prediction={"tokens": {"ids": [MOST_32]}}),
    refused("prediction.tokens.ids", prediction={"tokens": {"ids": [7] * 150_000}}),
    refused("prediction.text", prediction={"text": "a" * 900_000}),
    generates(prediction={"tokens": {"ids": [7] * 1000}}),
    generates(prediction={"text": "a b " * 200}),
)
OPTIONS.tries(
    "choice-counts",
    "more choices than there may be, and none",
    *of("GenerationSpec.n"),
)
OPTIONS.tries(
    "salts",
    "another salt each time, with a prompt of some blocks and a form; salts that are long",
    generates(
        text={"text": "Once upon a time there was a river. " * 8},
        cache=lambda s: {"salt": f"{s.source.getrandbits(256):064x}"},
        structured_output={"regex": "[a-z ]{1,20}"},
        each=True,
    ),
    refused("cache.salt", cache={"salt": "s" * 129}),
    generates(cache={"salt": "s", "bypass_prefix_cache": True}),
    *of("CacheOptions"),
    width=16,
)
OPTIONS.tries(
    "time-limits",
    "limits of time of nothing, below nothing, beyond all time, and of a nanosecond",
    *of("SchedulingOptions.time_limit"),
    generates(scheduling={"time_limit": {"seconds": 86_400}}),
    width=8,
)
OPTIONS.tries(
    "priorities",
    "priorities beyond the bounds",
    *of("SchedulingOptions.priority"),
)
OPTIONS.tries(
    "truncations",
    "inputs that are cut to nothing, to more than there is, and at no side",
    *of("TruncationOptions"),
    generates(truncation={"max_prompt_tokens": MOST_32, "side": pb.TRUNCATION_SIDE_RIGHT}),
)
OPTIONS.tries(
    "special-texts",
    "names of special tokens without and with the tokenizer's own, and no text",
    *(
        generates(text={"text": "<|bos|>" * 300, "add_special_tokens": special})
        for special in (True, False)
    ),
    *of("TextInput", "TokenInput"),
)
