"""Requests that are admitted or nearly admitted: many at the same time, with costly options, or
with results that nobody reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.inputs.kinds import OK, Call, Group, invalid
from tests.campaign.hostile.sending import ADD, CANCEL, GENERATE, NO_ANSWER, STREAM, Sender


def answered(answers: Mapping[str, int]) -> str | None:
    """Check that each call got an answer, or a refusal with a reason and a retry time.

    Returns what is wrong, or None.
    """
    wrong = {
        name: number
        for name, number in answers.items()
        if "(bare)" in name or "(no retry time)" in name
    }
    if wrong:
        told = ", ".join(f"{number} {name}" for name, number in wrong.items())
        return f"calls ended without a reason or a time to try again: {told}"
    if answers.get(NO_ANSWER):
        return f"{answers[NO_ANSWER]} calls had no answer in their time"
    return None


def _short(tokens: int = 4) -> bytes:
    return wire.request(stop={"max_tokens": tokens})


def _whole(most: int, **fields: Any) -> bytes:
    """Return a request that gets all its tokens."""
    return wire.request(stop={"max_tokens": most, "ignore_eos": True}, **fields)


def _prompt(tokens: int) -> dict[str, list[int]]:
    """Return a prompt of many different tokens."""
    return {"ids": [5 + number % 90 for number in range(tokens)]}


REQUESTS = Group("requests")


@REQUESTS.sends(judge=answered, seconds=20.0)
async def calls_at_once(s: Sender) -> None:
    """3,000 calls at once on one connection."""
    await s.crowd(3000, lambda _: s.call(GENERATE, _short()))


@REQUESTS.sends(judge=answered, seconds=20.0)
async def calls_at_once_apart(s: Sender) -> None:
    """3,000 calls at once on 30 connections."""
    channels = [s.connect() for _ in range(30)]
    await s.crowd(3000, lambda n: s.call(GENERATE, _short(), channel=channels[n % 30]))


@REQUESTS.sends()
async def unread_logprobs(s: Sender) -> None:
    """300 requests whose results nobody reads, with the most log-probabilities."""
    command = wire.add(
        stop={"max_tokens": 1500, "ignore_eos": True}, output={"logprobs": s.limits.max_logprobs}
    )
    await s.crowd(300, lambda _: s.session([command], read=False, stay=True))


@REQUESTS.sends(answers=invalid("spec.stop.max_tokens"))
async def whole_results(s: Sender) -> None:
    """The most tokens, choices and candidates, to be kept or sent in one piece."""
    raw = _whole(1900, output={"logprobs": s.limits.max_logprobs}, n=s.limits.max_choices)
    await s.again(32, lambda number: s.call((ADD, GENERATE)[number % 2], raw))


@REQUESTS.repeats(32)
def logit_bias(s: Sender) -> Iterable[Call]:
    """The most biases, with the most choices, 32 at once."""
    bias = {number % s.card.vocab_size: 1.0 for number in range(s.limits.max_logit_bias)}
    raw = _whole(8, sampling={"logit_bias": bias}, n=s.limits.max_choices)
    return [Call(GENERATE, raw, gzip=False)]


@REQUESTS.sends(answers=invalid("spec.output.prompt_logprobs"))
async def prompt_logprobs(s: Sender) -> None:
    """Prompts of 400 and 1,500 tokens, scored with the most candidates and choices."""
    raws = [
        _whole(
            1,
            tokens=_prompt(tokens),
            output={"prompt_logprobs": s.limits.max_logprobs},
            cache={"bypass_prefix_cache": True},
            n=s.limits.max_choices,
        )
        for tokens in (400, 1500)
    ]
    await s.again(4, lambda index: s.call(GENERATE, raws[index % 2]))


@REQUESTS.repeats(16)
def stop_strings(s: Sender) -> Iterable[Call]:
    """The most and longest stop strings, with the most choices, 16 at once."""
    blanks = " " * (s.limits.max_stop_string_bytes - 1)
    strings = [blanks + chr(97 + number) for number in range(s.limits.max_stop_strings)]
    stop = {"max_tokens": 64, "stop_strings": strings, "ignore_eos": True}
    return [Call(GENERATE, wire.request(stop=stop, n=s.limits.max_choices), gzip=False)]


@REQUESTS.repeats(4)
def detailed_answers(s: Sender) -> Iterable[Call]:
    """One answer with all details of the most choices, four at once."""
    asked = {
        "delivery": pb.DELIVERY_FINAL,
        "logprobs": s.limits.max_logprobs,
        "record_timestamps": True,
    }
    return [Call(GENERATE, _whole(128, output=asked, n=s.limits.max_choices), gzip=False)]


@REQUESTS.repeats(8)
def echo_longest(s: Sender) -> Iterable[Call]:
    """Prompts of 2,000 tokens that come back with the most choices."""
    prompt, asked = (
        _prompt(min(s.limits.max_context_tokens, 2000) - 60),
        {"echo": True, "token_details": True},
    )
    return [
        Call(STREAM, _whole(4, tokens=prompt, output=asked, n=s.limits.max_choices), gzip=False)
    ]


@REQUESTS.sends()
async def high_priority(s: Sender) -> None:
    """300 requests of the highest priority."""
    await s.crowd(300, lambda _: s.call(STREAM, _whole(200, scheduling={"priority": 100})))


@REQUESTS.repeats(64)
def short_requests(s: Sender) -> Iterable[Call]:
    """Requests of one token, 64 at once."""
    return [Call(GENERATE, _short(1), gzip=False)]


@REQUESTS.repeats(64)
def gone_callers(s: Sender) -> Iterable[Call]:
    """Calls whose callers go after 20 ms, 64 at once."""
    return [Call(STREAM, _short(500), patience_s=0.02, gzip=False)]


@REQUESTS.sends(answers=(OK,))
async def cancel_storm(s: Sender) -> None:
    """32 requests that are added and cancelled all the time."""
    numbers = itertools.count()

    async def one(_: int) -> None:
        name = f"storm-{next(numbers)}"
        cancel = rpc.CancelRequest(request_ids=[name]).SerializeToString()
        await s.call(ADD, wire.request(request_id=name, stop={"max_tokens": 500}))
        await s.call(CANCEL, cancel)

    await s.again(32, one)


@REQUESTS.repeats(64, answers=invalid("spec.text.text"))
def refused_requests(s: Sender) -> Iterable[Call]:
    """Requests that are refused, 64 at once."""
    return [Call(ADD, wire.request("", stop={"max_tokens": 1}), gzip=False)]


@REQUESTS.sends(seconds=90.0)
async def long_prompt(s: Sender) -> None:
    """One prompt as long as the context."""
    raw = wire.request(tokens=_prompt(s.limits.max_context_tokens - 1), stop={"max_tokens": 1})
    await s.call(GENERATE, raw)


WAITING = Group("waiting")
WAITING_PROMPTS = Group("waiting prompts")


async def _occupy(s: Sender) -> None:
    """Let as many requests run as may, so that all others wait."""
    await s.crowd(64, lambda _: s.call(ADD, _whole(1900)))


@WAITING.sends(answers=(OK,), seconds=20.0)
async def waiting_lists(s: Sender) -> None:
    """240 waiting requests with the longest lists of ids."""
    await _occupy(s)
    each = min(262_144, (s.below - 200) // 2)
    most = min(each // 3, s.card.vocab_size)
    for allowed, banned in (
        (b"\x05" * each, b"\x06" * each),
        (wire.packed(range(most)), b"\x06"),
        (b"", wire.packed(range(most // 2))),
    ):
        raw = wire.request("hi", stop={"max_tokens": 200})
        for name, ids in (("allowed_token_ids", allowed), ("banned_token_ids", banned)):
            if ids:
                raw += wire.inside(rpc.GenerateRequest, f"spec.sampling.{name}", ids)
        await s.crowd(80, lambda _, raw=raw: s.call(ADD, raw, gzip=True))  # type: ignore[misc]


@WAITING_PROMPTS.sends(answers=(OK,), seconds=20.0)
async def waiting_forms(s: Sender) -> None:
    """60 waiting requests with forms of 200 KiB, each another."""
    await _occupy(s)

    async def one(number: int) -> None:
        names = ",".join(f'"{number}-{index:08d}"' for index in range(12_000))
        form = {"json_schema": f'{{"enum":[{names}]}}'}
        await s.call(ADD, wire.request("hi", structured_output=form, stop={"max_tokens": 20}))

    await s.crowd(60, one)


@WAITING_PROMPTS.sends(answers=(OK,), seconds=20.0)
async def waiting_prompts(s: Sender) -> None:
    """1,000 waiting requests with the longest prompts."""
    raw = wire.request(
        tokens=_prompt(min(s.limits.max_context_tokens - 300, s.below)), stop={"max_tokens": 200}
    )
    await _occupy(s)
    await s.crowd(1000, lambda _: s.call(ADD, raw, gzip=True))
