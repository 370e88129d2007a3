"""The server under attack: a `headrace-server serve` process with default settings.

A callers file requires tokens, so that callers without one are strangers. Health checks have a
separate address, which the witness uses as probes do. The model runs in float32, so that the
witness's tokens do not depend on the other requests in a batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import model_service_pb2 as model

from benchmarks.processes import SystemFailure
from benchmarks.rig.serving import BIN, process
from tests.campaign.hostile.sending import CONTROL, MODEL, Sender
from tests.service.certificates import make_certificate
from tests.service.real_server import clean_environment

CALL_S = 30.0
WITNESS, ATTACKER, OPERATOR = "witness", "mallory", "operator"
SERVICES = {
    WITNESS: '["GenerationService", "ModelService"]',
    ATTACKER: '["GenerationService", "ModelService", "ServerReflection"]',
    OPERATOR: '"*"',
}
_LISTENING = re.compile(r"^Listening on (.+)\.$", re.MULTILINE)
_HEALTH = re.compile(r"^Health alone on (.+)\.$", re.MULTILINE)
_CACHE = re.compile(r"KV cache: ([\d.,]+) (MiB|GiB), \d")


class Server:
    """A server process.

    Attributes:
        target: its address without TLS.
        health_target: its address for health checks only.
        tls_target: its TCP address with TLS; empty if it has none.
        card: its model's, with the server's limits.
        cache_bytes: the KV cache's announced size.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        tls: bool = False,
        more: Sequence[str] = (),
        program: Sequence[str] | None = None,
    ) -> None:
        """Start the process, wait until it is ready, and read its limits. Raises SystemFailure.

        folder: where the log, the callers file and the socket are written. tls: whether it uses TLS
        on a TCP address; it then has a Unix socket without TLS. more: further options. program:
        what to run instead of `headrace-server`.
        """
        self.target = self.tls_target = self.health_target = ""
        self.cache_bytes = 0
        self._folder = folder
        self._tls = tls
        self._tokens = {name: secrets.token_urlsafe(24) for name in SERVICES}
        listen = ["--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"]
        if tls:
            certificate, key = make_certificate(folder)
            listen += ["--listen", f"unix:{folder}/s"]
            listen += ["--tls-cert", str(certificate), "--tls-key", str(key)]
        self._callers = folder / "callers.toml"
        self.grant(tuple(SERVICES))
        self._log = folder / "server.log"
        self._stack = contextlib.ExitStack()
        found = self._stack.enter_context(
            process(
                [
                    *(program or [str(BIN / "headrace-server")]),
                    "serve",
                    *("--model", str(model), "--dtype", "float32", "--speculation", "auto"),
                    *(*listen, *more),
                    *("--auth-file", str(self._callers)),
                ],
                self._log,
                environment=clean_environment(),
                ending=signal.SIGKILL,  # its engine ends by itself then
            )
        )
        self._process = found.popen
        try:
            self.card = self._read_limits()
        except BaseException:
            self.close()
            raise

    def _entry(self, name: str) -> str:
        digest = hashlib.sha256(self._tokens[name].encode()).hexdigest()
        return (
            f'[[callers]]\nidentity = "{name}"\nservices = {SERVICES[name]}\n'
            f'token_sha256 = "{digest}"\n'
        )

    def grant(self, names: Sequence[str]) -> None:
        """Write the callers file; it takes effect when the server rereads it."""
        # All at once: a server that reads half of it would say so.
        new = self._callers.with_suffix(".new")
        _write_secret(new, "\n".join(map(self._entry, names)))
        new.replace(self._callers)

    @property
    def certificate(self) -> bytes:
        return (self._folder / "cert.pem").read_bytes()

    def renew_certificate(self) -> bytes:
        new = self._folder / "new"
        new.mkdir(exist_ok=True)
        for path in make_certificate(new):
            path.replace(self._folder / path.name)
        return self.certificate

    def token(self, name: str) -> str:
        return self._tokens[name]

    def attacker(self, seed: str) -> dict[str, Any]:
        """Return the arguments of the attacker's own sender."""
        return {
            "target": self.target,
            "card": self.card,
            "token": self.token(ATTACKER),
            "operator": self.token(OPERATOR),
            "tls_target": self.tls_target,
            "seed": seed,
        }

    def sender(self, seed: str = "") -> Sender:
        """Return the attacker's own sender; call it within an event loop."""
        return Sender(**self.attacker(seed))

    def call(self, method: str, raw: bytes, caller: str = "", *, target: str = "") -> bytes:
        """Make a call and return its answer. Raises RpcError. caller: whose token is sent; empty
        for none. target: another address that leads to the server.
        """
        metadata = [("authorization", f"Bearer {self.token(caller)}")] if caller else []
        with grpc.insecure_channel(target or self.target) as channel:
            answer: bytes = channel.unary_unary(method)(raw, metadata=metadata, timeout=CALL_S)
        return answer

    def _read_limits(self) -> model.ModelCard:
        """Read where it listens, and return its model's card. Raises SystemFailure."""
        text = self.log()
        [found] = _LISTENING.findall(text)
        for address in found.split(", "):
            place = address.removesuffix(" with TLS")
            if self._tls and not place.startswith("unix:"):
                self.tls_target = place
            else:
                self.target = place
        [self.health_target] = _HEALTH.findall(text)
        announced = _CACHE.search(text)
        if announced:
            size, unit = announced.groups()
            self.cache_bytes = int(float(size.replace(",", "")) * 2 ** (20 + 10 * (unit == "GiB")))
        try:
            answer = self.call(MODEL + "GetModel", b"", WITNESS)
        except grpc.RpcError as error:
            raise SystemFailure(f"the server did not tell its limits: {error}") from error
        return model.GetModelResponse.FromString(answer).model

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of "front_end" and, while it runs, "engine"."""
        found = {"front_end": self._process.pid}
        try:
            for child in psutil.Process(self._process.pid).children():
                if child.status() != psutil.STATUS_ZOMBIE:
                    found["engine"] = child.pid
        except psutil.NoSuchProcess:
            pass
        return found

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def log(self, since: int = 0) -> str:
        """Return the log from the given byte offset."""
        return self._log.read_bytes()[since:].decode(errors="replace")

    def log_bytes(self) -> int:
        return self._log.stat().st_size

    def told_secrets(self, since: int) -> list[str]:
        """Return the callers whose tokens appear in the log after the given byte offset."""
        text = self._log.read_bytes()[since:]
        return [name for name, token in self._tokens.items() if token.encode() in text]

    def faults(self) -> list[str]:
        """Return what must never be: a process that has ended, a caller's token in the log."""
        wrong = [] if self.is_alive and "engine" in self.pids else ["a process has ended"]
        if secrets := self.told_secrets(0):
            wrong.append(f"the log shows the token of {', '.join(secrets)}")
        return wrong

    def forget_attacker(self) -> None:
        """Cancel the attacker's remaining requests as an operator. Raises RpcError."""
        page = control.ListRequestsRequest(identity=ATTACKER, page_size=1000).SerializeToString()
        for _ in range(10):
            answer = self.call(CONTROL + "ListRequests", page, OPERATOR)
            found = control.ListRequestsResponse.FromString(answer).requests
            if not found:
                return
            names = [{"identity": ATTACKER, "request_id": one.request_id} for one in found]
            cancel = control.CancelRequestsRequest(requests=names).SerializeToString()
            self.call(CONTROL + "CancelRequests", cancel, OPERATOR)
            time.sleep(0.05)

    def close(self) -> None:
        self._stack.close()


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
