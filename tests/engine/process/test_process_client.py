"""An engine in a process of its own: the same seam, and what happens when the process ends."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.contract.adapters import AdapterInfo, AdapterLoad, AdapterLoaded
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import (
    AdapterExistsError,
    AdapterNotLoadedError,
    AdapterRefusedError,
    AdapterRoomError,
    CompileQueueFullError,
    ConfigError,
    DuplicateRequestError,
    EngineUnavailableError,
    HeadraceError,
    InsufficientMemoryError,
    InvalidRequestError,
    ModelRefusedError,
    QueueFullError,
    UnsupportedFeatureError,
)
from engine.contract.outputs import FinishReason, RequestOutput, StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import (
    GrammarKind,
    GrammarParams,
    LogprobParams,
    ReasoningParams,
    SamplingParams,
    StopParams,
)
from engine.contract.types import RequestId, TokenId
from engine.process import engine_messages as messages
from engine.process.child import EngineProcess
from engine.process.local_client import LocalEngineClient
from engine.process.process_client import ProcessEngineClient
from engine.text import Tokenizer

DEMO = str(Path(__file__).parents[3] / "models" / "demo")
CONFIG = ContinuousBatchingConfig(block_size=16, num_blocks=256, max_queue_size=4)
WAIT = 60.0
PHASES = ["import", "weights", "kernels", "verify", "cache", "vocabulary", "warm_up"]
"""Of a start, in this order."""
_REFUSED_FORM = GrammarParams(kind=GrammarKind.REGEX, text="(?=a)b")

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Sink:
    """Collects outputs, and wakes who waits for a request's end."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.num_steps = 0
        self._changed = asyncio.Event()

    def __call__(self, step: StepOutputs) -> None:
        self.num_steps += step.step is not None
        for output in step.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self._changed.set()

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, ()) for token in output.token_ids]

    async def until(self, name: str, *, ended: bool = True) -> RequestOutput:
        async with asyncio.timeout(WAIT):
            while not (found := self.outputs.get(name)) or (ended and not found[-1].ends_request):
                self._changed.clear()
                await self._changed.wait()
        assert sum(output.ends_request for output in found) <= 1
        return found[-1]


def _request(name: str, max_tokens: int = 8, **options: object) -> GenerationRequest:
    spec = GenerationRequest(
        request_id=RequestId(name),
        prompt=tuple(TokenId(token) for token in (5, 6, 7)),
        sampling=SamplingParams(temperature=1.0, seed=7),
        stop=StopParams(max_tokens=max_tokens),
        logprobs=LogprobParams(top_n=2),
    )
    return dataclasses.replace(spec, **options)  # type: ignore[arg-type]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[tuple[ProcessEngineClient, Sink]]:
    sink = Sink()
    client = ProcessEngineClient(
        DEMO, CONFIG, LoadConfig(threads=1), log_level="warning", hang_timeout_s=1.0
    )
    with pytest.raises(EngineUnavailableError):
        await client.pause()
    await client.set_log_level("error")  # kept for the process that is to come
    lines: list[str] = []
    info = await client.start(sink, lines.append)
    assert any("verified" in line for line in lines)
    assert (info.vocab_size, info.max_queue_size) == (4096, 4)
    assert [phase for phase, _ in info.startup] == PHASES
    assert all(seconds > 0 for _, seconds in info.startup)
    yield client, sink
    try:
        await client.set_log_level(
            "debug", ("engine.core.loop=error", "engine.core.engine_core=notset")
        )
        await client.pause()
    finally:
        await client.close()  # also while paused
    assert client.pid is None


async def test_tokens_are_those_of_an_engine_in_this_process(
    shared: tuple[ProcessEngineClient, Sink], sink: Sink
) -> None:
    client, far = shared
    for name in ("a", "b"):
        await client.submit(_request(name))
    local = LocalEngineClient(DEMO, CONFIG, LoadConfig(threads=1))
    await local.start(sink, lambda line: None)
    try:
        await local.submit(_request("a"))
        await sink.until("a")
    finally:
        await local.close()
    last = await far.until("a")
    await far.until("b")
    assert far.tokens("a") == far.tokens("b") == sink.tokens("a") != []
    assert last.finish is not None
    assert last.finish.reason is FinishReason.LENGTH
    assert last.logprobs is not None
    assert len(last.logprobs[0].candidates) == 2


