"""The loop itself: what reaches the sink, warm-up, pauses, and requests that a bug has lost."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.contract.adapters import Adapter
from engine.contract.errors import EngineUnavailableError, QueueFullError, UnsupportedFeatureError
from engine.contract.loaded_adapters import AdapterBounds
from engine.contract.outputs import FinishReason
from engine.contract.request import MatcherFactory, RequestStatus
from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import CallerKey
from engine.fairness.drain_rate import MARGIN, UNKNOWN_DELAY_S
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.fake_runner import expected_tokens, make_request
from tests.engine.rig import WAIT, LoopRig, Rig, Sink, result


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(WAIT)
    return not thread.is_alive()


def until_wanted(rig: Rig) -> None:
    """Wait until somebody asks for a window."""
    deadline = time.monotonic() + WAIT
    while not rig.loop._window.is_wanted:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- what reaches the sink -------------------------------------------------------------------


def test_every_step_is_reported_also_those_that_bring_nobody_anything() -> None:
    sink = Sink()
    rig = LoopRig(sink=sink, max_batch_tokens=4)
    rig.loop.start()
    rig.loop.submit(make_request("a", [1] * 10, 3))
    assert sink.done.wait(WAIT)
    rig.loop.stop(timeout=WAIT)
    records = [step.step for step in sink.steps if step.step is not None]
    assert [(r.num_requests, r.num_prompt_tokens, r.num_decode_tokens) for r in records] == [
        (1, 4, 0),
        (1, 4, 0),
        (1, 2, 0),
        (1, 0, 1),
        (1, 0, 1),
    ]
    assert all(record.duration_s >= 0 for record in records)
    assert [len(step.outputs) for step in sink.steps] == [0, 0, 1, 1, 1]
    times = [step.time for step in sink.steps]
    assert times == sorted(times)


def test_timings_under_preemption() -> None:
    sink = Sink()
    rig = LoopRig(sink=sink, num_blocks=8, block_size=2, max_batch_tokens=8)
    rig.loop.start()
    arrivals = {}
    rig.hold()
    for name in "abcd":
        arrivals[name] = rig.loop.submit(make_request(name, [1, 2, ord(name)], 9)).arrival
    rig.let()
    rig.loop.stop(timeout=WAIT)
    assert rig.loop.stats().preemptions > 0
    first_seen: dict[str, float] = {}
    last_seen: dict[str, float] = {}
    finishes = {}
    for step in sink.steps:
        for output in step.outputs:
            if output.token_ids:
                first_seen.setdefault(output.request_id, step.time)
                last_seen[output.request_id] = step.time
            if output.finish is not None:
                finishes[output.request_id] = output.finish
    assert sum(finish.timings.preemptions for finish in finishes.values()) > 0
    for name, finish in finishes.items():
        timings = finish.timings
        assert timings.arrival == arrivals[name]
        assert timings.first_scheduled is not None
        assert timings.first_token is not None
        assert timings.last_token is not None
        assert (
            timings.arrival
            <= timings.first_scheduled
            <= timings.first_token
            <= first_seen[name]
            <= timings.last_token
            <= timings.finished
            <= last_seen[name]
        )


# ---- warm-up ---------------------------------------------------------------------------------


def test_warming_up_a_running_engine_blocks_nobody(rig: Rig) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert go_on.wait(WAIT)

    rig.runner.warmup = slow  # type: ignore[method-assign]
    assert not rig.manager.warmed_up
    warming = in_thread(rig.manager.warmup)
    assert inside.wait(WAIT)
    adding = in_thread(lambda: rig.manager.add_request([1], request_id="a", max_new_tokens=2))
    assert ended(adding), "the lock was held"
    assert rig.manager.cancel_request("a")
    assert warming.is_alive()
    go_on.set()
    assert ended(warming)
    assert rig.manager.warmed_up
    assert result(rig.manager, "a").status is RequestStatus.CANCELLED


def test_a_failing_warm_up_is_its_callers(rig: Rig) -> None:
    def broken() -> None:
        raise RuntimeError("no memory for graphs")

    rig.runner.warmup = broken  # type: ignore[method-assign]
    rig.hold()
    rig.manager.add_request([1], request_id="a", max_new_tokens=3)
    rig.let()
    with pytest.raises(RuntimeError, match="graphs"):
        rig.manager.warmup()
    assert result(rig.manager, "a").generated_tokens == expected_tokens([1], 3)
    assert rig.manager.failure is None
    rig.manager.stop()
    with pytest.raises(RuntimeError, match="graphs"):
        rig.manager.warmup()
    rig.manager.start()


def test_start_waits_for_a_warm_up() -> None:
    rig = Rig()
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert go_on.wait(WAIT)

    rig.runner.warmup = slow  # type: ignore[method-assign]
    warming = in_thread(rig.manager.warmup)
    assert inside.wait(WAIT)
    starting = in_thread(rig.manager.start)
    assert not rig.manager.is_running()
    go_on.set()
    assert ended(warming)
    assert ended(starting)
    assert rig.manager.is_running()
    rig.manager.stop(timeout=WAIT)


# ---- windows ---------------------------------------------------------------------------------


class Steps:
    """Fails when a step runs where none may. The second step waits until the test has asked for
    what it is about: the requests would be over by then on a busy machine.
    """

    def __init__(self, rig: Rig) -> None:
        self.count = 0
        self.may_run = True
        self.stopped = False
        self.wrong = False
        self.asked_for: Callable[[], bool] = lambda: True
        rig.runner.hook = self

    def wait_for_window(self, rig: Rig) -> None:
        """Have the second step wait until somebody wants a window, or had one before it."""
        self.asked_for = lambda: rig.manager._loop._window.is_wanted or self.stopped

    def __call__(self, batch: ScheduledBatch) -> None:
        self.count += 1
        deadline = time.monotonic() + WAIT
        while self.count == 2 and not self.asked_for():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.wrong = self.wrong or not self.may_run


@pytest.fixture
def steps(rig: Rig) -> Iterator[Steps]:
    steps = Steps(rig)
    yield steps
    assert not steps.wrong


def test_nothing_runs_in_a_window_and_all_goes_on_behind_it(rig: Rig, steps: Steps) -> None:
    steps.wait_for_window(rig)
    rig.manager.add_request([1], request_id="a", max_new_tokens=600, streaming=True)
    first = result(rig.manager, "a")
    with rig.manager.pause():
        steps.stopped = True
        steps.may_run = False
        before = steps.count
        rig.manager.add_request([2], request_id="b", max_new_tokens=4)
        while (rest := rig.manager.get_result("a", timeout=0)) is not None:
            first = rest
        assert rig.manager.get_result("b", timeout=0.02) is None
        assert steps.count == before
        steps.may_run = True
    assert len(first.generated_tokens) < 600
    assert result(rig.manager, "b").generated_tokens == expected_tokens([2], 4)
    last = list(rig.manager.request_id_iter("a"))[-1]
    assert last.generated_tokens == expected_tokens([1], 600)
    assert rig.core.scheduler.num_preemptions == 0


@pytest.mark.parametrize("streaming", [False, True])
def test_a_step_in_flight_is_over_before_the_window_opens(streaming: bool) -> None:
    rig = Rig(overlap=True, late=True)
    rig.manager.start()
    rig.manager.add_request([1], request_id="a", max_new_tokens=400, streaming=streaming)
    for _ in range(20):
        with rig.manager.pause():
            assert not rig.core._in_flight
    last = list(rig.manager.request_id_iter("a"))[-1]
    assert last.generated_tokens == expected_tokens([1], 400)
    rig.manager.stop(timeout=WAIT)


def test_the_last_of_several_holders_lets_the_loop_go_on(rig: Rig, steps: Steps) -> None:
    steps.wait_for_window(rig)
    rig.manager.add_request([1], request_id="a", max_new_tokens=900)
    inside = threading.Barrier(4, timeout=WAIT)
    leave = [threading.Event() for _ in range(3)]

    def hold(index: int) -> None:
        with (
            rig.manager.pause(),
            rig.manager.pause(),
        ):  # twice is fine
            steps.stopped = True
            inside.wait()
            assert leave[index].wait(WAIT)
            if index == 2:
                steps.may_run = True

    holders = [in_thread(lambda index=index: hold(index)) for index in range(3)]  # type: ignore[misc]
    inside.wait()
    steps.may_run = False
    before = steps.count
    for index in (0, 1):
        leave[index].set()
        assert ended(holders[index])
        assert rig.manager.get_result("a", timeout=0.01) is None
        assert steps.count == before
    leave[2].set()
    assert ended(holders[2])
    assert result(rig.manager, "a").generated_tokens == expected_tokens([1], 900)


def test_an_error_in_the_window_closes_it(rig: Rig) -> None:
    with pytest.raises(KeyError), rig.manager.pause():
        raise KeyError("the holder's own")
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    assert result(rig.manager, "a").is_finished()


def test_a_pause_that_is_not_entered_pauses_nothing(rig: Rig) -> None:
    rig.manager.pause()
    kept = rig.manager.pause()
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    assert result(rig.manager, "a").is_finished()
    with kept:
        pass


def test_a_pause_that_is_entered_and_dropped_ends(rig: Rig) -> None:
    pause = rig.manager.pause()
    pause.__enter__()
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    assert rig.manager.get_result("a", timeout=0.02) is None
    del pause
    assert result(rig.manager, "a").is_finished()


def test_each_block_has_a_pause_of_its_own(rig: Rig) -> None:
    pause = rig.manager.pause()
    with pause:
        with pytest.raises(RuntimeError, match="for each block"):
            pause.__enter__()
        assert rig.loop._window.is_parked
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    assert result(rig.manager, "a").is_finished()


def test_an_interrupted_wait_for_a_pause_pauses_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(predicate: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rig.loop._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), rig.manager.pause():
            pytest.fail("entered")
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    assert result(rig.manager, "a").is_finished()


async def test_a_coroutine_waits_for_its_pause_beside_others(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([1], request_id="a", max_new_tokens=300)
    rig.wait_for_step()
    states: list[str] = []

    async def visit() -> None:
        async with rig.manager.pause():
            states.append("inside")
            assert rig.loop._window.is_parked
            with pytest.raises(RuntimeError, match="leave the pause"):
                rig.manager.stop()

    visiting = asyncio.create_task(visit())
    await asyncio.to_thread(until_wanted, rig)
    states.append("beside")
    rig.let()
    await asyncio.wait_for(visiting, WAIT)
    assert states == ["beside", "inside"]
    output = await asyncio.to_thread(result, rig.manager, "a")
    assert output.generated_tokens == expected_tokens([1], 300)


async def test_a_coroutine_that_is_cancelled_pauses_nothing(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([1], request_id="a", max_new_tokens=3)
    rig.wait_for_step()

    async def visit() -> None:
        async with rig.manager.pause():
            pytest.fail("entered")

    visiting = asyncio.create_task(visit())
    await asyncio.to_thread(until_wanted, rig)
    waiter = next(one for one in threading.enumerate() if one.name == "headrace-pause")
    visiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await visiting
    await asyncio.to_thread(waiter.join, WAIT)  # it does not wait on, though no window opens
    assert not waiter.is_alive()
    rig.let()
    assert (await asyncio.to_thread(result, rig.manager, "a")).is_finished()


def test_prefixes_are_forgotten_within_a_pause(rig: Rig) -> None:
    with rig.manager.pause():
        rig.manager.reset_prefix_cache().result(0)


def test_a_pause_has_another_name(rig: Rig) -> None:
    with rig.manager.pause():
        assert rig.loop._window.is_parked


def test_only_a_running_engine_opens_a_window(rig: Rig) -> None:
    with pytest.raises(EngineUnavailableError, match="not running"), Rig().manager.pause():
        pytest.fail("entered")
    rig.manager.stop()
    with pytest.raises(EngineUnavailableError, match="not running"), rig.manager.pause():
        pytest.fail("entered")


def test_a_stop_during_a_window_takes_effect_behind_it(rig: Rig, steps: Steps) -> None:
    rig.manager.add_request([1], request_id="a", max_new_tokens=500)
    with rig.manager.pause():
        steps.may_run = False
        with pytest.raises(RuntimeError, match="leave the pause"):
            rig.manager.stop()
        rig.manager.add_request([1], request_id="b", max_new_tokens=3)  # it was not stopped
        with pytest.raises(RuntimeError, match="leave the pause"):
            rig.manager.join()
        with pytest.raises(RuntimeError, match="leave the pause"):
            rig.manager.warmup()
        stopping = in_thread(rig.manager.stop)
        rig.manager.stop(block=False)
        assert rig.manager.is_running()
        steps.may_run = True
    assert ended(stopping)
    outputs = {output.request_id: output.generated_tokens for output in rig.manager}
    assert outputs == {"a": expected_tokens([1], 500), "b": expected_tokens([1], 3)}


def test_a_hard_stop_during_a_window(rig: Rig) -> None:
    rig.manager.add_request([1], request_id="a", max_new_tokens=800)
    with rig.manager.pause():
        rig.manager.stop(block=False, hard_stop=True)
    rig.manager.join(WAIT)
    assert not rig.manager.is_running()
    assert result(rig.manager, "a").is_finished()


def test_death_before_the_window_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    entered, gate = threading.Event(), threading.Event()

    def broken(*arguments: Any, **options: Any) -> None:
        entered.set()
        assert gate.wait(WAIT)
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.core.scheduler, "schedule", broken)
    monkeypatch.setattr(rig.core, "fail_all", broken)
    rig.manager.start()
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    assert entered.wait(WAIT)
    caught: list[EngineUnavailableError] = []

    def hold() -> None:
        try:
            with rig.manager.pause():
                pass
        except EngineUnavailableError as error:
            caught.append(error)

    holder = in_thread(hold)
    while not rig.manager._loop._window.is_wanted:
        assert holder.is_alive()
    gate.set()
    assert ended(holder)
    assert "ended before" in str(caught[0])
    assert rig.manager.failure is not None
    assert result(rig.manager, "a").status is RequestStatus.FAILED


# ---- pauses ------------------------------------------------------------------------------------


def test_a_pause_takes_no_step_and_carries_out_commands(rig: Rig, steps: Steps) -> None:
    asked = threading.Event()
    steps.asked_for = asked.is_set
    rig.manager.add_request([1], request_id="a", max_new_tokens=600, streaming=True)
    rig.manager.add_request([3], request_id="c", max_new_tokens=600)
    result(rig.manager, "a")
    paused = rig.loop.pause()
    asked.set()
    paused.result(WAIT)
    steps.may_run = False
    before = steps.count
    rig.loop.pause().result(WAIT)  # again: harmless
    rig.manager.add_request([2], request_id="b", max_new_tokens=4)
    rig.manager.cancel_request("c")
    assert result(rig.manager, "c").status is RequestStatus.CANCELLED  # without a step
    rig.manager.reset_prefix_cache().result(WAIT)
    with rig.manager.pause():  # a window within the pause
        pass
    assert rig.manager.get_result("b", timeout=0.02) is None
    assert steps.count == before
    steps.may_run = True
    rig.loop.resume()
    assert result(rig.manager, "b").generated_tokens == expected_tokens([2], 4)
    last = list(rig.manager.request_id_iter("a"))[-1]
    assert last.generated_tokens == expected_tokens([1], 600)
    rig.loop.resume()  # again: harmless


def test_requests_of_an_adapter_that_has_come_back_go_on(rig: Rig) -> None:
    """Those of one that is gone are cancelled."""
    adapters, bounds = rig.loop._limits.adapters, AdapterBounds(100, 10)
    one = Adapter("one", bytes(32), 8, 1, 1, "", None)
    adapters.put(one, bounds)
    rig.loop.pause().result(WAIT)
    rig.manager.add_request([1], request_id="a", max_new_tokens=4, adapter="one")
    assert adapters.remove("one") == (one,)
    adapters.put(one, bounds)
    rig.loop.cancel_of([one])
    rig.loop.resume()
    assert result(rig.manager, "a").status is RequestStatus.FINISHED
    rig.loop.pause().result(WAIT)
    rig.manager.add_request([1], request_id="b", max_new_tokens=4, adapter="one")
    rig.manager.add_request([1], request_id="c", max_new_tokens=4)
    adapters.remove("one")
    rig.loop.cancel_of([one])
    assert result(rig.manager, "b").status is RequestStatus.CANCELLED
    assert not adapters.told()
    rig.loop.resume()
    assert result(rig.manager, "c").status is RequestStatus.FINISHED


def test_time_limits_end_requests_in_a_pause_on_time(rig: Rig, steps: Steps) -> None:
    rig.manager.add_request([1], request_id="runs", max_new_tokens=10**6, streaming=True)
    result(rig.manager, "runs")
    rig.loop.pause().result(WAIT)
    steps.may_run = False
    rig.manager.add_request([2], request_id="later", max_new_tokens=4, time_limit_s=1000)
    began = time.monotonic()
    for index, limit_s in enumerate((0.3, 0.1, 0.2)):
        rig.manager.add_request([3], request_id=f"w{index}", max_new_tokens=4, time_limit_s=limit_s)
    for index, limit_s in ((1, 0.1), (2, 0.2), (0, 0.3)):
        output = result(rig.manager, f"w{index}")
        assert output.finish_reason is FinishReason.TIME_LIMIT
        assert time.monotonic() - began >= limit_s
    assert rig.manager.get_result("later", timeout=0.02) is None
    assert rig.core.num_waiting == 1
    steps.may_run = True
    rig.loop.resume()
    assert result(rig.manager, "later").is_finished()
    rig.manager.cancel_request("runs")


def test_a_step_in_flight_is_over_when_the_loop_is_paused() -> None:
    rig = Rig(overlap=True, late=True)
    rig.manager.start()
    rig.manager.add_request([1], request_id="a", max_new_tokens=400)
    for _ in range(20):
        rig.loop.pause().result(WAIT)
        assert not rig.core._in_flight
        rig.loop.resume()
    assert result(rig.manager, "a").generated_tokens == expected_tokens([1], 400)
    rig.manager.stop(timeout=WAIT)


@pytest.mark.parametrize("hard_stop", [False, True])
def test_a_stop_ends_a_pause(rig: Rig, hard_stop: bool) -> None:
    rig.manager.add_request([1], request_id="a", max_new_tokens=300)
    rig.loop.pause().result(WAIT)
    rig.manager.stop(timeout=WAIT, hard_stop=hard_stop)
    assert not rig.manager.is_running()
    output = result(rig.manager, "a")
    assert output.is_finished()
    assert hard_stop or output.generated_tokens == expected_tokens([1], 300)
    with pytest.raises(EngineUnavailableError, match="does not run"):
        rig.loop.pause()
    rig.manager.reset_prefix_cache().result(0)
    rig.manager.start()  # and is not paused any more
    rig.manager.add_request([2], request_id="b", max_new_tokens=3)
    assert result(rig.manager, "b").generated_tokens == expected_tokens([2], 3)


# ---- a full queue ------------------------------------------------------------------------------


def test_a_full_queue_s_advice_is_the_rate_at_which_requests_ended() -> None:
    now = [50.0]
    sink = Sink()
    rig = LoopRig(
        sink=sink, max_queue_size=2, max_requests=1, clock=lambda: now[0], jitter=lambda: 0.0
    )
    rig.hold()
    rig.loop.start()
    rig.loop.submit(make_request("a", [1], 100))
    rig.wait_for_step()
    now[0] += 100  # nobody waits: what ends now, or does not, says nothing of a full queue
    rig.loop.submit(make_request("b", [1], 1))
    rig.loop.submit(make_request("c", [1], 1))
    with pytest.raises(QueueFullError) as caught:
        rig.loop.submit(make_request("d", [1], 1))
    assert caught.value.present == 2
    assert caught.value.retry_after_s == UNKNOWN_DELAY_S  # nothing ended yet
    now[0] += 4
    rig.loop.cancel_request("a")
    rig.let(1)
    assert sink.done.wait(WAIT)
    rig.wait_for_step()  # of b
    rig.loop.submit(make_request("d", [1], 1))
    now[0] += 4
    rig.let(1)
    rig.wait_for_step()  # of c: b has ended
    rig.loop.submit(make_request("e", [1], 1))
    with pytest.raises(QueueFullError, match="2 requests are waiting, and 2 may") as caught:
        rig.loop.submit(make_request("f", [1], 1))
    assert caught.value.retry_after_s == pytest.approx(4.0 * (1 + MARGIN))  # one in four seconds
    with pytest.raises(QueueFullError) as caught:
        rig.loop.submit(make_request("g", [1], 1))
    assert caught.value.retry_after_s == pytest.approx(8.0 * (1 + MARGIN))  # behind that one
    now[0] += 1
    rig.let()
    rig.loop.stop(timeout=WAIT)


def test_each_caller_has_a_share_of_the_queue() -> None:
    """Of what waits; a caller that comes new finds room, however much another has waiting."""
    rig = LoopRig(sink=(sink := Sink()), max_queue_size=8, max_requests=1)
    numbers = itertools.count()

    def submit(caller: str) -> QueueFullError | None:
        request = make_request(f"{caller}-{next(numbers)}", [1], 1, caller=caller)
        try:
            rig.loop.submit(request)
        except QueueFullError as error:
            return error
        return None

    rig.hold()
    rig.loop.start()
    assert submit("heavy") is None
    rig.wait_for_step()
    answers = [submit("heavy") for _ in range(9)]
    assert [answer is None for answer in answers] == [True] * 8 + [False]
    assert answers[8] is not None
    assert answers[8].share is None  # all of it is its own
    assert submit("b") is None  # beyond, as one who comes new
    refused = submit("heavy")
    assert refused is not None
    assert (refused.present, refused.held, refused.share) == (9, 9, 4)  # and the one that runs
    assert "others want theirs" in str(refused)
    assert submit("b") is not None  # nothing is free
    # What begins is for those who are below their shares.
    rig.let(2)
    rig.wait_for_step()
    rig.wait_for_step()
    assert submit("heavy") is not None
    assert submit("b") is None
    rig.let()
    rig.loop.stop(timeout=WAIT)
    assert not rig.loop._room._entered
    assert rig.loop._room._shares.callers <= 2  # who was refused lately
    assert sink.steps


def test_callers_of_one_group_have_one_share_of_the_queue() -> None:
    rig = LoopRig(sink=Sink(), max_queue_size=16, max_requests=1)
    requests = (
        dataclasses.replace(
            make_request(f"g{number}", [1], 1),
            caller=CallerKey(f"gateway/{number}"),
            caller_group=CallerKey("gateway"),
            weight=1 / (number + 1),
        )
        for number in itertools.count()
    )
    rig.hold()
    rig.loop.start()
    rig.loop.submit(make_request("first", [1], 1))
    rig.wait_for_step()
    for _ in range(16):
        rig.loop.submit(next(requests))
    for _ in range(5):
        with pytest.raises(QueueFullError):
            rig.loop.submit(next(requests))
    for name in ("a", "b"):
        rig.loop.submit(dataclasses.replace(make_request(name, [1], 1), caller=CallerKey(name)))
    rig.let()
    rig.loop.stop(timeout=WAIT)


# ---- requests that a bug has lost --------------------------------------------------------------


def test_a_request_that_the_core_lost_on_its_way_in_ends_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = rig.core.add
    broken = ["a"]

    def lose(spec: Any, *arguments: Any) -> None:
        if spec.request_id in broken:
            raise RuntimeError("a bug")
        add(spec, *arguments)

    monkeypatch.setattr(rig.core, "add", lose)
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    output = result(rig.manager, "a")
    assert output.status is RequestStatus.FAILED
    assert output.finish_reason is FinishReason.ERROR
    broken.clear()
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    assert result(rig.manager, "a").generated_tokens == expected_tokens([1], 2)


def test_a_grammar_that_cannot_be_followed_costs_its_request_alone() -> None:
    sink = Sink()
    rig = LoopRig(sink=sink)
    rig.hold()
    rig.loop.start()
    rig.loop.submit(make_request("neighbour", [1], 3))

    def broken() -> Any:
        raise ValueError("a grammar's own")

    arrival = rig.loop.submit(make_request("bad", [1], 3), MatcherFactory(broken)).arrival
    rig.let()
    rig.loop.stop(timeout=WAIT)
    finishes = {
        output.request_id: output.finish
        for step in sink.steps
        for output in step.outputs
        if output.finish is not None
    }
    assert finishes["neighbour"].reason is FinishReason.LENGTH
    assert finishes["bad"].reason is FinishReason.ERROR
    assert finishes["bad"].timings.arrival == arrival
    assert finishes["bad"].failure is not None
    assert "grammar" in finishes["bad"].failure.message


def test_a_grammar_is_compiled_before_its_request_is_taken(rig: Rig) -> None:
    request = dataclasses.replace(
        make_request("a", [1], 3), grammar=GrammarParams(kind=GrammarKind.JSON_OBJECT)
    )
    with pytest.raises(UnsupportedFeatureError, match="grammar"):
        rig.loop.compile_grammar(request)
    with pytest.raises(ValueError, match="matcher"):
        rig.loop.submit(request)
    assert rig.loop.compile_grammar(make_request("a", [1], 3)) is None
