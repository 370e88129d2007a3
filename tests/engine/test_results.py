"""What the offline API hands out: results, streams, handlers, and cuts at stop strings."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from engine.errors import DuplicateRequestError, RequestNotFoundError
from engine.outputs import FinishReason, StepOutputs
from engine.request import RequestStatus
from engine.results import GenerationOutput, ResultRouter
from tests.engine.fake_runner import (
    VOCAB,
    expected_tokens,
    make_core,
    make_request,
)
from tests.engine.rig import WAIT, LoopRig, Rig, result

# ---- results ---------------------------------------------------------------------------------


def test_add_and_get(rig: Rig) -> None:
    name = rig.manager.add_request([1, 2, 3], max_new_tokens=4)
    output = result(rig.manager)
    assert output.request_id == name
    assert output.prompt_ids == [1, 2, 3]
    assert output.generated_tokens == expected_tokens([1, 2, 3], 4)
    assert output.status is RequestStatus.FINISHED
    assert output.is_finished()
    assert output.finish_reason is FinishReason.LENGTH
    assert output.error is None
    assert output.logprobs == []
    assert output.timestamps is None
    assert output.created_time <= output.lifespan[0] <= output.lifespan[1]


def test_generated_ids_are_unique(rig: Rig) -> None:
    names = {rig.manager.add_request([1], max_new_tokens=1) for _ in range(50)}
    assert len(names) == 50


def test_get_result_by_id_leaves_the_others(rig: Rig) -> None:
    for name in "abc":
        rig.manager.add_request([ord(name) % VOCAB], request_id=name, max_new_tokens=3)
    assert result(rig.manager, "c").request_id == "c"
    assert result(rig.manager, "a").request_id == "a"
    assert result(rig.manager).request_id == "b"
    with pytest.raises(RequestNotFoundError, match="'a'"):
        rig.manager.get_result("a", timeout=0)


def test_get_result_times_out(rig: Rig) -> None:
    assert rig.manager.get_result(timeout=0) is None
    rig.hold()
    rig.manager.add_request([1], request_id="a", max_new_tokens=1)
    started = time.monotonic()
    assert rig.manager.get_result("a", timeout=0.02) is None
    assert time.monotonic() - started >= 0.02
    rig.let()
    assert result(rig.manager, "a").is_finished()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_streaming_results_are_cumulative(rig: Rig, length: int) -> None:
    rig.manager.add_request([4, 5], request_id="a", max_new_tokens=length, streaming=True)
    outputs = list(rig.manager.request_id_iter("a"))
    right = expected_tokens([4, 5], length)
    assert [output.generated_tokens for output in outputs] == [
        right[: i + 1] for i in range(length)
    ]
    assert [output.is_finished() for output in outputs] == [False] * (length - 1) + [True]
    assert all(output.status is RequestStatus.DECODING for output in outputs[:-1])
    assert all(output.finish_reason is None for output in outputs[:-1])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_without_streaming_there_is_one_result(rig: Rig, length: int) -> None:
    rig.manager.add_request([4, 5], request_id="a", max_new_tokens=length)
    outputs = list(rig.manager.request_id_iter("a"))
    assert [output.generated_tokens for output in outputs] == [expected_tokens([4, 5], length)]


def test_iteration_ends_when_the_engine_does(rig: Rig) -> None:
    names = {rig.manager.add_request([i], max_new_tokens=3) for i in range(20)}
    rig.manager.stop()
    assert {output.request_id for output in rig.manager} == names
    assert rig.manager.get_result() is None


def test_timestamps_are_recorded_on_request(rig: Rig) -> None:
    rig.manager.add_request([1], request_id="a", max_new_tokens=5, record_timestamps=True)
    output = result(rig.manager)
    assert output.timestamps is not None
    assert len(output.timestamps) == 5
    assert output.timestamps == sorted(output.timestamps)
    assert output.lifespan[0] <= output.timestamps[0]


def test_preemption_shortens_no_stream() -> None:
    rig = Rig(num_blocks=8, block_size=2, max_batch_tokens=8)
    rig.manager.start()
    for name in "abcd":
        rig.manager.add_request(
            [1, 2, ord(name) % VOCAB],
            request_id=name,
            max_new_tokens=9,
            streaming=True,
            record_timestamps=True,
        )
    for name in "abcd":
        outputs = list(rig.manager.request_id_iter(name))
        assert [len(output.generated_tokens) for output in outputs] == list(range(1, 10))
        assert outputs[-1].generated_tokens == expected_tokens([1, 2, ord(name) % VOCAB], 9)
        assert outputs[-1].timestamps is not None
        assert len(outputs[-1].timestamps) == 9
    assert rig.manager.stats().preemptions > 0
    rig.manager.stop()


def test_unread_results_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    router = ResultRouter(lambda name, count, choice: None, max_unread=10)
    core, _, _ = make_core(num_blocks=64)
    for index in range(25):
        spec = make_request(f"r{index}", [1], 1)
        router.expect(spec, 100.0)
        core.add(spec, 100.0)
    while core.has_work:
        router.accept(core.step())
    assert len(router._mailbox.unread) == 10
    assert len(router._choices) == 10
    assert not router._requests
    assert "unread" in caplog.text
    assert [router.get(None, 0).request_id for _ in range(10)] == [  # type: ignore[union-attr]
        f"r{i}" for i in range(15, 25)
    ]


# ---- handlers --------------------------------------------------------------------------------


async def test_handler_of_a_streaming_request(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([9], request_id="a", max_new_tokens=3, streaming=True)
    seen: asyncio.Queue[GenerationOutput] = asyncio.Queue()
    rig.manager.register_result_handler("a", seen.put_nowait)
    rig.let()
    outputs = [await asyncio.wait_for(seen.get(), WAIT) for _ in range(3)]
    right = expected_tokens([9], 3)
    assert [output.generated_tokens for output in outputs] == [right[:1], right[:2], right]
    assert outputs[-1].is_finished()
    assert rig.manager.get_result(timeout=0) is None
    assert seen.empty()
    assert not rig.manager._router._choices, "the handler goes with its request"


async def test_handler_of_a_request_that_does_not_stream(rig: Rig) -> None:
    rig.manager.add_request([9], request_id="a", max_new_tokens=3)
    seen: asyncio.Queue[GenerationOutput] = asyncio.Queue()
    await asyncio.to_thread(rig.manager.stop)  # the result is there before the handler is
    rig.manager.register_result_handler("a", seen.put_nowait)
    output = await asyncio.wait_for(seen.get(), WAIT)
    assert output.generated_tokens == expected_tokens([9], 3)
    assert seen.empty()


async def test_handler_of_an_unknown_request(rig: Rig) -> None:
    with pytest.raises(RequestNotFoundError):
        rig.manager.register_result_handler("nobody", print)


def test_handler_without_a_loop(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([9], request_id="a", max_new_tokens=1)
    with pytest.raises(RuntimeError, match="event loop"):
        rig.manager.register_result_handler("a", print)


def test_a_closed_loop_loses_its_own_results(rig: Rig) -> None:
    rig.hold()
    for name in "ab":
        rig.manager.add_request([9], request_id=name, max_new_tokens=3, streaming=True)
    loop = asyncio.new_event_loop()

    async def register() -> None:
        rig.manager.register_result_handler("a", print)

    loop.run_until_complete(register())
    loop.close()
    rig.let()
    assert [len(o.generated_tokens) for o in rig.manager.request_id_iter("b")] == [1, 2, 3]
    rig.manager.add_request([9], request_id="a", max_new_tokens=2)
    assert result(rig.manager, "a").generated_tokens == expected_tokens([9], 2)


async def test_a_raising_handler_loses_its_own_results(rig: Rig) -> None:
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
    rig.hold()
    for name in "ab":
        rig.manager.add_request([9], request_id=name, max_new_tokens=3, streaming=True)

    def broken(output: GenerationOutput) -> None:
        raise ValueError("a handler's own bug")

    seen: asyncio.Queue[GenerationOutput] = asyncio.Queue()
    rig.manager.register_result_handler("a", broken)
    rig.manager.register_result_handler("b", seen.put_nowait)
    rig.let()
    outputs = [await asyncio.wait_for(seen.get(), WAIT) for _ in range(3)]
    assert outputs[-1].generated_tokens == expected_tokens([9], 3)
    assert len(raised) == 3
    assert rig.manager.is_running()


def test_a_raising_sink_does_not_stop_the_loop() -> None:
    ends: list[str] = []
    done = threading.Event()

    def sink(step: StepOutputs) -> None:
        for output in step.outputs:
            if output.finish is not None:
                ends.append(output.request_id)
                if output.request_id == "b":
                    done.set()
        raise ValueError("a sink's own bug")

    rig = LoopRig(sink=sink)
    rig.loop.start()
    for name in "ab":
        rig.loop.submit(make_request(name, [1], 3))
    assert done.wait(WAIT)
    assert ends == ["a", "b"]
    rig.loop.stop()


# ---- stop strings ----------------------------------------------------------------------------


def _stop_at(count: int) -> Any:
    def make(stop_strings: tuple[str, ...]) -> Any:
        seen = 0

        def find(token_ids: tuple[int, ...]) -> int | None:
            nonlocal seen
            seen += len(token_ids)
            return count - 1 if seen >= count else None

        return find

    return make


def test_a_stop_string_cuts_tokens_timestamps_and_the_stream() -> None:
    rig = Rig(make_stop_finder=_stop_at(4), per_request_processors=True)
    rig.manager.start()
    rig.manager.add_request(
        [1],
        request_id="a",
        max_new_tokens=50,
        stop_strings="x",
        streaming=True,
        record_timestamps=True,
    )
    outputs = list(rig.manager.request_id_iter("a"))
    last = outputs[-1]
    assert last.generated_tokens == expected_tokens([1], 3)
    assert last.finish_reason is FinishReason.STOP
    assert last.timestamps is not None
    assert len(last.timestamps) == 3
    rig.manager.stop()
    assert rig.kv_cache.num_used_blocks == 0


def test_a_stop_string_in_the_last_token_is_a_stop() -> None:
    rig = Rig(make_stop_finder=_stop_at(4), per_request_processors=True)
    rig.manager.start()
    rig.manager.add_request([1], max_new_tokens=4, stop_strings=["x"])
    output = result(rig.manager)
    assert output.finish_reason is FinishReason.STOP
    assert output.generated_tokens == expected_tokens([1], 3)
    rig.manager.stop()


def test_a_second_record_of_an_id_does_not_replace_the_first() -> None:
    router = ResultRouter(lambda name, count, choice: None)
    spec = make_request("a", [1], 1)
    router.expect(spec, 100.0)
    with pytest.raises(DuplicateRequestError):
        router.expect(spec, 100.0)
    assert router.get("a", timeout=0) is None
    router.forget(spec.request_id)
    router.expect(spec, 100.0)
