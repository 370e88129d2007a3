"""A server that serves the gateways' protocol, and short ways to call it. Tests that import this
are skipped where the extra `gateway` is not installed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.service.fake_engine import FakeEngine
from tests.service.helpers import refused, serving

smg = pytest.importorskip("smg_grpc_proto", reason="the extra `gateway` is not installed")
pb: Any = smg.vllm_engine_pb2
common: Any = pytest.importorskip("smg_grpc_proto.generated.common_pb2")


NAME = "vllm.grpc.engine.VllmEngine"


@asynccontextmanager
async def gateway(engine: FakeEngine | None = None, **options: Any) -> AsyncIterator[Any]:
    """A server, and a stub of the gateways' protocol."""
    async with serving(engine, gateway=True, **options) as h:
        yield h, smg.vllm_engine_pb2_grpc.VllmEngineStub(h.channel)


def asks(prompt: str = "hi", /, **fields: Any) -> Any:
    """A request with a prompt of token ids, which are bytes here; `sampling` is the parameters."""
    params = {"top_p": 1.0, "repetition_penalty": 1.0, **fields.pop("sampling", {})}
    if not {"text", "tokenized"} & fields.keys():
        fields["tokenized"] = {"original_text": prompt, "input_ids": prompt.encode()}
    return pb.GenerateRequest(sampling_params=params, **fields)


async def answers(stub: Any, request: Any, **options: Any) -> list[Any]:
    """All responses to a request."""
    return [answer async for answer in stub.Generate(request, **options)]


async def failed(stub: Any, request: Any, **options: Any) -> Any:
    """The error of a request."""
    return await refused(answers(stub, request, **options))


def chunks_of(found: list[Any], index: int = 0) -> list[Any]:
    """The chunks of a choice."""
    return [one.chunk for one in found if one.HasField("chunk") and one.chunk.index == index]


def completes(found: list[Any]) -> list[Any]:
    """The completes of all choices."""
    return [one.complete for one in found if one.HasField("complete")]
