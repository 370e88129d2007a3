"""What drafts may take of a step, and what they cost."""

from __future__ import annotations

import pytest

from engine.contract.rope import RopeLengths
from engine.contract.types import RequestId, TokenId
from engine.core.engine_core import EngineCore
from engine.scheduler.pace import shape_of
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest
from tests.engine.core_machine import POLICIES
from tests.engine.fake_runner import expected_tokens, make_request
from tests.engine.ledger import drain
from tests.engine.scheduler.watched import CoreRig

WRONG = TokenId(3)


def decoding(
    names: str, *, length: int = 2, **options: object
) -> tuple[CoreRig, list[ScheduledBatch]]:
    """A core whose requests decode, and the batches of its steps from now on."""
    rig, batches = CoreRig(**options), []
    for name in names:
        spec = make_request(name, range(length), 30, caller=name)
        rig.ledger.add(spec)
        rig.core.add(spec, rig.clock())
    while not all(one.num_output_tokens for one in rig.core.scheduler.running.values()):
        rig.ledger.take(rig.core.step())
    rig.ledger.take(rig.core.step())
    rig.runner.hook = batches.append
    return rig, batches


def draft(core: EngineCore, name: str, count: int, *, right: bool = False) -> None:
    live = core._live.by_id[name].choices[0]  # type: ignore[index]
    known = live.num_output_tokens
    tokens = expected_tokens(live.spec.prompt, known + count)[known:]
    live.drafts = tuple(map(TokenId, tokens)) if right else (WRONG,) * count


def parts(batch: ScheduledBatch) -> dict[str, ScheduledRequest]:
    return {part.request.request_id: part for part in batch.requests}


@pytest.mark.parametrize(
    ("policy", "has_prompt"),
    [
        *((policy, False) for policy in POLICIES),
        *((policy, True) for policy in POLICIES if policy != "prefill_first"),  # it takes all
    ],
)
def test_drafts_leave_a_token_for_everybody(policy: str, has_prompt: bool) -> None:
    """Also where the rest of a prompt does not fit, so that requests enter one by one."""
    rig, batches = decoding("abc", policy=policy, max_batch_tokens=5, num_blocks=60)
    if has_prompt:
        spec = make_request("d", range(60), 5, caller="d")
        rig.ledger.add(spec)
        rig.core.add(spec, rig.clock())
        rig.ledger.take(rig.core.step())
    draft(rig.core, "a", 9)
    rig.ledger.take(rig.core.step())
    found = parts(batches[-1])
    assert set("abc") <= set(found)
    assert has_prompt or len(found["a"].drafts) == 2
    drain(rig.core, rig.ledger)


def test_drafts_take_no_block_of_a_held_request() -> None:
    rig, batches = decoding("ab", num_blocks=4, block_size=4, max_batch_tokens=16)
    rig.core.hold(RequestId("b"))
    pool = rig.kv_cache.pools[0]
    taken = pool.allocate(pool.num_free)
    draft(rig.core, "a", 9)
    rig.ledger.take(rig.core.step())
    assert rig.core.scheduler.num_preemptions == 0
    assert batches[0].requests[0].start + batches[0].requests[0].num_rows <= 4
    pool.free(taken)
    rig.core.unhold_all()
    drain(rig.core, rig.ledger)


def test_a_caller_pays_for_every_row_and_for_no_token_twice() -> None:
    def service(drafts: int, *, right: bool) -> tuple[int, int]:
        rig, _ = decoding("ab", num_blocks=40)
        if drafts:
            draft(rig.core, "a", drafts, right=right)
        rig.ledger.take(rig.core.step())
        tokens = len(rig.ledger.text("a"))
        rig.core.forget_computed()  # what is computed again for others' sake costs nothing
        drain(rig.core, rig.ledger)
        (found,) = [one.service for one in rig.core.stats().callers if one.caller == "a"]
        return found, tokens

    plain, one_token = service(0, right=False)
    right, tokens = service(4, right=True)
    assert tokens == one_token + 4
    assert right == plain, "kept drafts cost what the tokens would have cost"
    wrong, tokens = service(4, right=False)
    assert tokens == one_token
    assert wrong > plain, "rejected rows are charged"
    assert wrong - plain == 2 * (service(2, right=False)[0] - plain)


def test_rows_of_drafts_count_as_decodes() -> None:
    rig, batches = decoding("a", num_blocks=40)
    draft(rig.core, "a", 3)
    rig.ledger.take(rig.core.step())
    (part,) = batches[0].requests
    shape = shape_of(batches[0])
    assert (shape.num_prompt_tokens, shape.num_decodes) == (0, 4)
    assert shape.decode_context == sum(part.start + row + 1 for row in range(4))


def test_drafts_stop_at_the_original_length() -> None:
    """Behind it a request is computed again, with other frequencies."""
    original = 12
    rig, batches = decoding("a", num_blocks=40)
    rig.core.rope = RopeLengths(original, 100, is_graded=False, restarts=True)
    (live,) = rig.core._live.by_id["a"].choices.values()  # type: ignore[index]
    rig.core._bound_drafts(live)
    draft(rig.core, "a", 20, right=True)
    rig.ledger.take(rig.core.step())
    assert live.num_tokens == original
    assert max(part.start + part.num_rows for part in batches[0].requests) < original
