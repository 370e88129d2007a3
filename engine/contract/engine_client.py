"""The interface between the service and the engine. The service calls nothing else in the engine.

    service ── EngineClient ──▶ engine          submit, cancel, finish, hold, stats, pause, …
    service ◀── step sink ───── engine          one StepOutputs per engine step, on the service's
    event loop

Each verb is declared once, here, and implemented in `engine.process.local_client`. If the engine
has a process of its own, `engine.process` derives the verb's messages from its signature. All
arguments and results are therefore plain values or frozen dataclasses. docs/extending.md shows how
to add a verb.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.contract.adapters import AdapterInfo, AdapterLoad, AdapterLoaded
from engine.contract.outputs import StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import SamplingParams
from engine.contract.stats import EngineStats
from engine.contract.types import RequestId, TokenId

StepSink = Callable[[StepOutputs], None]
"""Receives one step's outputs. Called on the event loop on which `start` ran; must not block or
raise.
"""

ProgressSink = Callable[[str], None]
"""Receives one human-readable line of start-up progress. Called from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the front end needs to know about the loaded model.

    Attributes:
        name: the last component of the model's path, or its hub id.
        path: the local directory with the tokenizer's files.
        architecture: such as "LlamaForCausalLM".
        parameters: the number of parameters.
        dtype, device: such as "bfloat16" and "cpu".
        quantization: how the weights of linear layers are stored: "none" (in dtype), or see
            LoadConfig.
        vocab_size: the size of the vocabulary; all token ids are below it.
        eos_token_ids: the model's own end-of-sequence ids.
        max_context_tokens: the maximum length of a request, prompt and output together: the model's
            context, or what the KV cache can hold for one request if that is less.
        default_sampling: what `model.generate` would use with the model's own generation config.
        max_running_requests: the maximum number of requests running at the same time.
        max_queue_size: the maximum number of waiting requests; 0: no limit.
        heeds_priorities: whether the scheduling policy uses priorities; if not, they are refused.
        speculates: whether steps compute guessed tokens.
        serves_adapters: whether requests may ever name adapters.
        adapters: those that they may name at first.
        startup: how many seconds the phases of loading took, in order (`engine.contract.startup`).
    """

    name: str
    path: str
    architecture: str
    parameters: int
    dtype: str
    quantization: str
    device: str
    vocab_size: int
    eos_token_ids: tuple[TokenId, ...]
    max_context_tokens: int
    default_sampling: SamplingParams
    max_running_requests: int
    max_queue_size: int
    heeds_priorities: bool
    speculates: bool = False
    serves_adapters: bool = False
    adapters: tuple[AdapterInfo, ...] = ()
    startup: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to an accepted request.

    Attributes:
        queue_position: how many requests were waiting before it.
        arrival: when it was accepted, in seconds of the engine process's monotonic clock; the same
            as `Timings.arrival` in its `Finish`.
        notes: messages for the caller about how the enforced grammar differs from the one given.
        adapter_digest: the content of the request's adapter, in hexadecimal; empty: it has none.
    """

    queue_position: int
    arrival: float
    notes: tuple[str, ...] = ()
    adapter_digest: str = ""


