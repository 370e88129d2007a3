"""What the offline API hands out: results, streams, handlers, and cuts at stop strings."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine.api.request_builder import PreparedRequest
from engine.api.results import GenerationOutput, Mailbox, ResultRouter, choice_name
from engine.contract.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestNotFoundError,
    TooManyHandlersError,
    UnreadResultsError,
)
from engine.contract.outputs import FinishReason, StepOutputs
from engine.contract.request import RequestStatus
from engine.contract.types import RequestId
from tests.engine.fake_runner import (
    VOCAB,
    expected_tokens,
    make_core,
    make_request,
    prompt_logprob,
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


def test_no_end_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Instead, no more requests are taken."""
    router = ResultRouter(lambda name, count, choice: None, max_unread_requests=10)
    core, _, _ = make_core(num_blocks=64)

    def run(*names: str) -> None:
        for name in names:
            spec = make_request(name, [1], 1)
            router.expect(spec, 100.0)
            core.add(spec, 100.0)
        while core.has_work:
            router.accept(core.step())

    names = [f"r{index}" for index in range(12)]
    run(*names)  # when they were added, none had ended
    with pytest.raises(UnreadResultsError, match=r"10 requests.*max_unread_requests"):
        run("one more")
    mailbox = Mailbox()  # that of a batch, which is read
    router.expect(make_request("batch", [1], 1), 100.0, mailbox=mailbox)
    read = [router.get(None, 0) for _ in range(3)]
    run("one more")
    read += [router.get(None, 0) for _ in range(10)]
    assert [output and output.request_id for output in read] == [*names, "one more"]
    assert all(output is not None and output.is_finished() for output in read)
    assert router.get(None, 0) is None
    assert not caplog.text


def test_a_stream_that_nobody_reads_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its oldest results are merged into later ones, which have their tokens, too."""
    router = ResultRouter(lambda name, count, choice: None, max_unread_results=4)
    core, _, _ = make_core(num_blocks=64)
    for name, streaming in (("quiet", False), ("stream", True), ("short", True)):
        spec = make_request(name, [1], {"quiet": 1, "stream": 50, "short": 4}[name])
        router.expect(spec, 100.0, streaming=streaming, record_timestamps=True)
        core.add(spec, 100.0)
    for _ in range(30):
        router.accept(core.step())
    assert len(router._mailbox.unread) == 1 + 4 + 4
    quiet = router.get("quiet", 0)
    assert quiet is not None
    assert quiet.is_finished()
    right = expected_tokens([1], 50)
    first = router.get("stream", 0)
    assert first is not None
    assert first.generated_tokens == right[: len(first.generated_tokens)]
    assert first.merged_results == len(first.generated_tokens) - 1 > 20
    second = router.get("stream", 0)
    assert second is not None
    assert len(second.generated_tokens) == len(first.generated_tokens) + 1
    assert second.merged_results == 0
    while core.has_work:
        router.accept(core.step())
    rest = [router.get("stream", 0) for _ in range(4)]
    assert [output and len(output.generated_tokens) for output in rest] == [48 - 1, 48, 49, 50]
    assert [output and output.merged_results for output in rest][1:] == [0, 0, 0]
    last = rest[-1]
    assert last is not None
    assert last.is_finished()
    assert last.generated_tokens == right
    assert last.timestamps is not None
    assert len(last.timestamps) == 50
    short = [router.get("short", 0) for _ in range(4)]
    assert [output and len(output.generated_tokens) for output in short] == [1, 2, 3, 4]
    assert caplog.text.count("merged") == 2, "once until it is read again"
    assert not router._choices


def test_the_bounds_of_what_is_unread_are_options() -> None:
    rig = Rig(max_unread_results=2, max_unread_requests=1)
    rig.manager.start()
    rig.manager.add_request([1], request_id="a", max_new_tokens=9, streaming=True)
    rig.manager.stop()
    outputs = list(rig.manager.request_id_iter("a"))
    assert [len(output.generated_tokens) for output in outputs] == [8, 9]
    assert [output.merged_results for output in outputs] == [7, 0]
    rig.manager.start()
    rig.manager.add_request([1], request_id="a", max_new_tokens=1)
    rig.manager.stop()
    rig.manager.start()
    with pytest.raises(UnreadResultsError):
        rig.manager.add_request([1], request_id="b", max_new_tokens=1)
    rig.manager.stop()


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


async def test_a_handler_may_be_there_before_its_request(rig: Rig) -> None:
    """As transformers' own server does it: no result can come in between."""
    seen: asyncio.Queue[GenerationOutput] = asyncio.Queue()
    rig.manager.register_result_handler("a", print)
    rig.manager.register_result_handler("a", seen.put_nowait)  # the last one is the one
    rig.manager.register_result_handler("a__child#0", seen.put_nowait)
    rig.manager.add_request([9], request_id="b", max_new_tokens=1)
    rig.manager.add_request([9], request_id="a", max_new_tokens=2, streaming=True, n=2)
    outputs = [await asyncio.wait_for(seen.get(), WAIT) for _ in range(4)]
    for name in ("a", "a__child#0"):
        mine = [output for output in outputs if output.request_id == name]
        assert [len(output.generated_tokens) for output in mine] == [1, 2]
    assert result(rig.manager).request_id == "b", "nothing of the others is in the way"
    assert not rig.manager._router._waiting_handlers
    rig.manager.add_request([9], request_id="a", max_new_tokens=1)
    assert result(rig.manager).request_id == "a", "a handler is of one request"


