"""Pools that never start a thread later."""

from __future__ import annotations

import threading

import pytest

from service.door.thread_pool import started_pool
from tests.service.door.health import SERVING, check, target_of
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import serving, spec


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_all_threads_are_there_and_work_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started_pool(3, "some")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    met = threading.Barrier(3)
    waits = [pool.submit(met.wait, 30) for _ in range(3)]
    assert sorted(one.result(30) for one in waits) == [0, 1, 2]
    pool.shutdown()


def test_a_thread_that_is_refused_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start, number = threading.Thread.start, iter(range(9))
    monkeypatch.setattr(
        threading.Thread, "start", lambda one: (start if next(number) < 2 else refuse)(one)
    )
    with pytest.raises(RuntimeError, match="new thread"):
        started_pool(3, "refused")
    for thread in threading.enumerate():
        if thread.name.startswith("refused"):
            thread.join(30)
            assert not thread.is_alive()


async def test_long_texts_and_checks_need_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(script=says("x"))
    async with serving(engine, health_listen="127.0.0.1:0") as h:
        assert check(target_of(h)) == SERVING  # gRPC has what it needs by now

        def refuse_ours(self: threading.Thread) -> None:
            if self.name.startswith("headrace-"):
                refuse(self)
            start(self)

        start = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", refuse_ours)
        for _ in range(4):
            assert (await h.generate(spec("a" * 1500))).choices[0].text == "x"
            assert check(target_of(h)) == SERVING
