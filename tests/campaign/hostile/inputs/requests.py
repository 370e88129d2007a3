"""Requests that are admitted or nearly admitted: many at the same time, with costly options, or
with results that nobody reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.inputs.kinds import OK, Call, Group, invalid
from tests.campaign.hostile.sending import GENERATION, NO_ANSWER, Sender

GENERATE = GENERATION + "Generate"
STREAM = GENERATION + "GenerateStream"
ADD = GENERATION + "AddRequest"


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
    return wire.request(wire.text_input("Once upon a time") + wire.max_tokens(tokens))


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
    spec = (
        wire.text_input("Once upon a time")
        + wire.max_tokens(1500, ignore_eos=True)
        + wire.output(wire.count(3, s.card.logprobs))
    )
    await s.crowd(300, lambda _: s.session([wire.add(spec)], read=False, stay=True))


@REQUESTS.sends(answers=invalid("spec.stop.max_tokens"))
async def whole_results(s: Sender) -> None:
    """The most tokens, choices and candidates, to be kept or sent in one piece."""
    spec = (
        wire.text_input("Once upon a time")
        + wire.max_tokens(1900, ignore_eos=True)
        + wire.output(wire.count(3, s.card.logprobs))
        + wire.choices(s.card.choices)
    )
    await s.again(32, lambda number: s.call((ADD, GENERATE)[number % 2], wire.request(spec)))


@REQUESTS.repeats(32)
def logit_bias(s: Sender) -> Iterable[Call]:
    """The most biases, with the most choices, 32 at once."""
    entries = b"".join(
        wire.field(10, wire.count(1, number % s.card.vocabulary) + b"\x15\x00\x00\x80\x3f")
        for number in range(s.card.logit_bias)
    )
    spec = (
        wire.text_input("Once upon a time")
        + wire.sampling(entries)
        + wire.max_tokens(8, ignore_eos=True)
        + wire.choices(s.card.choices)
    )
    return [Call(GENERATE, wire.request(spec), gzip=False)]


@REQUESTS.sends(answers=invalid("spec.output.prompt_logprobs"))
async def prompt_logprobs(s: Sender) -> None:
    """Prompts of 400 and 1,500 tokens, scored with the most candidates and choices."""
    specs = [
        wire.token_input(bytes(5 + number % 90 for number in range(tokens)))
        + wire.output(wire.count(4, s.card.logprobs))
        + wire.max_tokens(1, ignore_eos=True)
        + wire.choices(s.card.choices)
        + wire.field(10, wire.count(2, 1))
        for tokens in (400, 1500)
    ]

    async def one(index: int) -> None:
        await s.call(GENERATE, wire.request(specs[index % 2]))

    await s.again(4, one)


@REQUESTS.repeats(16)
def stop_strings(s: Sender) -> Iterable[Call]:
    """The most and longest stop strings, with the most choices, 16 at once."""
    strings = b"".join(
        wire.field(3, b" " * (s.card.stop_string_bytes - 1) + bytes([97 + number]))
        for number in range(s.card.stop_strings)
    )
    stop = wire.field(6, wire.count(1, 64) + strings + wire.count(6, 1))
    spec = wire.text_input("Once upon a time") + stop + wire.choices(s.card.choices)
    return [Call(GENERATE, wire.request(spec), gzip=False)]


@REQUESTS.repeats(4)
def detailed_answers(s: Sender) -> Iterable[Call]:
    """One answer with all details of the most choices, four at once."""
    asked = wire.count(1, 2) + wire.count(3, s.card.logprobs) + wire.count(8, 1)
    spec = (
        wire.text_input("Once upon a time")
        + wire.max_tokens(128, ignore_eos=True)
        + wire.output(asked)
        + wire.choices(s.card.choices)
    )
    return [Call(GENERATE, wire.request(spec), gzip=False)]


@REQUESTS.repeats(8)
def echo_longest(s: Sender) -> Iterable[Call]:
    """Prompts of 2,000 tokens that come back with the most choices."""
    ids = bytes(5 + number % 90 for number in range(min(s.card.context, 2000) - 60))
    spec = (
        wire.token_input(ids)
        + wire.output(wire.count(6, 1) + wire.count(7, 1))
        + wire.max_tokens(4, ignore_eos=True)
        + wire.choices(s.card.choices)
    )
    return [Call(STREAM, wire.request(spec), gzip=False)]


@REQUESTS.sends()
async def high_priority(s: Sender) -> None:
    """300 requests of the highest priority."""
    spec = (
        wire.text_input("Once upon a time")
        + wire.max_tokens(200, ignore_eos=True)
        + wire.priority(100)
    )
    await s.crowd(300, lambda _: s.call(STREAM, wire.request(spec)))


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
        name = wire.field(1, f"storm-{next(numbers)}")
        spec = name + wire.text_input("Once upon a time") + wire.max_tokens(500)
        await s.call(ADD, wire.request(spec))
        await s.call(GENERATION + "Cancel", name)

    await s.again(32, one)


@REQUESTS.repeats(64, answers=invalid("spec.text.text"))
def refused_requests(s: Sender) -> Iterable[Call]:
    """Requests that are refused, 64 at once."""
    spec = wire.text_input("") + wire.max_tokens(1)
    return [Call(ADD, wire.request(spec), gzip=False)]


@REQUESTS.sends(seconds=90.0)
async def long_prompt(s: Sender) -> None:
    """One prompt as long as the context."""
    ids = bytes(5 + number % 90 for number in range(s.card.context - 1))
    await s.call(GENERATE, wire.request(wire.token_input(ids) + wire.max_tokens(1)))


WAITING = Group("waiting")


@WAITING.sends(answers=(OK,), seconds=20.0)
async def waiting_lists(s: Sender) -> None:
    """240 waiting requests with the longest lists of ids."""
    running = wire.text_input("Once upon a time") + wire.max_tokens(1900, ignore_eos=True)
    await s.crowd(64, lambda _: s.call(ADD, wire.request(running)))
    each = min(262_144, (s.below - 200) // 2)
    most = min(each // 3, s.card.vocabulary)
    distinct, half = (b"".join(map(wire.varint, range(number))) for number in (most, most // 2))
    lists = [
        wire.field(11, b"\x05" * each) + wire.field(12, b"\x06" * each),
        wire.field(11, distinct) + wire.field(12, b"\x06"),
        wire.field(12, half),
    ]
    for ids in lists:
        raw = wire.request(wire.text_input("hi") + wire.sampling(ids) + wire.max_tokens(200))
        await s.crowd(80, lambda _, raw=raw: s.call(ADD, raw, gzip=True))  # type: ignore[misc]


WAITING_PROMPTS = Group("waiting prompts")


@WAITING_PROMPTS.sends(answers=(OK,), seconds=20.0)
async def waiting_forms(s: Sender) -> None:
    """60 waiting requests with forms of 200 KiB, each another."""
    running = wire.text_input("Once upon a time") + wire.max_tokens(1900, ignore_eos=True)
    await s.crowd(64, lambda _: s.call(ADD, wire.request(running)))

    async def one(number: int) -> None:
        names = ",".join(f'"{number}-{index:08d}"' for index in range(12_000))
        spec = wire.text_input("hi") + wire.structured(1, f'{{"enum":[{names}]}}')
        await s.call(ADD, wire.request(spec + wire.max_tokens(20)))

    await s.crowd(60, one)


@WAITING_PROMPTS.sends(answers=(OK,), seconds=20.0)
async def waiting_prompts(s: Sender) -> None:
    """1,000 waiting requests with the longest prompts."""
    ids = bytes(5 + number % 90 for number in range(min(s.card.context - 300, s.below)))
    raw = wire.request(wire.token_input(ids) + wire.max_tokens(200))
    running = wire.text_input("Once upon a time") + wire.max_tokens(1900, ignore_eos=True)
    await s.crowd(64, lambda _: s.call(ADD, wire.request(running)))
    await s.crowd(1000, lambda _: s.call(ADD, raw, gzip=True))
