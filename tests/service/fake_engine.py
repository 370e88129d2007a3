"""An engine without a model: an `EngineClient` whose tokens are known beforehand, for tests of
whatever stands before it.

`FakeEngine` generates for every request what its `script` says (by default `default_script`: some
readable bytes that depend on the prompt alone), one token a step, and ends requests as the real
engine does: STOP at stop and end-of-sequence ids, LENGTH, CONTEXT, CANCELLED, TIME_LIMIT, ERROR.
It runs by itself (`auto=True`: one step each turn of the event loop while there is work), or step
by step:

    engine = FakeEngine(auto=False)
    ...
    engine.step()          # admits, generates one token for each running request, calls the sink
    once engine.run()           # steps until nothing is left

Tokens are bytes: `byte_tokenizer()` has the ids 0 to 255 for the bytes, EOS and BOS, so that texts
and tokens can be worked out by hand. Failures: `refuse_next` (an exception for the next submit),
`fail(request_id)`, `die(error)`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.client import Admission, ModelInfo, ProgressSink, StepSink
from engine.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
)
from engine.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    StepOutputs,
    Timings,
    TokenLogprobs,
    Usage,
)
from engine.request import GenerationRequest
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats
from engine.text import Tokenizer
from engine.types import RequestId, TokenId

EOS = 256
BOS = 257
VOCAB_SIZE = 258
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

Script = Callable[[GenerationRequest], Sequence[int]]


def byte_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """A tokenizer whose ids 0 to 255 are the bytes; EOS and BOS are special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    backend = Backend(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken("<eos>", special=True), AddedToken("<bos>", special=True)]
    )
    return Tokenizer(
        backend,
        special_tokens={"eos_token": "<eos>", "bos_token": "<bos>"},
        chat_templates={"default": chat_template} if chat_template is not None else None,
        vocab_size=VOCAB_SIZE,
    )


def default_script(request: GenerationRequest) -> Sequence[int]:
    """Endless lower-case letters and blanks that depend on the prompt alone."""
    digest = hashlib.sha256(repr(request.prompt).encode()).digest()
    letters = b"abcdefghijklmnopqrstuvwxyz      "
    return [letters[digest[i % 32] % 32] for i in range(4096)]


def says(text: str | bytes, *, eos: bool = True) -> Script:
    """A script that generates this text, and then the end-of-sequence token."""
    raw = text.encode() if isinstance(text, str) else text
    return lambda _request: [*raw, *([EOS] if eos else [])]


def model_info(**changes: object) -> ModelInfo:
    """A model's description, as the fake engine has it by default."""
    values: dict[str, object] = {
        "name": "fake",
        "path": "/nowhere",
        "architecture": "FakeForCausalLM",
        "parameters": 1000,
        "dtype": "float32",
        "device": "cpu",
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (TokenId(EOS),),
        "max_context_tokens": 2048,
        "default_sampling": SamplingParams(temperature=0.7, top_p=0.9),
        "max_running_requests": 64,
        "max_queue_size": 1024,
        **changes,
    }
    return ModelInfo(**values)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Live:
    """A request in the fake engine."""

    spec: GenerationRequest
    tokens: Sequence[int]
    arrival: float
    generated: int = 0
    running: bool = False
    prompt_done: bool = False
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    end: FinishReason | None = None
    failure: RequestFailure | None = None
    finish_at: int | None = None
    stop_token_id: int | None = None