async def test_a_handler_goes_with_a_refused_request(rig: Rig) -> None:
    seen: asyncio.Queue[GenerationOutput] = asyncio.Queue()

    def register() -> None:
        rig.manager.register_result_handler("a", seen.put_nowait)
        assert len(rig.manager._router._waiting_handlers) == 1

    register()
    with pytest.raises(InvalidRequestError):
        rig.manager.add_request([VOCAB], request_id="a")
    assert not rig.manager._router._waiting_handlers
    register()
    assert not rig.manager.cancel_request("a")
    assert not rig.manager._router._waiting_handlers
    register()
    await asyncio.to_thread(rig.manager.stop)
    with pytest.raises(EngineUnavailableError):
        rig.manager.add_request([1], request_id="a")
    assert not rig.manager._router._waiting_handlers
    rig.manager.start()
    # A live one keeps its handler when another of its name is refused.
    rig.hold()
    register()
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    with pytest.raises(DuplicateRequestError):
        rig.manager.add_request([1], request_id="a")
    rig.let()
    output = await asyncio.wait_for(seen.get(), WAIT)
    assert output.generated_tokens == expected_tokens([1], 2)


def test_handlers_that_wait_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.api.results.MAX_WAITING_HANDLERS", 3)

    async def register(*names: str) -> None:
        for name in names:
            rig.manager.register_result_handler(name, print)

    async def fill() -> None:
        await register("a", "b", "c", "b")
        with pytest.raises(TooManyHandlersError, match=r"3 result handlers.*cancel_request"):
            rig.manager.register_result_handler("d", print)
        rig.manager.add_request([1], request_id="a", max_new_tokens=1)
        await register("d")

    asyncio.run(fill())
    asyncio.run(register("e", "f", "g"))  # the others' event loop has gone, and they with it
    assert set(rig.manager._router._waiting_handlers) == {"e", "f", "g"}