async def test_steps_that_bring_nobody_anything_are_told_of(
    shared: tuple[ProcessEngineClient, Sink],
) -> None:
    client, sink = shared
    before, steps_before = sink.num_steps, (await client.stats()).steps
    # A prompt of two chunks: the first gives no output.
    await client.submit(_request("chunks", prompt=(TokenId(5),) * 1100, max_tokens=1))
    await sink.until("chunks")
    assert sink.num_steps - before == (await client.stats()).steps - steps_before == 2


async def test_calls_and_refusals_cross(shared: tuple[ProcessEngineClient, Sink]) -> None:
    client, sink = shared
    with pytest.raises(InvalidRequestError) as caught:
        await client.submit(_request("wrong", prompt=(TokenId(99999),)))
    assert caught.value.field == "prompt[0]"
    await client.submit(_request("long", max_tokens=1500))
    with pytest.raises(DuplicateRequestError):
        await client.submit(_request("long"))
    await sink.until("long", ended=False)
    assert (await client.stats()).running == 1
    await client.finish(RequestId("long"), 1)
    last = await sink.until("long")
    assert last.finish is not None
    assert (last.finish.reason, last.finish.usage.completion_tokens) == (FinishReason.STOP, 1)
    await client.submit(_request("cancelled", max_tokens=1500))
    assert await client.cancel(RequestId("cancelled"))
    last = await sink.until("cancelled")
    assert last.finish is not None
    assert last.finish.reason is FinishReason.CANCELLED
    assert not await client.cancel(RequestId("cancelled"))


async def _refusals_for(seconds: float, client: ProcessEngineClient) -> None:
    """Without a pause there are requests that are refused: they make no steps, and no hang."""
    end = time.monotonic() + seconds

    async def ask(name: str) -> None:
        while time.monotonic() < end:
            with pytest.raises(InvalidRequestError, match="look-around"):
                await client.submit(_request(name, grammar=_REFUSED_FORM))

    await asyncio.gather(*(ask(f"refused {number}") for number in range(4)))
    assert client.failure is None


async def test_reasoning_before_a_form_crosses(
    shared: tuple[ProcessEngineClient, Sink],
) -> None:
    client, sink = shared
    reasoning = ReasoningParams(
        "<think>", "</think>", then="x", is_open=True, max_tokens=2, forbidden=("<|user|>",)
    )
    form = GrammarParams(kind=GrammarKind.CHOICE, choices=("yes", "no"), reasoning=reasoning)
    await client.submit(_request("thoughtful", 40, grammar=form))
    await sink.until("thoughtful")
    text = Tokenizer.load(Path(DEMO)).decode(sink.tokens("thoughtful"))
    _, closing, rest = text.partition("</think>x")
    assert closing
    assert rest.strip() in ("yes", "no")
    free = GrammarParams(kind=GrammarKind.FREE, reasoning=reasoning)
    await client.submit(_request("free", 20, grammar=free))
    await sink.until("free")
    assert len(sink.tokens("free")) == 20


async def test_a_pause_crosses_and_is_no_hang_and_the_tokens_stay_the_same(
    shared: tuple[ProcessEngineClient, Sink],
) -> None:
    client, sink = shared
    await client.submit(_request("plain", max_tokens=400))
    await sink.until("plain")
    await client.submit(_request("paused", max_tokens=400))
    await client.submit(_request("cancelled meanwhile", max_tokens=1500))
    await sink.until("paused", ended=False)
    await client.pause()
    steps = (await client.stats()).steps
    await client.submit(_request("came meanwhile"))
    await client.reset_prefix_cache()
    assert await client.cancel(RequestId("cancelled meanwhile"))
    assert (await sink.until("cancelled meanwhile")).finish is not None
    await asyncio.sleep(2.2)  # longer than the timeout of a hang, and two looks at it
    assert client.failure is None
    assert (await client.stats()).steps == steps
    assert not sink.outputs["paused"][-1].ends_request
    await client.resume()
    await sink.until("paused")
    await sink.until("came meanwhile")
    assert sink.tokens("paused") == sink.tokens("plain")


