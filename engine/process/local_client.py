"""The engine in the service's own process: `EngineClient` over a loop and its thread.

event loop ── submit, cancel, … ──▶ EngineLoop (thread-safe)
event loop ◀── call_soon_threadsafe ───── engine thread, once per step

torch and transformers are imported only when the model is loaded, on the thread that loads it. By
then, the server's port is open.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from engine.contract.adapters import AdapterInfo, AdapterLoad, AdapterLoaded
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.engine_client import Admission, ModelInfo, ProgressSink, StepSink
from engine.contract.errors import EngineUnavailableError
from engine.contract.outputs import StepOutputs
from engine.contract.request import GenerationRequest, MatcherFactory
from engine.contract.startup import IMPORT, WARM_UP, Stages
from engine.contract.stats import EngineStats
from engine.contract.types import RequestId
from engine.core.admission import AdmissionLimits
from engine.core.loop import EngineLoop
from engine.core.threads import await_on_own_thread
from engine.logs.levels import set_levels
from engine.process.adapter_loads import AdapterLoads
from engine.text import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from engine.loading.verified import VerifiedModel

logger = logging.getLogger(__name__)


class LocalEngineClient:
    """Runs the engine on a thread of this process."""

    def __init__(
        self,
        model: str,
        config: ContinuousBatchingConfig | None = None,
        load_config: LoadConfig | None = None,
        *,
        owns_process: bool = False,
        adapters: tuple[AdapterLoad, ...] | None = None,
    ) -> None:
        """Create the client; `start` loads the model.

        Args:
            model: a directory, or a hub id.
            adapters: those that an engine had before this one, in place of load_config's.
            owns_process: whether the engine has the process to itself. If so, everything that was
                imported and loaded is frozen, so that the garbage collector does not scan some
                400,000 objects again and again.
        """
        self._owns_process = owns_process
        self._model = model
        self._config = config or ContinuousBatchingConfig()
        self._load_config = load_config or LoadConfig()
        self._adapters = adapters
        self._adapter_loads: AdapterLoads | None = None
        self._engine: EngineLoop | None = None
        self._verified: VerifiedModel | None = None
        self._held: BinaryIO | None = None
        self._closing = threading.Event()
        self._loaded: asyncio.Event | None = None
        self._ended = asyncio.Event()

    def launch(self) -> None:
        """Do nothing, because the engine starts in this process."""

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Load the model in a thread, warm it up and begin to serve; see the protocol.

        If the caller is cancelled, this returns immediately, and loading stops at its next stage.
        """
        bridge = _Bridge(asyncio.get_running_loop(), sink, self._ended)
        self._loaded = loaded = asyncio.Event()

        def tell(line: str) -> None:
            if self._closing.is_set():
                raise EngineUnavailableError("loading was given up, because the engine was closed")
            progress(line)

        stages = Stages(tell)

        def build() -> tuple[EngineLoop, ModelInfo]:
            try:
                return self._build(bridge, stages)
            finally:
                bridge.call(loaded.set)

        try:
            engine, info = await await_on_own_thread(build, "headrace-load")
        except asyncio.CancelledError:
            self._closing.set()
            raise
        if self._closing.is_set():
            raise EngineUnavailableError("loading was given up, because the engine was closed")
        engine.start(on_end=bridge.end)
        self._engine = engine
        return info

    def _build(self, bridge: _Bridge, stages: Stages) -> tuple[EngineLoop, ModelInfo]:
        stages.enter(IMPORT)
        stages("importing torch and transformers")
        if self._owns_process:
            gc.disable()  # a fifth of the time that the imports take
        from engine.assembly import build_loop
        from engine.hub.cache import hold
        from engine.loading.adapters.adapter_loading import AdapterLoader
        from engine.loading.loader import load_model

        if self._owns_process:
            gc.freeze()
            gc.enable()
        verified = load_model(self._model, self._load_config, stages, self._adapters)
        self._verified = verified
        self._held = hold(verified.path)
        engine, limits, plan = build_loop(
            verified,
            self._config,
            stages,
            sink=bridge.deliver,
            tokenizer=_load_tokenizer(verified),
        )
        loader = None
        if self._load_config.adapter_root is not None:
            loader = AdapterLoader(verified, self._load_config)
        self._adapter_loads = AdapterLoads(engine, verified.adapters, loader)
        stages.enter(WARM_UP)
        stages("warming up")
        engine.warmup()
        if self._owns_process:
            gc.collect()
            gc.freeze()
        return engine, _describe(
            self._model,
            verified,
            limits,
            plan.max_requests,
            self._config,
            self._load_config.quantization,
            engine.speculates,
            stages.end(),
        )

    async def submit(self, request: GenerationRequest) -> Admission:
        """Accept a request; see the protocol."""
        engine = self._running()
        compiling = engine.compile_grammar(request)
        if compiling is None:
            return engine.submit(request)
        make_matcher: MatcherFactory = await asyncio.wrap_future(compiling)
        return engine.submit(request, make_matcher)

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request; see the protocol."""
        return self._engine is not None and self._engine.cancel_request(request_id)

    async def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> None:
        """End a choice after its first `num_tokens` tokens; see the protocol."""
        if self._engine is not None:
            self._engine.finish_request(request_id, num_tokens, choice)

    async def hold(self, request_id: RequestId) -> None:
        """Exclude a request from all steps; see the protocol."""
        if self._engine is not None:
            self._engine.hold_request(request_id)

    async def unhold(self, request_id: RequestId) -> None:
        """Let a held request continue; see the protocol."""
        if self._engine is not None:
            self._engine.unhold_request(request_id)

    async def stats(self) -> EngineStats:
        """Return the engine's current statistics."""
        return self._running().stats()

    async def pause(self) -> None:
        """Stop taking steps until `resume`; see the protocol."""
        await asyncio.wrap_future(self._running().pause())

    async def resume(self) -> None:
        """End a pause; see the protocol."""
        self._running().resume()

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; see the protocol."""
        engine = self._running()
        if not engine.is_running():
            raise EngineUnavailableError("the engine has stopped, and its prefix cache with it")
        await asyncio.wrap_future(engine.reset_prefix_cache())

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """Load an adapter beside the steps; see the protocol."""
        return await self._loads().load(load)

    async def unload_adapter(self, name: str, timeout_s: float | None) -> int:
        """Unload an adapter; see the protocol."""
        return self._loads().unload(name, timeout_s)

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters; see the protocol."""
        return self._loads().told()

    async def set_log_level(self, level: str, level_of: tuple[str, ...] = ()) -> None:
        """Set the log levels of this process; see the protocol."""
        logging.getLogger().setLevel(level.upper())
        set_levels(level_of)

    async def close(self) -> None:
        """Stop immediately, or stop loading at its next stage; see the protocol."""
        self._closing.set()
        if self._loaded is not None:
            await self._loaded.wait()
        if self._engine is not None:
            self._engine.stop(block=False, hard_stop=True)
            await await_on_own_thread(self._engine.join, "headrace-close")
        if self._verified is not None:
            await await_on_own_thread(self._verified.end, "headrace-close")
        if self._held is not None:
            self._held.close()

    async def wait_failed(self) -> Exception:
        """Wait until the engine is dead; see the protocol."""
        while (failure := self.failure) is None:
            self._ended.clear()
            await self._ended.wait()
        return failure

    @property
    def is_restartable(self) -> bool:
        """False, because a failed engine may have left this process in a bad state."""
        return False

    @property
    def failure(self) -> Exception | None:
        """The reason why the engine is dead, or None if it is not."""
        return self._engine.failure if self._engine is not None else None

    def _loads(self) -> AdapterLoads:
        self._running()
        if self._adapter_loads is None:
            raise RuntimeError("the engine was built without")
        return self._adapter_loads

    def _running(self) -> EngineLoop:
        if self._engine is None:
            raise EngineUnavailableError("the model is still loading; try again when it is ready")
        return self._engine


