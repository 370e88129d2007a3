"""Headrace behind smg, by OpenAI's client: `python -m benchmarks gateway`.

It needs the extra `gateway`, `smg` and `openai` in this environment. It runs the demo model in
three parts:

prompts     Conversations go through smg and a relay that records what it sends. Is the answer the
            same as that of our own API for the same token ids? Are the ids those of our own chat
            template?
kill        Streamed chats run, a third of them with a tool; in the middle one of two servers is
            killed. Which chats fail, and when did they begin?
throughput  The same chats run through smg, and directly to the two servers in turn; in pairs with
            alternating order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import headrace
import openai
from smg_grpc_proto.generated import vllm_engine_pb2

from benchmarks.measures import compared
from benchmarks.models import DEMO
from benchmarks.records import Record
from benchmarks.rig.gateways import smg, with_template
from benchmarks.rig.load import Calls, Chats, connect, send
from benchmarks.rig.measurement import Measurement, in_turns, option
from benchmarks.rig.serving import Process, serve

SERVICE = "/vllm.grpc.engine.VllmEngine/"
NAME = "demo"
"""The servers' name of their model."""
AT_ONCE = 16
MAX_TOKENS = 48
HEALTH_INTERVAL_S = 5
"""How often smg checks a server's health here; its own default is 60."""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Ulm", "Bonn"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
CHOICE = {"type": "function", "function": {"name": "get_weather"}}


def story(number: int) -> str:
    """Return the prompt of a chat of a crowd."""
    return f"Tell me story number {number}."


def user(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **more}]


def conversations() -> dict[str, list[dict[str, Any]]]:
    """Return the conversations, by a name that describes what is special about each."""
    said = {"role": "assistant", "content": "Once there was a fox."}
    system = {"role": "system", "content": "You tell stories."}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"town": "Ulm"}'},
            }
        ],
    }
    return {
        "one message": user("Tell me a story about a fox."),
        "with a system message": [system, *user("Tell me a story about a fox.")],
        "with a developer message": [
            {"role": "developer", "content": "Be brief."},
            *user("Tell me a story."),
        ],
        "several turns": [*user("Begin."), said, *user("Go on.")],
        "blanks around": user("  Tell me a story. \n\n"),
        "an empty message": user(""),
        "umlauts and accents": user("Erzähl von Käthes Café à Zürich."),
        "combined emoji": user("A story about 👩‍👩‍👧‍👦 and 🦊, please."),
        "other scripts": user("讲一个关于狐狸的故事。 Расскажи сказку."),
        "line ends": user("One\r\nTwo\rThree\u2028Four"),
        "special tokens in the text": user("Write <|user|> and </s> and <|assistant|>."),
        "braces": user("What is {{ messages }} in {% raw %} a template?"),
        "content in parts": [{"role": "user", "content": [{"type": "text", "text": "A story."}]}],
        "content in two parts": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "A "}, {"type": "text", "text": "story."}],
            }
        ],
        "a tool's result": [
            *user("How is the weather?"),
            call,
            {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
        ],
        "a name": user("A story.", name="carol"),
        "a thousand words": user("fox " * 1000),
    }


# Processes


def server(model: Path = DEMO) -> contextlib.AbstractContextManager[Process]:
    flags = ("--gateway", "--device", "cpu", "--threads", "1", "--served-name", NAME)
    return serve(*flags, model=model)


@contextlib.asynccontextmanager
async def behind_smg(targets: Sequence[str], log: Path, *flags: str) -> AsyncIterator[Any]:
    """Yield an OpenAI client of smg in front of these targets, once it is ready."""
    # Its default policy, cache_aware, keeps prompts with a common beginning on one server.
    starting = smg(targets, NAME, log, "--policy", "round_robin", *flags)
    with contextlib.ExitStack() as stack:
        # What it asks may be a relay on this event loop, which must go on meanwhile.
        started = await asyncio.to_thread(stack.enter_context, starting)
        url = f"http://{started.address}/v1"
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=60
        ) as client:
            yield client


# Prompts


