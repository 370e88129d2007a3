"""The engine behind the service's seam: a saved model, an event loop, one sink."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.engine_client import EngineClient, ModelInfo
from engine.contract.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelRefusedError,
    QueueFullError,
)
from engine.contract.outputs import Finish, FinishReason, StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import LogprobParams, SamplingParams, StopParams
from engine.contract.types import RequestId, TokenId
from engine.process.local_client import LocalEngineClient
from tests.quantised_files import quantise
from tests.quantised_recipes import RECIPES
from tests.tiny_models import CONTEXT, FAMILIES, VOCAB, greedy_reference, make_model, make_prompts

WAIT = 30.0
CONFIG = ContinuousBatchingConfig(
    block_size=8, num_blocks=80, max_batch_tokens=64, max_requests_per_batch=4, max_queue_size=6
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_model(FAMILIES["llama"]()).save_pretrained(path)
    return path


class Sink:
    """Collects what reaches the loop."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finish] = {}
        self.threads: set[int] = set()
        self.changed = asyncio.Event()

    def __call__(self, step: StepOutputs) -> None:
        self.threads.add(threading.get_ident())
        for output in step.outputs:
            assert output.request_id not in self.ends
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                self.ends[output.request_id] = output.finish
        self.changed.set()

    async def until(self, name: str, tokens: int | None = None) -> Finish | None:
        """Wait for a request's end, or for so many of its tokens."""

        async def wait() -> None:
            while name not in self.ends and (
                tokens is None or len(self.tokens.get(name, ())) < tokens
            ):
                self.changed.clear()
                await self.changed.wait()

        await asyncio.wait_for(wait(), WAIT)
        return self.ends.get(name)


class Running:
    def __init__(self, client: LocalEngineClient, sink: Sink, info: ModelInfo) -> None:
        self.client, self.sink, self.info = client, sink, info


@pytest.fixture
async def running(path: Path) -> AsyncIterator[Running]:
    client: EngineClient = LocalEngineClient(str(path), CONFIG, LoadConfig(threads=1))
    assert isinstance(client, LocalEngineClient)
    sink = Sink()
    info = await client.start(sink, lambda line: None)
    yield Running(client, sink, info)
    await client.close()


async def test_how_weights_are_kept_is_told(running: Running, path: Path) -> None:
    assert (running.info.dtype, running.info.quantization) == ("float32", "none")
    light = LocalEngineClient(
        str(path), CONFIG, LoadConfig(threads=1, dtype="bfloat16", quantization="int8")
    )
    info = await light.start(Sink(), lambda line: None)
    await light.close()
    assert (info.dtype, info.quantization) == ("bfloat16", "int8")


@pytest.mark.parametrize(("asked", "told"), [("none", ""), ("int8", "+int8")])
async def test_what_a_quantised_file_is_is_told(tmp_path: Path, asked: str, told: str) -> None:
    quantise(make_model(FAMILIES["llama"]()), tmp_path, RECIPES["gptq"])
    client = LocalEngineClient(str(tmp_path), CONFIG, LoadConfig(threads=1, quantization=asked))
    info = await client.start(Sink(), lambda line: None)
    await client.close()
    assert (info.dtype, info.quantization) == ("bfloat16", f"gptq-4bit-g128{told}")


def request(name: str, prompt: list[int], max_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        prompt=tuple(TokenId(token) for token in prompt),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=max_tokens, eos_token_ids=(TokenId(2),)),
        logprobs=LogprobParams(top_n=1),
    )


def endless(name: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        prompt=(TokenId(5),),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=10**6),
    )