async def test_a_hold_of_all_requests_crosses_and_is_no_hang(
    shared: tuple[ProcessEngineClient, Sink],
) -> None:
    await ProcessEngineClient(DEMO).hold(RequestId("a"))  # harmless before there is anything
    client, sink = shared
    await client.submit(_request("not held", max_tokens=400))
    await sink.until("not held")
    await client.submit(_request("held", max_tokens=400))
    await sink.until("held", ended=False)
    await client.hold(RequestId("held"))
    async with asyncio.timeout(WAIT):
        while not (stats := await client.stats()).held:  # noqa: ASYNC110 - has no event
            await asyncio.sleep(0.01)
    assert (stats.held, stats.holds, stats.running) == (1, 1, 0)
    await asyncio.sleep(2.2)  # longer than the timeout of a hang, and two looks at it
    assert client.failure is None
    assert (await client.stats()).steps <= stats.steps + 1
    await client.submit(_request("beside it"))
    await sink.until("beside it")
    assert not sink.outputs["held"][-1].ends_request
    await client.unhold(RequestId("held"))
    await sink.until("held")
    assert sink.tokens("held") == sink.tokens("not held")
    await client.unhold(RequestId("held"))  # harmless


@pytest_asyncio.fixture(loop_scope="module")
async def impatient() -> AsyncIterator[ProcessEngineClient]:
    client = ProcessEngineClient(
        DEMO, CONFIG, LoadConfig(threads=1), log_level="warning", hang_timeout_s=1.0
    )
    yield client
    await client.close()  # also of a test that failed: its process would fail others
    await client.close()  # harmless
    assert client.pid is None


async def test_a_killed_process_ends_its_requests_and_its_successor_is_ended_if_it_stops_while_idle(
    sink: Sink, impatient: ProcessEngineClient
) -> None:
    client = impatient
    await client.start(sink, lambda line: None)
    assert client.failure is None
    await _refusals_for(2.5, client)
    await client.submit(_request("lost", max_tokens=1500))
    await sink.until("lost", ended=False)
    assert client.pid is not None
    # Its threads wait asleep for each other, if they wait long.
    assert b"GOMP_SPINCOUNT=" in _environ(client.pid)
    began = time.monotonic()
    os.kill(client.pid, signal.SIGKILL)
    last = await sink.until("lost")
    assert time.monotonic() - began < 5
    assert last.finish is not None
    assert last.finish.failure is not None
    assert last.finish.failure.retryable
    assert await client.wait_failed() is client.failure
    with pytest.raises(EngineUnavailableError):
        await client.submit(_request("late"))

    await client.start(sink, lambda line: None)
    await asyncio.sleep(2.0)  # idle for longer than the timeout
    assert client.failure is None
    os.kill(client.pid, signal.SIGSTOP)
    failure = await client.wait_failed()
    assert isinstance(failure, EngineUnavailableError)
    assert "exit code -9: it was killed; unless a line before says that it hung" in str(failure)
    assert failure.mentions == ("max_memory_percent",)


async def test_a_launched_process_that_nobody_starts_is_ended(
    impatient: ProcessEngineClient,
) -> None:
    impatient.launch()
    assert impatient._launched is not None
    process = impatient._launched[0]
    await impatient.close()
    assert await process.exit_code() == 0


async def test_a_process_that_is_stopped_while_it_loads_is_ended(
    sink: Sink, impatient: ProcessEngineClient
) -> None:
    client = impatient
    client.launch()  # `start` goes on with this process
    launched = client._launched
    loading: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(line: str) -> None:
        if line.startswith("importing") and not loading.done():
            loading.set_result(None)

    starting = asyncio.ensure_future(client.start(sink, note))
    async with asyncio.timeout(WAIT):
        await loading
        assert launched is not None
        assert client.pid == launched[0].pid
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailableError, match="exit code -9"):
            await starting


@pytest.mark.parametrize(
    ("program", "on_cpu", "is_ended"),
    [
        ("while True: pass", True, False),
        ("while True: pass", False, True),  # who waits for a GPU looks like this
        ("import time; time.sleep(60)", True, True),
    ],
    ids=["computes", "waits for a GPU", "idle"],
)
async def test_a_long_step_on_a_cpu_is_no_hang(program: str, on_cpu: bool, is_ended: bool) -> None:
    client = ProcessEngineClient(DEMO, hang_timeout_s=0.2)
    process = subprocess.Popen([sys.executable, "-c", program])  # noqa: ASYNC220 - at once
    client._computes_on_cpu = on_cpu
    client._live, client._admitted = {RequestId("a"): 0.0}, {RequestId("a")}
    watching = asyncio.ensure_future(client._watch(EngineProcess(process, None)))
    await asyncio.wait({watching}, timeout=WAIT if is_ended else 2.5)
    assert watching.done() is is_ended
    watching.cancel()
    if not is_ended:
        process.kill()
    assert process.wait(WAIT) == -signal.SIGKILL