class _Bridge:
    """Passes calls from the engine's threads to the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sink: StepSink, ended: asyncio.Event
    ) -> None:
        self._loop = loop
        self._sink = sink
        self._ended = ended

    def deliver(self, outputs: StepOutputs) -> None:
        """Pass one step's outputs to the sink."""
        self.call(lambda: self._sink(outputs))

    def end(self) -> None:
        """Report that the engine's thread has ended."""
        self.call(self._ended.set)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the event loop. If the loop is closed, which may happen at any time,
        the call is dropped, because there is nobody left to receive it.
        """
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            logger.debug("the event loop is closed; an output of the engine is dropped")


def _load_tokenizer(verified: VerifiedModel) -> Tokenizer | None:
    """Load the tokenizer for structured output. A model without a tokenizer is served without
    it.
    """
    try:
        return Tokenizer.load(verified.path, verified.vocab_size)
    except TokenizerError as error:
        logger.info("no tokenizer: %s", error)
        return None


def _describe(
    model: str,
    verified: VerifiedModel,
    limits: AdmissionLimits,
    max_requests: int,
    config: ContinuousBatchingConfig,
    quantization: str,
    speculates: bool,
    startup: tuple[tuple[str, float], ...],
) -> ModelInfo:
    return ModelInfo(
        name=model.rstrip("/").split("/")[-1],
        path=str(verified.path),
        architecture=type(verified.model).__name__,
        parameters=verified.parameters,
        dtype=str(verified.model.dtype).removeprefix("torch."),
        quantization="+".join(one for one in (verified.stored, quantization) if one != "none")
        or "none",
        device=str(verified.device),
        vocab_size=verified.vocab_size,
        eos_token_ids=verified.eos_token_ids,
        max_context_tokens=limits.max_context_tokens,
        default_sampling=verified.default_sampling,
        max_running_requests=max_requests,
        max_queue_size=config.max_queue_size,
        heeds_priorities=limits.heeds_priorities,
        speculates=speculates,
        serves_adapters=verified.adapters.are_served,
        adapters=verified.adapters.told(),
        startup=startup,
    )
