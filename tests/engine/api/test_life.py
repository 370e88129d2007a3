"""What ends a manager besides `stop`: nobody refers to it, the interpreter ends, a fork."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import from_model
from engine.api.results import GenerationOutput
from engine.contract.config import ContinuousBatchingConfig
from tests.engine.fake_runner import expected_tokens
from tests.engine.rig import WAIT, Rig
from tests.tiny_models import FAMILIES, make_model

ROOT = Path(__file__).parents[3]


def run(script: str) -> list[str]:
    """The lines that a script prints; it must end in good order and say nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


# ---- nobody refers to it ---------------------------------------------------------------------


def test_dropped_managers_end_their_threads_and_free_their_caches() -> None:
    model = from_model(make_model(FAMILIES["llama"]()))
    config = ContinuousBatchingConfig(num_blocks=8, block_size=16)

    def start() -> tuple[weakref.ref[ContinuousBatchingManager], weakref.ref[object], object]:
        manager = model.init_continuous_batching(continuous_batching_config=config)
        manager.start()
        manager.add_request([5, 6, 7], max_new_tokens=100, streaming=True)
        assert manager.get_result(timeout=WAIT) is not None
        runner = manager._loop._core.runner
        return weakref.ref(manager), weakref.ref(runner.kv.caches[0].keys), manager._loop._thread

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            manager, cache, thread = start()
            assert manager() is None
            thread.join(WAIT)
            assert not thread.is_alive()
            assert cache() is None
    finally:
        gc.enable()


async def test_what_a_dropped_manager_had_accepted_ends() -> None:
    seen: asyncio.Queue[GenerationOutput] = asyncio.Queue()
    rig = Rig()
    rig.hold()
    rig.manager.start()
    rig.manager.add_request([1], request_id="a", max_new_tokens=500)
    rig.manager.register_result_handler("a", seen.put_nowait)
    thread = rig.loop._thread
    assert thread is not None
    rig.wait_for_step()
    del rig.manager
    rig.let()
    output = await asyncio.wait_for(seen.get(), WAIT)
    assert output.error is not None
    assert "stopped before" in output.error
    await asyncio.to_thread(thread.join, WAIT)
    assert not rig.loop.is_running()
    rig.kv_cache.check_integrity()
    assert rig.kv_cache.num_used_blocks == 0


def test_a_manager_that_is_to_be_kept_is_not_dropped() -> None:
    model = from_model(make_model(FAMILIES["llama"]()))
    config = ContinuousBatchingConfig(num_blocks=8, block_size=16)

    def manager() -> ContinuousBatchingManager:
        return model.init_continuous_batching(continuous_batching_config=config)

    first = manager()
    first.start()
    first.add_request([5, 6, 7], request_id="a", max_new_tokens=100)
    thread, one = first._loop._thread, weakref.ref(first)
    first.stop(block=False, keep_for_next_session=True)  # it goes on until the request is complete
    del first
    assert thread is not None
    thread.join(WAIT)
    again = manager()
    assert again is one()
    output = again.get_result("a")
    assert output is not None
    assert len(output.generated_tokens) == 100


def test_who_waits_for_a_result_refers_to_it() -> None:
    rig = Rig()
    rig.manager.start()
    rig.manager.add_request([1], request_id="a", max_new_tokens=50, streaming=True)
    outputs = rig.manager.request_id_iter("a")
    del rig.manager
    assert [len(output.generated_tokens) for output in outputs] == list(range(1, 51))
    thread = rig.loop._thread
    del outputs
    assert thread is not None
    thread.join(WAIT)
    assert not rig.loop.is_running()


# ---- the interpreter ends --------------------------------------------------------------------


def test_the_thread_ends_before_the_interpreter() -> None:
    """Otherwise a step that asks for the interpreter afterwards aborts the process."""
    lines = run(
        """
        import atexit, threading
        from tests.engine.rig import Rig

        rig = Rig()
        atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
        rig.manager.start()
        rig.manager.add_request([1], request_id="a", max_new_tokens=900, streaming=True)
        print(rig.manager.get_result("a", timeout=20).generated_tokens)
        """
    )
    assert lines == [str(expected_tokens([1], 1)), "['MainThread']"]


