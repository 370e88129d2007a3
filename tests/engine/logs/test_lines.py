"""Lines of a pipe, of sys.stderr, and of another process' records."""

from __future__ import annotations

import logging
import os
import sys

import pytest

from engine.logs import hooks, records
from engine.logs.lines import MAX_LINE_BYTES, LineReader, LineWriter, open_pipe

WAIT_S = 30.0


def test_a_pipe_is_read_to_its_end() -> None:
    found: list[str] = []
    reading, writing = open_pipe()
    reader = LineReader(reading, found.append)
    os.write(writing, b"one\n\ntw")
    os.set_blocking(writing, True)
    os.write(writing, b"o\n\xff\n" + b"y" * MAX_LINE_BYTES + b"yyy")
    os.write(writing, b"\nlast words")
    os.close(writing)
    reader.join(WAIT_S)
    assert found[:3] == ["one", "two", "\\xff"]
    assert "".join(found[3:-1]) == "y" * (MAX_LINE_BYTES + 3)
    assert max(map(len, found)) <= MAX_LINE_BYTES
    assert found[-1] == "last words"


def test_whoever_writes_to_a_pipe_that_nobody_reads_does_not_wait() -> None:
    reading, writing = open_pipe()
    taken = os.write(writing, b"a line\n" * 100_000)
    assert 0 < taken < 700_000
    with pytest.raises(BlockingIOError):
        os.write(writing, b"a line\n" * 1000)
    os.close(reading)
    os.close(writing)


def test_text_is_handed_on_by_lines() -> None:
    found: list[str] = []
    stream = LineWriter(found.append)
    stream.write("one\ntwo\n")
    stream.write("thr")
    stream.write("ee\n\n")
    stream.write("z" * (MAX_LINE_BYTES + 1))  # a bar that never ends its line
    stream.flush()
    assert found == ["one", "two", "three", "z" * (MAX_LINE_BYTES + 1)]
    assert not stream.isatty()


def test_a_record_travels() -> None:
    try:
        raise ValueError("line\nbreak \ud800")
    except ValueError:
        record = logging.LogRecord(
            "engine.core.engine_core",
            logging.ERROR,
            "core.py",
            7,
            "%s\nof %d",
            ("a\ud800", 2),
            sys.exc_info(),
        )
    line = records.encode(record)
    assert "\n" not in line
    read = records.decode(line, "engine")
    assert (read.name, read.levelno, read.lineno) == ("engine.core.engine_core", logging.ERROR, 7)
    assert read.getMessage() == "a\\ud800\nof 2"
    assert read.created == record.created
    assert read.processName == "engine"
    assert read.exc_text is not None
    assert read.exc_text.startswith("Traceback")
    assert read.exc_text.endswith("ValueError: line\nbreak \\ud800")


@pytest.mark.parametrize(
    "line", ["E0000 a native library: trouble", "\x1enot json", '\x1e{"a": 1}', "x" * 10_000]
)
def test_any_other_line_is_a_warning(line: str) -> None:
    read = records.decode(line, "engine")
    assert (read.name, read.levelno) == ("stderr", logging.WARNING)
    assert len(read.getMessage()) < records.MAX_MESSAGE + 50
    assert read.getMessage()[:5] == line.lstrip("\x1e")[:5]


def test_the_longest_texts_keep_their_ends() -> None:
    assert records.cut("short", 5) == "short"
    assert records.cut("a" * 100 + "b" * 900, 8) == "aa … (992 characters) … bbbbbb"


def test_what_python_writes_by_itself_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    import threading
    import warnings

    found: list[str] = []
    former = sys.stderr, threading.excepthook, sys.unraisablehook, warnings.showwarning

    class Broken:
        def __del__(self) -> None:
            raise ValueError("in a finalizer")

    def fail() -> None:
        raise ValueError("in a thread")

    with hooks.install(found.append):
        sys.stderr.write("printed\n")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(False)
            logging.captureWarnings(True)
            warnings.warn("take care", stacklevel=1)
        thread = threading.Thread(target=fail, name="worker")
        thread.start()
        thread.join()
        broken = Broken()
        del broken
    assert found == ["printed"]
    assert "take care" in caplog.text
    assert "the thread worker ends with an exception" in caplog.text
    assert "in a finalizer" in caplog.text
    assert (sys.stderr, threading.excepthook, sys.unraisablehook, warnings.showwarning) == former