def test_handler_without_a_loop(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([9], request_id="a", max_new_tokens=1)
    with pytest.raises(RuntimeError, match="event loop"):
        rig.manager.register_result_handler("a", print)


def test_a_closed_loop_loses_its_own_results(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.hold()
    for name in "ab":
        rig.manager.add_request([9], request_id=name, max_new_tokens=30, streaming=True)
    loop = asyncio.new_event_loop()

    async def register() -> None:
        rig.manager.register_result_handler("a", print)

    loop.run_until_complete(register())
    loop.close()
    rig.let()
    lengths = [len(output.generated_tokens) for output in rig.manager.request_id_iter("b")]
    assert lengths == list(range(1, 31))
    rig.manager.add_request([9], request_id="a", max_new_tokens=2)
    assert result(rig.manager, "a").generated_tokens == expected_tokens([9], 2)
    assert rig.manager.get_result(timeout=0) is None  # nothing was kept for nobody
    told = [record.message for record in caplog.records if "event loop is closed" in record.message]
    assert told == [
        "results of a are dropped from now on: its handler's event loop is closed"
    ]  # once, not with each token


async def test_another_handler_takes_the_place_of_a_closed_loop_s(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([9], request_id="a", max_new_tokens=3, streaming=True)
    closed = asyncio.new_event_loop()

    async def register() -> None:
        rig.manager.register_result_handler("a", print)

    await asyncio.to_thread(closed.run_until_complete, register())
    closed.close()
    rig.wait_for_step()
    rig.let(1)
    rig.wait_for_step()
    seen: asyncio.Queue[GenerationOutput] = asyncio.Queue()
    rig.manager.register_result_handler("a", seen.put_nowait)
    rig.let()
    outputs = [await asyncio.wait_for(seen.get(), WAIT) for _ in range(2)]
    assert outputs[-1].generated_tokens == expected_tokens([9], 3)


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


# ---- several choices ---------------------------------------------------------------------------


def admit(rig: Rig, name: str, n: int, max_tokens: int = 3, **options: Any) -> None:
    """A request of several choices, as num_return_sequences makes it."""
    spec = dataclasses.replace(make_request(name, [4, 5], max_tokens), n=n)
    rig.manager._admit(
        [PreparedRequest(spec, options.pop("make_stop_finder", None))],
        **{"streaming": False, "record_timestamps": False, **options},
    )


@pytest.fixture
def forks() -> Iterator[Rig]:
    rig = Rig()
    rig.manager.start()
    yield rig
    rig.let()
    rig.manager.stop(timeout=WAIT, hard_stop=True)
    assert rig.kv_cache.num_used_blocks == 0
    assert not rig.manager._loop._live
    assert not rig.manager._router._requests


def test_each_choice_has_a_name_of_its_own(forks: Rig) -> None:
    admit(forks, "a", 3, record_timestamps=True)
    outputs = {name: result(forks.manager, name) for name in ("a__child#1", "a", "a__child#0")}
    for index, name in enumerate(("a", "a__child#0", "a__child#1")):
        assert name == choice_name("a", index)
        output = outputs[name]
        assert output.request_id == name
        assert output.choice == index
        assert output.prompt_ids == [4, 5]
        assert output.generated_tokens == expected_tokens([4, 5], 3, choice=index)
        assert output.timestamps is not None
        assert len(output.timestamps) == 3
        assert output.created_time <= output.lifespan[0] <= output.timestamps[0]
        assert output.timestamps[-1] <= output.lifespan[1]
    assert forks.manager.get_result(timeout=0) is None
    admit(forks, "a", 2)  # all names are free again
    assert {result(forks.manager).request_id for _ in range(2)} == {"a", "a__child#0"}


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_choices_of_next_to_nothing(forks: Rig, max_tokens: int) -> None:
    spec = dataclasses.replace(make_request("a", [4], max_tokens), n=3)
    forks.manager._admit([PreparedRequest(spec, None)], streaming=True, record_timestamps=False)
    for index in range(3):
        outputs = list(forks.manager.request_id_iter(choice_name("a", index)))
        assert [output.is_finished() for output in outputs] == [True]
        assert outputs[0].generated_tokens == expected_tokens([4], max_tokens, choice=index)
        assert outputs[0].finish_reason is FinishReason.LENGTH


def test_each_choice_streams(forks: Rig) -> None:
    admit(forks, "a", 2, streaming=True)
    for choice in (1, 0):
        outputs = list(forks.manager.request_id_iter(choice_name("a", choice)))
        right = expected_tokens([4, 5], 3, choice=choice)
        assert [output.generated_tokens for output in outputs] == [
            right[:length] for length in (1, 2, 3)
        ]


async def test_each_choice_has_handlers_of_its_own(forks: Rig) -> None:
    forks.hold()
    admit(forks, "a", 3, streaming=True)
    seen: dict[str, list[GenerationOutput]] = {"a": [], "a__child#1": []}
    done = asyncio.Event()

    def take(output: GenerationOutput) -> None:
        seen[output.request_id].append(output)
        if all(outputs and outputs[-1].is_finished() for outputs in seen.values()):
            done.set()

    for name in seen:
        forks.manager.register_result_handler(name, take)
    forks.let()
    await asyncio.wait_for(done.wait(), WAIT)
    assert [len(outputs) for outputs in seen.values()] == [3, 3]
    forks.manager.stop()
    assert [output.request_id for output in forks.manager] == ["a__child#0"] * 3


def test_a_stop_string_ends_its_choice_alone(forks: Rig) -> None:
    finders = iter([_stop_at(4), _stop_at(99), _stop_at(2)])
    admit(forks, "a", 3, 8, make_stop_finder=lambda: next(finders)(("x",)))
    lengths = [len(result(forks.manager, choice_name("a", i)).generated_tokens) for i in range(3)]
    assert lengths == [3, 8, 1]


def test_cancelling_ends_all_choices(forks: Rig) -> None:
    admit(forks, "a", 3, 900)
    assert not forks.manager.cancel_request("a__child#0")
    assert forks.manager.cancel_request("a")
    outputs = [result(forks.manager) for _ in range(3)]
    assert {output.status for output in outputs} == {RequestStatus.CANCELLED}
    assert len({output.request_id for output in outputs}) == 3


def test_an_error_ends_all_choices(forks: Rig) -> None:
    forks.runner.invalid = {RequestId("a")}
    admit(forks, "a", 3)
    outputs = [result(forks.manager) for _ in range(3)]
    assert {output.status for output in outputs} == {RequestStatus.FAILED}
    assert len({output.request_id for output in outputs}) == 3
    assert all("finite logits" in (output.error or "") for output in outputs)


def test_a_choices_name_is_taken(forks: Rig) -> None:
    forks.hold()
    admit(forks, "a", 2)
    with pytest.raises(DuplicateRequestError, match="child#0"):
        forks.manager.add_request([1], request_id="a__child#0")
    forks.manager.add_request([1], request_id="b__child#1", max_new_tokens=1)
    with pytest.raises(DuplicateRequestError, match="b__child#1"):
        admit(forks, "b", 3)
    admit(forks, "b", 2)


def test_a_refused_duplicate_takes_nothing_from_the_live_one() -> None:
    """Its first choice has ended and was read; the second one's end is still to come."""
    core, _, _ = make_core(num_blocks=64)
    router = ResultRouter(core.finish)
    finders = iter([_stop_at(2), _stop_at(99)])
    spec = dataclasses.replace(make_request("a", [4, 5], 6), n=2)
    router.expect(spec, 100.0, make_stop_finder=lambda: next(finders)(("x",)))
    core.add(spec, 100.0)
    first = None
    while first is None:
        router.accept(core.step())
        first = router.get("a", 0)
    assert first.is_finished()
    with pytest.raises(DuplicateRequestError):
        router.expect(make_request("a", [7], 1), 101.0)
    while core.has_work:
        router.accept(core.step())
    second = router.get("a__child#0", 0)
    assert second is not None
    assert second.generated_tokens == expected_tokens([4, 5], 6, choice=1)
    router.expect(make_request("a", [7], 1), 102.0)  # now the id is free


# ---- a stop finder's own failure ---------------------------------------------------------------


def test_a_stop_finder_that_fails_costs_its_request_alone() -> None:
    def make(stop_strings: tuple[str, ...]) -> Any:
        def find(token_ids: tuple[int, ...]) -> int | None:
            if stop_strings == ("bad",):
                raise ValueError("a tokenizer's own bug")
            return None

        return find

    rig = Rig(make_stop_finder=make, per_request_processors=True)
    rig.hold()
    rig.manager.start()
    rig.manager.add_request([1], request_id="good", max_new_tokens=5, stop_strings="x")
    rig.manager.add_request([1], request_id="bad", max_new_tokens=500, stop_strings="bad")
    rig.manager.add_request([1], request_id="last", max_new_tokens=5)
    rig.let()
    bad = result(rig.manager, "bad")
    assert bad.status is RequestStatus.FAILED
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.generated_tokens == expected_tokens([1], 1)
    assert bad.error is not None
    assert "stop strings" in bad.error
    assert "bug" not in bad.error
    for name in ("good", "last"):
        assert result(rig.manager, name).generated_tokens == expected_tokens([1], 5)
    rig.manager.stop(timeout=WAIT)
    assert rig.kv_cache.num_used_blocks == 0


# ---- log-probabilities --------------------------------------------------------------------------


def test_candidates_are_kept() -> None:
    rig = Rig(per_request_processors=True)
    rig.manager.start()
    rig.manager.add_request([1], max_new_tokens=2, logprobs=3)
    output = result(rig.manager)
    assert output.logprobs == [-float(token) for token in output.generated_tokens]
    assert [entry.rank for entry in output.token_logprobs] == [1, 2]
    assert output.prompt_logprobs is None
    rig.manager.add_request([1, 5, 9], max_new_tokens=1, prompt_logprobs=0, n=2)
    for _ in range(2):
        output = result(rig.manager)
        assert output.prompt_logprobs == [prompt_logprob(5, 1), prompt_logprob(9, 2)]
        assert output.logprobs == []
    rig.manager.stop()


# ---- several requests at once --------------------------------------------------------------------


def test_several_at_once(rig: Rig) -> None:
    names = rig.manager.add_requests([[1], [2, 3]], max_new_tokens=3, streaming=True)
    assert names == ["req_0", "req_1"]
    assert rig.manager.add_requests([]) == []
    for name, prompt in zip(names, ([1], [2, 3]), strict=True):
        last = list(rig.manager.request_id_iter(name))[-1]
        assert last.generated_tokens == expected_tokens(prompt, 3)
    assert rig.manager.add_request([1], max_new_tokens=1) == "req_2"


def test_of_several_all_or_none_are_taken() -> None:
    rig = Rig(max_queue_size=3)
    rig.hold()
    rig.manager.start()
    with pytest.raises(InvalidRequestError, match=r"inputs\[1\]\.prompt\[0\]"):
        rig.manager.add_requests([[1], [VOCAB]], max_new_tokens=1)
    with pytest.raises(QueueFullError):
        rig.manager.add_requests([[1]] * 4, max_new_tokens=1)
    names = rig.manager.add_requests([[1]] * 3, max_new_tokens=1)
    rig.let()
    rig.manager.stop(timeout=WAIT)
    assert [output.request_id for output in rig.manager] == names
    assert rig.core.stats().requests_accepted == 3


def test_given_names_are_left_out(rig: Rig) -> None:
    rig.manager.add_request([1], request_id="req_0", max_new_tokens=1)
    assert rig.manager.add_request([1], max_new_tokens=1) == "req_1"