async def test_start_tells_its_progress_and_the_model(path: Path) -> None:
    client = LocalEngineClient(str(path), CONFIG, LoadConfig(threads=1))
    with pytest.raises(EngineUnavailableError, match="loading"):
        await client.submit(request("a", [5]))
    assert not await client.cancel(RequestId("a"))
    await client.finish(RequestId("a"), 1)
    lines: list[str] = []
    info = await client.start(Sink(), lines.append)
    for word in ("loading", "loaded", "verified", "KV cache", "warming up"):
        assert any(line.startswith(word) for line in lines), word
    assert info.name == "tiny-llama"
    assert info.path == str(path)
    assert info.architecture == "LlamaForCausalLM"
    assert info.parameters > 0
    assert (info.dtype, info.device) == ("float32", "cpu")
    assert info.vocab_size == VOCAB
    assert info.eos_token_ids == (2,)
    assert info.max_context_tokens == CONTEXT
    assert info.default_sampling == SamplingParams(top_k=50)
    assert (info.max_running_requests, info.max_queue_size) == (4, 6)
    assert client.failure is None
    await client.close()
    await client.close()


async def test_a_model_that_is_refused() -> None:
    client = LocalEngineClient("/not/here")
    with pytest.raises(ModelRefusedError):
        await client.start(Sink(), lambda line: None)
    await client.close()


async def test_submit_and_finish(running: Running, path: Path) -> None:
    prompts = make_prompts((3, 30, 70))
    model = make_model(FAMILIES["llama"]())
    arrivals: dict[str, float] = {}
    for index, prompt in enumerate(prompts):
        admission = await running.client.submit(request(str(index), prompt))
        assert admission.queue_position >= 0
        arrivals[str(index)] = admission.arrival
    for index, prompt in enumerate(prompts):
        end = await running.sink.until(str(index))
        assert end is not None
        assert end.reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert running.sink.tokens[str(index)] == greedy_reference(model, prompt, 8)
        assert end.usage.prompt_tokens == len(prompt)
        assert end.timings.arrival == arrivals[str(index)]
    assert running.sink.threads == {threading.get_ident()}, "the sink is called on the loop"
    stats = await running.client.stats()
    assert stats.blocks_used == 0
    assert stats.requests_finished == 3


async def test_cancel_and_finish_early(running: Running) -> None:
    await running.client.submit(endless("cancelled"))
    await running.client.submit(endless("finished"))
    await running.sink.until("cancelled", 2)
    await running.sink.until("finished", 3)
    assert await running.client.cancel(RequestId("cancelled"))
    await running.client.finish(RequestId("finished"), 2)
    end = await running.sink.until("cancelled")
    assert end is not None
    assert end.reason is FinishReason.CANCELLED
    end = await running.sink.until("finished")
    assert end is not None
    assert end.reason is FinishReason.STOP
    assert end.usage.completion_tokens == 2
    assert not await running.client.cancel(RequestId("cancelled"))
    await running.client.finish(RequestId("finished"), 1)  # harmless
    await running.client.submit(request("cancelled", [6], 1))  # the id is free again


async def test_refusals(running: Running) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        await running.client.submit(request("a", []))
    await running.client.submit(endless("a"))
    with pytest.raises(DuplicateRequestError):
        await running.client.submit(endless("a"))
    await running.sink.until("a", 1)
    refused = 0
    for index in range(20):
        try:
            await running.client.submit(endless(f"q{index}"))
        except QueueFullError:
            refused += 1
    assert refused >= 20 - 6 - 3


async def test_close_ends_live_requests_with_a_retryable_error(running: Running) -> None:
    for name in "abcdef":  # four run, two wait
        await running.client.submit(endless(name))
    await running.sink.until("a", 1)
    await running.client.close()
    assert sorted(running.sink.ends) == list("abcdef")
    for end in running.sink.ends.values():
        assert end.reason is FinishReason.ERROR
        assert end.failure is not None
        assert end.failure.retryable
    with pytest.raises(EngineUnavailableError):
        await running.client.submit(endless("late"))


# ---- death, closing, and cancelled loading -----------------------------------------------------


