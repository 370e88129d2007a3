"""Requests that are admitted or nearly admitted: many at the same time, with costly options, or
with results that nobody reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from benchmarks.hostile import encoding as wire
from benchmarks.hostile.inputs.kinds import OK, Group, Input, invalid
from benchmarks.hostile.sending import GENERATION, NO_ANSWER, Sender

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


async def calls_at_once(s: Sender) -> None:
    """Send 3,000 concurrent calls on one connection."""
    await s.crowd(3000, lambda _: s.call(GENERATE, _short()))


async def calls_at_once_apart(s: Sender) -> None:
    """Send 3,000 concurrent calls on 30 connections."""
    channels = [s.connect() for _ in range(30)]
    await s.crowd(3000, lambda n: s.call(GENERATE, _short(), channel=channels[n % 30]))


async def unread_logprobs(s: Sender) -> None:
    """Open 300 streams that are never read, with as many logprobs per token as allowed."""
    spec = (
        wire.text_input("Once upon a time")
        + wire.max_tokens(1500, ignore_eos=True)
        + wire.output(wire.count(3, s.card.logprobs))
    )
    await s.crowd(300, lambda _: s.session([wire.add(spec)], read=False, stay=True))


async def whole_results(s: Sender) -> None:
    """Send AddRequest and Generate calls whose results are too large to be kept or sent.

    The server must refuse them before it computes anything.
    """
    spec = (
        wire.text_input("Once upon a time")
        + wire.max_tokens(1900, ignore_eos=True)
        + wire.output(wire.count(3, s.card.logprobs))
        + wire.choices(s.card.choices)
    )
    await s.again(32, lambda number: s.call((ADD, GENERATE)[number % 2], wire.request(spec)))


async def logit_bias(s: Sender) -> None:
    """Send requests with as many logit biases and choices as allowed, 32 at the same time."""
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
    await s.again(32, lambda _: s.call(GENERATE, wire.request(spec)))


async def prompt_logprobs(s: Sender) -> None:
    """Ask for prompt logprobs with as many candidates and choices as allowed.

    One prompt is accepted; the other has scores that do not fit in a message.
    """
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


async def stop_strings(s: Sender) -> None:
    """Send requests with as many stop strings of the longest size, and as many choices, as
    allowed.
    """
    strings = b"".join(
        wire.field(3, b" " * (s.card.stop_string_bytes - 1) + bytes([97 + number]))
        for number in range(s.card.stop_strings)
    )
    stop = wire.field(6, wire.count(1, 64) + strings + wire.count(6, 1))
    spec = wire.text_input("Once upon a time") + stop + wire.choices(s.card.choices)
    await s.again(16, lambda _: s.call(GENERATE, wire.request(spec)))


async def detailed_answers(s: Sender) -> None:
    """Ask for all details of as many choices as allowed in one answer."""
    asked = wire.count(1, 2) + wire.count(3, s.card.logprobs) + wire.count(8, 1)
    spec = (
        wire.text_input("Once upon a time")
        + wire.max_tokens(128, ignore_eos=True)
        + wire.output(asked)
        + wire.choices(s.card.choices)
    )
    await s.again(4, lambda _: s.call(GENERATE, wire.request(spec)))


async def echo_longest(s: Sender) -> None:
    """Send a prompt of nearly 2,000 tokens whose text is echoed with each choice."""
    ids = bytes(5 + number % 90 for number in range(min(s.card.context, 2000) - 60))
    spec = (
        wire.token_input(ids)
        + wire.output(wire.count(6, 1) + wire.count(7, 1))
        + wire.max_tokens(4, ignore_eos=True)
        + wire.choices(s.card.choices)
    )
    await s.again(8, lambda _: s.call(STREAM, wire.request(spec)))


async def long_prompt(s: Sender) -> None:
    """Send one prompt that leaves room in the context for a single token."""
    ids = bytes(5 + number % 90 for number in range(s.card.context - 1))
    await s.call(GENERATE, wire.request(wire.token_input(ids) + wire.max_tokens(1)))


async def high_priority(s: Sender) -> None:
    """Send 300 requests with the highest priority."""
    spec = (
        wire.text_input("Once upon a time")
        + wire.max_tokens(200, ignore_eos=True)
        + wire.priority(100)
    )
    await s.crowd(300, lambda _: s.call(STREAM, wire.request(spec)))


async def short_requests(s: Sender) -> None:
    """Send short requests continuously from 64 concurrent callers."""
    await s.again(64, lambda _: s.call(GENERATE, _short(1)))


async def gone_callers(s: Sender) -> None:
    """Send calls whose callers disconnect within milliseconds, 64 at the same time."""
    await s.again(64, lambda _: s.call(STREAM, _short(500), patience_s=0.02))


async def cancel_storm(s: Sender) -> None:
    """Add requests and cancel them."""
    numbers = itertools.count()

    async def one(_: int) -> None:
        name = wire.field(1, f"storm-{next(numbers)}")
        spec = name + wire.text_input("Once upon a time") + wire.max_tokens(500)
        await s.call(ADD, wire.request(spec))
        await s.call(GENERATION + "Cancel", name)

    await s.again(32, one)


async def refused_requests(s: Sender) -> None:
    """Send requests with an invalid field, 64 at the same time."""
    spec = wire.text_input("") + wire.max_tokens(1)
    await s.again(64, lambda _: s.call(ADD, wire.request(spec)))


async def waiting_lists(s: Sender) -> None:
    """Queue requests with id lists of the largest allowed size: 64 run and 80 more wait."""
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


async def waiting_prompts(s: Sender) -> None:
    """Queue as many requests as allowed, each with the longest possible prompt."""
    ids = bytes(5 + number % 90 for number in range(min(s.card.context - 300, s.below)))
    raw = wire.request(wire.token_input(ids) + wire.max_tokens(200))
    running = wire.text_input("Once upon a time") + wire.max_tokens(1900, ignore_eos=True)
    await s.crowd(64, lambda _: s.call(ADD, wire.request(running)))
    await s.crowd(1000, lambda _: s.call(ADD, raw, gzip=True))


async def waiting_forms(s: Sender) -> None:
    """Queue requests that each have a different 200 KiB output format."""
    running = wire.text_input("Once upon a time") + wire.max_tokens(1900, ignore_eos=True)
    await s.crowd(64, lambda _: s.call(ADD, wire.request(running)))

    async def one(number: int) -> None:
        names = ",".join(f'"{number}-{index:08d}"' for index in range(12_000))
        spec = wire.text_input("hi") + wire.structured(1, f'{{"enum":[{names}]}}')
        await s.call(ADD, wire.request(spec + wire.max_tokens(20)))

    await s.crowd(60, one)


REQUESTS = Group(
    "requests",
    (
        Input(
            name="calls-at-once",
            meaning="3,000 calls at once on one connection",
            send=calls_at_once,
            judge=answered,
            seconds=20.0,
        ),
        Input(
            name="calls-at-once-apart",
            meaning="3,000 calls at once on 30 connections",
            send=calls_at_once_apart,
            judge=answered,
            seconds=20.0,
        ),
        Input(
            name="unread-logprobs",
            meaning="300 requests whose results nobody reads, with the most log-probabilities",
            send=unread_logprobs,
            fields=("OutputOptions.logprobs",),
        ),
        Input(
            name="whole-results",
            meaning="the most tokens, choices and candidates, to be kept or sent in one piece",
            send=whole_results,
            answers=invalid("spec.stop.max_tokens"),
            fields=("StopOptions.max_tokens",),
        ),
        Input(
            name="logit-bias",
            meaning="the most biases, with the most choices, 32 at once",
            send=logit_bias,
            fields=("SamplingOptions.logit_bias", "GenerationSpec.n"),
        ),
        Input(
            name="prompt-logprobs",
            meaning="prompts of 400 and 1,500 tokens, scored with the most candidates and choices",
            send=prompt_logprobs,
            answers=invalid("spec.output.prompt_logprobs"),
            fields=("OutputOptions.prompt_logprobs",),
        ),
        Input(
            name="stop-strings",
            meaning="the most and longest stop strings, with the most choices, 16 at once",
            send=stop_strings,
            fields=("StopOptions.stop_strings",),
        ),
        Input(
            name="detailed-answers",
            meaning="one answer with all details of the most choices, four at once",
            send=detailed_answers,
            fields=("OutputOptions.delivery", "OutputOptions.logprobs"),
        ),
        Input(
            name="echo-longest",
            meaning="prompts of 2,000 tokens that come back with the most choices",
            send=echo_longest,
            fields=("OutputOptions.echo",),
        ),
        Input(
            name="high-priority",
            meaning="300 requests of the highest priority",
            send=high_priority,
            fields=("SchedulingOptions.priority",),
        ),
        Input(
            name="short-requests",
            meaning="requests of one token, 64 at once",
            send=short_requests,
        ),
        Input(
            name="gone-callers",
            meaning="calls whose callers go after 20 ms, 64 at once",
            send=gone_callers,
        ),
        Input(
            name="cancel-storm",
            meaning="32 requests that are added and cancelled all the time",
            send=cancel_storm,
            answers=(OK,),
        ),
        Input(
            name="refused-requests",
            meaning="requests that are refused, 64 at once",
            send=refused_requests,
            answers=invalid("spec.text.text"),
        ),
        Input(
            name="long-prompt",
            meaning="one prompt as long as the context",
            send=long_prompt,
            fields=("TokenInput.ids",),
            seconds=90.0,
        ),
    ),
)
WAITING = Group(
    "waiting",
    (
        Input(
            name="waiting-lists",
            meaning="240 waiting requests with the longest lists of ids",
            send=waiting_lists,
            answers=(OK,),
            fields=("SamplingOptions.allowed_token_ids", "SamplingOptions.banned_token_ids"),
            seconds=20.0,
        ),
    ),
)
WAITING_PROMPTS = Group(
    "waiting prompts",
    (
        Input(
            name="waiting-forms",
            meaning="60 waiting requests with forms of 200 KiB, each another",
            send=waiting_forms,
            answers=(OK,),
            fields=("StructuredOutput.json_schema",),
            seconds=20.0,
        ),
        Input(
            name="waiting-prompts",
            meaning="1,000 waiting requests with the longest prompts",
            send=waiting_prompts,
            answers=(OK,),
            fields=("TokenInput.ids",),
            seconds=20.0,
        ),
    ),
)
