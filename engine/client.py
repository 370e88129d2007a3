"""The seam between the service and the engine: what the service speaks to, and nothing else of the
engine.

    service ── EngineClient ──▶ engine          submit, cancel, finish, hold, stats, pause, …
    service ◀── step sink ───── engine          one StepOutputs per engine step, on the service's
    event loop

A verb is written here once: `engine.local_client` carries it out, and what `engine.process` sends
for it, to an engine in a process of its own, follows from its signature. So everything that
crosses is a plain value or a frozen dataclass (docs/extending.md shows how to add a verb).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.outputs import StepOutputs
from engine.request import GenerationRequest
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats
from engine.types import RequestId, TokenId

StepSink = Callable[[StepOutputs], None]
"""Takes one step's outputs. Called on the event loop on which `start` ran; must not block and must
not raise.
"""

ProgressSink = Callable[[str], None]
"""Takes one human-readable line of start-up progress. Called from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the front end needs to know of the loaded model.

    Attributes:
        name: the last part of the model's path, or its hub id.
        path: the local directory with the tokenizer's files.
        architecture: such as "LlamaForCausalLM".
        parameters: how many.
        dtype, device: such as "bfloat16", "cpu".
        quantization: how linear layers' weights are kept: "none" (in dtype) or "int8".
        vocab_size: token ids are below this.
        eos_token_ids: the model's own end-of-sequence ids.
        max_context_tokens: prompt and output of one request together: the lesser of the model's
            context and what the KV cache can hold for one request.
        default_sampling: what `model.generate` would use with the model's own generation config.
        max_running_requests: how many requests run at the same time.
        max_queue_size: how many may wait; 0: no limit.
        heeds_priorities: whether the scheduling policy looks at requests' priorities; where it does
            not, they are refused.
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


@dataclass(frozen=True, slots=True)
class Admission:
    """A request was taken in.

    Attributes:
        queue_position: how many requests were waiting before it.
        arrival: when it was taken in, in seconds of the engine process's monotonic clock: the
            `Timings.arrival` that its end will show.
    """

    queue_position: int
    arrival: float


class EngineVerbs(Protocol):
    """What an engine can be asked to do: each method is a verb, and there are no others.

    Arguments are given by place. They and the answer are annotated with types that msgspec can
    check; an error that a verb raises is one of those in `engine.process.messages`.
    """

    async def submit(self, request: GenerationRequest) -> Admission:
        """Take a request in, or refuse it at once. Its outputs may reach the sink before this
        returns.

        Raises:
            InvalidRequestError: a field is wrong, or the prompt does not fit the context.
            DuplicateRequestError: a request of that id is live.
            QueueFullError: too many are waiting.
            CompileQueueFullError: too many forms wait to be compiled.
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

        What was generated beyond them is not billed. Harmless for a request that has ended already.
        The choice's `Finish` still arrives at the sink, and may carry another reason if it ended
        by itself first.
        """
        ...

    async def hold(self, request_id: RequestId) -> None:
        """Take no step for a request, with all its choices, until `unhold`: nobody reads what it
        generates. A step that is under way still brings its tokens.

        It takes no place in the batch. Its KV stays until others need the room, and it is preempted
        before any request that runs. It ends as any other: it can be cancelled, and its time limit
        goes on. Harmless for a request that has ended, or is held.
        """
        ...

    async def unhold(self, request_id: RequestId) -> None:
        """Let a held request go on where it was. Calls for one request take effect in their order.
        Harmless for a request that has ended, or is not held.
        """
        ...

    async def stats(self) -> EngineStats:
        """The engine's figures now.

        Raises:
            EngineUnavailableError: loading, or stopped.
        """
        ...

    async def pause(self) -> None:
        """Take no further step until `resume`. Returns when the last step is done: nothing touches
        the model from then on. Live requests stay, new ones are accepted and wait, cancelled ones
        end. Harmless when paused. An engine that is closed, or started again, is not paused.

        Raises:
            EngineUnavailableError: loading, or stopped.
        """
        ...

    async def resume(self) -> None:
        """End a pause. Harmless where there is none.

        Raises:
            EngineUnavailableError: loading, or stopped.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Returns when that is done; what running requests hold of them
        they keep to their end.

        Raises:
            EngineUnavailableError: loading, or stopped.
        """
        ...

    async def set_log_level(self, level: str) -> None:
        """Set what the engine logs: "debug", "info", "warning" or "error". Stays in force when the
        engine is started again. Works while it loads too.
        """
        ...


class EngineClient(EngineVerbs, Protocol):
    """An engine, wherever it runs: its verbs, and its life. All methods are called on the event
    loop on which `start` was called.
    """

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Load the model and begin to serve. Every accepted request's outputs go to `sink`.

        Raises:
            ModelRefusedError, InsufficientMemoryError, ConfigError: with the reason.
            EngineUnavailableError: `close` was called meanwhile; loading ended at its next stage.
        """
        ...

    async def close(self) -> None:
        """Stop at once: live requests end with ERROR (retryable). Returns when the engine's thread
        has ended, and the thread that loads the model, which ends at its next stage.
        """
        ...

    async def wait_failed(self) -> Exception:
        """Wait until the engine is dead, and return why. Any number of tasks may wait; an engine
        that is closed in good order never returns from here.
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
