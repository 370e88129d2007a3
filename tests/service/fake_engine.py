"""An engine without a model: an `EngineClient` whose tokens are known beforehand, for tests of
whatever stands before it.

`FakeEngine` generates for every choice of a request what its `script` says (by default
`default_script`: some readable bytes that depend on the prompt and the choice alone), one token a
step, and ends choices as the real engine does: STOP at stop and end-of-sequence ids, LENGTH,
CONTEXT, CANCELLED, TIME_LIMIT; ERROR ends the whole request. Waiting requests of a higher priority
run first. A prompt counts as cached as far as an earlier one under the same salt began with the
same tokens. A schema that is no JSON is refused.
It runs by itself (`auto=True`: one step each pass of the event loop while there is work), or step
by step:

    engine = FakeEngine(auto=False)
    ...
    engine.step()          # admits, generates one token for each running request, calls the sink
    once engine.run()           # steps until nothing is left

Tokens are bytes: `byte_tokenizer()` has the ids 0 to 255 for the bytes, EOS and BOS, so that texts
and tokens can be worked out by hand. Failures: `refuse_next` (an exception for the next submit),
`fail(request_id)`, `die(error)`. While it is paused, steps bring ends alone; so they do to a
request that is held.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.contract.adapters import Adapter, AdapterInfo, AdapterLoad, AdapterLoaded
from engine.contract.engine_client import Admission, ModelInfo, ProgressSink, StepSink
from engine.contract.errors import (
    AdapterExistsError,
    AdapterRefusedError,
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
)
from engine.contract.loaded_adapters import AdapterBounds, LoadedAdapters
from engine.contract.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    StepOutputs,
    StepRecord,
    Timings,
    TokenLogprobs,
    Usage,
    end_of_lost,
)
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import GrammarKind, GrammarParams, SamplingParams
from engine.contract.stats import EngineStats
from engine.contract.token_ids import TokenValues
from engine.contract.types import RequestId, TokenId
from engine.text import Tokenizer

EOS = 256
BOS = 257
VOCAB_SIZE = 258
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

Script = Callable[[GenerationRequest, int], Sequence[int]]
"""What a choice of a request generates; over again where that is not enough."""


def byte_tokenizer(
    *, chat_template: str | None = CHAT_TEMPLATE, special: Sequence[str] = ()
) -> Tokenizer:
    """A tokenizer whose ids 0 to 255 are the bytes; EOS and BOS are special tokens, and so are
    these, which have the ids behind.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    backend = Backend(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<eos>", "<bos>", *special)]
    )
    return Tokenizer(
        backend,
        special_tokens={"eos_token": "<eos>", "bos_token": "<bos>"},
        chat_templates={"default": chat_template} if chat_template is not None else None,
        vocab_size=VOCAB_SIZE + len(special),
    )


def default_script(request: GenerationRequest, choice: int = 0) -> Sequence[int]:
    """Endless lower-case letters and blanks that depend on the prompt and the choice alone."""
    digest = hashlib.sha256(repr((request.prompt, choice)).encode()).digest()
    letters = b"abcdefghijklmnopqrstuvwxyz      "
    return [letters[digest[i % 32] % 32] for i in range(4096)]


def says(*texts: str | bytes, eos: bool = True) -> Script:
    """A script that generates this text, and then the end-of-sequence token; of several texts, each
    choice gets its own, and the last one is for all that follow.
    """
    scripts = [
        [*(text.encode() if isinstance(text, str) else text), *([EOS] if eos else [])]
        for text in texts
    ]
    return lambda _request, choice: scripts[min(choice, len(scripts) - 1)]


