"""A queue of lines before a file that nobody reads, or that cannot be written."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator

import pytest

from engine.logs import queue
from engine.logs.queue import LogQueue

WAIT_S = 30.0


class Pipe:
    """A pipe, and what was read from it."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, 4096)

    def read(self, until: bytes) -> bytes:
        """All up to something."""
        found = b""
        while until not in found:
            chunk = os.read(self.reading, 4096)
            assert chunk, found
            found += chunk
        return found


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.reading)  # whoever still writes is told so
    os.close(made.writing)


def notice(count: int) -> str:
    return f"<{count} dropped>"


def test_lines_are_written_in_order(pipe: Pipe) -> None:
    lines = LogQueue(pipe.writing, notice)
    for number in range(100):
        lines.put(f"line {number}")
    lines.put("half a character: \ud800")
    assert lines.flush(WAIT_S)
    written = pipe.read(b"half").split(b"\n")
    assert written[:100] == [b"line %d" % number for number in range(100)]


@pytest.mark.parametrize("bound", [{"max_lines": 10}, {"max_bytes": 10 * 6}])
def test_what_a_full_queue_drops_is_said_in_its_place(pipe: Pipe, bound: dict[str, int]) -> None:
    os.write(pipe.writing, b"-" * 4096)  # full: nothing is written from here on
    lines = LogQueue(pipe.writing, notice, **bound)
    for number in range(25):
        lines.put(f"{number:05d}")
    assert not lines.flush(0.01)
    assert pipe.read(b"dropped>\n") == (
        b"-" * 4096 + b"".join(b"%05d\n" % number for number in range(10)) + b"<15 dropped>\n"
    )
    lines.put("later")
    assert pipe.read(b"later\n") == b"later\n"
    assert lines.flush(WAIT_S)


def test_lines_that_cannot_be_written_are_counted(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full for a while."""
    room = False

    def write(fd: int, data: bytes) -> None:
        if not room:
            raise OSError(errno.ENOSPC, "no space")
        os.write(fd, data)

    monkeypatch.setattr(queue, "_write_all", write)
    lines = LogQueue(pipe.writing, notice)
    for number in range(3):
        lines.put(f"lost {number}")
    assert lines.flush(WAIT_S)
    room = True
    lines.put("there")
    assert lines.flush(WAIT_S)
    assert pipe.read(b"there\n") == b"<3 dropped>\nthere\n"


def test_nobody_is_told_of_a_reader_that_has_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    lines = LogQueue(writing, notice)
    for _ in range(queue.MAX_LINES):
        lines.put("for nobody")
    assert lines.flush(WAIT_S)
    os.close(writing)


def test_a_file_that_somebody_made_non_blocking_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.writing, False)
    os.write(pipe.writing, b"-" * 4096)
    lines = LogQueue(pipe.writing, notice)
    lines.put("x" * 10_000)
    assert not lines.flush(0.01)
    assert pipe.read(b"x\n") == b"-" * 4096 + b"x" * 10_000 + b"\n"
