"""Cores and batches around real runners, put together by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.contract.config import ContinuousBatchingConfig
from engine.contract.outputs import RequestOutput
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.types import RequestId, TokenId
from engine.core.engine_core import EngineCore
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.loading.running import LoadedRunner, build_runner
from engine.loading.verified import VerifiedModel
from engine.runner.cuda_graph import GraphBackend
from engine.scheduler.fifo import FIFOScheduler
from tests.engine.runner.fake_attention import CapturableAttention
from tests.tiny_models import CONTEXT

if TYPE_CHECKING:
    # Not imported: it needs more packages than a bare host with a GPU has (see tests/gpu).
    from engine.api.offline import LoadedModel


def make_request(
    name: str, prompt: list[int], max_tokens: int, **options: Any
) -> GenerationRequest:
    """A greedy request, unless `options` say otherwise."""
    return GenerationRequest(
        request_id=RequestId(name),
        prompt=tuple(TokenId(token) for token in prompt),
        **{
            "stop": StopParams(max_tokens=max_tokens),
            "sampling": SamplingParams(temperature=0.0),
            **options,
        },
    )


def build(
    loaded: LoadedModel, *, graphs: GraphBackend | None = None, **options: Any
) -> LoadedRunner:
    """A runner with a small cache; `options` are those of ContinuousBatchingConfig."""
    return build_verified(loaded._verified, graphs=graphs, **options)


def build_verified(
    verified: VerifiedModel, *, graphs: GraphBackend | None = None, **options: Any
) -> LoadedRunner:
    """The same around a model that is no more than verified. With graphs it is warm."""
    config = ContinuousBatchingConfig(**{"block_size": 8, "num_blocks": 128, **options})
    if graphs is not None and verified.backend.name == "torch":
        verified = replace(verified, backend=CapturableAttention())
    built = build_runner(verified, config, lambda line: None, graphs=graphs)
    if graphs is not None:
        built.runner.warmup()
        built.runner.steps.clear()
    return built


def make_core(
    built: LoadedRunner, *, runner: Any = None, share_blocks: bool = False, **options: Any
) -> EngineCore:
    """A core around a runner."""
    plan = built.plan
    kv_cache = KVCacheManager(
        built.groups,
        plan.num_blocks,
        plan.block_size,
        share_blocks=share_blocks,
        host_blocks=plan.host_blocks,
    )
    scheduler = FIFOScheduler(
        kv_cache, max_batch_tokens=plan.max_batch_tokens, max_requests_per_batch=plan.max_requests
    )
    return EngineCore(scheduler, runner or built.runner, max_context_tokens=CONTEXT, **options)


def run(core: EngineCore, requests: list[GenerationRequest]) -> dict[str, list[RequestOutput]]:
    """Step until all is done: each request's outputs."""
    for request in requests:
        core.add(request, 0.0)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    """The tokens of a request with one choice."""
    return [token for output in outputs for token in output.token_ids]