class EngineVerbs(Protocol):
    """The engine's operations: each method is a verb, and there are no others.

    Arguments are positional. Arguments and results are annotated with types that msgspec can check.
    A verb raises only errors that `engine.process.engine_messages` lists.
    """

    async def submit(self, request: GenerationRequest) -> Admission:
        """Accept a request, or refuse it immediately. Its outputs may reach the sink before this
        returns.

        Raises:
            InvalidRequestError: a field is wrong, or the prompt does not fit the context.
            DuplicateRequestError: a live request has the same id.
            QueueFullError: too many requests are waiting.
            CompileQueueFullError: too many grammars wait to be compiled.
            AdapterNotLoadedError: it names an adapter that is not loaded.
            EngineUnavailableError: the engine is loading or stopped.
        """
        ...

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request with CANCELLED within one step. Idempotent.

        Returns False if no live request has that id.
        """
        ...

    async def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> None:
        """End a choice with STOP after its first `num_tokens` tokens, because a stop string was
        found there.

        Later tokens are not billed. Harmless if the request has already ended. The choice's
        `Finish` still arrives at the sink, and may have another reason if the choice ended by
        itself first.
        """
        ...

    async def hold(self, request_id: RequestId) -> None:
        """Exclude a request and all its choices from all steps until `unhold`, because nobody is
        reading its output. A step that is already running still delivers its tokens.

        A held request takes no slot in the batch. Its KV stays until others need the memory, and it
        is preempted before any running request. It can be cancelled, and its time limit still
        applies. Harmless if the request has ended or is already held.
        """
        ...

    async def unhold(self, request_id: RequestId) -> None:
        """Resume a held request where it left off. Calls for one request take effect in order.
        Harmless if the request has ended or is not held.
        """
        ...

    async def stats(self) -> EngineStats:
        """Return the engine's current statistics.

        Raises:
            EngineUnavailableError: the engine is loading or stopped.
        """
        ...

    async def pause(self) -> None:
        """Run no further steps until `resume`.

        Returns when the last step is done; from then on, nothing uses the model. Live requests
        stay, new ones are accepted and wait, and cancelled ones end. Harmless if the engine is
        already paused. Closing or restarting the engine ends the pause.

        Raises:
            EngineUnavailableError: the engine is loading or stopped.
        """
        ...

    async def resume(self) -> None:
        """End a pause. Harmless if the engine is not paused.

        Raises:
            EngineUnavailableError: the engine is loading or stopped.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Discard all cached prefixes, and return when that is done. Running requests keep the
        prefixes they hold until they end.

        Raises:
            EngineUnavailableError: the engine is loading or stopped.
        """
        ...

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """Load an adapter. No step waits for that. Requests that are accepted later get it, and
        those that were accepted before keep what they have.

        Raises:
            AdapterRefusedError: it cannot be served, or this engine loads none; the message gives
                the reason.
            AdapterRoomError: there is no room, also not without those that may go.
            AdapterExistsError: the name is taken.
            EngineUnavailableError: the engine is loading or stopped.
        """
        ...

    async def unload_adapter(self, name: str, timeout_s: float | None) -> int:
        """Unload an adapter: requests can no longer name it. Those that have it go on, for
        `timeout_s` seconds at most if it is given, and are cancelled then. An adapter that is still
        being loaded under this name is given up.

        Returns:
            How many requests have it.

        Raises:
            AdapterNotLoadedError: no adapter has this name.
            EngineUnavailableError: the engine is loading or stopped.
        """
        ...

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters that are loaded, being loaded, or unloaded and still had by requests.

        Raises:
            EngineUnavailableError: the engine is loading or stopped.
        """
        ...

    async def set_log_level(self, level: str, level_of: tuple[str, ...] = ()) -> None:
        """Set the engine's log level ("debug", "info", "warning" or "error") and the levels of some
        modules (see `engine.logs.levels`).

        The levels of other modules do not change. The setting survives a restart of the engine, and
        can be made while the model loads.
        """
        ...


class EngineClient(EngineVerbs, Protocol):
    """An engine, in this process or another: its verbs, its start and its end. All methods except
    `launch` are called on the event loop on which `start` was called.
    """

    def launch(self) -> None:
        """Do in advance whatever part of `start` needs no event loop. Has no effect by itself."""

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Load the model and begin to serve. The outputs of all requests go to `sink`.

        Raises:
            ModelRefusedError, InsufficientMemoryError, ConfigError: loading fails; the message
                gives the reason.
            EngineUnavailableError: `close` was called while the model was loading.
        """
        ...

    async def close(self) -> None:
        """Stop immediately. Live requests end with ERROR (retryable).

        Returns when the engine's thread has ended. If the model is still loading, waits until
        loading is abandoned at its next stage.
        """
        ...

    async def wait_failed(self) -> Exception:
        """Wait until the engine dies, and return the reason. Any number of tasks may wait.

        If the engine is closed instead, this never returns.
        """
        ...

    @property
    def is_restartable(self) -> bool:
        """Whether `start` may be called again once the engine has died."""
        ...

    @property
    def failure(self) -> Exception | None:
        """The reason the engine is dead, or None if it is not."""
        ...
