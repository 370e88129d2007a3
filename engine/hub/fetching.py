"""Downloads the files of a model that are used, and no others.

    find, or ask ─▶ what will come, room on the disk ─▶ small files ─▶ the config is checked
         ─▶ weights, four at a time ─▶ each one's digest ─▶ names in the snapshot

huggingface_hub deletes partial files when a download is interrupted. This module therefore uses its
client and its directories, but receives the bytes itself. DIGEST.incomplete grows, can be continued
by any later process, and is renamed once its digest is correct.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from engine.contract.errors import DownloadError
from engine.contract.startup import DOWNLOAD, Transfer, enter, size_text
from engine.hub import cache
from engine.hub.cache import HubId
from engine.hub.repository import (
    INDEX,
    HubFile,
    Listing,
    ask,
    explained,
    gguf_file,
    retry_after_s,
    small_files,
    weight_files,
)

_AT_ONCE = 4
_CHUNK = 1 << 18
_TELL_S, _RATE_OVER = 0.5, 20
"""The seconds between two lines of progress, and the number of lines over which the rate is
measured.
"""
_MOST_OVER_HTTP = constants.MAX_HTTP_DOWNLOAD_SIZE
_PARTIAL_CONTENT = 206
_AGAIN = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which a call is retried."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHA256 = 64
_T = TypeVar("_T")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to keep trying when the hub fails.

    Attributes:
        tries: the maximum number of consecutive tries that bring no bytes.
        first_s: the first wait in seconds, which doubles up to 8 s.
        most_s: the longest wait, in seconds, that the hub may ask for.
    """

    tries: int = 5
    first_s: float = 0.5
    most_s: float = 300.0


_PATIENCE = Patience()


def fetch(
    model: HubId,
    progress: Progress,
    *,
    needs_weights: bool = True,
    check: Callable[[Path], object] | None = None,
    patience: Patience = _PATIENCE,
) -> Path:
    """Download the missing files of a model.

    Args:
        model: the model to download.
        progress: receives a line for each stage, and `Transfer`s during the download.
        needs_weights: whether to download the weights; if False, only the small files. A GGUF file
            comes in either case.
        check: called with the directory before the weights are downloaded, or with a GGUF file once
            it is here; may refuse the model.
        patience: how long to keep trying when the hub fails.

    Returns:
        The model's directory, or its GGUF file.

    Raises:
        DownloadError: the download failed; the error gives the cause and what to do.
    """
    enter(progress, DOWNLOAD)
    ours = _Fetching(model, progress, patience)
    with explained(model), _writing(model):
        return ours.run(ours.patient(lambda: ask(model)), needs_weights, check)


class _writing:
    """Converts disk errors into DownloadErrors."""

    def __init__(self, model: HubId) -> None:
        self._model = model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, HTTPError | OfflineModeIsEnabled):
            return
        where = cache.cache_folder()
        if error.errno in _FULL:
            raise DownloadError(
                "disk_full",
                f"the disk of {where} is full: free some (headrace-server models says what is "
                f"there), or set HF_HOME to a directory on another one; what has come of "
                f"{self._model} stays, and is continued",
            ) from error
        raise DownloadError(
            "cannot_write",
            f"{where} cannot be written ({error.strerror or error}): set HF_HOME to a directory "
            "that can",
        ) from error