@dataclass(eq=False)
class FakeEngine:
    """See the module. Attributes beside the options: what happened, for tests to look at.

    `hold_at`: with auto, the loop stands still once this many steps were done, until `go_on`.
    """

    script: Script = default_script
    auto: bool = True
    tokens_per_step: int = 1
    info: ModelInfo = field(default_factory=model_info)
    load_error: Exception | None = None
    load_gate: asyncio.Event | None = None
    refuse_next: list[BaseException] = field(default_factory=list)
    submit_gate: asyncio.Event | None = None
    hold_at: int | None = None
    # What happened.
    submitted: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    finished: list[tuple[str, int]] = field(default_factory=list)
    steps: int = 0
    generated: int = 0
    ended: int = 0
    closed: bool = False
    _dead: Exception | None = None
    _died: asyncio.Event = field(default_factory=asyncio.Event)
    _sink: StepSink | None = None
    _waiting: deque[_Live] = field(default_factory=deque)
    _live: dict[RequestId, _Live] = field(default_factory=dict)
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.Task[None] | None = None

    # EngineClient

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Load: waits for `load_gate`, raises `load_error`."""
        progress("loading the fake model")
        if self.load_gate is not None:
            await self.load_gate.wait()
        if self.load_error is not None:
            raise self.load_error
        self._sink = sink
        if self.auto:
            self._loop = asyncio.create_task(self._run_loop())
        return self.info

    async def submit(self, request: GenerationRequest) -> Admission:
        """Take a request in."""
        if self.refuse_next:
            raise self.refuse_next.pop(0)
        if self.submit_gate is not None:
            await self.submit_gate.wait()
        if self._sink is None or self._dead is not None or self.closed:
            raise EngineUnavailableError("the engine has stopped; try another server, or later")
        if request.request_id in self._live:
            raise DuplicateRequestError(request.request_id)
        if not 0 < len(request.prompt) < self.info.max_context_tokens:
            raise InvalidRequestError("prompt", "does not fit the context")
        self._admit()
        limit = self.info.max_queue_size
        if limit and len(self._waiting) >= limit:
            raise QueueFullError(limit, 0.5)
        position = len(self._waiting)
        live = _Live(request, self.script(request), time.monotonic())
        self._waiting.append(live)
        self._live[request.request_id] = live
        self.submitted.append(request)
        self._work.set()
        return Admission(position, live.arrival)

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request with CANCELLED at the next step."""
        self.cancelled.append(request_id)
        return self._end(request_id, FinishReason.CANCELLED)

    async def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> None:
        """End a request with STOP at the next step."""
        self.finished.append((request_id, num_tokens))
        live = self._live.get(request_id)
        if live is not None and live.end is None:
            live.end = FinishReason.STOP
            live.finish_at = num_tokens
            self._work.set()

    async def stats(self) -> EngineStats:
        """The figures now."""
        running = sum(live.running for live in self._live.values())
        return EngineStats(
            running=running,
            waiting=len(self._live) - running,
            blocks_total=0,
            blocks_used=0,
            steps=self.steps,
            prompt_tokens=0,
            generated_tokens=self.generated,
            requests_accepted=len(self.submitted),
            requests_finished=self.ended,
            preemptions=0,
            last_step_s=0.0,
        )

    async def close(self) -> None:
        """Stop; live requests end with ERROR."""
        if not self.closed:
            self.closed = True
            self._fail_all("the engine was stopped")
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def wait_failed(self) -> Exception:
        """Wait for `die`."""
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    @property
    def failure(self) -> Exception | None:
        """Why the engine is dead."""
        return self._dead

    # For tests

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def fail(self, request_id: RequestId, failure: RequestFailure) -> None:
        """Let one request fail at the next step."""
        self._live[request_id].failure = failure
        self._end(request_id, FinishReason.ERROR)

    def time_out(self, request_id: RequestId) -> None:
        """Let one request reach its time limit at the next step."""
        self._end(request_id, FinishReason.TIME_LIMIT)

    def die(self, error: Exception) -> None:
        """The engine dies: all live requests fail, retryably."""
        self._dead = error
        self._died.set()
        self._fail_all("the engine has stopped")

    def step(self) -> bool:
        """One step; False: there was nothing to do."""
        self._admit()
        now = time.monotonic()
        outputs = []
        for live in list(self._live.values()):
            if live.running or live.end is not None:
                outputs.append(self._output(live, now))
        if not outputs or self._sink is None:
            return False
        self.steps += 1
        self._sink(StepOutputs(now, tuple(outputs)))
        return True

    def run(self) -> None:
        """Step until nothing is left."""
        while self.step():
            pass

    def go_on(self) -> None:
        """End what `hold_at` began."""
        self.hold_at = None
        self._work.set()

    async def _run_loop(self) -> None:
        while True:
            await self._work.wait()
            held = self.hold_at is not None and self.steps >= self.hold_at
            if held or not self.step():
                self._work.clear()
            await asyncio.sleep(0)

    def _end(self, request_id: RequestId, reason: FinishReason) -> bool:
        live = self._live.get(request_id)
        if live is None or live.end is not None:
            return False
        live.end = reason
        self._work.set()
        return True

    def _admit(self) -> None:
        running = sum(live.running for live in self._live.values())
        while self._waiting and running < self.info.max_running_requests:
            live = self._waiting.popleft()
            if self._live.get(live.spec.request_id) is live:
                live.running = True
                running += 1

    def _output(self, live: _Live, now: float) -> RequestOutput:
        ids: tuple[TokenId, ...] = ()
        prompt_done = None
        if live.end is None:
            if not live.prompt_done:
                live.prompt_done = True
                live.first_scheduled = now
                prompt_done = 0
            ids = self._generate(live, now)
        finish = None
        if live.end is not None:
            finish = self._finish(live, now)
            del self._live[live.spec.request_id]
            self.ended += 1
        logprobs = None
        if live.spec.logprobs is not None:
            start = live.generated - len(ids)
            top_n = live.spec.logprobs.top_n
            logprobs = tuple(token_logprobs(start + i, t, top_n) for i, t in enumerate(ids))
        return RequestOutput(
            live.spec.request_id,
            token_ids=ids,
            logprobs=logprobs,
            prompt_done=prompt_done,
            finish=finish,
            ends_request=finish is not None,
        )

    def _generate(self, live: _Live, now: float) -> tuple[TokenId, ...]:
        stop, ids = live.spec.stop, []
        ending = stop.ending_token_ids
        room = self.info.max_context_tokens - len(live.spec.prompt)
        while live.end is None and len(ids) < self.tokens_per_step:
            if live.generated >= stop.max_tokens:
                live.end = FinishReason.LENGTH
                break
            token = TokenId(live.tokens[live.generated % len(live.tokens)])
            if token in ending and live.generated < stop.min_tokens:
                token = TokenId(ord("x"))
            live.generated += 1
            self.generated += 1
            ids.append(token)
            if live.first_token is None:
                live.first_token = now
            live.last_token = now
            if token in ending:
                live.end = FinishReason.STOP
                live.stop_token_id = token
            elif live.generated >= stop.max_tokens:
                live.end = FinishReason.LENGTH
            elif live.generated >= room:
                live.end = FinishReason.CONTEXT
        return tuple(ids)

    def _finish(self, live: _Live, now: float) -> Finish:
        tokens = live.generated if live.finish_at is None else live.finish_at
        timings = Timings(
            live.arrival, live.first_scheduled, live.first_token, live.last_token, now, 0
        )
        failure = live.failure
        stop_id = None if live.stop_token_id is None else TokenId(live.stop_token_id)
        usage = Usage(len(live.spec.prompt), 0, tokens)
        return Finish(live.end or FinishReason.ERROR, usage, timings, stop_id, failure)

    def _fail_all(self, message: str) -> None:
        for live in self._live.values():
            live.end = FinishReason.ERROR
            live.failure = RequestFailure(message, "fake-error-id", retryable=True)
        self.step()


def token_logprobs(position: int, token_id: int, top_n: int) -> TokenLogprobs:
    """The log-probabilities that the fake engine reports: worked out from position and id."""
    return TokenLogprobs(
        logprob=-0.5 * (position + 1),
        rank=1 + position % 3,
        candidates=tuple((TokenId((token_id + i) % VOCAB_SIZE), -1.0 - i) for i in range(top_n)),
    )