def test_a_script_may_end_in_the_middle_of_a_models_step() -> None:
    assert run(
        """
        import torch
        from engine.api.offline import from_model
        from tests.tiny_models import FAMILIES, make_model

        torch.set_num_threads(1)
        manager = from_model(make_model(FAMILIES["llama"]())).init_continuous_batching()
        manager.start()
        manager.add_request([5, 6, 7], max_new_tokens=400, streaming=True)
        print(len(manager.get_result(timeout=20).generated_tokens))
        """
    ) == ["1"]


def test_a_pause_that_nobody_ends_does_not_keep_the_process() -> None:
    assert run(
        """
        import threading
        from tests.engine.rig import Rig

        rig = Rig()
        rig.manager.start()
        rig.manager.add_request([1], request_id="a", max_new_tokens=900)
        entered = threading.Event()

        def stay():
            with rig.manager.pause():
                entered.set()
                threading.Event().wait()

        threading.Thread(target=stay, daemon=True).start()
        print(entered.wait(20))
        """
    ) == ["True"]


# ---- a fork ----------------------------------------------------------------------------------


FORK = """
    import os, sys, threading, time
    from engine.contract.errors import EngineUnavailableError
    from tests.engine.rig import Rig

    rig = Rig()
    manager = rig.manager
    manager.start()
    manager.add_request([1], request_id="a", max_new_tokens=900, streaming=True)
    assert manager.get_result("a", timeout=20)
    held, done = threading.Event(), threading.Event()

    def hold_all_locks():
        with manager._loop._changed, manager._router._changed, manager._lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold_all_locks)
    holder.start()
    held.wait()
    child = os.fork()
    if child:
        done.set()
        holder.join()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), manager.is_running())
        manager.stop(hard_stop=True)
        sys.exit()
"""


def test_in_a_fork_a_manager_says_that_it_does_not_run_there() -> None:
    lines = run(
        FORK
        + """
    def enter():
        with manager.pause():
            pass

    for call in (
        lambda: manager.get_result("a", timeout=60),
        lambda: next(iter(manager)),
        lambda: manager.add_request([1]),
        lambda: manager.add_request([1], request_id="b"),
        lambda: manager.add_requests([[1]]),
        lambda: manager.cancel_request("a"),
        lambda: manager.finish_request("a", 1),
        lambda: manager.register_result_handler("a", print),
        manager.start,
        manager.warmup,
        manager.reset_prefix_cache,
        manager.new_name,
        enter,
    ):
        try:
            call()
        except EngineUnavailableError as error:
            assert f"process {os.getppid()}" in str(error), error
        else:
            raise AssertionError(call)
    manager.stop()
    manager.join()
    print(manager.is_running(), flush=True)
    other = Rig().manager
    other.start()
    other.add_request([2], request_id="b", max_new_tokens=3)
    print(other.get_result("b", timeout=20).generated_tokens)
    """
    )
    assert lines == ["False", str(expected_tokens([2], 3)), "0 True"]


def test_a_fork_that_drops_the_manager_ends_in_good_order() -> None:
    assert run(FORK + "    del manager, rig.manager, rig\n") == ["0 True"]


def test_a_manager_that_did_not_run_may_be_started_in_a_fork() -> None:
    assert run(
        """
        import os, sys
        from tests.engine.rig import Rig

        manager = Rig().manager
        manager.start()
        manager.stop()
        child = os.fork()
        manager.start()
        manager.add_request([2], request_id="b", max_new_tokens=3)
        tokens = manager.get_result("b", timeout=20).generated_tokens
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(tokens, flush=True)
        """
    ) == [str(expected_tokens([2], 3)), "0", str(expected_tokens([2], 3))]


def test_a_fork_within_a_pause_leaves_it_to_its_parent() -> None:
    assert run(
        """
        import os
        from tests.engine.rig import Rig

        manager = Rig().manager
        manager.start()
        manager.add_request([2], request_id="b", max_new_tokens=300)
        with manager.pause():
            child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            print(len(manager.get_result("b", timeout=20).generated_tokens))
        """
    ) == ["0", "300"]
