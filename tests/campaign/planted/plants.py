"""The planted faults. Each exchanges one thing of the product in the process that applies it.

    @plant(promise, at="module:Class.method", what=…, caught_by=…)
    def name(right): ──▶ what stands in the place of `right` from then on

`serve` puts one in a server, `plugin` in a run of tests.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

WITNESS, LOG = "witness", "log"
"""What catches a fault in a server: the external witness, or the server's log."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A planted fault.

    Attributes:
        promises: the promises that it breaks.
        at: what it exchanges, as "module:name" or "module:Class.name"; of several, one after the
            other.
        exchange: takes what is right and returns what is put in its place.
        caught_by: the tests that must fail, as pytest arguments; or WITNESS or LOG.
        in_cut: whether CI's cut includes it.
    """

    name: str
    promises: tuple[int, ...]
    what: str
    at: tuple[str, ...]
    exchange: Callable[[Any], Any]
    caught_by: tuple[str, ...]
    in_cut: bool = False

    def apply(self) -> None:
        """Put the fault in, for as long as the process lives."""
        for place in self.at:
            module, _, path = place.partition(":")
            *owners, name = path.split(".")
            owner = reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, name, self.exchange(getattr(owner, name)))


PLANTS: dict[str, Plant] = {}
CHANCE = "tests/campaign/test_parts.py::test_a_round_by_chance"
STALL_S = 0.5
STALLING = "stall me"
"""The text of the request that makes a planted server stall."""


def plant(
    *promises: int, at: str, what: str, caught_by: str, in_cut: bool = False
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a plant under the function's name."""

    def enter(exchange: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = exchange.__name__.replace("_", "-")
        places, tests = tuple(at.split()), tuple(caught_by.split())
        PLANTS[name] = Plant(name, promises, what, places, exchange, tests, in_cut)
        return exchange

    return enter


@plant(
    1,
    at="engine.core.endings:LiveRequests.fail",
    what="a request whose step failed is not told so",
    caught_by=CHANCE,
)
def no_end(_: Any) -> Any:
    def fail(self: Any, live: Any, failure: Any) -> None:
        for request in list(live.choices.values()):
            self._scheduler.remove(request)

    return fail


@plant(
    1,
    at="engine.core.engine_core:EngineCore.take_outputs",
    what="the end of a choice is told twice",
    caught_by="tests/engine/core/test_core.py::test_every_end_in_every_state",
)
def two_ends(take: Any) -> Any:
    def twice(self: Any) -> Any:
        found = take(self)
        ends = tuple(one for one in found.outputs if one.ends_request)
        return replace(found, outputs=found.outputs + ends)

    return twice


@plant(
    2,
    at="service.delivery.choice:ChoiceLog.push",
    what="one token in fifty is lost on its way",
    caught_by=CHANCE,
    in_cut=True,
)
def a_lost_token(push: Any) -> Any:
    count = 0

    def losing(self: Any, ids: Any, logprobs: Any, now: float) -> Any:
        nonlocal count
        count += len(ids)
        if count % 50 == 0 and len(ids) == 1:
            return None
        return push(self, ids, logprobs, now)

    return losing


@plant(
    2,
    at="service.delivery.log:EventLog.move_to",
    what="what is sent after an attach begins one event too late",
    caught_by="tests/service/test_properties.py::"
    "test_lost_streams_resume_without_loss_or_repetition",
)
def a_gap_after_attach(move: Any) -> Any:
    def late(self: Any, seq: int, credit: Any) -> None:
        move(self, min(seq + (seq > 1), self.next_seq), credit)

    return late


@plant(
    3,
    at="service.convert.converter:Converter.draft",
    what=f"the event loop stands still for {STALL_S} s at one input",
    caught_by=WITNESS,
)
def a_stall(draft: Any) -> Any:
    def slow(self: Any, message: Any, *more: Any) -> Any:
        if message.spec.text.text == STALLING:
            time.sleep(STALL_S)
        return draft(self, message, *more)

    return slow


@plant(
    3,
    at="engine.core.endings:LiveRequests.fail_at_token",
    what="a request that cannot be sampled ends its whole batch",
    caught_by="tests/campaign/test_parts.py::test_a_cell_beside_a_fault[sampler]",
)
def an_error_that_spreads(fail: Any) -> Any:
    def spread(self: Any, live: Any, request: Any, message: str) -> None:
        fail(self, live, request, message)
        for other in list(self.by_id.values()):
            self.fail_alone(other, message, RuntimeError(message))

    return spread


@plant(
    4,
    at="engine.sampling.greedy:in_torch",
    what="greedy sampling takes the last token of the vocabulary now and then",
    caught_by="tests/engine/test_parity.py::test_without_pressure_too",
)
def a_wrong_token(right: Any) -> Any:
    numbers = itertools.count(1)

    def wrong(logits: Any) -> Any:
        found = right(logits)
        if next(numbers) % 5 == 0:
            found[-1] = logits.shape[-1] - 1
        return found

    return wrong


@plant(
    4,
    at="engine.sampling.sampling_rows:uniform",
    what="a seeded request's randomness depends on its neighbours",
    caught_by="tests/engine/test_seeded_sampling.py",
)
def a_seed_that_is_shared(right: Any) -> Any:
    numbers = itertools.count(1)
    return lambda *arguments: (right(*arguments) + 0.1 * (next(numbers) % 7)) % 1.0


@plant(
    5,
    at="engine.kv_cache.block_pool:BlockPool.free",
    what="one block of a request in eight is not freed",
    caught_by=CHANCE,
    in_cut=True,
)
def a_lost_block(free: Any) -> Any:
    numbers = itertools.count(1)

    def leaky(self: Any, blocks: Any) -> None:
        found = list(blocks)
        free(self, found[1:] if next(numbers) % 8 == 0 and found else found)

    return leaky


@plant(
    6,
    at="engine.core.engine_core:EngineCore.cancel",
    what="a cancelled request goes on to its end",
    caught_by="tests/engine/core/test_core.py::test_every_end_in_every_state",
)
def a_cancel_that_does_nothing(_: Any) -> Any:
    return lambda self, request_id: request_id in self._live.by_id


@plant(
    7,
    at="service.delivery.registry:Registry.has_ended",
    what="a kilobyte of every request stays",
    caught_by="tests/campaign/test_parts.py::test_a_kilobyte_that_stays_of_each_request_is_found",
    in_cut=True,
)
def a_leak(ended: Any) -> Any:
    kept: list[bytes] = []

    def leaky(self: Any, request: Any) -> None:
        kept.append(bytes(1000))
        ended(self, request)

    return leaky


@plant(
    7,
    at="engine.fairness.shares:Shares._due",
    what="a caller's share of a limit is ignored",
    caught_by="tests/service/test_shares.py::test_one_caller_fills_a_bound_and_another_gets_its_share",
)
def a_share_that_is_ignored(right: Any) -> Any:
    return lambda *arguments: replace(right(*arguments), is_within=True, is_of_due_group=True)


@plant(
    8,
    at="engine.loading.gate:_LAYER_TOLERANCE engine.loading.gate:_LOGITS_TOLERANCE",
    what="a model whose layers differ from what is run passes the gate",
    caught_by="tests/engine/loading/test_gate.py::test_a_wrong_backend_is_caught",
)
def an_open_gate(tolerances: Any) -> Any:
    return dict.fromkeys(tolerances, float("inf"))


@plant(
    9,
    at="service.errors.status_table:_public",
    what="the text of an unexpected exception reaches the caller",
    caught_by="tests/service/delivery/test_engine_calls.py tests/service/test_hard_inputs.py"
    " tests/service/servicers/test_generate.py",
)
def a_frank_error(public: Any) -> Any:
    return lambda error: replace(public(error), message=f"{type(error).__name__}: {error}")


@plant(
    10,
    at="service.door.callers_file:CallerEntry.may_call",
    what="every known caller may call everything",
    caught_by="tests/service/door/test_auth.py::test_the_right_token_and_the_wrong_service",
    in_cut=True,
)
def a_grant_for_all(_: Any) -> Any:
    return lambda self, method: True


@plant(
    10,
    at="service.convert.converter:cache_salt",
    what="all identities share cached prefixes",
    caught_by="tests/service/door/test_auth.py::test_identities_share_no_cached_prefixes",
)
def a_shared_prefix(_: Any) -> Any:
    return lambda identity, salt: b"the same"


@plant(
    10,
    at="service.door.auth:Permit.check",
    what="a session whose token was revoked goes on",
    caught_by="tests/service/door/test_revoked.py::test_every_command_is_refused_and_the_session_ends",
)
def a_revoked_token(_: Any) -> Any:
    return lambda self: None


@plant(
    11,
    at="service.door.auth:Authenticator.by_token",
    what='a caller\'s token is logged, without the "Bearer" by which the log would hide it',
    caught_by=LOG,
)
def a_token_in_the_log(by_token: Any) -> Any:
    def telling(self: Any, method: str, metadata: Any) -> Any:
        token = dict(metadata).get("authorization", "").removeprefix("Bearer ")
        logging.getLogger("service.door.auth").warning("a call with %s", token)
        return by_token(self, method, metadata)

    return telling


@plant(
    12,
    at="engine.scheduler.token_counters:TokenCounters.weight",
    what="the weights of callers are ignored",
    caught_by="tests/engine/scheduler/test_fair.py::test_weights_are_heeded",
)
def a_weight_that_is_ignored(_: Any) -> Any:
    return lambda self, share: 1.0


@plant(
    13,
    at="service.delivery.registry:Registry.retried",
    what="the same call again starts another request",
    caught_by="tests/service/delivery/test_retries.py::test_addrequest_again_gets_the_first_answer",
)
def a_retry_that_is_forgotten(_: Any) -> Any:
    async def retried(self: Any, identity: str, name: str, *_: Any) -> None:
        self.requests.pop((identity, name), None)

    return retried


@plant(
    14,
    at="engine.text.chat_template:ChatTemplate.render",
    what="a conversation's prompt loses the blanks at its end",
    caught_by="tests/engine/text/test_chat_template.py::test_renders_as_transformers",
)
def a_stripped_prompt(render: Any) -> Any:
    return lambda self, values: render(self, values).rstrip()


@plant(
    15,
    at="service.replies.pieces:PieceWriter.text",
    what="text between two calls of a reply is dropped where it is blank",
    caught_by="tests/service/replies/test_any_reply.py",
)
def a_reply_that_loses_blanks(text: Any) -> Any:
    return lambda self, raw: None if raw.isspace() else text(self, raw)


@plant(
    9,
    10,
    at="service.door.callers_file:ConfigError",
    what="an error about the callers' file shows a digest",
    caught_by="tests/campaign/test_parts.py::test_a_target_takes_its_seeds_and_what_becomes_of_them"
    " tests/service/door/test_auth.py::test_an_error_does_not_end_in_the_callers_file",
)
def a_digest_in_an_error(right: Any) -> Any:
    digest = "0123456789abcdef" * 4
    return lambda field, message, *_: right(field, f"{message} ({digest})")


@plant(
    16,
    at="headrace._fleet:FleetState.set_aside",
    what="a client of several servers does not notice that one is gone",
    caught_by="tests/clients/python/test_fleet.py::test_a_server_is_replaced_at_its_address",
)
def a_server_that_is_not_set_aside(_: Any) -> Any:
    return lambda self, server, problem: None


@plant(
    17,
    at="engine.core.step_results:StepResults._append",
    what="tokens after a draft that was wrong are kept",
    caught_by="tests/engine/runner/test_drafts.py::test_drafts_change_no_token",
)
def a_wrong_draft_that_is_kept(append: Any) -> Any:
    def trusting(self: Any, live: Any, part: Any, tokens: Any, *rest: Any) -> None:
        drafts = tuple(tokens[: len(part.drafts)])
        append(self, live, part._replace(drafts=drafts), tokens, *rest)

    return trusting
