"""The model and the laws find what they are there for: one bug at a time is put in, and found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from engine.contract.request import Request
from engine.contract.types import BlockId, RequestKey
from engine.kv_cache import kv_cache_manager as manager_module
from engine.kv_cache import prefix_cache as prefix_cache_module
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.group_kinds import KeptMark, SlidingAttention
from engine.kv_cache.host_cache import HostCache
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.prefix_index import PrefixIndex, extend_block_hashes
from engine.kv_cache.state_slot import SlotTable, StateSlot
from tests.engine.fake_runner import Kind
from tests.engine.kv_cache import simulation as simulation_module
from tests.engine.kv_cache.machine import KINDS, WITH_STATES, drive
from tests.engine.kv_cache.simulation import Content, Part, Simulation, make_request

SEEDS = range(40)
CALLS = 120

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]
BUGS: list[tuple[Bug, str]] = []


def bug(found_by: str) -> Callable[[Bug], Bug]:
    """A bug, and what is said when it is found."""

    def register(plant: Bug) -> Bug:
        BUGS.append((plant, found_by))
        return plant

    return register


def _wrap(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method; the wrapper gets the original as its first argument."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args: wrapper(original, self, *args))


@bug("not held as often")
def a_block_is_not_freed(patch: Patch) -> None:
    def free(original: Any, pool: BlockPool, blocks: Iterable[BlockId]) -> None:
        original(pool, list(blocks)[1:])

    _wrap(patch, BlockPool, "free", free)


@bug("not held as often")
def a_reference_is_counted_twice(patch: Patch) -> None:
    def share(original: Any, pool: BlockPool, blocks: Iterable[BlockId]) -> None:
        shared = list(blocks)
        original(pool, shared + shared[:1])

    _wrap(patch, BlockPool, "share", share)


@bug("not held as often")
def a_shared_block_is_not_counted(patch: Patch) -> None:
    def share(original: Any, pool: BlockPool, blocks: Iterable[BlockId]) -> None:
        original(pool, [block for block in blocks if not pool.holders(block)])

    _wrap(patch, BlockPool, "share", share)


@bug("not held as often")
def a_held_block_is_given_away(patch: Patch) -> None:
    def allocate(original: Any, pool: BlockPool, count: int) -> list[BlockId]:
        held = sorted(pool.used_blocks())
        return held[:1] if count == 1 and len(held) > 3 else original(pool, count)

    _wrap(patch, BlockPool, "allocate", allocate)


@bug("a shared block holds it")
def an_evicted_block_keeps_its_digest(patch: Patch) -> None:
    patch.setattr(PrefixIndex, "remove", lambda self, block: None)


@bug("reads")
def a_fork_copies_nothing(patch: Patch) -> None:
    def fork(original: Any, kv_cache: Any, parent: Request, child: Request) -> int | None:
        position = original(kv_cache, parent, child)
        for copy in kv_cache._forks.pop(child.key, ()):
            kv_cache.pools[copy.group].free([copy.source])
        return position

    _wrap(patch, KVCacheManager, "fork", fork)


@bug("is not in use|not held as often")
def a_forks_source_is_not_held(patch: Patch) -> None:
    def fork(original: Any, kv_cache: Any, parent: Request, child: Request) -> int | None:
        position = original(kv_cache, parent, child)
        for copy in kv_cache._forks.get(child.key, ()):
            kv_cache.pools[copy.group].free([copy.source])
        return position

    _wrap(patch, KVCacheManager, "fork", fork)


@bug("reads")
def a_fork_of_garbage_goes_to_the_host(patch: Patch) -> None:
    def preempt(original: Any, kv_cache: Any, request: Request) -> int:
        for copy in kv_cache._forks.pop(request.key, ()):
            kv_cache.pools[copy.group].free([copy.source])
        return original(kv_cache, request)

    _wrap(patch, KVCacheManager, "preempt", preempt)


@bug("reads")
def a_restore_that_was_not_made_goes_to_the_host(patch: Patch) -> None:
    def preempt(original: Any, kv_cache: Any, request: Request) -> int:
        if kv_cache._host.is_restoring(request.key):
            kv_cache._host.drop(request.key)
        return original(kv_cache, request)

    _wrap(patch, KVCacheManager, "preempt", preempt)


@bug("a shared block holds it")
def a_block_is_shared_before_it_is_computed(patch: Patch) -> None:
    def commit(original: Any, kv_cache: Any, request: Request, computed: int) -> None:
        size = kv_cache.block_size
        more = min(computed + size, request.num_tokens - request.num_pending_tokens)
        known = more // size <= kv_cache.tables(request.key)[0].length
        original(kv_cache, request, more if known else computed)

    _wrap(patch, KVCacheManager, "commit", commit)


@bug("visible must be there")
def the_window_is_left_too_early(patch: Patch) -> None:
    def first_visible(original: Any, kind: Any, position: int, block_size: int) -> int:
        return original(kind, position + 1, block_size)

    _wrap(patch, SlidingAttention, "first_visible", first_visible)


@bug("visible must be there")
def the_window_of_a_prefix_is_too_short(patch: Patch) -> None:
    def shorter(original: Any, kind: Any, found: Any, digests: Any, block_size: int) -> Any:
        less = SlidingAttention(max(1, kind.window - block_size))
        return original(less, found, digests, block_size)

    _wrap(patch, SlidingAttention, "fits", shorter)
    _wrap(patch, SlidingAttention, "match", shorter)


@bug("reads")
def a_slot_is_not_copied_at_a_fork(patch: Patch) -> None:
    def fork(original: Any, kind: Any, pool: BlockPool, *rest: Any) -> Any:
        table, copies = original(kind, pool, *rest)
        pool.free(source for source, _ in copies)
        return table, []

    _wrap(patch, StateSlot, "fork", fork)


@bug("a shared state is that")
def a_slot_is_shared_with_who_keeps_it(patch: Patch) -> None:
    def start(original: Any, kind: Any, pool: BlockPool, match: Any) -> Any:
        if not match.blocks:
            return original(kind, pool, match)
        pool.share(match.blocks)
        return SlotTable(0, match.blocks), []

    _wrap(patch, StateSlot, "start", start)


@bug("a shared state is that")
def a_slot_is_kept_a_token_late(patch: Patch) -> None:
    def keep(original: Any, kind: Any, pool: Any, table: Any, mark: KeptMark, size: int) -> Any:
        blocks, late = divmod(mark.tokens - 1, size)
        if not blocks or late:
            return []
        return original(kind, pool, table, mark._replace(blocks=blocks), 1)

    _wrap(patch, StateSlot, "keep", keep)


@bug("the longest prefix")
def a_prefix_is_found_without_a_state(patch: Patch) -> None:
    patch.setattr(StateSlot, "fits", lambda self, index, digests, size: [True] * (len(digests) + 1))


@bug("reads")
def a_request_goes_on_from_what_its_slot_held(patch: Patch) -> None:
    def start(original: Any, kind: Any, pool: BlockPool, match: Any) -> Any:
        table, copies = original(kind, pool, match)
        return table, [(source, source) for source, _ in copies]

    _wrap(patch, StateSlot, "start", start)


@bug("reads")
def a_slot_is_not_emptied_for_its_next_request(patch: Patch) -> None:
    def before(original: Any, sim: Simulation, part: Part, held: Content | None) -> Content | None:
        return held or original(sim, part, held)

    _wrap(patch, Simulation, "_before", before)


@bug("a shared state is that|reads")
def a_request_writes_on_in_what_it_keeps(patch: Patch) -> None:
    def keep(original: Any, kind: Any, pool: Any, table: Any, *rest: Any) -> Any:
        copies = original(kind, pool, table, *rest)
        if copies:
            table.blocks[[0, table.length - 1]] = table.blocks[[table.length - 1, 0]]
        return copies

    _wrap(patch, StateSlot, "keep", keep)


@bug("a planned copy's target is shared")
def a_state_is_shared_before_it_is_kept(patch: Patch) -> None:
    patch.setattr(SlotTable, "is_made", lambda self, mark: True)


@bug("the longest prefix|holds nothing that could be shared")
def an_old_answer_is_given_again(patch: Patch) -> None:
    patch.setattr(PrefixIndex, "_tell", lambda self, digest: None)


def _hash_otherwise(patch: Patch, of_blocks: Callable[[Request, int, int], list[bytes]]) -> None:
    """Let the cache hash in another way. The model learns of it too, so that it is not the digests
    that look strange, but the content of the blocks.
    """

    def extend(request: Request, num_blocks: int, block_size: int) -> None:
        if len(request.block_hashes) < num_blocks:
            request.block_hashes[:] = of_blocks(request, num_blocks, block_size)

    def digests_of(salt: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
        request = make_request(1, tokens or [0], salt=salt)
        return of_blocks(request, len(tokens) // block_size, block_size)

    patch.setattr(manager_module, "extend_block_hashes", extend)
    patch.setattr(prefix_cache_module, "extend_block_hashes", extend)
    patch.setattr(simulation_module, "digests_of", digests_of)


@bug("a shared block holds it|reads")
def the_salt_is_ignored(patch: Patch) -> None:
    def of_blocks(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
        saltless = make_request(1, request.token_ids[: num_blocks * block_size])
        extend_block_hashes(saltless, num_blocks, block_size)
        return saltless.block_hashes

    _hash_otherwise(patch, of_blocks)


@bug("a shared block holds it|reads")
def the_tokens_before_are_ignored(patch: Patch) -> None:
    def of_blocks(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
        digests: list[bytes] = []
        for start in range(0, num_blocks * block_size, block_size):
            tokens = request.token_ids[start : start + block_size]
            alone = make_request(1, tokens, salt=request.spec.cache_salt)
            extend_block_hashes(alone, 1, block_size)
            digests += alone.block_hashes
        return digests

    _hash_otherwise(patch, of_blocks)


@bug("the longest prefix")
def the_wish_to_bypass_is_ignored(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "_uses_prefixes", lambda self, request: True)


@bug("reads|not its host block")
def a_restore_reads_the_wrong_block(patch: Patch) -> None:
    def restore(
        original: Any, host: HostCache, key: RequestKey, blocks: Sequence[Sequence[BlockId]]
    ) -> None:
        original(host, key, [list(reversed(part)) for part in blocks])

    _wrap(patch, HostCache, "restore", restore)


@bug("reads")
def a_host_block_is_reused_in_the_step_that_restores(patch: Patch) -> None:
    def restore(
        original: Any, host: Any, key: RequestKey, blocks: Sequence[Sequence[BlockId]]
    ) -> None:
        original(host, key, blocks)
        for free, part in zip(host._free, host._kept[key].groups, strict=True):
            free.extend(part.blocks)
        early.add(key)

    def drop(original: Any, host: Any, key: RequestKey) -> None:
        if key in early:
            early.remove(key)
            host._offloads.pop(key, None)
            del host._kept[key]
        original(host, key)

    early: set[RequestKey] = set()
    _wrap(patch, HostCache, "restore", restore)
    _wrap(patch, HostCache, "drop", drop)
    # The law would say so at once; the content must tell as well.
    patch.setattr(HostCache, "check_integrity", lambda self: None)


@bug("host blocks were lost")
def a_dropped_request_keeps_its_host_blocks(patch: Patch) -> None:
    def drop(original: Any, host: Any, key: RequestKey) -> None:
        host._offloads.pop(key, None)
        host._restores.pop(key, None)
        host._kept.pop(key, None)

    _wrap(patch, HostCache, "drop", drop)


@bug("not its host block")
def a_dropped_requests_copies_are_made(patch: Patch) -> None:
    def drop(original: Any, host: Any, key: RequestKey) -> None:
        planned = host._offloads.get(key)
        original(host, key)
        if planned is not None:
            host._offloads[key] = planned

    _wrap(patch, HostCache, "drop", drop)


@bug("nobody was told|reads")
def nobody_is_told_of_lost_copies(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "copies_failed", lambda self, copies: frozenset())


def _run(kinds: Sequence[tuple[Kind, ...]] = tuple(KINDS)) -> None:
    for seed in SEEDS:
        drive(seed, CALLS, kinds)


@pytest.mark.parametrize(("plant", "found_by"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
def test_the_bug_is_found(plant: Bug, found_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError), match=found_by):
        _run()


def test_without_a_bug_nothing_is_found() -> None:
    _run()


OF_STATES = (
    a_slot_is_kept_a_token_late,
    a_slot_is_shared_with_who_keeps_it,
    a_request_goes_on_from_what_its_slot_held,
    a_prefix_is_found_without_a_state,
    a_slot_is_not_emptied_for_its_next_request,
    a_slot_is_not_copied_at_a_fork,
    a_request_writes_on_in_what_it_keeps,
    a_state_is_shared_before_it_is_kept,
)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", WITH_STATES, ids=lambda kinds: f"{len(kinds)} groups")
@pytest.mark.parametrize(
    ("plant", "found_by"),
    [one for one in BUGS if one[0] in OF_STATES],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bug_of_states_is_found_whatever_stands_beside_them(
    plant: Bug, found_by: str, kinds: tuple[Kind, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a model without attention."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError), match=found_by):
        _run([kinds])
