"""A file of callers as tests write it, their tokens, and a server that asks for one of them."""

from __future__ import annotations

import hashlib
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from headrace.v1 import generation_service_pb2 as rpc

from tests.service.fake_engine import FakeEngine
from tests.service.helpers import Harness, serving, spec

TOKENS = {"alice": "alice's secret", "bob": "bob's secret", "probe": "the probe's secret"}
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def entry(identity: str, services: str, token: str | None = None, certificate: str = "") -> str:
    """One entry of the callers' file."""
    lines = ["[[callers]]", f'identity = "{identity}"', f"services = {services}"]
    if token is not None:
        lines.append(f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"')
    if certificate:
        lines.append(f'certificate = "{certificate}"')
    return "\n".join(lines) + "\n"


CALLERS = (
    entry("alice", '["GenerationService", "ModelService", "ServerReflection"]', TOKENS["alice"])
    + entry("bob", '"*"', TOKENS["bob"])
    + entry("probe", '["ModelService"]', TOKENS["probe"])
)


def replace(path: Path, text: str) -> None:
    """Put a new file in the old one's place, as careful writers do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o640)
    os.replace(new, path)


def bearer(who: str) -> tuple[tuple[str, str], ...]:
    """The metadata that somebody sends."""
    return (("authorization", f"Bearer {TOKENS[who]}"),)


@asynccontextmanager
async def guarded(callers: Path, engine: FakeEngine | None = None, **options: Any) -> Any:
    async with serving(engine, auth_file=str(callers), **options) as h:
        yield h


def add_request(h: Harness, who: str, **fields: Any) -> Any:
    return h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(**fields)), metadata=bearer(who))