@dataclass
class Relay:
    """Forwards calls of the gateways' protocol to a server, and records Generate.

    Attributes:
        seen: the request, the ids of its answer, and the keys of its metadata, in order.
    """

    target: str
    seen: list[tuple[Any, list[int], list[str]]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Run the relay and yield its address."""
        async with grpc.aio.insecure_channel(self.target) as channel:
            server = grpc.aio.server()
            methods = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].methods
            server.add_registered_method_handlers(
                SERVICE.strip("/"),
                {method.name: self._handler(channel, method.name) for method in methods},
            )
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                yield f"127.0.0.1:{port}"
            finally:
                await server.stop(0)

    def _handler(self, channel: Any, method: str) -> Any:
        call = channel.stream_stream(SERVICE + method)

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            [raw] = [raw async for raw in requests]
            ids: list[int] = []
            if method == "Generate":
                keys = [key for key, _ in context.invocation_metadata()]
                request = vllm_engine_pb2.GenerateRequest.FromString(raw)
                self.seen.append((request, ids, keys))

            async def one() -> AsyncIterator[bytes]:
                yield raw

            try:
                async for answer in call(one()):
                    if method == "Generate":
                        message = vllm_engine_pb2.GenerateResponse.FromString(answer)
                        ids.extend(message.complete.output_ids)
                    yield answer
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")

        return grpc.stream_stream_rpc_method_handler(forward)


async def prompts(target: str, logs: Path) -> dict[str, Any]:
    """Run the part `prompts` with one chat template; see the module."""
    relay = Relay(target)
    differ: dict[str, Any] = {}
    refused: dict[str, str] = {}
    equal = answered = 0
    sampling: Any = None
    async with (
        relay.serving() as address,
        behind_smg([address], logs / "smg-prompts.log") as gateway,
        headrace.AsyncClient(target) as direct,
    ):
        for name, messages in conversations().items():
            for tools in (False, True):
                label = f"{name}, with a tool" if tools else name
                more: dict[str, Any] = {"tools": [TOOL], "tool_choice": CHOICE} if tools else {}
                relay.seen.clear()
                try:
                    await gateway.chat.completions.create(
                        model=NAME,
                        messages=messages,
                        max_tokens=MAX_TOKENS,
                        temperature=0,
                        **more,
                    )
                except openai.APIError as error:
                    refused[label] = str(error)[:300]
                    continue
                [(request, ids, keys)] = relay.seen
                sampling = request.sampling_params
                sent = list(request.tokenized.input_ids)
                form = {}
                if sampling.WhichOneof("constraint"):
                    form = {sampling.WhichOneof("constraint"): sampling.json_schema}
                own = await direct.generate(
                    sent,
                    max_tokens=MAX_TOKENS,
                    temperature=0,
                    stop_token_ids=list(sampling.stop_token_ids),
                    **form,
                )
                answered += 1
                equal += list(own.token_ids) == ids
                try:
                    ours = await direct.tokenize(messages, **({"tools": [TOOL]} if tools else {}))
                except headrace.HeadraceError as error:
                    differ[label] = {"ours": str(error)[:300]}
                    continue
                if list(ours.token_ids) != sent:
                    texts = [
                        await direct.detokenize(some, skip_special_tokens=False)
                        for some in (sent, ours.token_ids)
                    ]
                    differ[label] = {"sent": texts[0][:200], "ours": texts[1][:200]}
    return {
        "answered": answered,
        "answers_equal_to_ours_for_the_same_ids": equal,
        "prompts_that_differ_from_ours": differ,
        "refused": refused,
        "metadata_keys": sorted(set(keys)),
    }


async def prompts_of(templates: list[Path], logs: Path) -> dict[str, Any]:
    """Run the part `prompts` with each of these chat templates."""
    found = {}
    for template in templates:
        model = with_template(DEMO, template.read_text(), logs / template.stem)
        with server(model) as one:
            found[template.stem] = await prompts(one.address, logs)
    return found


# Kill


async def stream(gateway: Any, number: int, **more: Any) -> AsyncIterator[Any]:
    chunks = await gateway.chat.completions.create(
        model=NAME, messages=user(story(number)), max_tokens=MAX_TOKENS, stream=True, **more
    )
    async for chunk in chunks:
        yield chunk


async def chat(gateway: Any, number: int) -> dict[str, Any]:
    """Run one streamed chat; every third has a tool."""
    more: dict[str, Any] = {"tools": [TOOL], "tool_choice": CHOICE} if number % 3 == 0 else {}
    began, got, error, finished = time.monotonic(), 0, None, None
    try:
        async for chunk in stream(gateway, number, **more):
            got += 1
            finished = chunk.choices[0].finish_reason or finished
        if finished is None:
            error = "ended without a finish_reason" if got else "ended without a chunk"
    except openai.OpenAIError as failure:
        error = f"{type(failure).__name__}: {failure}"[:200]
    return {"began": began, "ended": time.monotonic(), "chunks": got, "error": error}


async def crowd(count: int, run: Callable[[int], Awaitable[None]]) -> None:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await run(number)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def kill(servers: Sequence[Process], count: int, logs: Path) -> dict[str, Any]:
    """Run the part `kill`; see the module."""
    killed = 0.0
    found: list[dict[str, Any]] = []
    afterwards: list[dict[str, Any]] = []
    interval = ("--health-check-interval-secs", str(HEALTH_INTERVAL_S))
    async with behind_smg(
        [one.address for one in servers], logs / "smg-kill.log", *interval
    ) as gateway:

        async def around_the_kill(number: int) -> None:
            nonlocal killed
            if number == count // 2:
                os.killpg(servers[1].pid, signal.SIGKILL)
                killed = time.monotonic()
            found.append(await chat(gateway, number))

        async def later(number: int) -> None:
            afterwards.append(await chat(gateway, number))

        await crowd(count, around_the_kill)
        await asyncio.sleep(max(0.0, killed + HEALTH_INTERVAL_S + 1 - time.monotonic()))
        await crowd(count // 4, later)
    failed = [one for one in found if one["error"]]
    running = [one for one in found if one["began"] < killed < one["ended"]]
    return {
        "chats": len(found),
        "health_interval_s": HEALTH_INTERVAL_S,
        "running_at_the_kill": len(running),
        "failed": len(failed),
        "failed_that_ran_at_the_kill": sum(one in running for one in failed),
        "failed_that_began_later": [
            {"seconds_after_the_kill": round(one["began"] - killed, 3), "error": one["error"]}
            for one in failed
            if one not in running
        ],
        "errors": sorted({one["error"] for one in failed}),
        "begun_after_the_health_interval": len(afterwards),
        "failed_of_those": [one["error"] for one in afterwards if one["error"]],
    }


# Throughput


async def throughput(
    servers: Sequence[Process], count: int, pairs: int, logs: Path
) -> dict[str, Any]:
    """Run the part `throughput`; see the module."""
    turns: dict[str, list[dict[str, float]]] = {"smg": [], "direct": []}
    async with (
        behind_smg([one.address for one in servers], logs / "smg-throughput.log") as gateway,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(connect(one)) for one in servers]
        chats = Chats(story, MAX_TOKENS)

        async def through(number: int) -> None:
            async for _ in stream(gateway, number, temperature=0, extra_body={"ignore_eos": True}):
                pass

        for number, way in in_turns(tuple(turns), pairs):
            began = time.perf_counter()
            if way == "smg":
                await crowd(count, through)
            else:
                await send([Calls(one) for one in clients], chats, count, AT_ONCE)
            if number:
                rate = count * MAX_TOKENS / (time.perf_counter() - began)
                turns[way].append({"tokens_per_s": rate})
    return {
        "chats_in_each": count,
        "at_once": AT_ONCE,
        "tokens_each": MAX_TOKENS,
        "turns": turns,
        "smg_over_direct": compared(turns["smg"], turns["direct"], "tokens_per_s"),
    }


async def parts(options: argparse.Namespace, record: Record, logs: Path) -> None:
    """Run all three parts, or `prompts` alone with the given templates."""
    async with asyncio.timeout(60 * options.minutes):
        if options.template:
            record.put(await prompts_of(options.template, logs), "prompts")
            return
        with server() as one, server() as other:
            count, servers = options.count, (one, other)
            record.put(await prompts(one.address, logs), "prompts")
            record.put(await throughput(servers, count // 2, options.pairs, logs), "throughput")
            record.put(await kill(servers, count, logs), "kill")


def measure(options: argparse.Namespace, record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(parts(options, record, Path(folder)))


MEASUREMENT = Measurement(
    measure=measure,
    options=(
        option("count", 200, "chats in the part with a kill"),
        option("pairs", 5, "pairs of throughput"),
        option("template", [], "prompts alone, with this one", type=Path, action="append"),
        option("minutes", 8.0, "most it may take"),
    ),
    packages=("smg", "smg-grpc-proto", "openai"),
)
