"""The manager around a scripted runner: its life, its refusals, its failures."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from engine.api.results import choice_name
from engine.contract.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedFeatureError,
)
from engine.contract.outputs import FinishReason
from engine.contract.request import RequestStatus
from engine.contract.types import RequestId
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.fake_runner import (
    VOCAB,
    FakeRunner,
    expected_tokens,
    make_request,
)
from tests.engine.rig import WAIT, Rig, result

# ---- ends ------------------------------------------------------------------------------------


def test_cancel_gives_a_terminal_result_and_frees_blocks_within_a_step(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([1, 2], request_id="a", max_new_tokens=1000)
    rig.wait_for_step()
    rig.let(3)
    for _ in range(3):
        rig.wait_for_step()
    assert rig.manager.cancel_request("a")
    rig.manager.add_request([7], request_id="b", max_new_tokens=1)
    rig.let(1)  # the step in which it stands; the next one has only the other request
    rig.wait_for_step()
    assert [r.request_id for r in rig.core.scheduler.running.values()] == ["b"]
    assert rig.kv_cache.num_used_blocks == 1
    rig.let()
    output = result(rig.manager, "a")
    assert output.status is RequestStatus.CANCELLED
    assert output.finish_reason is FinishReason.CANCELLED
    assert output.generated_tokens == expected_tokens([1, 2], 4)
    assert result(rig.manager, "b").is_finished()
    assert not rig.manager.cancel_request("a")


def test_cancel_of_an_unknown_request(rig: Rig) -> None:
    assert not rig.manager.cancel_request("nobody")


def test_cancel_then_the_same_id_again(rig: Rig) -> None:
    for _ in range(20):
        rig.manager.add_request([1], request_id="a", max_new_tokens=100_000 // VOCAB)
        rig.manager.cancel_request("a")
        assert result(rig.manager, "a").is_finished()
        rig.manager.add_request([3], request_id="a", max_new_tokens=4)
        assert result(rig.manager, "a").generated_tokens == expected_tokens([3], 4)


def test_finish_cuts_the_output(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([1], request_id="a", max_new_tokens=100)
    rig.wait_for_step()
    rig.let(3)
    for _ in range(3):
        rig.wait_for_step()
    assert rig.manager.finish_request("a", 2)
    rig.let()
    output = result(rig.manager, "a")
    assert output.finish_reason is FinishReason.STOP


def test_a_duplicate_id_is_refused_and_the_first_lives_on(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([1], request_id="a", max_new_tokens=3)
    with pytest.raises(DuplicateRequestError, match="'a'"):
        rig.manager.add_request([2], request_id="a", max_new_tokens=3)
    rig.let()
    assert result(rig.manager, "a").generated_tokens == expected_tokens([1], 3)


def test_of_many_threads_with_one_id_one_wins(rig: Rig) -> None:
    """The losers must not take the winner's record with them."""
    for turn in range(30):
        barrier = threading.Barrier(4)
        won: list[int] = []

        def add(prompt: int, barrier: threading.Barrier = barrier, won: list[int] = won) -> None:
            barrier.wait()
            try:
                rig.manager.add_request([prompt], request_id="a", max_new_tokens=2)
                won.append(prompt)
            except DuplicateRequestError:
                pass

        threads = [threading.Thread(target=add, args=(turn + i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert result(rig.manager, "a").generated_tokens == expected_tokens([won[0]], 2)


def test_adds_from_many_threads(rig: Rig) -> None:
    def add(offset: int) -> None:
        for i in range(50):
            rig.manager.add_request([offset, i], request_id=f"{offset}-{i}", max_new_tokens=3)

    threads = [threading.Thread(target=add, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    seen = {}
    for _ in range(400):
        output = result(rig.manager)
        seen[output.request_id] = output.generated_tokens
    for thread in threads:
        thread.join()
    assert seen == {f"{o}-{i}": expected_tokens([o, i], 3) for o in range(8) for i in range(50)}


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"input_ids": []}, InvalidRequestError, "prompt"),
        ({"input_ids": [1, VOCAB]}, InvalidRequestError, r"prompt\[1\]"),
        ({"input_ids": [-1]}, InvalidRequestError, r"prompt\[0\]"),
        ({"input_ids": [1, 2, "x"]}, InvalidRequestError, r"prompt\[2\]"),
        ({"input_ids": [True]}, InvalidRequestError, r"prompt\[0\]"),
        ({"input_ids": [1] * 5000}, InvalidRequestError, "5000 tokens; at most 1023"),
        ({"max_new_tokens": -1}, InvalidRequestError, "max_tokens"),
        ({"max_new_tokens": 2.5}, InvalidRequestError, "max_new_tokens"),
        ({"eos_token_id": VOCAB}, InvalidRequestError, "eos_token_ids"),
        ({"eos_token_id": "x"}, InvalidRequestError, "eos_token_id"),
        ({"temperature": -0.1}, InvalidRequestError, "temperature"),
        ({"temperature": float("nan")}, InvalidRequestError, "temperature"),
        ({"temperature": "hot"}, InvalidRequestError, "temperature"),
        ({"top_k": -1}, InvalidRequestError, "top_k"),
        ({"top_p": 0.0}, InvalidRequestError, "top_p"),
        ({"min_p": 1.1}, InvalidRequestError, "min_p"),
        ({"repetition_penalty": 0.0}, InvalidRequestError, "repetition_penalty"),
        ({"presence_penalty": 2.1}, InvalidRequestError, "presence_penalty"),
        ({"frequency_penalty": -2.1}, InvalidRequestError, "frequency_penalty"),
        ({"logit_bias": {VOCAB: 1.0}}, InvalidRequestError, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, InvalidRequestError, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, InvalidRequestError, "logit_bias"),
        ({"logit_bias": [1]}, InvalidRequestError, "logit_bias"),
        ({"allowed_token_ids": []}, InvalidRequestError, "allowed_token_ids: is empty.* leave it"),
        ({"allowed_token_ids": ()}, InvalidRequestError, "allowed_token_ids: is empty"),
        ({"seed": -1}, InvalidRequestError, "seed"),
        ({"seed": 2**64}, InvalidRequestError, "seed"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, InvalidRequestError, "min_tokens"),
        ({"stop_token_ids": [VOCAB]}, InvalidRequestError, "stop_token_ids"),
        ({"stop_token_ids": [1] * 257}, InvalidRequestError, "stop_token_ids"),
        ({"stop_strings": [""]}, InvalidRequestError, "stop_strings"),
        ({"stop_strings": ["\ud800"]}, InvalidRequestError, "stop_strings"),
        ({"stop_strings": [7]}, InvalidRequestError, "stop_strings"),
        ({"stop_strings": ["x"] * 17}, InvalidRequestError, "stop_strings"),
        ({"stop_strings": ["x"]}, UnsupportedFeatureError, "tokenizer"),
        ({"logprobs": 129}, InvalidRequestError, "logprobs"),
        ({"n": 2, "num_return_sequences": 3}, InvalidRequestError, "n"),
        ({"num_beams": 2}, UnsupportedFeatureError, "num_beams"),
        ({"epsilon_cutoff": 0.1}, UnsupportedFeatureError, "epsilon_cutoff"),
        ({"temprature": 1.0}, InvalidRequestError, "temprature"),
    ],
)
def test_refusals_name_the_field_and_touch_nobody(
    rig: Rig, options: dict[str, Any], error: type[Exception], field: str
) -> None:
    rig.hold()
    rig.manager.add_request([1, 2], request_id="neighbour", max_new_tokens=5)
    with pytest.raises(error, match=field):
        rig.manager.add_request(**{"input_ids": [1], "request_id": "bad", **options})
    rig.let()
    assert result(rig.manager).generated_tokens == expected_tokens([1, 2], 5)
    rig.manager.add_request([5], request_id="bad", max_new_tokens=1)  # the id is free
    assert result(rig.manager, "bad").is_finished()


def test_zero_tokens_process_the_prompt_only(rig: Rig) -> None:
    rig.manager.add_request([1, 2], max_new_tokens=0)
    output = result(rig.manager)
    assert output.generated_tokens == []
    assert output.finish_reason is FinishReason.LENGTH


def test_the_context_ends_a_request() -> None:
    rig = Rig(num_blocks=4, block_size=4)
    rig.manager.start()
    rig.manager.add_request([1] * 10, max_new_tokens=100)
    output = result(rig.manager)
    assert output.generated_tokens == expected_tokens([1] * 10, 6)
    assert output.finish_reason is FinishReason.CONTEXT
    with pytest.raises(InvalidRequestError, match="at most 15 fit"):
        rig.manager.add_request([1] * 16, max_new_tokens=1)
    rig.manager.add_request([1] * 16, max_new_tokens=0)
    assert result(rig.manager).finish_reason is FinishReason.LENGTH
    rig.manager.stop()


def test_sampling_options_need_leave() -> None:
    rig = Rig()
    rig.manager.start()
    with pytest.raises(InvalidRequestError, match="per_request_processors"):
        rig.manager.add_request([1], temperature=0.5)
    with pytest.raises(InvalidRequestError, match="nonsense"):
        rig.manager.add_request([1], nonsense=0.5)
    rig.manager.stop()


def test_a_full_queue_refuses_at_once_with_advice() -> None:
    rig = Rig(max_queue_size=3, max_requests=1)
    rig.hold()
    rig.manager.start()
    rig.manager.add_request([1], request_id="running", max_new_tokens=3)
    rig.wait_for_step()
    for index in range(3):
        assert rig.loop.submit(make_request(f"w{index}", [1], 1)).queue_position == index
    with pytest.raises(QueueFullError, match=r"max_queue_size.* try again in") as caught:
        rig.manager.add_request([1], request_id="late", max_new_tokens=1)
    assert caught.value.retry_after_s > 0
    assert caught.value.limit == 3
    rig.let()
    assert result(rig.manager, "running").is_finished()
    rig.manager.stop()
    rig.manager.start()
    rig.manager.add_request([1], request_id="late", max_new_tokens=1)
    assert result(rig.manager, "late").is_finished()
    rig.manager.stop()


def test_two_thousand_queued(rig: Rig) -> None:
    for index in range(2000):
        rig.manager.add_request([index % VOCAB], request_id=str(index), max_new_tokens=2)
    seen = {}
    for _ in range(2000):
        output = result(rig.manager)
        seen[output.request_id] = output.generated_tokens
    assert seen == {str(i): expected_tokens([i % VOCAB], 2) for i in range(2000)}


# ---- life ------------------------------------------------------------------------------------


def test_stop_drains_and_start_begins_anew(rig: Rig) -> None:
    assert rig.manager.is_running()
    rig.manager.start()  # harmless
    for index in range(30):
        rig.manager.add_request([index], request_id=str(index), max_new_tokens=6)
    rig.manager.stop(timeout=WAIT)
    assert not rig.manager.is_running()
    outputs = {output.request_id: output.generated_tokens for output in rig.manager}
    assert outputs == {str(i): expected_tokens([i], 6) for i in range(30)}
    with pytest.raises(EngineUnavailableError, match="not running"):
        rig.manager.add_request([1])
    rig.manager.start()
    rig.manager.add_request([1], max_new_tokens=2)
    assert result(rig.manager).generated_tokens == expected_tokens([1], 2)


def test_while_it_drains_nothing_is_taken(rig: Rig) -> None:
    rig.hold()
    rig.manager.add_request([1], request_id="a", max_new_tokens=3)
    rig.wait_for_step()
    rig.manager.stop(block=False)
    with pytest.raises(EngineUnavailableError):
        rig.manager.add_request([1])
    with pytest.raises(EngineUnavailableError, match=r"join\(\)"):
        rig.manager.start()
    rig.manager.join(timeout=0.01)
    assert rig.manager.is_running()
    rig.let()
    rig.manager.join(timeout=WAIT)
    assert not rig.manager.is_running()
    assert result(rig.manager).generated_tokens == expected_tokens([1], 3)


def test_abort_ends_everybody_at_once(rig: Rig) -> None:
    rig.hold()
    for name in "abc":
        rig.manager.add_request([1], request_id=name, max_new_tokens=500)
    rig.wait_for_step()
    rig.manager.stop(block=False, hard_stop=True)
    rig.let()
    rig.manager.join(timeout=WAIT)
    outputs = list(rig.manager)
    assert sorted(output.request_id for output in outputs) == ["a", "b", "c"]
    for output in outputs:
        assert output.status is RequestStatus.FAILED
        assert output.error is not None
        assert "stopped" in output.error


def test_before_the_first_start_nobody_hangs() -> None:
    manager = Rig().manager
    assert not manager.is_running()
    assert manager.get_result() is None
    assert list(manager) == []
    with pytest.raises(EngineUnavailableError):
        manager.add_request([1])
    assert not manager.cancel_request("a")
    manager.join()
    manager.stop()


def test_warmup_before_and_while_running(rig: Rig) -> None:
    other = Rig()
    other.manager.warmup()
    assert other.runner.warmups == 1
    rig.manager.warmup()
    rig.manager.add_request([1], max_new_tokens=1)
    assert result(rig.manager).is_finished()
    assert rig.runner.warmups == 1


def test_a_manager_that_no_model_made_is_not_kept(rig: Rig) -> None:
    with pytest.raises(UnsupportedFeatureError, match="keep_for_next_session"):
        rig.manager.stop(keep_for_next_session=True)


# ---- attributes ------------------------------------------------------------------------------


def test_the_number_of_choices_may_be_set(rig: Rig) -> None:
    assert rig.manager.num_return_sequences == 1
    rig.manager.num_return_sequences = 2
    assert rig.manager.num_return_sequences == 2
    name = rig.manager.add_request([3], max_new_tokens=4)
    outputs = [result(rig.manager, choice_name(name, choice)) for choice in range(2)]
    assert [output.choice for output in outputs] == [0, 1]
    assert all(len(output.generated_tokens) == 4 for output in outputs)
    rig.manager.add_request([3], request_id="own", max_new_tokens=4, n=1)
    assert result(rig.manager, "own").generated_tokens == expected_tokens([3], 4)
    assert rig.manager.get_result(timeout=0) is None


@pytest.mark.parametrize("number", [0, 129, 1.5, True, None])
def test_a_number_of_choices_that_is_none_is_refused(rig: Rig, number: Any) -> None:
    with pytest.raises(InvalidRequestError, match="num_return_sequences: is"):
        rig.manager.num_return_sequences = number
    assert rig.manager.num_return_sequences == 1


def test_no_attribute_is_set_to_no_effect(rig: Rig) -> None:
    manager: Any = rig.manager
    with pytest.raises(AttributeError, match="do_sample"):
        manager.do_sample = True


# ---- failures of the loop itself -------------------------------------------------------------


class BrokenScheduling:
    """Makes the scheduler raise, as a bug of ours would."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        original = rig.core.scheduler.schedule

        def schedule(now: float, **options: Any) -> ScheduledBatch | None:
            if self.left:
                self.left -= 1
                self.entered.release()
                assert self.gate.acquire(timeout=WAIT)
                raise RuntimeError("a bug")
            return original(now, **options)

        monkeypatch.setattr(rig.core.scheduler, "schedule", schedule)


def test_a_bug_in_the_loop_ends_the_living_and_the_loop_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = BrokenScheduling(rig, monkeypatch, 1)
    bug.gate.release()
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    output = result(rig.manager, "a")
    assert output.status is RequestStatus.FAILED
    assert output.error is not None
    assert "a bug" not in output.error
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    assert result(rig.manager, "a").generated_tokens == expected_tokens([1], 2)


def test_death_ends_every_accepted_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were accepted while the last step failed, and stand in the inbox."""
    rig = Rig()
    bug = BrokenScheduling(rig, monkeypatch, 3)
    rig.manager.start()
    for turn in range(3):
        rig.manager.add_request([1], request_id=f"a{turn}", max_new_tokens=2)
        assert bug.entered.acquire(timeout=WAIT)
        if turn < 2:
            bug.gate.release()
            assert result(rig.manager, f"a{turn}").status is RequestStatus.FAILED
    rig.manager.add_request([1], request_id="inbox", max_new_tokens=2)
    bug.gate.release()
    rig.manager.join(timeout=WAIT)
    assert not rig.manager.is_running()
    assert isinstance(rig.manager.failure, RuntimeError)
    outputs = {output.request_id: output for output in rig.manager}
    assert sorted(outputs) == ["a2", "inbox"]
    assert all(output.status is RequestStatus.FAILED for output in outputs.values())
    with pytest.raises(EngineUnavailableError, match="failed"):
        rig.manager.add_request([1])
    with pytest.raises(EngineUnavailableError, match="failed"):
        rig.manager.start()
    assert rig.manager.get_result() is None


def test_a_core_that_cannot_end_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    bug = BrokenScheduling(rig, monkeypatch, 1)

    def broken(message: str, *, retryable: bool) -> None:
        raise RuntimeError("worse")

    monkeypatch.setattr(rig.core, "fail_all", broken)
    rig.manager.start()
    rig.manager.add_request([1], request_id="a", max_new_tokens=2)
    bug.gate.release()
    assert result(rig.manager, "a").status is RequestStatus.FAILED
    rig.manager.join(timeout=WAIT)
    assert rig.manager.failure is not None


def test_failing_steps_fail_their_batches(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    rig.hold()
    rig.manager.add_request([1], request_id="a", max_new_tokens=4)
    rig.wait_for_step()
    runner: FakeRunner = rig.runner
    runner.fail = 1
    rig.let()
    output = result(rig.manager, "a")
    assert output.status is RequestStatus.FAILED
    assert output.error is not None
    assert "scripted" not in output.error
    rig.manager.add_request([1], request_id="b", max_new_tokens=4)
    assert result(rig.manager, "b").generated_tokens == expected_tokens([1], 4)


def test_an_unsampleable_request_fails_alone(rig: Rig) -> None:
    rig.runner.invalid = {RequestId("bad")}
    rig.hold()
    rig.manager.add_request([1], request_id="bad", max_new_tokens=4)
    rig.manager.add_request([2], request_id="good", max_new_tokens=4)
    rig.let()
    bad = result(rig.manager, "bad")
    assert bad.status is RequestStatus.FAILED
    assert bad.error is not None
    assert "finite logits" in bad.error
    assert result(rig.manager, "good").generated_tokens == expected_tokens([2], 4)
