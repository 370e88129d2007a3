"""A hub on loopback that speaks what huggingface_hub's client asks of the real one, and fails in
the ways that hubs, proxies and networks do.

    python tests/engine/hub/loopback_hub.py models/demo --rate 50e6

serves a directory as `org/tiny`, with that many bytes a second; it prints its URL, for HF_ENDPOINT.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE = 1 << 20
_PIECE = 1 << 16


@dataclass
class Repository:
    """What the hub has. `content`: bytes by name; of a large file, `.safetensors`, the listing has
    the SHA-256, as of files in git-lfs.
    """

    files: dict[str, bytes]
    licence: str | None = "apache-2.0"
    announced: dict[str, dict[str, object]] = field(default_factory=dict)
    """What the listing says otherwise than it is."""


@dataclass
class Behaviour:
    """How the hub answers.

    Attributes:
        rate: bytes a second.
        cut_after: bytes of an answer after which the connection is closed, one for each answer with
            weights.
        refuse, refuse_files: (status, headers) for calls of the API, and for files: one each, then
            all is well.
        ignores_range: the whole file comes again.
        extra, short: what is sent behind a file's end, and how many bytes before it is the end.
        etag: of files.
        redirect: where files are.
        renamed: new names by old ones.
        on_bytes: is told how many bytes of weights were sent in all.
    """

    rate: float = float("inf")
    cut_after: list[int] = field(default_factory=list)
    refuse: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    refuse_files: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    ignores_range: bool = False
    extra: bytes = b""
    short: int = 0
    etag: str | None = None
    redirect: str | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    on_bytes: Callable[[int], None] = lambda sent: None


class Hub(ThreadingHTTPServer):
    """The hub. `log`: (method, path, headers) of each call."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.behaviour = Behaviour()
        self.log: list[tuple[str, str, dict[str, str]]] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no event here."""


@contextmanager
def running(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """A hub that serves until the end of the block."""
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def listing(repository: Repository) -> list[dict[str, object]]:
    """The `siblings` of the hub's answer."""
    found: list[dict[str, object]] = []
    for name, content in repository.files.items():
        entry: dict[str, object] = {"rfilename": name, "size": len(content)}
        if name.endswith((".safetensors", ".bin")):
            sha = _sha256(content)
            entry["blobId"] = "0" * 40
            entry["lfs"] = {"size": len(content), "sha256": sha, "pointerSize": 134}
        else:
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        found.append(entry | repository.announced.get(name, {}))
    return found


@cache
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.log.append((self.command, path, dict(self.headers)))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._model(f"{parts[2]}/{parts[3]}", parts[5] if len(parts) > 5 else "main")
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file(f"{parts[0]}/{parts[1]}", "/".join(parts[4:]))
        else:
            self._send(404, {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _model(self, repo: str, revision: str) -> None:
        hub, how = self.server, self.server.behaviour
        if how.refuse:
            self._send(*how.refuse.pop(0))
            return
        if repo in how.renamed:
            self._send(307, {"Location": self.path.replace(repo, how.renamed[repo])})
            return
        repository = hub.repositories.get(repo)
        if repository is None:
            self._send(401, {})  # as the hub says to strangers, of private ones too
            return
        if revision not in ("main", "v1", COMMIT):
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        card = {} if repository.licence is None else {"license": repository.licence}
        told = {"id": repo, "sha": COMMIT, "cardData": card, "siblings": listing(repository)}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

    def _file(self, repo: str, name: str) -> None:
        hub, how = self.server, self.server.behaviour
        repository = hub.repositories.get(repo)
        if repository is None or name not in repository.files:
            self._send(404, {"X-Error-Code": "EntryNotFound"})
            return
        if how.refuse_files:
            self._send(*how.refuse_files.pop(0))
            return
        if how.redirect is not None:
            self._send(302, {"Location": how.redirect + self.path})
            return
        content = memoryview(repository.files[name])
        begin = 0
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes=") and not how.ignores_range:
            begin = int(asked[6:].rstrip("-"))
            if begin >= len(content):
                self._send(416, {"Content-Range": f"bytes */{len(content)}"})
                return
        is_large = name.endswith(".safetensors")
        end = len(content) - (how.short if is_large else 0)
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        digest = how.etag or hashlib.sha256(content[:_LARGE]).hexdigest()
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(content)))
        extra = how.extra if is_large else b""
        self.send_header("Content-Length", str(max(end - begin, 0) + len(extra)))
        self.end_headers()
        if self.command == "GET":
            self._write(content[begin:end], how, is_large)
            self.wfile.write(extra)

    def _write(self, content: memoryview, how: Behaviour, is_large: bool) -> None:
        limit = how.cut_after.pop(0) if how.cut_after and is_large else len(content)
        began, sent = time.monotonic(), 0
        while sent < min(limit, len(content)):
            piece = content[sent : min(sent + _PIECE, limit)]
            self.wfile.write(piece)
            sent += len(piece)
            if is_large:
                self.server.sent += len(piece)
                how.on_bytes(self.server.sent)
            ahead = sent / how.rate - (time.monotonic() - began)
            if ahead > 0.001:
                time.sleep(ahead)
        if limit < len(content):
            self.close_connection = True
            self.wfile.flush()
            self.connection.close()


def main() -> None:
    """Serve a model with weights of a given size, until interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="a model's directory with model.safetensors")
    parser.add_argument("--rate", type=float, default=float("inf"))
    arguments = parser.parse_args()
    files = {one.name: one.read_bytes() for one in arguments.folder.iterdir() if one.is_file()}
    with running({"org/tiny": Repository(files)}) as hub:
        hub.behaviour.rate = arguments.rate
        sys.stdout.write(f"{hub.url}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
