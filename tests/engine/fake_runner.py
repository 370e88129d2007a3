"""A runner without a model: tokens computed by hand, and a check of every batch that it is given.

It keeps a cache of its own, slot by slot, as the device would: what is written where, and whether
every token that a step attends to is found where the block table says it is. A block that was given
to two requests, freed too early, or left out of a table shows at the step that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.batch import ScheduledBatch, ScheduledRequest
from engine.core import EngineCore
from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.manager import KVCacheManager
from engine.outputs import TokenLogprobs
from engine.request import GenerationRequest
from engine.runner_protocol import INVALID_TOKEN, SampledTokens
from engine.sampling_params import SamplingParams, StopParams
from engine.scheduler.fifo import FIFOScheduler
from engine.types import GroupId, RequestId, RequestKey, TokenId

VOCAB = 101


def next_token(last: int, position: int) -> TokenId:
    """The token that follows `last`, which stands at `position`."""
    return TokenId((last * 31 + position * 17 + 7) % VOCAB)


def expected_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    ending: Sequence[int] = (),
    context: int = 10**9,
) -> list[int]:
    """The whole output of a request, computed by hand."""
    tokens = list(prompt)
    limit = min(len(prompt) + max_tokens, context)
    while len(tokens) < limit:
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
        if tokens[-1] in ending:
            break
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class ComputedStep:
    """A step that was over when it was launched."""

    sampled: SampledTokens

    def result(self) -> SampledTokens:
        return self.sampled


class FakeRunner:
    """See the module.

    Attributes:
        fail: how many of the next steps raise.
        invalid: requests whose next token cannot be sampled.
        hook: called at the start of each step, on the engine's thread.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_batch_tokens: int,
        max_requests: int,
        verify: bool = True,
    ) -> None:
        self.kv_cache = kv_cache
        self.max_batch_tokens = max_batch_tokens
        self.max_requests = max_requests
        self.verify = verify
        self.fail = 0
        self.invalid: set[RequestId] = set()
        self.hook: Callable[[ScheduledBatch], None] | None = None
        self.released: list[RequestKey] = []
        self.steps = 0
        self.chunks = 0
        self.warmups = 0
        self._slots: list[dict[int, tuple[RequestId, int, int]]] = [{} for _ in kv_cache.groups]

    def launch(self, batch: ScheduledBatch) -> ComputedStep:
        self.steps += 1
        if self.hook is not None:
            self.hook(batch)
        if self.verify:
            self._check_batch(batch)
            for part in batch.requests:
                self._write(part)
            for part in batch.requests:
                self._read(part)
        self.chunks += sum(1 for part in batch.requests if not part.samples)
        if self.fail:
            self.fail -= 1
            raise RuntimeError("scripted failure")
        tokens: list[TokenId] = []
        logprobs: list[TokenLogprobs | None] = []
        for part in batch.requests:
            if part.samples:
                request = part.request
                token = next_token(request.token_ids[-1], len(request.token_ids) - 1)
                tokens.append(INVALID_TOKEN if request.request_id in self.invalid else token)
                asked = request.spec.logprobs is not None
                logprobs.append(TokenLogprobs(-0.5, 1, ()) if asked else None)
        return ComputedStep(SampledTokens(token_ids=tokens, logprobs=logprobs))

    def release(self, key: RequestKey) -> None:
        self.released.append(key)

    def warmup(self) -> None:
        self.warmups += 1

    def _check_batch(self, batch: ScheduledBatch) -> None:
        parts = batch.requests
        assert parts, "an empty batch was executed"
        assert len({part.request.request_id for part in parts}) == len(parts)
        assert batch.num_tokens == sum(part.num_tokens for part in parts)
        assert batch.num_tokens <= self.max_batch_tokens, "token budget"
        assert len(parts) <= self.max_requests
        many = [part.num_tokens > 1 for part in parts]
        assert many == sorted(many), "requests that compute one token come first"
        for index in range(len(self.kv_cache.groups)):
            held = [block for part in parts for block in part.tables[index].held()]
            assert len(held) == len(set(held)), "a block is in two tables"
            assert NULL_BLOCK not in held
        for part in parts:
            request = part.request
            end = part.start + part.num_tokens
            assert part.num_tokens > 0
            assert part.start == request.num_computed_tokens
            assert end <= len(request.token_ids)
            assert part.samples == (end == len(request.token_ids))
            assert not request.status.is_terminal
            for table in part.tables:
                assert table.length * self.kv_cache.block_size >= end, "the table is too short"

    def _write(self, part: ScheduledRequest) -> None:
        request = part.request
        for slots, table in zip(self._slots, part.tables, strict=True):
            for position in range(part.start, part.start + part.num_tokens):
                slot = self._slot(table.blocks, position)
                slots[slot] = (request.request_id, position, request.token_ids[position])

    def _read(self, part: ScheduledRequest) -> None:
        """What the step attends to is there, and nobody has written over it."""
        request = part.request
        for group, slots, table in zip(self.kv_cache.groups, self._slots, part.tables, strict=True):
            first = 0 if group.window is None else max(0, part.start - group.window + 1)
            for position in range(first, part.start + part.num_tokens):
                found = slots.get(self._slot(table.blocks, position))
                wanted = (request.request_id, position, request.token_ids[position])
                assert found == wanted, f"group {group.group_id}: {found} instead of {wanted}"

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        block = int(blocks[position // self.kv_cache.block_size])
        assert block != NULL_BLOCK, "the window's blocks must be there"
        return block * self.kv_cache.block_size + position % self.kv_cache.block_size


class Clock:
    """Monotonic seconds that move when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_groups(*windows: int | None) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(group_id=GroupId(i), window=window, layers=(i,), bytes_per_token=8)
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
) -> tuple[EngineCore, FakeRunner, KVCacheManager]:
    """A core around a fake runner; max_context None: what the cache holds for one request."""
    sizes = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
    kv_cache = KVCacheManager(make_groups(*windows), sizes, block_size)
    runner = FakeRunner(
        kv_cache, max_batch_tokens=max_batch_tokens, max_requests=max_requests, verify=verify
    )
    scheduler = FIFOScheduler(
        kv_cache, max_batch_tokens=max_batch_tokens, max_requests_per_batch=max_requests
    )
    fits = kv_cache.max_tokens_per_request(max_batch_tokens)
    core = EngineCore(
        scheduler,
        runner,
        max_context_tokens=fits if max_context is None else min(fits, max_context),
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
) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        prompt=tuple(TokenId(token) for token in prompt),
        sampling=SamplingParams(),
        stop=StopParams(
            max_tokens=max_tokens, stop_token_ids=tuple(TokenId(token) for token in ending)
        ),
        time_limit_s=time_limit_s,
    )
