"""Files that change while they are being read."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from engine.contract.errors import ConfigError
from service.door.watched_files import WatchedFiles
from tests.service.helpers import until


class Restless:
    """Reads a pair of files, and writes to the second one in between for a while."""

    def __init__(self, folder: Path, changes: int) -> None:
        self.first, self.second = folder / "1", folder / "2"
        self.first.write_text("0")
        self.second.write_text("0")
        self.changes = changes
        self.reads = 0

    def load(self) -> tuple[str, str]:
        first = self.first.read_text()
        if self.changes:
            self.changes -= 1
            for path in (self.first, self.second):
                path.write_text(path.read_text() + "+")
        self.reads += 1
        return first, self.second.read_text()

    def watched(self) -> WatchedFiles[tuple[str, str]]:
        return WatchedFiles("files", (str(self.first), str(self.second)), self.load)


def test_what_is_read_stood_there_at_one_time(tmp_path: Path) -> None:
    files = Restless(tmp_path, changes=2)
    watched = files.watched()
    assert watched.current() == ("0++", "0++")
    assert files.reads == 3
    assert watched.current() is watched.current()
    assert files.reads == 3


def test_files_that_do_not_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="change while"):
        Restless(tmp_path, changes=3).watched()
    files = Restless(tmp_path, changes=0)
    watched = files.watched()
    files.changes = 3
    files.first.write_text("1")
    assert watched.current() == ("0", "0")
    assert "files stay as they were: " in caplog.text
    assert watched.current() == ("1+++", "0+++")  # though nothing has changed since


def test_files_are_read_when_somebody_asks_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = Restless(tmp_path, changes=0)
    watched = files.watched()
    assert files.reads == 1
    watched.reload()
    assert files.reads == 2
    assert "files were read again" in caplog.text


async def test_a_thread_reads_what_has_changed_and_the_loop_goes_on(tmp_path: Path) -> None:
    files = Restless(tmp_path, changes=0)
    begun, goes_on = threading.Event(), threading.Event()

    def load() -> tuple[str, str]:
        begun.set()
        assert goes_on.wait(30)
        return files.load()

    goes_on.set()
    watched = WatchedFiles("files", (str(files.first), str(files.second)), load)
    begun.clear()
    goes_on.clear()
    files.first.write_text("1")
    waiting = [asyncio.create_task(watched.fresh()) for _ in range(3)]
    waiting[0].cancel()  # which is nothing to the others
    assert await asyncio.to_thread(begun.wait, 30)
    assert watched.last == ("0", "0")
    goes_on.set()
    assert [await one for one in waiting[1:]] == [("1", "0")] * 2
    assert files.reads == 2
    assert await watched.fresh() is watched.last
    watched.begin_reload()
    await watched.fresh()
    assert files.reads == 3


async def test_who_asks_while_files_are_read_has_them_read_once_more(tmp_path: Path) -> None:
    files = Restless(tmp_path, changes=0)
    begun, goes_on = threading.Event(), threading.Event()

    def load() -> tuple[str, str]:
        found = files.load()
        begun.set()
        assert goes_on.wait(30)
        return found

    goes_on.set()
    watched = WatchedFiles("files", (str(files.first), str(files.second)), load)
    begun.clear()
    goes_on.clear()
    watched.begin_reload()
    assert await asyncio.to_thread(begun.wait, 30)
    for _ in range(1000):
        watched.begin_reload()
    goes_on.set()
    await until(lambda: watched._reading is None)
    assert files.reads == 3


async def test_a_thread_that_cannot_be_started_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Restless(tmp_path, changes=0)
    watched = files.watched()
    files.first.write_text("1")

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert await watched.fresh() == ("0", "0")
    assert "files stay as they were: can't start new thread" in caplog.text
    assert await watched.fresh() == ("1", "0")


def test_another_file_of_the_same_size_and_time_is_read(tmp_path: Path) -> None:
    files = Restless(tmp_path, changes=0)
    watched = files.watched()
    times = files.first.stat()
    other = tmp_path / "other"
    other.write_text("1")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(files.first)
    assert watched.current() == ("1", "0")