def model_info(**changes: object) -> ModelInfo:
    """A model's description, as the fake engine has it by default."""
    values: dict[str, object] = {
        "name": "fake",
        "path": "/nowhere",
        "architecture": "FakeForCausalLM",
        "parameters": 1000,
        "dtype": "float32",
        "quantization": "none",
        "device": "cpu",
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (TokenId(EOS),),
        "max_context_tokens": 2048,
        "default_sampling": SamplingParams(temperature=0.7, top_p=0.9),
        "max_running_requests": 64,
        "max_queue_size": 1024,
        "heeds_priorities": True,
        "startup": (("weights", 3.5),),
        **changes,
    }
    return ModelInfo(**values)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Choice:
    """A choice of a request in the fake engine."""

    index: int
    tokens: Sequence[int]
    generated: int = 0
    first_token: float | None = None
    last_token: float | None = None
    end: FinishReason | None = None
    over: bool = False
    finish_at: int | None = None
    stop_token_id: int | None = None


@dataclass(eq=False)
class _Live:
    """A request in the fake engine."""

    spec: GenerationRequest
    choices: list[_Choice]
    arrival: float
    running: bool = False
    cached: int = 0
    prompt_done: bool = False
    first_scheduled: float | None = None
    failure: RequestFailure | None = None
    held: bool = False

    @property
    def left(self) -> list[_Choice]:
        """The choices that have not ended."""
        return [choice for choice in self.choices if not choice.over]