async def test_death_is_noticed_by_all_who_wait(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("a bug")

    waiting = [asyncio.create_task(running.client.wait_failed()) for _ in range(2)]
    await asyncio.sleep(0)
    engine = running.client._engine
    assert engine is not None
    monkeypatch.setattr(engine._core.scheduler, "schedule", broken)
    for turn in range(3):
        await running.client.submit(request(f"a{turn}", [5]))
        end = await running.sink.until(f"a{turn}")
        assert end is not None
        assert end.reason is FinishReason.ERROR
    failures = await asyncio.wait_for(asyncio.gather(*waiting), WAIT)
    assert failures == [running.client.failure] * 2
    assert isinstance(failures[0], RuntimeError)
    assert await running.client.wait_failed() is failures[0]
    with pytest.raises(EngineUnavailableError, match="failed"):
        await running.client.submit(request("late", [5]))


async def test_an_engine_closed_in_good_order_has_not_failed(path: Path) -> None:
    client = LocalEngineClient(str(path), CONFIG, LoadConfig(threads=1))
    await client.start(Sink(), lambda line: None)
    waiting = asyncio.create_task(client.wait_failed())
    await client.close()
    await asyncio.sleep(0)  # the end of the engine's thread has reached the loop
    assert not waiting.done()
    waiting.cancel()


class Stages:
    """Holds loading at a stage."""

    def __init__(self, held: str) -> None:
        self.held = held
        self.seen: list[str] = []
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, line: str) -> None:
        self.seen.append(line)
        if line.startswith(self.held):
            self.reached.set()
            assert self.go_on.wait(WAIT)


async def test_closing_while_the_model_loads_ends_it_at_the_next_stage(path: Path) -> None:
    client = LocalEngineClient(str(path), CONFIG, LoadConfig(threads=1))
    stages = Stages("loading")
    starting = asyncio.create_task(client.start(Sink(), stages))
    await asyncio.to_thread(stages.reached.wait, WAIT)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    assert not closing.done(), "the loading thread still runs"
    stages.go_on.set()
    await asyncio.wait_for(closing, WAIT)
    with pytest.raises(EngineUnavailableError, match="given up"):
        await starting
    assert stages.seen[-1].startswith("loading")
    with pytest.raises(EngineUnavailableError):
        await client.submit(request("a", [5]))


async def test_a_cancelled_start_does_not_wait_and_keeps_nothing(path: Path) -> None:
    client = LocalEngineClient(str(path), CONFIG, LoadConfig(threads=1))
    stages = Stages("warming up")
    starting = asyncio.create_task(client.start(Sink(), stages))
    await asyncio.to_thread(stages.reached.wait, WAIT)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    stages.go_on.set()
    await asyncio.wait_for(client.close(), WAIT)
    assert client._engine is None
    assert "headrace-engine" not in {thread.name for thread in threading.enumerate()}


def test_outputs_after_the_event_loop_is_closed_are_dropped(path: Path) -> None:
    """Also where it closes between a look at it and the call."""
    client = LocalEngineClient(str(path), CONFIG, LoadConfig(threads=1))

    async def begin() -> None:
        await client.start(Sink(), lambda line: None)
        await client.submit(endless("a"))

    asyncio.run(begin())
    engine = client._engine
    assert engine is not None
    engine.stop(timeout=WAIT, hard_stop=True)
    assert not engine.is_running()
    assert client.failure is None


_OWN = """
import asyncio, gc, sys
from engine.process.local_client import LocalEngineClient

async def main():
    client = LocalEngineClient(sys.argv[1], owns_process=sys.argv[2] == "own")
    await client.start(lambda outputs: None, lambda line: None)
    print(gc.isenabled(), gc.get_freeze_count() > 100_000)
    await client.close()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("whose", "frozen"), [("own", True), pytest.param("shared", False, marks=pytest.mark.slow)]
)
def test_what_is_loaded_is_no_garbage_where_the_process_is_the_engines(
    whose: str, frozen: bool, path: Path
) -> None:
    command = [sys.executable, "-c", _OWN, str(path), whose]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["True", str(frozen)]
