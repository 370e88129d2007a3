"""The whole path: the client, the real server as a process, the real engine, the demo model.

Nothing here depends on what the demo model says, only on how what it says hangs together.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import headrace
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace import FinishReason, HealthStatus, Message

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.process.local_client import LocalEngineClient
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.helpers import until
from tests.service.real_server import ROOT, WAIT_S, RealServer, clean_environment, real_server

DEMO = ROOT / "models" / "demo"
PROMPT = "Once upon a time there was a mill by the river"


@pytest.fixture(scope="module")
def client(demo: RealServer) -> Iterator[headrace.Client]:
    with headrace.Client(demo.addresses[0]) as client:
        yield client


@pytest.fixture(scope="module")
def card(client: headrace.Client) -> headrace.ModelCard:
    return client.model()


def greedy(client: headrace.Client, **options: Any) -> headrace.Result:
    """A greedy output that no end-of-sequence token cuts short."""
    return client.generate(PROMPT, **{"temperature": 0, "ignore_eos": True, **options})


# ---- one request ---------------------------------------------------------------------------------


def test_generate(client: headrace.Client, card: headrace.ModelCard) -> None:
    result = greedy(client, max_tokens=24)
    assert (result.finish_reason, len(result.token_ids)) == (FinishReason.LENGTH, 24)
    assert all(token_id < card.vocab_size for token_id in result.token_ids)
    assert result.usage.prompt_tokens == len(client.tokenize(PROMPT))
    assert result.usage.completion_tokens == 24
    timings = result.timings
    assert timings.first_scheduled is not None
    assert timings.first_token is not None
    assert timings.last_token is not None
    assert timings.finished is not None
    assert 0 <= timings.first_scheduled <= timings.first_token <= timings.last_token
    assert timings.last_token <= timings.finished


def test_the_text_is_that_of_the_tokens(client: headrace.Client) -> None:
    prompt = client.tokenize(PROMPT).token_ids
    before = client.detokenize(prompt)
    for seed in range(4):
        result = client.generate(PROMPT, seed=seed, temperature=1.5, max_tokens=40)
        whole = client.detokenize([*prompt, *result.token_ids])
        assert before + result.text == whole


def test_a_stream_is_the_same_in_pieces(client: headrace.Client) -> None:
    whole = greedy(client, max_tokens=24)
    with client.stream(PROMPT, temperature=0, ignore_eos=True, max_tokens=24) as stream:
        chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
    assert [chunk.seq for chunk in chunks] == sorted({chunk.seq for chunk in chunks})
    coarse = client.stream(
        PROMPT, temperature=0, ignore_eos=True, max_tokens=24, min_tokens_per_delta=10
    )
    with coarse:
        sizes = [len(chunk.token_ids) for chunk in coarse]
    assert sum(sizes) == 24
    assert all(size >= 10 for size in sizes[:-1])


def test_a_session_over_the_unix_socket(demo: RealServer, client: headrace.Client) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(12)]
    alone = [client.generate(p, seed=3, max_tokens=16, temperature=0.9) for p in prompts]
    with headrace.Client(demo.addresses[1]) as unix, unix.session() as session:
        handles = [session.submit(p, seed=3, max_tokens=16, temperature=0.9) for p in prompts]
        for handle in handles:
            result = handle.result(WAIT_S)
            assert result.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            assert result.usage.completion_tokens == len(result.token_ids)
    # In bfloat16 a batch may round differently, so tokens are compared for one that is alone.
    again = client.generate(prompts[0], seed=3, max_tokens=16, temperature=0.9)
    assert again.token_ids == alone[0].token_ids


def test_seeds(client: headrace.Client) -> None:
    options: Any = {"temperature": 1.5, "max_tokens": 24, "ignore_eos": True}
    first = client.generate(PROMPT, seed=7, **options)
    assert client.generate(PROMPT, seed=7, **options).token_ids == first.token_ids
    others = [client.generate(PROMPT, seed=seed, **options).token_ids for seed in (8, 2**63 - 1)]
    assert first.token_ids not in others
    drawn = client.generate(PROMPT, **options)
    assert drawn.seed is not None
    assert client.generate(PROMPT, seed=drawn.seed, **options).token_ids == drawn.token_ids


def test_stop_strings(client: headrace.Client) -> None:
    whole = greedy(client, max_tokens=40)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    cut = whole.text.index(stop)
    result = greedy(client, max_tokens=40, stop=[stop, "\u2603"])
    assert (result.finish_reason, result.stop_string) == (FinishReason.STOP, stop)
    assert result.text == whole.text[:cut]
    included = greedy(client, max_tokens=40, stop=stop, include_stop=True)
    assert included.text == whole.text[:cut] + stop
    assert result.token_ids == included.token_ids == whole.token_ids[: len(result.token_ids)]
    assert result.usage.completion_tokens == len(result.token_ids)
    with client.stream(PROMPT, temperature=0, ignore_eos=True, max_tokens=40, stop=stop) as stream:
        assert "".join(chunk.text for chunk in stream) == whole.text[:cut]


def test_min_tokens(client: headrace.Client) -> None:
    whole = greedy(client, max_tokens=20)
    third = whole.token_ids[2]
    early = greedy(client, max_tokens=20, stop_token_ids=[third])
    assert (early.finish_reason, early.stop_token_id) == (FinishReason.STOP, third)
    assert early.token_ids == whole.token_ids[: whole.token_ids.index(third) + 1]
    late = greedy(client, max_tokens=20, stop_token_ids=[third], min_tokens=10)
    assert len(late.token_ids) > 10
    assert third not in late.token_ids[:10]


def test_echo(client: headrace.Client) -> None:
    plain = greedy(client, max_tokens=8)
    echoed = greedy(client, max_tokens=8, echo=True)
    assert echoed.token_ids == plain.token_ids
    assert echoed.text == client.detokenize(client.tokenize(PROMPT).token_ids) + plain.text


def test_logprobs(client: headrace.Client) -> None:
    result = greedy(client, max_tokens=12, logprobs=5, record_timestamps=True)
    assert [token.id for token in result.tokens] == list(result.token_ids)
    for token in result.tokens:
        logprobs = [candidate.logprob for candidate in token.candidates]
        assert len(logprobs) == 5
        assert logprobs == sorted(logprobs, reverse=True)
        assert len({candidate.id for candidate in token.candidates}) == 5
        assert token.logprob == logprobs[0]
        assert token.rank == 1
        assert all(logprob <= 0 for logprob in logprobs)
    times = [token.time for token in result.tokens]
    assert times == sorted(times, key=lambda time: time or 0)
    sampled = client.generate(PROMPT, temperature=2, seed=1, max_tokens=12, logprobs=0)
    assert len(sampled.logprobs) == len(sampled.token_ids)
    assert all(logprob is not None and logprob <= 0 for logprob in sampled.logprobs)
    assert not any(token.candidates for token in sampled.tokens)


def test_chat(client: headrace.Client, card: headrace.ModelCard) -> None:
    messages = [Message.system("Be brief."), Message.user("What is a headrace?")]
    if not card.capabilities.input.chat:
        with pytest.raises(headrace.NotSupportedError, match="no chat template"):
            client.generate(messages, max_tokens=4)
        return
    assert "chat" in card.capabilities.names
    ids = client.tokenize(messages).token_ids
    result = client.generate(messages, temperature=0, max_tokens=12)
    assert result.usage.prompt_tokens == len(ids)
    assert result.token_ids == client.generate(ids, temperature=0, max_tokens=12).token_ids
    opened = client.tokenize(messages, add_generation_prompt=False).token_ids
    assert len(opened) <= len(ids)
    assert ids[: len(opened)] == opened


# ---- the model card and the tokenizer ------------------------------------------------------------


def test_the_model_card(client: headrace.Client, card: headrace.ModelCard) -> None:
    limits = card.limits
    assert (card.name, card.device) == ("demo", "cpu")
    assert card.architecture
    assert card.parameters > 0
    assert limits.max_prompt_tokens == limits.max_context_tokens - 1
    assert all(token_id < card.vocab_size for token_id in card.eos_token_ids)
    assert (limits.default_max_tokens, limits.max_queue_size, limits.max_choices) == (256, 1024, 16)
    with pytest.raises(headrace.InvalidArgumentError, match=str(limits.max_prompt_tokens)):
        client.generate([5] * limits.max_context_tokens)
    with pytest.raises(headrace.InvalidArgumentError):
        client.generate(PROMPT, logprobs=limits.max_logprobs + 1)
    with pytest.raises(headrace.InvalidArgumentError):
        client.generate(PROMPT, stop=["x"] * (limits.max_stop_strings + 1))
    with pytest.raises(headrace.InvalidArgumentError, match=r"limits\.max_choices"):
        client.generate(PROMPT, n=limits.max_choices + 1)
    assert client.health() is HealthStatus.SERVING


def test_a_top_k_that_nobody_gives_is_generates(
    client: headrace.Client, card: headrace.ModelCard
) -> None:
    assert card.default_sampling.top_k == 50  # the demo's generation config has none
    drawn = client.generate(PROMPT, max_tokens=1)
    assert (drawn.accepted.sampling.top_k, drawn.accepted.sampling.temperature > 0) == (50, True)
    assert client.generate(PROMPT, max_tokens=1, top_k=0).accepted.sampling.top_k == 0


def test_the_longest_prompt(client: headrace.Client, card: headrace.ModelCard) -> None:
    longest = [5] * card.limits.max_prompt_tokens
    result = client.generate(longest, max_tokens=50, temperature=0, ignore_eos=True)
    assert (result.finish_reason, len(result.token_ids)) == (FinishReason.CONTEXT, 1)
    scored = client.generate([*longest, 5], max_tokens=0)
    assert (scored.finish_reason, scored.token_ids) == (FinishReason.LENGTH, ())


@pytest.mark.parametrize(
    "text", ["The river runs.", "Größe, naïve café, 水車 👩‍👩‍👧", "  a\n\tb  "]
)
def test_tokenize_and_back(client: headrace.Client, text: str) -> None:
    plain = client.tokenize(text, add_special_tokens=False, token_details=True)
    assert client.detokenize(plain.token_ids) == text
    assert b"".join(token.bytes for token in plain.tokens).decode() == text
    assert [token.id for token in plain.tokens] == list(plain.token_ids)
    special = client.tokenize(text).token_ids
    assert client.detokenize(special) == text
    assert client.generate(text, max_tokens=0).usage.prompt_tokens == len(special)


# ---- a client that is killed ---------------------------------------------------------------------

STREAMS = """
import sys
import headrace