@dataclass(eq=False)
class FakeEngine:
    """See the module. Attributes beside the options: what happened, for tests to look at.

    `hold_at`: with auto, the loop stands still once this many steps were done, until `go_on`.
    """

    script: Script = default_script
    auto: bool = True
    restartable: bool = False
    tokens_per_step: int = 1
    info: ModelInfo = field(default_factory=model_info)
    load_error: Exception | None = None
    load_gate: asyncio.Event | None = None
    refuse_next: list[BaseException] = field(default_factory=list)
    submit_gate: asyncio.Event | None = None
    hold_at: int | None = None
    blocks: tuple[int, int] = (0, 0)  # used, in all
    # What happened.
    submitted: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    finished: list[tuple[str, int, int]] = field(default_factory=list)
    steps: int = 0
    generated: int = 0
    ended: int = 0
    closed: bool = False
    paused: bool = False
    num_holds: int = 0
    resets: int = 0
    log_levels: list[str] = field(default_factory=list)
    listings: int = 0
    adapters: LoadedAdapters = field(default_factory=LoadedAdapters)
    adapter_bounds: AdapterBounds = AdapterBounds(1 << 30, 256)  # noqa: RUF009 - it is frozen
    stats_gate: asyncio.Event | None = None
    pause_gate: asyncio.Event | None = None
    _dead: Exception | None = None
    _died: asyncio.Event = field(default_factory=asyncio.Event)
    _sink: StepSink | None = None
    _waiting: list[_Live] = field(default_factory=list)
    _prefixes: dict[bytes, list[tuple[TokenId, ...]]] = field(default_factory=dict)
    _live: dict[RequestId, _Live] = field(default_factory=dict)
    _adapter_of: dict[RequestId, Adapter | None] = field(default_factory=dict)
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.Task[None] | None = None

    # EngineClient

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        """Load: waits for `load_gate`, raises `load_error`."""
        progress("loading the fake model")
        if self.load_gate is not None:
            await self.load_gate.wait()
        if self.load_error is not None:
            raise self.load_error
        if self.restartable:
            self._dead = None
            self._died.clear()
            if self.loop is not None:
                self.loop.cancel()
        self._sink = sink
        self.paused = False
        if self.auto:
            self.loop = asyncio.create_task(self._run_loop())
        return self.info

    async def submit(self, request: GenerationRequest) -> Admission:
        """Take a request in."""
        if self.refuse_next:
            raise self.refuse_next.pop(0)
        if self.submit_gate is not None:
            await self.submit_gate.wait()
        self._running()
        if request.request_id in self._live:
            raise DuplicateRequestError(request.request_id)
        if not 0 < len(request.prompt) < self.info.max_context_tokens:
            raise InvalidRequestError("prompt", "does not fit the context")
        _check_grammar(request.grammar)
        self._admit()
        limit = self.info.max_queue_size
        if limit and len(self._waiting) >= limit:
            raise QueueFullError(limit, 0.5)
        with self.adapters.begun([request.adapter]) as [adapter]:
            self._adapter_of[request.request_id] = adapter
        position = len(self._waiting)
        choices = [_Choice(i, self.script(request, i)) for i in range(request.n)]
        live = _Live(request, choices, time.monotonic())
        self._waiting.append(live)
        self._live[request.request_id] = live
        self.submitted.append(request)
        self._work.set()
        digest = "" if adapter is None else adapter.digest.hex()
        return Admission(position, live.arrival, adapter_digest=digest)

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request with CANCELLED at the next step."""
        self.cancelled.append(request_id)
        return self._end(request_id, FinishReason.CANCELLED)

    async def finish(self, request_id: RequestId, num_tokens: int, choice: int = 0) -> None:
        """End a request with STOP at the next step."""
        self.finished.append((request_id, num_tokens, choice))
        live = self._live.get(request_id)
        if live is not None and live.choices[choice].end is None:
            live.choices[choice].end = FinishReason.STOP
            live.choices[choice].finish_at = num_tokens
            self._work.set()

    async def hold(self, request_id: RequestId) -> None:
        """The request generates nothing until `unhold`."""
        live = self._live.get(request_id)
        if live is not None and not live.held:
            live.held = True
            self.num_holds += 1

    async def unhold(self, request_id: RequestId) -> None:
        """End a hold."""
        live = self._live.get(request_id)
        if live is not None:
            live.held = False
            self._work.set()

    async def stats(self) -> EngineStats:
        """The figures now."""
        if self.stats_gate is not None:
            await self.stats_gate.wait()
        self._running()
        running = sum(live.running and not live.held for live in self._live.values())
        held = sum(live.held for live in self._live.values())
        return EngineStats(
            running=running,
            waiting=len(self._live) - running - held,
            held=held,
            holds=self.num_holds,
            blocks_total=self.blocks[1],
            blocks_used=self.blocks[0],
            steps=self.steps,
            prompt_tokens=0,
            generated_tokens=self.generated,
            requests_accepted=len(self.submitted),
            requests_finished=self.ended,
            preemptions=0,
            last_step_s=0.0,
        )

    async def pause(self) -> None:
        """No request generates anything until `resume`."""
        self._running()
        self.paused = True
        if self.pause_gate is not None:
            await self.pause_gate.wait()

    async def resume(self) -> None:
        """End a pause."""
        self._running()
        self.paused = False
        self._work.set()

    async def reset_prefix_cache(self) -> None:
        """Forget all prompts."""
        self._running()
        self._prefixes.clear()
        self.resets += 1

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """The source's name is the content; each has 1,000 bytes."""
        self._running()
        if not self.info.serves_adapters:
            raise AdapterRefusedError("source: none are loaded here")
        if load.name in self.adapters and not load.replaces:
            raise AdapterExistsError(load.name, "is loaded")
        digest = hashlib.sha256(load.source.encode()).digest()
        one = Adapter(load.name, digest, 8, 1000, 14, "base", None)
        told, evicted = self.adapters.put(one, self.adapter_bounds, is_pinned=load.is_pinned)
        return AdapterLoaded(told, evicted)

    async def unload_adapter(self, name: str, timeout_s: float | None) -> int:
        """Those that have it go on; with a timeout, they are cancelled at once."""
        self._running()
        gone = self.adapters.remove(name)
        users = [one for one, adapter in self._adapter_of.items() if adapter in gone]
        for request_id in users if timeout_s is not None else ():
            self._end(request_id, FinishReason.CANCELLED)
        return len(users)

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters, and how often that was asked."""
        self._running()
        self.listings += 1
        return self.adapters.told()

    async def set_log_level(self, level: str, level_of: tuple[str, ...] = ()) -> None:
        """Note the levels."""
        self.log_levels += [level, *level_of]

    def _running(self) -> None:
        if self._sink is None or self._dead is not None or self.closed:
            raise EngineUnavailableError("the engine has stopped; try another server, or later")

    async def close(self) -> None:
        """Stop; live requests end with ERROR."""
        if not self.closed:
            self.closed = True
            self._fail_all("the engine was stopped")
        if self.loop is not None:
            self.loop.cancel()
            await asyncio.gather(self.loop, return_exceptions=True)

    async def wait_failed(self) -> Exception:
        """Wait for `die`."""
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    @property
    def is_restartable(self) -> bool:
        """Whether `start` brings it back to life."""
        return self.restartable

    @property
    def failure(self) -> Exception | None:
        """Why the engine is dead."""
        return self._dead

    # For tests

    @property
    def held(self) -> set[str]:
        """The requests that are held."""
        return {name for name, live in self._live.items() if live.held}

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def fail(self, request_id: RequestId, failure: RequestFailure) -> None:
        """Let one request fail at the next step."""
        self._live[request_id].failure = failure
        self._work.set()

    def time_out(self, request_id: RequestId) -> None:
        """Let one request reach its time limit at the next step."""
        self._end(request_id, FinishReason.TIME_LIMIT)

    def die(self, error: Exception) -> None:
        """The engine dies, as its process does: all live requests fail, retryably, and nobody says
        any more what they have cost.
        """
        self._dead = error
        self._died.set()
        self._fail_all("the engine has stopped")

    def step(self) -> bool:
        """One step; False: there was nothing to do."""
        self._admit()
        now = time.monotonic()
        outputs: list[RequestOutput] = []
        for live in list(self._live.values()):
            outputs += self._outputs(live, now)
        if not outputs or self._sink is None:
            return False
        self.steps += 1
        prompts = sum(output.prompt_done is not None for output in outputs)
        tokens = sum(len(output.token_ids) for output in outputs)
        record = StepRecord(0.25, len({output.request_id for output in outputs}), prompts, tokens)
        self._sink(StepOutputs(now, tuple(outputs), record))
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
        going = [] if live is None else [one for one in live.choices if one.end is None]
        for choice in going:
            choice.end = reason
        self._work.set()
        return bool(going)

    def _admit(self) -> None:
        running = sum(live.running and not live.held for live in self._live.values())
        while self._waiting and running < self.info.max_running_requests:
            live = max(self._waiting, key=lambda one: one.spec.priority)  # of equals, the first
            self._waiting.remove(live)
            if self._live.get(live.spec.request_id) is live:
                live.running = True
                live.cached = self._look_up(live.spec)
                running += 1

    def _look_up(self, request: GenerationRequest) -> int:
        """How much of a prompt is cached; the whole of it is from now on."""
        if request.bypass_prefix_cache:
            return 0
        known = self._prefixes.setdefault(request.cache_salt, [])
        found = max((_common(request.prompt, other) for other in known), default=0)
        known.append(request.prompt)
        return min(found, len(request.prompt) - 1)

    def _outputs(self, live: _Live, now: float) -> list[RequestOutput]:
        if live.failure is not None:
            finish = self._finish(live, live.left[0], now)
            self._forget(live)
            return [RequestOutput(live.spec.request_id, finish=finish, ends_request=True)]
        return [
            self._output(live, choice, now)
            for choice in live.left
            if (live.running and not self.paused and not live.held) or choice.end is not None
        ]

    def _output(self, live: _Live, choice: _Choice, now: float) -> RequestOutput:
        ids: tuple[TokenId, ...] = ()
        prompt_done = prompt_logprobs = None
        if choice.end is None:
            if not live.prompt_done:
                live.prompt_done = True
                live.first_scheduled = now
                prompt_done = live.cached
                prompt_logprobs = self._prompt_logprobs(live.spec)
            ids = self._generate(live, choice, now)
        finish = None
        if choice.end is not None:
            finish = self._finish(live, choice, now)
            choice.over = True
            if not live.left:
                self._forget(live)
        logprobs = None
        if live.spec.logprobs is not None:
            start, wanted = choice.generated - len(ids), live.spec.logprobs
            logprobs = tuple(
                token_logprobs(start + i, token_id, wanted.top_n, wanted.token_ids)
                for i, token_id in enumerate(ids)
            )
        return RequestOutput(
            live.spec.request_id,
            choice=choice.index,
            token_ids=ids,
            logprobs=logprobs,
            prompt_done=prompt_done,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            ends_request=not live.left,
        )

    def _prompt_logprobs(self, spec: GenerationRequest) -> tuple[TokenLogprobs, ...] | None:
        top_n = spec.prompt_logprobs
        if top_n is None:
            return None
        return tuple(token_logprobs(i, t, top_n) for i, t in enumerate(spec.prompt) if i)

    def _generate(self, live: _Live, choice: _Choice, now: float) -> tuple[TokenId, ...]:
        stop, ids = live.spec.stop, []
        ending = stop.ending_token_ids
        room = self.info.max_context_tokens - len(live.spec.prompt)
        while choice.end is None and len(ids) < self.tokens_per_step:
            if choice.generated >= stop.max_tokens:
                choice.end = FinishReason.LENGTH
                break
            token = TokenId(choice.tokens[choice.generated % len(choice.tokens)])
            if token in ending and choice.generated < stop.min_tokens:
                token = TokenId(ord("x"))
            choice.generated += 1
            self.generated += 1
            ids.append(token)
            if choice.first_token is None:
                choice.first_token = now
            choice.last_token = now
            if token in ending:
                choice.end = FinishReason.STOP
                choice.stop_token_id = token
            elif choice.generated >= stop.max_tokens:
                choice.end = FinishReason.LENGTH
            elif choice.generated >= room:
                choice.end = FinishReason.CONTEXT
        return tuple(ids)

    def _finish(self, live: _Live, choice: _Choice, now: float) -> Finish:
        tokens = choice.generated if choice.finish_at is None else choice.finish_at
        timings = Timings(
            live.arrival, live.first_scheduled, choice.first_token, choice.last_token, now, 0
        )
        stop_id = None if choice.stop_token_id is None else TokenId(choice.stop_token_id)
        usage = Usage(len(live.spec.prompt), live.cached, tokens)
        reason = FinishReason.ERROR if live.failure is not None else choice.end
        assert reason is not None
        return Finish(reason, usage, timings, stop_id, live.failure)

    def _forget(self, live: _Live) -> None:
        for choice in live.choices:
            choice.over = True
        del self._live[live.spec.request_id]
        self.adapters.end([self._adapter_of.pop(live.spec.request_id)])
        self.ended += 1

    def _fail_all(self, message: str) -> None:
        """All live requests end, with the little that is known of them once their engine's process
        is gone.
        """
        now = time.monotonic()
        failure = RequestFailure(message, "fake-error-id", retryable=True)
        lost = list(self._live.values())
        outputs = [end_of_lost(one.spec.request_id, failure, one.arrival, now) for one in lost]
        for live in lost:
            self._forget(live)
        self._waiting.clear()
        if outputs and self._sink is not None:
            self._sink(StepOutputs(now, tuple(outputs)))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _check_grammar(grammar: GrammarParams | None) -> None:
    if grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA:
        try:
            json.loads(grammar.text)
        except ValueError as error:
            raise InvalidRequestError("grammar.json_schema", f"is not JSON: {error}") from error


def token_logprobs(
    position: int, token_id: int, top_n: int, requested: Sequence[TokenId] = ()
) -> TokenLogprobs:
    """The log-probabilities that the fake engine reports: worked out from position and id."""
    return TokenLogprobs(
        logprob=-0.5 * (position + 1),
        rank=1 + position % 3,
        candidates=TokenValues.of(((token_id + i) % VOCAB_SIZE, -1.0 - i) for i in range(top_n)),
        requested=TokenValues.of((token, -10.0 - token) for token in requested),
    )
