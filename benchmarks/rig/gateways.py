"""`headrace openai` and smg in front of servers, and what any door of OpenAI's API is asked."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.processes import free_port
from benchmarks.rig.serving import BIN, WAIT_S, Process, process


def stream_chat(
    port: int, body: Mapping[str, Any], token: str = ""
) -> Generator[bytes, None, None]:
    """Run a chat at a door on this machine, on a connection of its own. Yields the answer's lines.
    Raises RuntimeError if it was refused.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {token}"} if token else {}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read(500)!r}")
        yield from answer


def door(
    target: str,
    log: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    ending: signal.Signals = signal.SIGTERM,
) -> AbstractContextManager[Process]:
    """Run `headrace openai` in front of a server during the block. log: the file for its output.
    environment, ending: as of `process`.
    """
    address = f"127.0.0.1:{free_port()}"
    words = [str(BIN / "headrace"), "--target", target, "openai", "--listen", address, *flags]
    return process(
        words,
        log,
        is_ready=lambda said: "ready: " in said,
        address=address,
        environment=environment,
        ending=ending,
    )


def smg(
    targets: Sequence[str], model: str, log: Path, *flags: str, command: Path = BIN / "smg"
) -> AbstractContextManager[Process]:
    """Run smg in front of servers during the block, from when a chat has come to its end. Its
    address has the port. model: the servers' name of their model. log: the file for its output.
    command: its path.
    """
    port = free_port()
    words = [str(command), "launch", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-port", str(free_port())]
    words += ["--worker-urls", *(f"grpc://{target}" for target in targets), *flags]
    body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}

    def is_ready(_: str) -> bool:
        with contextlib.suppress(OSError, RuntimeError, http.client.HTTPException):
            list(stream_chat(port, body))
            return True
        return False

    address = f"127.0.0.1:{port}"
    return process(words, log, is_ready=is_ready, address=address, ending=signal.SIGKILL)


def with_template(model: Path, template: str, folder: Path) -> Path:
    """Return a checkpoint with another chat template, as links in a folder that is made."""
    folder.mkdir()
    for path in model.iterdir():
        if path.is_file() and path.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (folder / path.name).symlink_to(path)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder
