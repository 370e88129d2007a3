"""The interface between the service and the engine: the service calls nothing else of the engine.

    service ── EngineClient ──▶ engine          submit, cancel, finish, hold, stats, pause, …
    service ◀── step sink ───── engine          one StepOutputs per engine step, on the service's
    event loop

A verb is declared here, once. `engine.process.local_client` carries it out; if the engine has a
process of its own, `engine.process` derives the messages for it from its signature. So all
arguments and results are plain values or frozen dataclasses (docs/extending.md shows how to add a
verb).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.contract.outputs import StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import SamplingParams
from engine.contract.stats import EngineStats
from engine.contract.types import RequestId, TokenId

StepSink = Callable[[StepOutputs], None]
"""Takes one step's outputs. Called on the event loop on which `start` ran; must not block and must
not raise.
"""

ProgressSink = Callable[[str], None]
"""Takes one human-readable line of start-up progress. Called from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the front end needs to know about the loaded model.

    Attributes:
        name: the last part of the model's path, or its hub id.
        path: the local directory with the tokenizer's files.
        architecture: such as "LlamaForCausalLM".
        parameters: how many it has.
        dtype, device: such as "bfloat16" and "cpu".
        quantization: how the weights of linear layers are stored: "none" (in dtype) or "int8".
        vocab_size: token ids are below this.
        eos_token_ids: the model's own end-of-sequence ids.
        max_context_tokens: the longest request, prompt and output together: the model's context, or
            what the KV cache can hold for one request if that is less.
        default_sampling: what `model.generate` would use with the model's own generation config.
        max_running_requests: how many requests run at the same time.
        max_queue_size: how many may wait; 0: no limit.
        heeds_priorities: whether the scheduling policy uses priorities; if not, they are refused.
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
    startup: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to an accepted request.

    Attributes:
        queue_position: how many requests were waiting before it.
        arrival: when it was accepted, in seconds of the engine process's monotonic clock; the same
            as `Timings.arrival` in its `Finish`.
        notes: what of its form is held otherwise than it was written, in words for the caller.
    """

    queue_position: int
    arrival: float
    notes: tuple[str, ...] = ()


class EngineVerbs(Protocol):
    """What an engine can be asked to do: each method is a verb, and there are no others.

    Arguments are positional. They and the answer are annotated with types that msgspec can check; a
    verb raises only errors that `engine.process.engine_messages` lists.
    """

    async def submit(self, request: GenerationRequest) -> Admission:
        """Accept a request, or refuse it at once. Its outputs may reach the sink before this
        returns.

        Raises:
            InvalidRequestError: a field is wrong, or the prompt does not fit the context.
            DuplicateRequestError: a live request has the same id.
            QueueFullError: too many are waiting.
            CompileQueueFullError: too many grammars wait to be compiled.
            EngineUnavailableError: loading, or stopped.
        """
        ...

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request with CANCELLED within one step. False: no live request has that id
        (idempotent).
        """
        ...

    async def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> None:
        """End a choice with STOP, as of its first `num_tokens` tokens: a stop string was found
        there.

        Tokens beyond them are not billed. Harmless if the request has already ended. The choice's
        `Finish` still arrives at the sink, and may carry another reason if it ended by itself
        first.
        """
        ...

    async def hold(self, request_id: RequestId) -> None:
        """Leave a request, with all its choices, out of all steps until `unhold`, because nobody
        reads its output. A step that is already running still delivers its tokens.

        A held request takes no place in the batch. Its KV stays until others need the room, and it
        is preempted before any running request. It can be cancelled, and its time limit goes on.
        Harmless if the request has ended or is already held.
        """
        ...

    async def unhold(self, request_id: RequestId) -> None:
        """Let a held request go on where it was. Calls for one request take effect in order.
        Harmless if the request has ended or is not held.
        """
        ...

    async def stats(self) -> EngineStats:
        """The engine's figures now.

        Raises:
            EngineUnavailableError: loading, or stopped.
        """
        ...

    async def pause(self) -> None:
        """Take no further step until `resume`. Returns when the last step is done; from then on
        nothing touches the model. Live requests stay, new ones are accepted and wait, cancelled
        ones end. Harmless if paused. Closing or restarting the engine ends the pause.

        Raises:
            EngineUnavailableError: loading, or stopped.
        """
        ...

    async def resume(self) -> None:
        """End a pause. Harmless if there is none.

        Raises:
            EngineUnavailableError: loading, or stopped.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Returns when that is done. Running requests keep the prefixes
        that they hold until they end.

        Raises:
            EngineUnavailableError: loading, or stopped.
        """
        ...

    async def set_log_level(self, level: str, level_of: tuple[str, ...] = ()) -> None:
        """Set what the engine logs: "debug", "info", "warning" or "error", and what some modules
        log (see `engine.logs.levels`); others of them stay as they are. Still applies after a
        restart of the engine. Also works while the model loads.
        """
        ...


class EngineClient(EngineVerbs, Protocol):
    """An engine, in this process or another: its verbs, its start and its end. All methods but
    `launch` are called on the event loop on which `start` was called.
    """

    def launch(self) -> None:
        """Begin already what `start` goes on with, as far as that needs no event loop. By itself
        there is nothing.
        """

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Load the model and begin to serve. The outputs of all requests go to `sink`.

        Raises:
            ModelRefusedError, InsufficientMemoryError, ConfigError: with the reason.
            EngineUnavailableError: `close` was called while the model loaded.
        """
        ...

    async def close(self) -> None:
        """Stop at once: live requests end with ERROR (retryable). Returns when the engine's thread
        has ended. Loading is given up at its next stage, and waited for too.
        """
        ...

    async def wait_failed(self) -> Exception:
        """Wait until the engine dies, and return why. Any number of tasks may wait. If the engine
        is closed instead, this never returns.
        """
        ...

    @property
    def is_restartable(self) -> bool:
        """Whether `start` may be called again once the engine has died."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why the engine is dead, if it is."""
        ...