class _Fetching:
    """The download of one model."""

    def __init__(self, model: HubId, progress: Progress, patience: Patience) -> None:
        self._model = model
        self._tell = progress
        self._patience = patience
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._commit = ""

    def run(
        self, listing: Listing, needs_weights: bool, check: Callable[[Path], object] | None
    ) -> Path:
        model, self._commit = self._model, listing.commit
        first = small_files(model, listing)
        then: list[HubFile] = []
        snapshot = found = model.folder / "snapshots" / listing.commit
        if model.file:  # which has the config, too
            first += weight_files(model, listing, b"")
            found = snapshot / gguf_file(model, listing)
        elif needs_weights:
            then = weight_files(model, listing, self._index(listing))
        (model.folder / "blobs").mkdir(parents=True, exist_ok=True)
        waits = lambda: self._tell(f"another process downloads {model}; waiting for it")  # noqa: E731
        with cache.fetching(model, waits):
            self._announce([*first, *then], listing)
            self._bring(first, snapshot)
            if check is not None:
                self._tell("checking whether it can be served")
                check(found)
            self._bring(then, snapshot)
            names = [file.name for file in (*first, *then)]
            cache.mark(model, listing.commit, names if needs_weights else [])
        return found

    def _index(self, listing: Listing) -> bytes:
        file = listing.files.get(INDEX)
        if file is None:
            return b""
        blob = self._blob(file)
        if blob.exists():
            return blob.read_bytes()
        content = io.BytesIO()
        self._receive(file, content)
        self._done = 0
        return content.getvalue()

    def _blob(self, file: HubFile) -> Path:
        return self._model.folder / "blobs" / file.digest

    def _announce(self, files: list[HubFile], listing: Listing) -> None:
        """Report what will be downloaded, or refuse it if the disk has no room."""
        model = self._model
        self._total = sum(file.size for file in files)
        for file in files:
            blob = self._blob(file)
            partial = _partial(blob)
            if blob.exists():
                self._done += file.size
            elif partial.exists():
                self._done += min(partial.stat().st_size, file.size)
            elif file.size > _MOST_OVER_HTTP:
                raise DownloadError(
                    "too_large",
                    f"{file.name} of {model} has {size_text(file.size)}, and the hub gives at most "
                    f"{size_text(_MOST_OVER_HTTP)} over HTTP: fetch it by `hf download "
                    f"{model.repo}`, and serve it then",
                )
        free = shutil.disk_usage(model.folder).free
        missing = self._total - self._done
        if not missing:
            return
        self._tell(
            f"downloading {model} ({listing.commit[:12]}): {len(files)} files, "
            f"{size_text(self._total)}; licence: {listing.licence or 'not stated'} ({model.page})"
        )
        here = f"; {size_text(self._done)} of it is here" if self._done else ""
        self._tell(f"into {cache.cache_folder()}: {size_text(free)} free{here}")
        if missing > free:
            raise DownloadError(
                "no_room",
                f"{model} takes {size_text(missing)} more, and {size_text(free)} are free in "
                f"{cache.cache_folder()}: free some (headrace-server models says what is there, "
                "and rm removes it), or set HF_HOME to a directory on another disk",
            )

    def _bring(self, files: Iterable[HubFile], path: Path) -> None:
        """Download the missing files, and link all files under their names."""
        files = list(files)
        missing = {file.digest: file for file in files if not self._blob(file).exists()}
        pool = ThreadPoolExecutor(_AT_ONCE, "headrace-download")
        futures = [pool.submit(self._fetch, file) for file in missing.values()]
        began, seen = time.monotonic(), deque([(time.monotonic(), self._done)], _RATE_OVER)
        try:
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, _TELL_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                now, first = time.monotonic(), seen[0]
                seen.append((now, self._done))
                rate = (self._done - first[1]) / max(now - first[0], 1e-3)
                self._tell(Transfer(self._done, self._total, now - began, rate))
        finally:  # a thread may wait for a hub that is silent
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop = threading.Event()
        for file in files:
            cache.link(self._blob(file), path / file.name)

    def _fetch(self, file: HubFile) -> None:
        blob = self._blob(file)
        with _partial(blob).open("a+b") as out:
            try:
                self._receive(file, out)
            except DownloadError as error:
                if error.cause == "damaged":
                    os.unlink(out.name)
                raise
            out.flush()
            os.fsync(out.fileno())
        _partial(blob).rename(blob)

    def _receive(self, file: HubFile, out: BinaryIO) -> None:
        """Receive the missing rest of a file, and check the whole file."""
        stop = self._stop
        seen = _Seen(file, out)
        while seen.size < file.size:
            before = seen.size
            self.patient(lambda: self._stream(seen, stop), lambda: seen.size)
            if stop.is_set():
                raise DownloadError("stopped", "the download was stopped")
            if seen.size == before:
                raise self._damaged(file, f"ended after {before:,} of {file.size:,} bytes")
        if seen.digest() != file.digest:
            raise self._damaged(
                file, "is not the file that the hub has announced: its digest differs"
            )

    def _damaged(self, file: HubFile, what: str) -> DownloadError:
        return DownloadError(
            "damaged",
            f"{file.name} of {self._model} {what}; what has come of it is deleted: try again, and "
            "look for a proxy that changes what comes",
        )

    def _stream(self, seen: _Seen, stop: threading.Event) -> None:
        """Receive as much of the rest of a file as one response provides."""
        file = seen.file
        model = self._model
        url = f"{model.page}/resolve/{self._commit}/{quote(file.name)}"
        headers = build_hf_headers(library_name="headrace")
        headers["Accept-Encoding"] = "identity"
        if seen.size:
            headers["Range"] = f"bytes={seen.size}-"
        # The client follows redirects, and leaves the token out where they go to another host.
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as answer:
            hf_raise_for_status(answer)
            if seen.size:
                place = answer.headers.get("Content-Range", "")
                if answer.status_code != _PARTIAL_CONTENT:  # the whole comes again
                    self._count(-seen.size)
                    seen.restart()
                elif not place.startswith(f"bytes {seen.size}-"):
                    raise self._damaged(file, f"was continued at another place ({place[:50]!r})")
            for chunk in answer.iter_bytes(_CHUNK):
                if stop.is_set():
                    return
                if seen.size + len(chunk) > file.size:
                    raise self._damaged(file, f"has more than its {file.size:,} bytes")
                seen.add(chunk)
                self._count(len(chunk))

    def _count(self, number: int) -> None:
        with self._lock:
            self._done += number

    def patient(self, call: Callable[[], _T], gained: Callable[[], int] = lambda: 0) -> _T:
        """Make a call, and retry it if the hub asks for that or the connection fails.

        Args:
            call: the call to make.
            gained: returns how many bytes a failed call has received. While there are some, the
                call is retried.
        """
        tries, before = 0, 0
        while True:
            try:
                return call()
            except OfflineModeIsEnabled:
                raise
            except HTTPError as error:
                response: Any = getattr(error, "response", None)
                if isinstance(error, HfHubHTTPError) and response.status_code not in _AGAIN:
                    raise
                now = gained()
                tries, before = (0 if now > before else tries + 1), now
                asked = retry_after_s(error)
                if tries >= self._patience.tries or (asked or 0) > self._patience.most_s:
                    raise
                pause = min(self._patience.first_s * 2**tries, 8.0) if asked is None else asked
                if pause > 1:
                    self._tell(
                        f"the hub does not answer as it should; trying again in {pause:.0f} s"
                    )
                self._stop.wait(pause)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


class _Seen:
    """The received bytes of a file, and their digest so far. `out` is open for appending and
    reading.
    """

    def __init__(self, file: HubFile, out: BinaryIO) -> None:
        self.file = file
        self._out = out
        self.size = 0
        self._hash = self._new()
        out.seek(0)
        while chunk := out.read(_CHUNK):
            self._hash.update(chunk)
            self.size += len(chunk)
        if self.size > file.size:
            self.restart()

    def _new(self) -> Any:
        if len(self.file.digest) == _SHA256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.file.size, usedforsecurity=False)  # as git does

    def restart(self) -> None:
        """Discard everything received so far."""
        self._out.seek(0)
        self._out.truncate()
        self.size, self._hash = 0, self._new()

    def add(self, chunk: bytes) -> None:
        """Append a chunk."""
        self._out.write(chunk)
        self._hash.update(chunk)
        self.size += len(chunk)

    def digest(self) -> str:
        """Return the digest of all bytes, in hexadecimal digits."""
        return str(self._hash.hexdigest())
