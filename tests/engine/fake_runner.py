"""A runner without a model: tokens computed by hand, and a check of every batch that it is given.

It keeps caches of its own, slot by slot, as the device and the host would, and makes the block
copies in them. A slot holds a number that stands for the whole token prefix up to its position, so
that equal prefixes may share blocks, and anything else that is found where a step attends to is a
violation: a block that was given to two requests, freed too early, copied too late, or left out of
a table.

`late`: what a step does happens when its results are collected, from what was read at its launch,
as on a device that is behind. Whatever is read of a batch's lists after its launch fails. Only a
step with a request that needs a pending token on the host reads masks later, when it samples.

A violation is no Exception: the core ends a batch whose step raises, and would hide it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.contract.outputs import TokenLogprobs
from engine.contract.request import PENDING_TOKEN, GenerationRequest, Request
from engine.contract.sampling_params import LogprobParams, SamplingParams, StopParams
from engine.contract.types import CallerKey, GroupId, RequestId, RequestKey, TokenId
from engine.core.engine_core import EngineCore
from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.copies import BlockCopy, StepCopies
from engine.kv_cache.group_kinds import FullAttention, GroupKind, SlidingAttention
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.runner.input_batch import StackedTables
from engine.scheduler.pace import StepPace
from engine.scheduler.policies import scheduler_class
from engine.scheduler.runner_protocol import INVALID_TOKEN, SampledTokens
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest

VOCAB = 101
POISON = TokenId(VOCAB + 13)
"""What is sampled from a cache that a failed step left wrong. Never to be delivered."""
_GARBAGE = -1

Slots = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]


class Violation(BaseException):
    """A law of the seam between core and runner was broken."""


def demand(law: bool, what: object) -> None:
    if not law:
        raise Violation(what)


def next_token(last: int, position: int, choice: int = 0) -> TokenId:
    """The token that follows `last`, which stands at `position`."""
    return TokenId((last * 31 + position * 17 + choice * 29 + 7) % VOCAB)


def echoed(position: int, choice: int = 0) -> TokenId:
    """The token that is followed by itself if it stands at `position`."""
    return TokenId((position * 17 + choice * 29 + 7) * pow(-30, -1, VOCAB) % VOCAB)


def expected_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    ending: Sequence[int] = (),
    context: int = 10**9,
    choice: int = 0,
) -> list[int]:
    """The whole output of a choice, computed by hand."""
    tokens = list(prompt)
    limit = min(len(prompt) + max_tokens, context)
    while len(tokens) < limit:
        tokens.append(next_token(tokens[-1], len(tokens) - 1, choice))
        if tokens[-1] in ending:
            break
    return tokens[len(prompt) :]


def prompt_logprob(token: int, position: int) -> TokenLogprobs:
    """What is reported of a prompt token."""
    return TokenLogprobs(logprob=-token - 1000.0 * position, rank=position)


# ---- lists that may be read during the launch only -------------------------------------------


class _Expired:
    """Stands where a list was that must not be read any more."""

    def __getattr__(self, name: str) -> object:
        raise Violation(f"{name} of a batch's list was read after its launch")

    def __len__(self) -> int:
        raise Violation("the length of a batch's list was read after its launch")

    def __iter__(self) -> object:
        raise Violation("a batch's list was read after its launch")

    def __getitem__(self, index: object) -> object:
        raise Violation("a batch's list was read after its launch")


def expiring(batch: ScheduledBatch) -> tuple[ScheduledBatch, Callable[[], None]]:
    """The same batch through requests and tables of its own, and what makes their lists fail from
    then on. For any runner: launch the first, then call the second.
    """
    parts = tuple(
        part._replace(
            request=copy.copy(part.request),
            tables=tuple(copy.copy(table) for table in part.tables),
        )
        for part in batch.requests
    )

    def expire() -> None:
        for part in parts:
            part.request.token_ids = _Expired()  # type: ignore[assignment]
            for table in part.tables:
                table.blocks = _Expired()  # type: ignore[assignment]

    return replace(batch, requests=parts), expire


# ---- the runner ------------------------------------------------------------------------------


@dataclass
class _History:
    """What the runner has seen of a choice: its tokens, for each of them its prefix's number, and
    the position and value of the token that it sampled last.
    """

    tokens: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    sampled: tuple[int, TokenId] = (-1, POISON)

    def append(self, token: int) -> None:
        before = self.prefixes[-1] if self.prefixes else 12345
        self.tokens.append(token)
        self.prefixes.append((before * 1_000_003 + token + 1) % (2**61 - 1))

    def forget(self, length: int) -> None:
        """Nobody knows yet which tokens from a position on were right."""
        del self.tokens[length:], self.prefixes[length:]


@dataclass(frozen=True)
class _Part:
    """What a step needs of one request's part, read at its launch. `tail`: the tokens from position
    `known` on, the last `drafted` of them drafts. `live`: the core's own record, for what may be
    read later.
    """

    request: Request
    live: Request
    history: _History
    start: int
    end: int
    num_sampled: int
    drafted: int
    blocks: tuple[npt.NDArray[np.int32], ...]
    known: int
    tail: list[int]


class _Step:
    """A step that was launched; in a late runner it is not computed before its result.

    Attributes:
        waits: whether its tokens cannot be chosen at its launch.
        masks: what the grammars allow; None: the tokens have not been chosen.
    """

    def __init__(self, runner: FakeRunner, parts: list[_Part], copies: StepCopies) -> None:
        self.runner, self.parts, self.copies = runner, parts, copies
        self.number = runner.steps
        self.is_tainted = False
        self.fails = False
        self.fails_to_sample = False
        self.waits = any(
            part.num_sampled and part.live.num_pending_tokens and _needs_host_tokens(part.live)
            for part in parts
        )
        self.masks: list[npt.NDArray[np.int32] | None] | None = None
        self.sampled: SampledTokens | None = None

    def compute(self) -> None:
        self.sampled = self.runner.compute(self)

    def sample(self) -> None:
        runner = self.runner
        if self.masks is not None:
            return
        if self.waits:
            demand(runner.in_flight[0] is self, "the step before is collected first")
        runner.events.append(("sample", self.number))
        if self.fails_to_sample:
            runner.in_flight.remove(self)
            raise RuntimeError("scripted failure of a choice")
        self.masks = [self._mask(part) for part in self.parts]
        if not runner.late:
            self.compute()

    def _mask(self, part: _Part) -> npt.NDArray[np.int32] | None:
        request = part.live
        if not part.num_sampled or not _needs_host_tokens(request) or request.status.is_terminal:
            return None
        known = request.num_tokens - (request.num_pending_tokens if self.waits else 0)
        demand(self.is_tainted or known == part.end, "the tokens before must be on the host")
        if request.matcher is None:
            return None
        mask = np.zeros((VOCAB + 31) // 32, dtype=np.int32)
        request.matcher.fill_mask(mask)
        return mask

    def result(self) -> SampledTokens:
        runner = self.runner
        demand(runner.in_flight[0] is self, "steps are collected in order, once")
        demand(self.masks is not None, "tokens are chosen before they are collected")
        runner.events.append(("result", self.number))
        del runner.in_flight[0]
        if self.fails:
            for later in runner.in_flight:
                later.is_tainted = True
            raise RuntimeError("scripted failure of a result")
        if self.sampled is None:
            self.compute()
        assert self.sampled is not None
        return self.sampled


class FakeRunner:
    """See the module.

    Attributes:
        fail: how many of the next steps raise when they are launched.
        fail_results: how many of the next steps raise when they are collected.
        fail_samples: how many of the next steps that choose their tokens later raise then.
        events: the calls, in order: (launch, sample or result, the step's number).
        invalid: requests whose next token cannot be sampled.
        hook: called at the start of each step, on the engine's thread.
        in_flight: the steps that were not collected.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_batch_tokens: int,
        max_requests: int,
        verify: bool = True,
        late: bool = False,
        host_blocks: Sequence[int] | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.max_batch_tokens = max_batch_tokens
        self.max_requests = max_requests
        self.verify = verify
        self.late = late
        self.fail = 0
        self.fail_results = 0
        self.fail_samples = 0
        self.events: list[tuple[str, int]] = []
        self.invalid: set[RequestId] = set()
        self.hook: Callable[[ScheduledBatch], None] | None = None
        self.released: list[RequestKey] = []
        self.steps = 0
        self.chunks = 0
        self.drafted = 0
        self.warmups = 0
        self.overlapped = 0
        self.copied = {"offloads": 0, "restores": 0, "forks": 0}
        self.in_flight: list[_Step] = []
        self.histories: dict[RequestKey, _History] = {}
        size = kv_cache.block_size
        self._tables = [StackedTables(group) for group in range(len(kv_cache.pools))]
        self._device: list[Slots] = [
            np.full((pool.num_blocks + 1, size), _GARBAGE, dtype=np.int64)
            for pool in kv_cache.pools
        ]
        self._host: list[Slots] = [
            np.full((slots, size), _GARBAGE, dtype=np.int64)
            for slots in (host_blocks or [0] * len(kv_cache.pools))
        ]

    def launch(self, batch: ScheduledBatch) -> _Step:
        self.steps += 1
        self.events.append(("launch", self.steps))
        if self.hook is not None:
            self.hook(batch)
        demand(len(self.in_flight) < 2, "at most one other step is pending")
        self.overlapped += bool(self.in_flight)
        if self.verify:
            self._check_batch(batch)
        self.chunks += sum(1 for part in batch.requests if not part.num_sampled)
        self.drafted += sum(len(part.drafts) for part in batch.requests)
        if self.fail:
            self.fail -= 1
            raise RuntimeError("scripted failure")
        view, expire = expiring(batch) if self.late else (batch, lambda: None)
        seen = zip(view.requests, batch.requests, strict=True)
        stacked = (
            [tables.stack(batch.requests) for tables in self._tables] if batch.requests else []
        )
        parts = [
            self._read_part(part, whole.request, [tables[row] for tables in stacked])
            for row, (part, whole) in enumerate(seen)
        ]
        step = _Step(self, parts, batch.copies)
        expire()
        if self.fail_results:
            self.fail_results -= 1
            step.fails = True
        self.in_flight.append(step)
        if not step.waits:
            step.sample()
        elif self.fail_samples:
            self.fail_samples -= 1
            step.fails_to_sample = True
        return step

    def release(self, key: RequestKey) -> None:
        self.released.append(key)
        self.histories.pop(key, None)

    def forget_model(self) -> None:
        """It has none."""

    def warmup(self) -> None:
        self.warmups += 1

    # ---- at the launch ---------------------------------------------------------------------------

    def _check_batch(self, batch: ScheduledBatch) -> None:
        parts = batch.requests
        demand(parts or not batch.copies.is_empty, "an empty batch was launched")
        demand(len({part.request.key for part in parts}) == len(parts), "a request is in it twice")
        demand(batch.num_tokens == sum(part.num_rows for part in parts), "num_tokens")
        demand(batch.num_tokens <= self.max_batch_tokens, "token budget")
        demand(len(parts) <= self.max_requests, "max_requests_per_batch")
        many = [part.num_tokens > 1 for part in parts]
        demand(many == sorted(many), "requests that compute one token come first")
        for part in parts:
            request = part.request
            end = part.start + part.num_tokens
            demand(part.num_tokens > 0, "nothing to compute")
            demand(part.start == request.num_computed_tokens, "start")
            demand(end <= len(request.token_ids), "more than there is")
            demand(end <= request.max_total_tokens, "more than there may be")
            is_last = end == len(request.token_ids)
            demand(part.num_sampled == is_last + len(part.drafts), "the sampled rows")
            if part.drafts:
                demand(is_last and part.num_tokens == 1, "drafts with a chunk")
                demand(not _needs_host_tokens(request), "drafts that cannot be sampled")
                demand(end + len(part.drafts) < request.max_total_tokens, "drafts past the end")
            demand(not request.is_verifying, "nobody knows how many tokens it has")
            demand(not request.status.is_terminal, f"{request.request_id} has ended")
            pending = request.token_ids[part.start : end].count(PENDING_TOKEN)
            demand(pending in (0, part.num_tokens == 1), "a pending token among others")
            demand(NULL_BLOCK not in [b for table in part.tables for b in table.held()], "null")
            for table in part.tables:
                room = table.length * self.kv_cache.block_size
                demand(room >= part.start + part.num_rows, "the table is too short")

    def _read_part(self, part: ScheduledRequest, live: Request, blocks: Sequence[Table]) -> _Part:
        request, end = part.request, part.start + part.num_rows
        history = self.histories.setdefault(request.key, _History())
        known = min(part.start, len(history.tokens))
        return _Part(
            request=request,
            live=live,
            history=history,
            start=part.start,
            end=end,
            num_sampled=part.num_sampled,
            drafted=len(part.drafts),
            blocks=tuple(
                stacked[: table.length] for table, stacked in zip(part.tables, blocks, strict=True)
            ),
            known=known,
            tail=[*request.token_ids[known : end - len(part.drafts)], *part.drafts],
        )

    # ---- on the device ---------------------------------------------------------------------------

    def compute(self, step: _Step) -> SampledTokens:
        """Copy, write, read, sample; in this order."""
        self._copy(step.copies)
        right = [self._take_tokens(step, part) for part in step.parts]
        if self.verify:
            self._write(step)
            for index, part in enumerate(step.parts):
                right[index] = right[index] and self._check_read(step, part)
        tokens: list[TokenId] = []
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: dict[RequestKey, list[TokenLogprobs]] = {}
        for part, is_right, mask in zip(step.parts, right, step.masks or (), strict=True):
            request = part.request
            if request.spec.prompt_logprobs is not None and part.start < request.num_prompt_tokens:
                prompt = request.spec.prompt
                prompt_logprobs[request.key] = [
                    prompt_logprob(prompt[position], position)
                    for position in range(part.start + 1, min(part.end + 1, len(prompt)))
                ]
            for at in range(part.end - part.num_sampled + 1, part.end + 1):
                token = self._sample(part, at, mask) if is_right else POISON
                # Nobody may go on with a token of a part with drafts before it is collected.
                part.history.sampled = (-1, POISON) if part.drafted else (at, token)
                tokens.append(token)
                asked = request.spec.logprobs is not None
                logprobs.append(TokenLogprobs(-float(token), at, ()) if asked else None)
            part.history.forget(part.end - part.drafted)
        return SampledTokens(tokens, logprobs, prompt_logprobs)

    def _copy(self, copies: StepCopies) -> None:
        def move(
            name: str, plans: Sequence[BlockCopy], source: list[Slots], to: list[Slots]
        ) -> None:
            self.copied[name] += len(plans)
            for plan in plans:
                if source is self._device:
                    demand(plan.source != NULL_BLOCK, f"{name}: the null block is a source")
                if to is self._device:
                    demand(plan.target != NULL_BLOCK, f"{name}: the null block is a target")
                to[plan.group][plan.target] = source[plan.group][plan.source]

        move("offloads", copies.offloads, self._device, self._host)
        move("restores", copies.restores, self._host, self._device)
        move("forks", copies.forks, self._device, self._device)

    def _take_tokens(self, step: _Step, part: _Part) -> bool:
        """Go on with a choice's history; the pending token's value is this runner's own."""
        history = part.history
        for position, given in enumerate(part.tail, part.known):
            token = given
            if given == PENDING_TOKEN:
                at, token = history.sampled
                if at != position:
                    demand(step.is_tainted, f"no token was sampled for position {position}")
                    return False
            if position < len(history.tokens):
                demand(history.tokens[position] == token, "a token has changed")
            else:
                history.append(token)
        return True

    def _write(self, step: _Step) -> None:
        for group, device in enumerate(self._device):
            flat = device.reshape(-1)
            written: list[int] = []
            for part in step.parts:
                slots = self._slots(part, group, part.start)
                prefixes = part.history.prefixes[part.start : part.end]
                flat[slots] = prefixes + [_GARBAGE] * (len(slots) - len(prefixes))
                written += slots.tolist()
            demand(len(written) == len(set(written)), "two requests write to one slot")

    def _check_read(self, step: _Step, part: _Part) -> bool:
        """Whether what the step attends to is there, and nobody has written over it. If a failed
        step is to blame, what this one has written is garbage.
        """
        prefixes = part.history.prefixes
        for index, group in enumerate(self.kv_cache.groups):
            first = 0 if group.window is None else max(0, part.start - group.window + 1)
            flat = self._device[index].reshape(-1)
            found = flat[self._slots(part, index, first)]
            wanted = np.array(prefixes[first : part.end], dtype=np.int64)
            if len(found) != len(wanted) or not np.array_equal(found, wanted):
                demand(
                    step.is_tainted,
                    f"group {index}: {part.request.request_id} (choice {part.request.choice}) "
                    f"attends to {first}…{part.end - 1}, not all is right",
                )
                flat[self._slots(part, index, part.start)] = _GARBAGE
                return False
        return True

    def _slots(self, part: _Part, group: int, first: int) -> npt.NDArray[np.int64]:
        positions = np.arange(first, part.end)
        blocks = part.blocks[group][positions // self.kv_cache.block_size].astype(np.int64)
        demand(bool((blocks != NULL_BLOCK).all()), "the window's blocks must be there")
        return blocks * self.kv_cache.block_size + positions % self.kv_cache.block_size

    def _sample(self, part: _Part, at: int, mask: npt.NDArray[np.int32] | None) -> TokenId:
        """Choose the token at a position."""
        if part.request.request_id in self.invalid:
            return INVALID_TOKEN
        token = next_token(part.history.tokens[at - 1], at - 1, part.request.choice)
        if mask is not None:
            while not int(mask[token // 32]) >> (token % 32) & 1:
                token = TokenId((token + 1) % VOCAB)
        return token


def _needs_host_tokens(request: Request) -> bool:
    """Whether this runner chooses a request's token only once those before it are on the host."""
    return request.matcher is not None or request.spec.sampling.needs_history


class Clock:
    """Monotonic seconds that move when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


Kind = GroupKind | int | None
"""Of a group; a number is a window, None is full attention."""


def kind_of(kind: Kind) -> GroupKind:
    if isinstance(kind, GroupKind):
        return kind
    return FullAttention() if kind is None else SlidingAttention(kind)


def make_groups(*windows: Kind) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(group_id=GroupId(i), kind=kind_of(window), layers=(i,), bytes_per_token=8)
        for i, window in enumerate(windows)
    )


def make_core(
    *,
    windows: Sequence[int | None] = (None,),
    num_blocks: Sequence[int] | int = 16,
    block_size: int = 4,
    max_batch_tokens: int = 16,
    max_requests: int = 8,
    max_context: int | None = None,
    clock: Callable[[], float] | None = None,
    verify: bool = True,
    policy: str = "fifo",
    safety_margin: float | None = None,
    overlap: bool = False,
    late: bool = False,
    share_blocks: bool = False,
    host_blocks: int | None = None,
    target_step_time: float = 0.0,
) -> tuple[EngineCore, FakeRunner, KVCacheManager]:
    """A core around a fake runner; max_context None: what the cache holds for one request;
    host_blocks: of each group.
    """
    sizes = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
    slots = None if host_blocks is None else [host_blocks] * len(windows)
    kv_cache = KVCacheManager(
        make_groups(*windows), sizes, block_size, share_blocks=share_blocks, host_blocks=slots
    )
    runner = FakeRunner(
        kv_cache,
        max_batch_tokens=max_batch_tokens,
        max_requests=max_requests,
        verify=verify,
        late=late,
        host_blocks=slots,
    )
    scheduler = scheduler_class(policy)(
        kv_cache,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests,
        safety_margin=safety_margin,
    )
    if target_step_time:
        scheduler.pace = StepPace(target_step_time, block_size)
    fits = kv_cache.max_tokens_per_request(max_batch_tokens)
    core = EngineCore(
        scheduler,
        runner,
        max_context_tokens=fits if max_context is None else min(fits, max_context),
        overlap=overlap,
        clock=clock or Clock(),
    )
    return core, runner, kv_cache


def make_request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 5,
    *,
    ending: Sequence[int] = (),
    time_limit_s: float | None = None,
    n: int = 1,
    priority: int = 0,
    prompt_logprobs: int | None = None,
    logprobs: bool = False,
    history: bool = False,
    caller: str = "",
    weight: float = 1.0,
    group: str = "",
) -> GenerationRequest:
    """`history`: its sampling needs the tokens before on the host."""
    return GenerationRequest(
        request_id=RequestId(name),
        prompt=tuple(TokenId(token) for token in prompt),
        sampling=SamplingParams(frequency_penalty=0.5 if history else 0.0),
        stop=StopParams(
            max_tokens=max_tokens, stop_token_ids=tuple(TokenId(token) for token in ending)
        ),
        logprobs=LogprobParams() if logprobs else None,
        time_limit_s=time_limit_s,
        n=n,
        priority=priority,
        prompt_logprobs=prompt_logprobs,
        caller=CallerKey(caller),
        weight=weight,
        caller_group=CallerKey(group),
    )
