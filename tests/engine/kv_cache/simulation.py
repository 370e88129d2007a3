"""A device, a host and a core without tensors: every slot holds the name of its content.

The name of a position's KV is (salt, all tokens up to it): exactly what it depends on. Copies move
names, steps write and read them, in the order in which a device would. So a block that is shared
wrongly, given away too early, or copied in the wrong order shows at the first step that reads it,
or as an entry of the prefix index that does not hold what its digest says. A state's name is made
as states are: each step adds its tokens to what the slot held before.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.contract.request import PENDING_TOKEN, GenerationRequest, Request
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.types import RequestId, RequestKey, TokenId
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.copies import BlockCopy, StepCopies
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.state_slot import StateSlot

Content = tuple[bytes, tuple[int, ...]]


def make_request(
    key: int,
    prompt: Sequence[int],
    *,
    salt: bytes = b"",
    choice: int = 0,
    bypass: bool = False,
    prompt_logprobs: int | None = None,
    max_total_tokens: int = 10**6,
) -> Request:
    spec = GenerationRequest(
        request_id=RequestId(str(key)),
        prompt=tuple(TokenId(token) for token in prompt),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=10**6),
        cache_salt=salt,
        bypass_prefix_cache=bypass,
        prompt_logprobs=prompt_logprobs,
    )
    return Request(
        spec=spec,
        arrival=0.0,
        max_total_tokens=max_total_tokens,
        key=RequestKey(key),
        choice=choice,
    )


def digests_of(salt: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The chain of the full blocks' digests, written down a second time."""
    digest = hashlib.blake2b(salt, digest_size=16, person=b"salt").digest()
    chain = []
    for end in range(block_size, len(tokens) + 1, block_size):
        data = struct.pack(f"={block_size}i", *tokens[end - block_size : end])
        digest = hashlib.blake2b(digest + data, digest_size=16, person=b"block").digest()
        chain.append(digest)
    return chain


@dataclass
class Part:
    request: Request
    start: int
    end: int
    tables: tuple[BlockTable, ...]
    samples: bool


@dataclass
class Step:
    parts: list[Part]
    copies: StepCopies
    fails: bool