client = headrace.Client(sys.argv[1])
options = dict(max_tokens=2**31, ignore_eos=True, temperature=0)
streams = [client.stream("The river", **options) for _ in range(3)]
session = client.session()
handles = [session.submit("The mill", **options) for _ in range(3)]
for one in (*streams, *handles):
    next(iter(one))
print("streaming", flush=True)
sys.stdin.read()
"""


async def test_a_client_that_is_killed_leaves_nothing_running() -> None:
    batching = ContinuousBatchingConfig(block_size=32, num_blocks=512, max_requests_per_batch=8)
    engine = LocalEngineClient(str(DEMO), batching, LoadConfig(device="cpu", threads=1))
    config = ServiceConfig(listen=("127.0.0.1:0",))
    server = HeadraceServer(config, engine, progress=lambda line: None)
    await server.start()
    try:
        await server.ready()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STREAMS, server.addresses[0]),
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            assert await asyncio.wait_for(child.stdout.readline(), WAIT_S) == b"streaming\n"
            stats = await engine.stats()
            assert stats.running == 6
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        await until(lambda: server.registry.live == 0)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert stats.requests_accepted == stats.requests_finished == 6
        assert stats.generated_tokens < 6 * 1900, "they ran to the end of their context"
        assert not server.registry.requests
    finally:
        await server.stop()


# ---- what a request may ask for ------------------------------------------------------------------


def test_choices_are_those_of_their_places(client: headrace.Client) -> None:
    """The draws depend on (seed, choice, position): the first choices of many are those of few."""
    options: Any = {"temperature": 1.2, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    alone = client.generate(PROMPT, **options)
    three = client.generate(PROMPT, n=3, **options)
    with client.stream(PROMPT, n=3, **options) as stream:
        chunks = list(stream)
    assert three.choices[0].token_ids == alone.token_ids
    assert len({choice.token_ids for choice in three.choices}) == 3
    for choice in three.choices:
        own = [chunk for chunk in chunks if chunk.choice_index == choice.index]
        assert tuple(i for chunk in own for i in chunk.token_ids) == choice.token_ids
        assert "".join(chunk.text for chunk in own) == choice.text
        assert choice.finish_reason is FinishReason.LENGTH
    assert three.usage.completion_tokens == 36
    assert three.usage.prompt_tokens == alone.usage.prompt_tokens
    session_result = None
    with client.session() as session:
        session_result = session.submit(PROMPT, n=3, **options).result(WAIT_S)
    assert [c.token_ids for c in session_result.choices] == [c.token_ids for c in three.choices]


def test_a_stop_string_in_one_of_several_choices(client: headrace.Client) -> None:
    options: Any = {"temperature": 1.2, "seed": 11, "max_tokens": 24, "ignore_eos": True, "n": 3}
    whole = client.generate(PROMPT, **options)
    others = whole.choices[0].text + whole.choices[2].text
    text = whole.choices[1].text
    stop = next(
        text[i : i + size]
        for size in range(3, 8)
        for i in range(1, len(text) - size)
        if text[i : i + size] not in others and text.index(text[i : i + size]) == i
    )
    cut = client.generate(PROMPT, stop=stop, **options)
    assert cut.choices[1].text == text[: text.index(stop)]
    assert cut.choices[1].stop_string == stop
    for index in (0, 2):
        assert cut.choices[index].token_ids == whole.choices[index].token_ids
    assert cut.usage.completion_tokens == 48 + len(cut.choices[1].token_ids)


def test_a_cancel_ends_all_choices(client: headrace.Client) -> None:
    with client.session() as session:
        handle = session.submit(PROMPT, n=3, max_tokens=1800, temperature=1.2, ignore_eos=True)
        seen: set[int] = set()
        for chunk in handle:
            seen.add(chunk.choice_index)
            if len(seen) == 3:
                break
        handle.cancel()
        result = handle.result(WAIT_S)
    for choice in result.choices:
        assert choice.finish_reason is FinishReason.CANCELLED
        assert 0 < len(choice.token_ids) < 1800
        assert choice.usage.completion_tokens == len(choice.token_ids)


def test_a_server_with_other_options() -> None:
    arguments = ("--listen", "127.0.0.1:0", "--scheduler", "prefill_first", "--no-prefix-cache")
    more = ("--cpu-offload-space", "0.1", "--async-batching", "--max-choices", "2")
    with real_server(*arguments, *more) as server:
        server.wait_until_ready()
        with headrace.Client(server.addresses[0]) as client:
            for _ in range(2):
                result = client.generate(f"{PROMPT}. " * 8, n=2, max_tokens=4)
                assert result.usage.cached_tokens == 0
            assert len(result.choices) == 2
            capabilities = client.model().capabilities
            with pytest.raises(headrace.NotSupportedError, match="'priorities'"):
                client.generate(PROMPT, priority=1)
            with pytest.raises(headrace.InvalidArgumentError, match="limits"):
                client.generate(PROMPT, n=3)
        assert "priorities" not in capabilities.names
        assert not capabilities.scheduling.prefix_cache


def test_the_prompt_is_scored(client: headrace.Client, card: headrace.ModelCard) -> None:
    ids = client.tokenize(PROMPT).token_ids
    result = client.generate(PROMPT, prompt_logprobs=2, max_tokens=0)
    assert result.prompt is not None
    tokens = result.prompt.tokens
    assert tuple(token.id for token in tokens) == ids
    assert tokens[0].logprob is None
    for token in tokens[1:]:
        assert token.logprob is not None
        assert token.rank is not None
        assert token.logprob <= 0
        assert len(token.candidates) == 2
        best = token.candidates[0]
        assert (best.id == token.id) == (token.rank == 1)
        assert token.logprob <= best.logprob
    # The most likely next token is the one that greedy output takes.
    longer = [*ids, *greedy(client, max_tokens=1).token_ids]
    scored = client.generate(longer, prompt_logprobs=0, max_tokens=0)
    assert scored.prompt is not None
    assert scored.prompt.tokens[-1].rank == 1


def test_requested_ids_come_with_every_token(client: headrace.Client) -> None:
    result = greedy(client, max_tokens=4, logprobs=3, logprob_token_ids=[5, 9])
    for token in result.tokens:
        assert [one.id for one in token.candidates[3:]] == [5, 9]
        assert all(one.logprob <= token.candidates[0].logprob for one in token.candidates)


def test_ids_that_are_allowed_or_banned(client: headrace.Client) -> None:
    allowed = [40, 50, 60]
    result = client.generate(
        PROMPT, allowed_token_ids=allowed, max_tokens=8, temperature=2.0, ignore_eos=True
    )
    assert set(result.token_ids) <= set(allowed)
    first = greedy(client, max_tokens=1).token_ids
    assert greedy(client, max_tokens=8, banned_token_ids=first).token_ids[0] != first[0]


def test_typical_p_and_ngrams(client: headrace.Client) -> None:
    options: Any = {"max_tokens": 48, "ignore_eos": True}
    assert client.generate(PROMPT, temperature=1.5, typical_p=0.3, seed=1, **options).token_ids
    ids = (
        *client.tokenize(PROMPT).token_ids,
        *client.generate(PROMPT, temperature=0, no_repeat_ngram_size=2, **options).token_ids,
    )
    pairs = list(itertools.pairwise(ids))
    assert len(pairs) == len(set(pairs))


def test_prefix_hits_are_seen_and_salts_part_them(client: headrace.Client) -> None:
    prompt = f"{PROMPT}. " * 8 + "This prompt is told twice."
    options: Any = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    first = client.generate(prompt, **options)
    again = client.generate(prompt, **options)
    assert first.usage.prompt_tokens > 64
    assert again.usage.cached_tokens >= 64
    assert again.usage.cached_tokens % 32 == 0
    assert again.prompt is not None
    assert again.prompt.cached_tokens == again.usage.cached_tokens
    assert again.token_ids == first.token_ids
    for other in ({"cache_salt": "mine"}, {"bypass_prefix_cache": True}):
        result = client.generate(prompt, **options, **other)
        assert result.usage.cached_tokens == 0
        assert result.token_ids == first.token_ids
    assert client.generate(prompt, cache_salt="mine", **options).usage.cached_tokens >= 64


def test_forms(client: headrace.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["mill", "river"]}, "age": {"enum": [1, 2, 3]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    result = client.generate(PROMPT, json_schema=schema, n=2, temperature=1.0, max_tokens=200)
    for choice in result.choices:
        assert choice.finish_reason is FinishReason.STOP
        found = json.loads(choice.text)
        assert found["name"] in ("mill", "river")
        assert found["age"] in (1, 2, 3)
    assert client.generate(PROMPT, choices=["yes", "no"]).text in ("yes", "no")
    assert re.fullmatch("[ab]{3}c", client.generate(PROMPT, regex="[ab]{3}c").text)
    assert client.generate(PROMPT, grammar='start: "x" "y"').text == "xy"
    assert client.generate(PROMPT, json_object=True, max_tokens=5).text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("json_schema", "{"), ("json_schema", {"type": 7}), ("regex", "("), ("grammar", "start: (")],
)
def test_wrong_forms_are_refused_by_name(client: headrace.Client, option: str, wrong: Any) -> None:
    options: Any = {option: wrong}
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        client.generate(PROMPT, **options)
    [violation] = caught.value.fields
    assert violation.field == f"spec.structured_output.{option}"
    assert violation.description


def test_what_of_a_form_is_held_otherwise_is_told(client: headrace.Client) -> None:
    schema = {
        "type": "object",
        "properties": {
            "at": {"type": "string", "format": "path", "maxLength": 3},
            "n": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1},
        },
        "required": ["at", "n"],
        "additionalProperties": False,
    }
    stream = client.stream(PROMPT, json_schema=schema, max_tokens=3)
    stream.result()
    assert stream.accepted is not None
    assert stream.accepted.notes == (
        "the maximum 9223372036854775807 in $.properties.n is held as 9007199254740992",
        'the format "path" in $.properties.at is not held',
    )
    stream = client.stream(PROMPT, max_tokens=1)
    stream.result()
    assert stream.accepted is not None
    assert stream.accepted.notes == ()


def test_an_option_that_contradicts_the_form_is_named_with_it(client: headrace.Client) -> None:
    quotes = [i for i in range(4096) if '"' in client.detokenize([i])]
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        client.generate(PROMPT, json_schema={"type": "string"}, banned_token_ids=quotes)
    assert "structured_output.json_schema" in str(caught.value)
    assert "sampling.banned_token_ids" in str(caught.value)


def test_priorities_are_taken(client: headrace.Client) -> None:
    assert client.generate(PROMPT, priority=5, max_tokens=1).token_ids


# ---- the process ---------------------------------------------------------------------------------


def test_the_start_is_told(demo: RealServer) -> None:
    assert demo.said.startswith("headrace-server ")
    for part in ("port open on", "loading", "verified", "KV cache:", "warming up", "Ready in"):
        assert part in demo.said
    target, socket = demo.addresses
    assert f"--target {target}" in demo.said
    assert Path(socket.removeprefix("unix:")).is_socket()


@contextlib.contextmanager
def watching(target: str) -> Iterator[Any]:
    """A Watch of readiness that is open: its first answer has been sent."""
    with grpc.insecure_channel(target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="headrace.v1.GenerationService")
        )
        first = next(watch)
        yield itertools.chain([first], watch)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, RealServer]]:
    """Two servers to be ended, started at the same time."""
    folder = tmp_path_factory.mktemp("two")
    listen = [
        ("--listen", "127.0.0.1:0", "--listen", f"unix:{folder}/{name}") for name in ("a", "b")
    ]
    with real_server(*listen[0]) as first, real_server(*listen[1]) as second:
        first.wait_until_ready()
        second.wait_until_ready()
        yield first, second


def test_the_first_signal_drains(two: tuple[RealServer, RealServer]) -> None:
    """Streams finish, and the process ends with the last of them, though a Watch is open."""
    server = two[0]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(headrace.Client(a)) for a in server.addresses]
        streams = [
            stack.enter_context(one.stream(PROMPT, max_tokens=400, temperature=0, ignore_eos=True))
            for one in clients
        ]
        for stream in streams:
            next(stream)
        watch = stack.enter_context(watching(server.addresses[0]))
        server.signal(signal.SIGTERM)
        server.read_until("Draining: 2 live requests")
        with pytest.raises(headrace.UnavailableError) as caught:
            next(clients[0].stream(PROMPT))
        assert caught.value.reason == "DRAINING"
        assert clients[1].health() is HealthStatus.NOT_SERVING
        assert clients[1].health("") is HealthStatus.SERVING
        # Read now: a client may drop what it has not read when the connection goes away.
        assert [next(watch).status for _ in range(2)] == [
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        ]
        for stream in streams:
            result = stream.result()
            assert (result.finish_reason, len(result.token_ids)) == (FinishReason.LENGTH, 400)
        last = time.monotonic()
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        assert server.ended() == 0
        took = time.monotonic() - last
        assert not list(watch)
    assert took < 0.5 * busy  # a busy machine gives everybody less
    assert server.said.endswith("Stopped.\n")
    assert "Traceback" not in server.said
    assert not Path(server.addresses[1].removeprefix("unix:")).exists()


def test_the_second_signal_ends_at_once(two: tuple[RealServer, RealServer]) -> None:
    server = two[1]
    with headrace.Client(server.addresses[1]) as client, client.session() as session:
        handles = [
            session.submit(PROMPT, max_tokens=2000, temperature=0, ignore_eos=True)
            for _ in range(8)
        ]
        for handle in handles:
            next(iter(handle))
        server.signal(signal.SIGTERM)
        server.read_until("Draining: 8 live requests")
        server.signal(signal.SIGTERM)
        assert server.ended() == 128 + signal.SIGTERM
        for handle in handles:
            with pytest.raises(headrace.UnavailableError):
                handle.result(WAIT_S)
    assert server.said.endswith("Stopped at once.\n")
    assert not Path(server.addresses[1].removeprefix("unix:")).exists()