async def test_a_request_ends_though_its_process_dies_after_it_was_found_to_have_ended(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end was on its way when the process died."""

    async def not_live(*_: object) -> bool:
        return False

    client = ProcessEngineClient(DEMO)
    monkeypatch.setattr(client, "_call", not_live)
    monkeypatch.setattr(client, "_writer", object())
    accepted, given_up = RequestId("accepted"), RequestId("given up before it was accepted")
    client._sink = sink
    client._live = {accepted: 0.0, given_up: 0.0}
    client._admitted = {accepted}
    assert not await client.cancel(accepted)
    assert not await client.cancel(given_up)
    client._fail("its process ended")
    assert sink.outputs.keys() == {accepted}
    assert sink.outputs[accepted][0].ends_request


async def test_the_process_ends_with_its_parent() -> None:
    script = (
        "import asyncio, sys\n"
        "from engine.process.process_client import ProcessEngineClient\n"
        "async def main():\n"
        f"    client = ProcessEngineClient({DEMO!r})\n"
        "    starting = asyncio.ensure_future(client.start(print, lambda line: None))\n"
        "    while client.pid is None:\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(client.pid, 'torch' in sys.modules, flush=True)\n"
        "    await starting\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    pid, has_torch = (await parent.stdout.readline()).decode().split()
    assert has_torch == "False"
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(WAIT):
        while _is_alive(int(pid)):  # noqa: ASYNC110  # nothing tells when a grandchild ends
            await asyncio.sleep(0.02)


def _environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("stop.max_tokens", "is -1"),
        UnsupportedFeatureError("adapter", "is not done"),
        AdapterNotLoadedError("a"),
        AdapterNotLoadedError("a", "name"),
        AdapterExistsError("a", "is loaded"),
        AdapterRoomError.of(12, 34, 56),
        AdapterRefusedError("no"),
        DuplicateRequestError("a"),
        QueueFullError(3, 0.25),
        QueueFullError(3, 0.25, 4, 3, 1),
        QueueFullError(3, 0.25, 2, kept=1),
        CompileQueueFullError(64, 0.25, 64),
        CompileQueueFullError(64, 0.25, 12, 10.0),
        ConfigError("block_size", "is 0"),
        ModelRefusedError("no"),
        InsufficientMemoryError("too large"),
        EngineUnavailableError("later"),
    ],
)
async def test_errors_come_back_as_they_were(error: HeadraceError) -> None:
    back = messages.from_wire(messages.to_wire(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


async def test_options_cross_or_are_refused() -> None:
    config = ContinuousBatchingConfig(
        use_cuda_graph=(False, True), seed=3, block_size=16, target_step_time=None
    )
    options = messages.options_of(config)
    assert options == {
        "use_cuda_graph": (False, True),
        "seed": 3,
        "block_size": 16,
        "target_step_time": None,
    }
    assert messages.batching_config({**options, "use_cuda_graph": [False, True]}) == config
    with pytest.raises(ConfigError, match="decode_compile_config"):
        messages.options_of(ContinuousBatchingConfig(decode_compile_config=object()))


async def test_a_later_process_loads_what_the_one_before_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its digest, so that other content is found; not what gave way or was unloaded."""
    client = ProcessEngineClient(DEMO, CONFIG, LoadConfig(threads=1))

    async def answer(verb: object, *given: Any) -> object:
        if isinstance(given[0], str):
            return 0
        name = given[0].name
        return AdapterLoaded(
            AdapterInfo(name=name, digest=f"of {name}"), ("a",) if name == "c" else ()
        )

    monkeypatch.setattr(client, "_call", answer)
    for name in "abc":
        await client.load_adapter(AdapterLoad(name=name, source="s"))
    await client.unload_adapter("b", None)
    assert client._starting().adapters == (AdapterLoad(name="c", source="s", digest="of c"),)
