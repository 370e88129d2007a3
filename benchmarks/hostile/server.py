"""The server under attack: a `headrace-server serve` process with default settings.

A callers file requires tokens, so that callers without one are strangers. Health checks have a
separate address, which the witness uses as probes do. The model runs in float32, so that the
witness's tokens do not depend on the other requests in a batch.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
from headrace.v1 import control_service_pb2 as control
from headrace.v1 import model_service_pb2 as model
from headrace.v1.control_service_pb2_grpc import ControlServiceStub
from headrace.v1.model_service_pb2_grpc import ModelServiceStub

from benchmarks.hostile.sending import Card
from benchmarks.processes import ROOT, SystemFailure

START_S = 180.0
"""The time limit for the server to become ready."""
CALL_S = 10.0
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
        card: its limits, available once it is ready.
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
        """Start the process; call `wait` next.

        Args:
            model: the model's directory.
            folder: where the log, the callers file, the tokens and the socket are written.
            tls: whether the server uses TLS on a TCP address; it then has a Unix socket without
                TLS.
            more: further options of the server.
            program: the program to run instead of `headrace-server`.
        """
        self.target = self.tls_target = self.health_target = ""
        self.cache_bytes = 0
        self.card: Card | None = None
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
        for name in SERVICES:
            _write_secret(self.token_file(name), self._tokens[name])
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(program or [str(Path(sys.executable).with_name("headrace-server"))]),
                    "serve",
                    *("--model", str(model), "--dtype", "float32", *listen, *more),
                    *("--auth-file", str(self._callers)),
                ],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the campaign's to handle
            )

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
        """The current certificate."""
        return (self._folder / "cert.pem").read_bytes()

    def renew_certificate(self) -> bytes:
        """Replace the server's certificate and key, and return the new certificate."""
        new = self._folder / "new"
        new.mkdir(exist_ok=True)
        for path in make_certificate(new):
            path.replace(self._folder / path.name)
        return self.certificate

    def token_file(self, name: str) -> Path:
        """Return the path of the file with a caller's token."""
        return self._folder / f"{name}.token"

    def token(self, name: str) -> str:
        """Return a caller's token."""
        return self._tokens[name]

    def wait(self) -> None:
        """Wait until the server is ready, and read its limits. Raises SystemFailure."""
        ends = time.monotonic() + START_S
        while "Stop it with" not in (text := self.log()):
            if self._process.poll() is not None or time.monotonic() > ends:
                raise SystemFailure(f"the server did not start:\n{text[-2000:]}")
            time.sleep(0.05)
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
        with grpc.insecure_channel(self.target) as channel:
            stub: Any = ModelServiceStub(channel)
            try:
                answer = stub.GetModel(
                    model.GetModelRequest(), metadata=self._metadata(WITNESS), timeout=CALL_S
                )
            except grpc.RpcError as error:
                raise SystemFailure(f"the server did not tell its limits: {error}") from error
        self.card = limits_of(answer.model)

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
        """Whether the process is running."""
        return self._process.poll() is None

    def log(self, since: int = 0) -> str:
        """Return the log from the given byte offset."""
        return self._log.read_bytes()[since:].decode(errors="replace")

    def log_bytes(self) -> int:
        """Return the length of the log in bytes."""
        return self._log.stat().st_size

    def told_secrets(self, since: int) -> list[str]:
        """Return the callers whose tokens appear in the log after the given byte offset."""
        text = self._log.read_bytes()[since:]
        return [name for name, token in self._tokens.items() if token.encode() in text]

    def forget_attacker(self) -> None:
        """Cancel the attacker's remaining requests as an operator. Raises RpcError."""
        with grpc.insecure_channel(self.target) as channel:
            stub: Any = ControlServiceStub(channel)
            metadata = self._metadata(OPERATOR)
            for _ in range(10):
                found = stub.ListRequests(
                    control.ListRequestsRequest(identity=ATTACKER, page_size=1000),
                    metadata=metadata,
                    timeout=CALL_S,
                )
                names = [
                    control.RequestName(identity=ATTACKER, request_id=one.request_id)
                    for one in found.requests
                ]
                if not names:
                    return
                stub.CancelRequests(
                    control.CancelRequestsRequest(requests=names),
                    metadata=metadata,
                    timeout=CALL_S,
                )
                time.sleep(0.05)

    def close(self) -> None:
        """Stop the process, whatever it is doing."""
        self._process.kill()  # its engine ends by itself then
        self._process.wait()

    def _metadata(self, name: str) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self._tokens[name]}")]


def limits_of(card: model.ModelCard) -> Card:
    """Read an attacker's knowledge of the server from the model's card."""
    limits = card.limits
    return Card(
        context=limits.max_context_tokens,
        vocabulary=card.vocab_size,
        limit=limits.max_message_bytes,
        choices=limits.max_choices,
        logprobs=limits.max_logprobs,
        logit_bias=limits.max_logit_bias,
        stop_strings=limits.max_stop_strings,
        stop_string_bytes=limits.max_stop_string_bytes,
    )


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Create a certificate for this machine and its key with the openssl command."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate)),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
