"""The engine in the service's own process: `EngineClient` over a manager and its thread.

event loop ── submit, cancel, finish ──▶ manager (thread-safe)
event loop ◀── call_soon_threadsafe ───── engine thread, once a step

torch and transformers are imported when the model is loaded, on the thread that loads it: the
server's port is open by then.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine.client import Admission, ModelInfo, ProgressSink, StepSink
from engine.config import ContinuousBatchingConfig, LoadConfig
from engine.errors import EngineUnavailableError
from engine.manager import ContinuousBatchingManager
from engine.outputs import StepOutputs
from engine.request import GenerationRequest
from engine.stats import EngineStats
from engine.threads import call_on_own_thread
from engine.types import RequestId

if TYPE_CHECKING:
    from engine.runner.loader import VerifiedModel


class LocalEngineClient:
    """See `engine.client.EngineClient`."""

    def __init__(
        self,
        model: str,
        config: ContinuousBatchingConfig | None = None,
        load_config: LoadConfig | None = None,
    ) -> None:
        """Prepare; nothing is loaded before `start`.

        Args:
            model: a directory, or a hub id.
        """
        self._model = model
        self._config = config or ContinuousBatchingConfig()
        self._load_config = load_config or LoadConfig()
        self._manager: ContinuousBatchingManager | None = None

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Load the model in a thread, warm it up and begin; see the protocol."""
        loop = asyncio.get_running_loop()

        def deliver(outputs: StepOutputs) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(sink, outputs)

        def build() -> tuple[ContinuousBatchingManager, ModelInfo]:
            progress("importing torch and transformers")
            from engine.assembly import build_manager
            from engine.runner.loader import load_model

            verified = load_model(self._model, self._load_config, progress)
            manager, limits, plan = build_manager(verified, self._config, progress, sink=deliver)
            progress("warming up")
            manager.warmup()
            return manager, _describe(
                self._model, verified, limits.max_context_tokens, plan.max_requests, self._config
            )

        # On a thread that ends (engine.threads); the one that waits for it only waits.
        manager, info = await asyncio.to_thread(call_on_own_thread, build, "headrace-load")
        manager.start()
        self._manager = manager
        return info

    async def submit(self, request: GenerationRequest) -> Admission:
        """Take a request in; see the protocol."""
        return Admission(self._running().submit(request))

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request; see the protocol."""
        return self._manager is not None and self._manager.cancel_request(request_id)

    async def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> None:
        """End a choice as of its first tokens; see the protocol."""
        if self._manager is not None:
            self._manager.finish_request(request_id, num_tokens, choice)

    async def stats(self) -> EngineStats:
        """The engine's figures now."""
        return self._running().stats()

    async def close(self) -> None:
        """Stop at once; see the protocol."""
        if self._manager is not None:
            await asyncio.to_thread(self._manager.stop, abort=True)

    @property
    def failure(self) -> Exception | None:
        """Why the engine is dead, if it is."""
        return self._manager.failure if self._manager is not None else None

    def _running(self) -> ContinuousBatchingManager:
        if self._manager is None:
            raise EngineUnavailableError("the model is still loading; try again when it is ready")
        return self._manager


def _describe(
    model: str,
    verified: VerifiedModel,
    max_context_tokens: int,
    max_requests: int,
    config: ContinuousBatchingConfig,
) -> ModelInfo:
    return ModelInfo(
        name=model.rstrip("/").split("/")[-1],
        path=str(verified.path),
        architecture=type(verified.model).__name__,
        parameters=verified.model.num_parameters(),
        dtype=str(verified.model.dtype).removeprefix("torch."),
        device=str(verified.device),
        vocab_size=verified.vocab_size,
        eos_token_ids=verified.eos_token_ids,
        max_context_tokens=max_context_tokens,
        default_sampling=verified.default_sampling,
        max_running_requests=max_requests,
        max_queue_size=config.max_queue_size,
    )