class Simulation:
    """See the module. What it does with a request is what the scheduler and the core do."""

    def __init__(self, kv_cache: KVCacheManager, *, cuts: bool = False) -> None:
        """cuts: whether steps end where states are worth keeping, as a scheduler's do."""
        self.kv_cache = kv_cache
        self.cuts = cuts and kv_cache.keeps
        self.device: list[dict[tuple[int, int], Content | None]] = [{} for _ in kv_cache.groups]
        self.host: list[dict[tuple[int, int], Content | None]] = [{} for _ in kv_cache.groups]
        self.waiting: dict[RequestKey, Request] = {}
        self.running: dict[RequestKey, Request] = {}
        self.children: dict[RequestKey, list[Request]] = {}
        self.truth: dict[RequestKey, list[int]] = {}  # the tokens, pending ones too
        self.meaning: dict[bytes, Content] = {}  # what each digest stands for
        self.plan: dict[RequestKey, Part] = {}
        self.pending: Step | None = None
        self.slots = {
            group.group_id for group in kv_cache.groups if isinstance(group.kind, StateSlot)
        }
        self.suspects: set[RequestKey] = set()
        self.num_keys = 0
        self.seen = dict.fromkeys(("steps", "hits", "forks", "offloads", "restores", "lost"), 0)

    # ---- what happens to a request -------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        *,
        salt: bytes = b"",
        n: int = 1,
        bypass: bool = False,
        prompt_logprobs: int | None = None,
        max_tokens: int = 100,
    ) -> Request:
        choices = []
        for choice in range(n):
            self.num_keys += 1
            request = make_request(
                self.num_keys,
                prompt,
                salt=salt,
                choice=choice,
                bypass=bypass,
                prompt_logprobs=prompt_logprobs,
                max_total_tokens=len(prompt) + max_tokens,
            )
            self.truth[request.key] = list(prompt)
            choices.append(request)
        self._learn(choices[0])
        self.waiting[choices[0].key] = choices[0]
        if n > 1:
            self.children[choices[0].key] = choices[1:]
        return choices[0]

    def admit(self, request: Request, chunk: int, spare: int = 0) -> bool:
        """False: no room, or its last token is not known yet."""
        if request.num_pending_tokens:
            return False
        kv_cache = self.kv_cache
        found = kv_cache.find_prefix(request)
        assert 0 <= found < request.num_tokens
        if request.num_computed_tokens:
            assert found == request.num_computed_tokens, "what the host keeps"
        else:
            assert found == self._longest_prefix(request), "the longest prefix"
        chunk = min(chunk, request.num_tokens - found)
        assert chunk > 0
        free = [pool.num_free for pool in kv_cache.pools]
        if not kv_cache.can_start(request, found, chunk, [spare] * len(free)):
            return False
        if not request.num_computed_tokens:
            self.seen["hits"] += found > 0
        assert kv_cache.start(request) == found
        request.num_computed_tokens = found
        del self.waiting[request.key]
        self.running[request.key] = request
        assert self.extend(request, chunk), "can_start said that there is room"
        # What was promised is kept: all that the full groups still need, and the spare blocks.
        for group, pool, before in zip(kv_cache.groups, kv_cache.pools, free, strict=True):
            table = kv_cache.tables(request.key)[group.group_id]
            kept_free = group.kind.tokens_at_start(request.num_tokens, 0)
            rest = group.kind.num_entries(kept_free, kv_cache.block_size) - table.length
            assert pool.num_free - max(0, rest) >= spare
            assert pool.num_free <= before
        return True

    def extend(self, request: Request, chunk: int) -> bool:
        """False: no room, or there is nothing to compute."""
        start = request.num_computed_tokens
        end = min(start + chunk, request.num_tokens)
        if self.cuts and end > start:
            end = start + self.kv_cache.cut(request, start, end - start)
        if request.key in self.plan or end == start:
            return False
        if len(self.truth[request.key]) > request.max_total_tokens:
            return False
        if not self.kv_cache.allocate(request.key, end):
            return False
        samples = end == request.num_tokens
        tables = self.kv_cache.tables(request.key)
        self.plan[request.key] = Part(request, start, end, tables, samples)
        return True

    def preempt(self, request: Request) -> None:
        """At any time, even when its restore or its fork's copy is only planned."""
        self.plan.pop(request.key, None)
        kept = self.kv_cache.preempt(request)
        assert kept in (0, request.num_computed_tokens)
        self._requeue(request, kept)

    def end(self, request: Request) -> None:
        """It is complete, cancelled, or has failed."""
        self.plan.pop(request.key, None)
        self.waiting.pop(request.key, None)
        self.running.pop(request.key, None)
        self.kv_cache.free(request.key)
        rest = self.children.pop(request.key, None)
        if rest:  # it ended before the others began: the next one does
            self.waiting[rest[0].key] = rest[0]
            self.children[rest[0].key] = rest[1:]

    # ---- steps ---------------------------------------------------------------------------------

    def launch(self, *, fails: bool = False) -> None:
        """Make the plan's step on the device; its end is not known yet. A step that is still
        pending is collected after that, as it is when steps overlap.
        """
        step = Step(list(self.plan.values()), self.kv_cache.take_copies(), fails)
        self.seen["steps"] += bool(step.parts)
        self.plan = {}
        self._copy(step)
        for part in step.parts:
            self._write(part, fails=fails)
        if not fails:
            for part in step.parts:
                self._read(part)
        for part in step.parts:
            request = part.request
            request.num_computed_tokens = part.end
            self.kv_cache.launched(request, part.end)
            if part.samples:
                request.token_ids.append(PENDING_TOKEN)
                request.num_pending_tokens += 1
                truth = self.truth[request.key]
                truth.append((sum(truth) + len(truth) + request.choice) % 2)
        self.collect()
        self.pending = step

    def collect(self) -> None:
        step, self.pending = self.pending, None
        if step is None:
            return
        if step.fails:
            self._fail(step)
            return
        for part in step.parts:
            request = part.request
            if request.key not in self.running and request.key not in self.waiting:
                continue
            if part.samples and request.key in self.children:
                self._fork(request)
            is_current = request.key in self.running and (
                self.kv_cache.tables(request.key) is part.tables
            )
            if is_current:
                self.kv_cache.commit(request, part.end)
            if part.samples:
                request.token_ids[part.end] = TokenId(self.truth[request.key][part.end])
                request.num_pending_tokens -= 1
                self._learn(request)
                if part.end + 1 >= request.max_total_tokens:
                    self.end(request)

    def _fail(self, step: Step) -> None:
        ended = {part.request.key for part in step.parts}
        for part in step.parts:
            self.end(part.request)
        lost = self.kv_cache.copies_failed(step.copies)
        for key in lost:
            request = self.running.get(key) or self.waiting[key]
            self.kv_cache.free(key)
            self.plan.pop(key, None)
            self._requeue(request, 0)
        self.seen["lost"] += len(lost)
        assert self.suspects <= ended | lost, "KV was lost, and nobody was told"
        self.suspects = set()

    def _fork(self, parent: Request) -> None:
        for child in self.children.pop(parent.key):
            computed = self.kv_cache.fork(parent, child)
            if computed is None:
                self.waiting[child.key] = child
            else:
                last = parent.num_prompt_tokens - 1
                assert computed == last or (self.slots and computed < last)
                child.num_computed_tokens = computed
                self.running[child.key] = child
                self.seen["forks"] += 1

    def _requeue(self, request: Request, kept: int) -> None:
        self.running.pop(request.key, None)
        self.waiting[request.key] = request
        request.num_computed_tokens = kept

    # ---- the device ----------------------------------------------------------------------------

    def _copy(self, step: Step) -> None:
        """A step that fails may have written anything where it was to write."""
        device, host = self.device, self.host
        for copies, source, target in (
            (step.copies.offloads, device, host),
            (step.copies.restores, host, device),
            (step.copies.forks, device, device),
        ):
            for copy in copies:
                self._copy_block(copy, source, target, fails=step.fails)
        self.seen["offloads"] += len(step.copies.offloads)
        self.seen["restores"] += len(step.copies.restores)

    def _copy_block(
        self,
        copy: BlockCopy,
        source: list[dict[tuple[int, int], Content | None]],
        target: list[dict[tuple[int, int], Content | None]],
        *,
        fails: bool,
    ) -> None:
        for offset in range(self.kv_cache.block_size):
            content = source[copy.group].get((copy.source, offset))
            target[copy.group][copy.target, offset] = None if fails else content

    def _write(self, part: Part, *, fails: bool) -> None:
        for index, (slots, table) in enumerate(zip(self.device, part.tables, strict=True)):
            if index in self.slots:
                self._write_state(part, slots, int(table.blocks[0]), fails=fails)
                continue
            for position in range(part.start, part.end):
                content = None if fails else self._content(part.request, position)
                slots[self._slot(table, position)] = content

    def _write_state(
        self, part: Part, slots: dict[tuple[int, int], Content | None], slot: int, *, fails: bool
    ) -> None:
        """Go on from the state behind the tokens before, in the same slot."""
        key, salt = part.request.key, part.request.spec.cache_salt
        truth, before = self.truth[key], self._before(part, slots.get((slot, 0)))
        if not fails:
            self._demand(key, before, (salt, tuple(truth[: part.start])), part.start)
        made = None if before is None else (salt, before[1] + tuple(truth[part.start : part.end]))
        slots[slot, 0] = None if fails else made

    def _before(self, part: Part, held: Content | None) -> Content | None:
        """What a step goes on from: what its slot holds, or an empty state in the first one."""
        return held if part.start else (part.request.spec.cache_salt, ())

    def _read(self, part: Part) -> None:
        key = part.request.key
        for group, slots, table in zip(self.kv_cache.groups, self.device, part.tables, strict=True):
            if group.group_id in self.slots:
                continue
            first = 0 if group.window is None else max(0, part.start - group.window + 1)
            for position in range(first, part.end):
                found = slots.get(self._slot(table, position))
                self._demand(key, found, self._content(part.request, position), position)

    def _demand(
        self, key: RequestKey, found: Content | None, wanted: Content, position: int
    ) -> None:
        if found != wanted:
            is_excused = self.pending is not None and self.pending.fails
            assert is_excused, f"request {key} reads {found} at {position}, not {wanted}"
            self.suspects.add(key)

    def _slot(self, table: BlockTable, position: int) -> tuple[int, int]:
        entry, offset = divmod(position, self.kv_cache.block_size)
        assert entry < table.length, "the table is too short"
        assert table.blocks[entry] != 0, "what is visible must be there"
        return int(table.blocks[entry]), offset

    def _content(self, request: Request, position: int) -> Content:
        return request.spec.cache_salt, tuple(self.truth[request.key][: position + 1])

    # ---- laws ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Between any two calls: the books agree, and every block that can be found holds what its
        digest says.
        """
        kv_cache = self.kv_cache
        kv_cache.check_integrity()
        for index, (slots, pool) in enumerate(zip(self.device, kv_cache.pools, strict=True)):
            for block in pool.index.blocks():
                digest = pool.index.digest(block)
                assert digest in self.meaning, "a digest that stands for no request's block"
                salt, tokens = self.meaning[digest]
                if index in self.slots:
                    assert slots.get((block, 0)) == (salt, tokens), "a shared state is that"
                    continue
                start = len(tokens) - kv_cache.block_size
                for offset in range(kv_cache.block_size):
                    wanted = (salt, tokens[: start + offset + 1])
                    assert slots.get((block, offset)) == wanted, "a shared block holds it"
        live = set(self.running) | set(self.waiting)
        if not live:
            assert all(pool.num_used == 0 for pool in kv_cache.pools)
            assert kv_cache.num_used_host_blocks == 0
        assert kv_cache.num_used_host_blocks <= kv_cache.num_host_blocks

    def live(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self.waiting.values()

    def _learn(self, request: Request) -> None:
        """Note what the digests of a request's known blocks stand for."""
        known = self.truth[request.key][: request.num_tokens - request.num_pending_tokens]
        size = self.kv_cache.block_size
        salt = request.spec.cache_salt
        for i, digest in enumerate(digests_of(salt, known, size)):
            self.meaning[digest] = (salt, tuple(known[: (i + 1) * size]))

    def _longest_prefix(self, request: Request) -> int:
        """What `find_prefix` must say, by trying every length."""
        spec, size = request.spec, self.kv_cache.block_size
        if spec.bypass_prefix_cache or spec.prompt_logprobs is not None:
            return 0
        digests = digests_of(spec.cache_salt, request.token_ids[:-1], size)
        for length in range(len(digests), 0, -1):
            if all(
                pool.index.block(digests[entry]) is not None
                for group, pool in zip(self.kv_cache.groups, self.kv_cache.pools, strict=True)
                for entry in self._needed(group, length)
            ):
                return length * size
        return 0

    def _needed(self, group: LayerGroup, length: int) -> range:
        """Which blocks, of so many, a request needs that goes on behind them."""
        size = self.kv_cache.block_size
        if group.group_id in self.slots:
            return range(length - 1, length)
        return range(
            0 if group.window is None else max(0, length * size - group.window + 1) // size, length
        )
