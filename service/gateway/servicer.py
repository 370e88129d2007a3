"""Implements `vllm.grpc.engine.VllmEngine`; see the package.

A gateway (smg 1.13) calls HealthCheck at an interval of its choice; GetModelInfo, GetServerInfo and
GetTokenizer once, when it registers the server; GetLoads every few seconds; Generate for each
request; and Abort when it drops a stream. Abort and the cancellation of the call may both arrive,
in either order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine.contract.errors import EngineUnavailableError
from engine.contract.stats import EngineStats
from service.convert.model import server_version
from service.convert.snapshot import Snapshot
from service.delivery.joining import join
from service.door.auth import current_permit
from service.errors.call_errors import FieldError, MethodNotServedError, NoTokenizerError
from service.gateway.gateway_fields import SPEC, named_for_gateway
from service.gateway.generate_request import generation
from service.gateway.generate_response import Answers
from service.gateway.throughput import Throughput
from service.gateway.tokenizer_archive import TokenizerArchive
from service.servicers.operator_control import Control
from service.servicers.submit import start_request
from service.state import FrontEnd, current_front

NAME: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
MAX_ABORT_IDS = 1024
NO_TOKENIZER_PATH = "/dev/null"
"""The tokenizer path reported to gateways, which look there first. smg treats it as a path. If
nothing exists there, smg treats it as a name on the Hugging Face hub (the model's name if it is
empty), and could load the tokenizer of an unrelated model. With this value it finds none, and calls
GetTokenizer.
"""
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters whose defaults are reported to gateways."""


def add_gateway(server: grpc.aio.Server, control: Control) -> str:
    """Add VllmEngine to the server and return the service's name."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(control), server)
    return NAME


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # untyped
    """The implementation of VllmEngine; see the module."""

    def __init__(self, control: Control) -> None:
        """Create the servicer. `control` provides the server's metrics."""
        self._control = control
        self._archive = TokenizerArchive()
        self._throughput = Throughput()
        self._asking: asyncio.Task[Snapshot] | None = None

    # Requests

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Run one request and send chunks and completes, or only completes."""
        front, permit = current_front.get(), current_permit.get()
        registry = front.registry
        with named_for_gateway():
            message = generation(request, front.info.max_context_tokens)
            draft = front.converter.draft(message, permit.caller.may_use, SPEC)
        answers = Answers(request, front.max_send_bytes)
        del request, message  # the draft has what is needed
        stream = registry.open_stream(permit.account)
        context.add_done_callback(lambda _: registry.lost(stream))
        try:
            with named_for_gateway():
                started = await start_request(front, permit, draft, stream)
            while (batch := await stream.receive()) is not None:
                make = partial(answers.of, batch.events)
                for response in await front.text_pool.answer(permit.account, batch.size, make):
                    yield response
                del batch, make  # not kept while the next one is awaited
            registry.complete(stream)
            with named_for_gateway():
                stream.check_end(started)
        finally:
            registry.lost(stream)

    async def Abort(self, request: Any, context: Any) -> Any:
        """Cancel requests by their ids; unknown ids are ignored."""
        registry, identity = current_front.get().registry, current_permit.get().caller.identity
        ids = request.request_ids
        if len(ids) > MAX_ABORT_IDS:
            raise FieldError(
                "request_ids", f"has {len(ids)} entries; at most {MAX_ABORT_IDS} are allowed"
            )
        for request_id in ids:
            registry.cancel(identity, request_id)
        return pb.AbortResponse()

    # About the server

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Report that the server is healthy. In any other phase the call is refused before it gets
        here.
        """
        return pb.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """Describe the model. Its paths on this machine are not disclosed."""
        front = current_front.get()
        info, name = front.info, front.card.name
        sampling = info.default_sampling
        defaults = {field: getattr(sampling, field) for field in _DEFAULTS}
        return pb.GetModelInfoResponse(
            model_path=name,
            tokenizer_path=NO_TOKENIZER_PATH,
            served_model_name=name,
            is_generation=True,
            max_context_length=info.max_context_tokens,
            max_req_input_len=info.max_context_tokens - 1,
            vocab_size=info.vocab_size,
            architectures=[info.architecture],
            eos_token_ids=info.eos_token_ids,
            pad_token_id=_special(front, "pad_token"),
            bos_token_id=_special(front, "bos_token"),
            default_sampling_params_json=json.dumps(defaults, separators=(",", ":")),
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Describe the server."""
        front, snapshot = current_front.get(), await self._snapshot()
        return pb.GetServerInfoResponse(
            active_requests=front.registry.live,
            is_paused=snapshot.pause is not None,
            uptime_seconds=snapshot.uptime_s,
            server_type="headrace",
            data_parallel_size=1,
            model_dtype=f"torch.{front.info.dtype}",
            max_num_seqs=front.info.max_running_requests,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:
        """Return the engine's load, always for one rank and in one section."""
        front, snapshot = current_front.get(), await self._snapshot()
        if snapshot.engine is None:
            raise EngineUnavailableError("the engine did not tell its load in time; ask again")
        load = _load(snapshot.engine, front.info.max_running_requests)
        load.gen_throughput = self._throughput.of(snapshot.moment, snapshot.engine.generated_tokens)
        return pb.GetLoadsResponse(
            timestamp=datetime.fromtimestamp(snapshot.taken_at, UTC).isoformat(),
            version=server_version(),
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Send the tokenizer's files as a zip archive, in chunks."""
        front = current_front.get()
        if front.encoder is None:
            raise NoTokenizerError
        archive = await self._archive.of(Path(front.info.path))
        for data, sha256 in archive.chunks():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256)

    async def _snapshot(self) -> Snapshot:
        """Return the current metrics. Concurrent callers share one query to the engine."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._control.snapshot())
        return await join(self._asking)

    # What this server does not do

    async def Embed(self, request: Any, context: Any) -> NoReturn:
        """Not served."""
        raise MethodNotServedError(NAME, "Embed", "the model generates text")

    async def FlushCache(self, request: Any, context: Any) -> NoReturn:
        """Not served."""
        raise MethodNotServedError(
            NAME, "FlushCache", "operators have headrace.v1.ControlService/ResetPrefixCache"
        )

    async def StartProfile(self, request: Any, context: Any) -> NoReturn:
        """Not served."""
        raise MethodNotServedError(NAME, "StartProfile", "there is no profiler")

    async def StopProfile(self, request: Any, context: Any) -> NoReturn:
        """Not served."""
        raise MethodNotServedError(NAME, "StopProfile", "there is no profiler")

    def SubscribeKvEvents(self, request: Any, context: Any) -> NoReturn:
        """Not served."""
        raise MethodNotServedError(
            NAME, "SubscribeKvEvents", "what the prefix cache holds is not told; ask for GetLoads"
        )


def _special(front: FrontEnd, name: str) -> int:
    """Return the id of a special token. Return 0 if there is none, because the protocol cannot
    express that.
    """
    if front.encoder is None:
        return 0
    tokenizer = front.encoder.tokenizer
    token = tokenizer.special_tokens.get(name)
    return 0 if token is None else tokenizer.token_id(token) or 0


def _load(stats: EngineStats, max_running: int) -> Any:
    return pb.SchedulerLoad(
        num_running_reqs=stats.running,
        num_waiting_reqs=stats.waiting,
        num_total_reqs=stats.running + stats.waiting + stats.held,
        token_usage=stats.kv_usage,
        cache_hit_rate=stats.prefix_hits / max(stats.prefix_queries, 1),
        utilization=stats.running / max(max_running, 1),
        max_running_requests=max_running,
    )
