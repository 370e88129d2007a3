"""The planted faults. Each changes the product's code in the process in which it is applied."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WITNESS, LOG = "witness", "log"
"""What catches a fault in a server: the external witness, or the server's log."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A planted fault.

    Attributes:
        name: its name in the record.
        promises: the promises that it breaks.
        what: a one-line description.
        apply: applies the fault.
        caught_by: the tests that must fail, as pytest arguments; or WITNESS or LOG.
        in_cut: whether CI's cut includes it.
    """

    name: str
    promises: tuple[int, ...]
    what: str
    apply: Callable[[], None]
    caught_by: tuple[str, ...]
    in_cut: bool = False


PLANTS: dict[str, Plant] = {}
CHANCE = "tests/campaign/test_parts.py::test_a_round_by_chance"
STALL_S = 0.5
STALLING = "stall me"
"""The text of the request that makes a planted server stall."""


def plant(
    *promises: int, what: str, caught_by: str, in_cut: bool = False
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a plant under the function's name."""

    def enter(apply: Callable[[], None]) -> Callable[[], None]:
        name = apply.__name__.strip("_").replace("_", "-")
        PLANTS[name] = Plant(name, promises, what, apply, tuple(caught_by.split()), in_cut)
        return apply

    return enter


@plant(1, what="a request whose step failed is not told so", caught_by=CHANCE)
def no_end() -> None:
    from engine.core.endings import LiveRequests

    def fail(self: Any, live: Any, failure: Any) -> None:
        for request in list(live.choices.values()):
            self._scheduler.remove(request)

    LiveRequests.fail = fail  # type: ignore[method-assign]


@plant(
    1,
    what="the end of a choice is told twice",
    caught_by="tests/engine/core/test_core.py::test_every_end_in_every_state",
)
def two_ends() -> None:
    from dataclasses import replace

    from engine.core.engine_core import EngineCore

    take = EngineCore.take_outputs

    def twice(self: EngineCore) -> Any:
        found = take(self)
        ends = tuple(one for one in found.outputs if one.ends_request)
        return replace(found, outputs=found.outputs + ends)

    EngineCore.take_outputs = twice  # type: ignore[method-assign]


@plant(2, what="one token in fifty is lost on its way", caught_by=CHANCE, in_cut=True)
def a_lost_token() -> None:
    from service.delivery.choice import ChoiceLog

    push, count = ChoiceLog.push, [0]

    def losing(self: ChoiceLog, ids: Any, logprobs: Any, now: float) -> Any:
        count[0] += len(ids)
        if count[0] % 50 == 0 and len(ids) == 1:
            return None
        return push(self, ids, logprobs, now)

    ChoiceLog.push = losing  # type: ignore[method-assign]


@plant(
    2,
    what="what is sent after an attach begins one event too late",
    caught_by="tests/service/test_properties.py::"
    "test_lost_streams_resume_without_loss_or_repetition",
)
def a_gap_after_attach() -> None:
    from service.delivery.log import EventLog

    move = EventLog.move_to

    def late(self: EventLog, seq: int, credit: Any) -> None:
        move(self, min(seq + (seq > 1), self.next_seq), credit)

    EventLog.move_to = late  # type: ignore[method-assign]


@plant(3, what=f"the event loop stands still for {STALL_S} s at one input", caught_by=WITNESS)
def a_stall() -> None:
    from service.convert.converter import Converter

    draft = Converter.draft

    def slow(self: Converter, message: Any, *more: Any) -> Any:
        if message.spec.text.text == STALLING:
            time.sleep(STALL_S)
        return draft(self, message, *more)

    Converter.draft = slow  # type: ignore[method-assign]


@plant(
    3,
    what="a request that cannot be sampled ends its whole batch",
    caught_by="tests/campaign/test_parts.py::test_a_cell_beside_a_fault[sampler]",
)
def an_error_that_spreads() -> None:
    from engine.core.endings import LiveRequests

    fail = LiveRequests.fail_at_token

    def spread(self: Any, live: Any, request: Any, message: str) -> None:
        fail(self, live, request, message)
        for other in list(self.by_id.values()):
            self.fail_alone(other, message, RuntimeError(message))

    LiveRequests.fail_at_token = spread  # type: ignore[method-assign]


@plant(
    4,
    what="greedy sampling takes the last token of the vocabulary now and then",
    caught_by="tests/engine/test_parity.py::test_without_pressure_too",
)
def a_wrong_token() -> None:
    from engine.sampling import greedy

    right, count = greedy.in_torch, [0]

    def wrong(logits: Any) -> Any:
        found = right(logits)
        count[0] += 1
        if count[0] % 5 == 0:
            found[-1] = logits.shape[-1] - 1
        return found

    greedy.in_torch = wrong


@plant(
    4,
    what="a seeded request's randomness depends on its neighbours",
    caught_by="tests/engine/test_seeded_sampling.py",
)
def a_seed_that_is_shared() -> None:
    from engine.sampling import sampling_rows

    right, count = sampling_rows.uniform, [0]

    def shared(*arguments: int) -> float:
        count[0] += 1
        return (right(*arguments) + 0.1 * (count[0] % 7)) % 1.0

    sampling_rows.uniform = shared


@plant(5, what="one block of a request in eight is not freed", caught_by=CHANCE, in_cut=True)
def a_lost_block() -> None:
    from engine.kv_cache.block_pool import BlockPool

    free, count = BlockPool.free, [0]

    def leaky(self: BlockPool, blocks: Any) -> None:
        count[0] += 1
        found = list(blocks)
        free(self, found[1:] if count[0] % 8 == 0 and found else found)

    BlockPool.free = leaky  # type: ignore[method-assign]


@plant(
    6,
    what="a cancelled request goes on to its end",
    caught_by="tests/engine/core/test_core.py::test_every_end_in_every_state",
)
def a_cancel_that_does_nothing() -> None:
    from engine.core.engine_core import EngineCore

    def cancel(self: EngineCore, request_id: Any) -> bool:
        return request_id in self._live.by_id

    EngineCore.cancel = cancel  # type: ignore[method-assign]


@plant(
    7,
    what="a kilobyte of every request stays",
    caught_by="tests/campaign/test_parts.py::test_a_kilobyte_that_stays_of_each_request_is_found",
    in_cut=True,
)
def a_leak() -> None:
    from service.delivery.registry import Registry

    kept: list[bytes] = []
    ended = Registry.has_ended

    def leaky(self: Registry, request: Any) -> None:
        kept.append(bytes(1000))
        ended(self, request)

    Registry.has_ended = leaky  # type: ignore[method-assign]


@plant(
    7,
    what="a caller's share of a limit is ignored",
    caught_by="tests/service/test_shares.py::test_one_caller_fills_a_bound_and_another_gets_its_share",
)
def a_share_that_is_ignored() -> None:
    from dataclasses import replace

    from engine.fairness.shares import Shares

    right = Shares._due

    def blind(self: Any, *arguments: Any) -> Any:
        return replace(right(self, *arguments), is_within=True, is_of_due_group=True)

    Shares._due = blind  # type: ignore[method-assign]


@plant(
    8,
    what="a model whose layers differ from what is run passes the gate",
    caught_by="tests/engine/loading/test_gate.py::test_a_wrong_backend_is_caught",
)
def an_open_gate() -> None:
    from engine.loading import gate

    for name, value in vars(gate).items():
        if name in ("_LAYER_TOLERANCE", "_LOGITS_TOLERANCE"):
            for kind in value:
                value[kind] = float("inf")


@plant(
    9,
    what="the text of an unexpected exception reaches the caller",
    caught_by="tests/service/delivery/test_engine_calls.py tests/service/test_hard_inputs.py"
    " tests/service/servicers/test_generate.py",
)
def a_frank_error() -> None:
    from dataclasses import replace

    from service.errors import status_table

    public = status_table._public

    def frank(error: BaseException) -> Any:
        return replace(public(error), message=f"{type(error).__name__}: {error}")

    status_table._public = frank


@plant(
    10,
    what="every known caller may call everything",
    caught_by="tests/service/door/test_auth.py::test_the_right_token_and_the_wrong_service",
    in_cut=True,
)
def a_grant_for_all() -> None:
    from service.door.callers_file import CallerEntry

    CallerEntry.may_call = lambda self, method: True  # type: ignore[method-assign]


@plant(
    10,
    what="all identities share cached prefixes",
    caught_by="tests/service/door/test_auth.py::test_identities_share_no_cached_prefixes",
)
def a_shared_prefix() -> None:
    from service.convert import converter as request

    request.cache_salt = lambda identity, salt: b"the same"


@plant(
    10,
    what="a session whose token was revoked goes on",
    caught_by="tests/service/door/test_revoked.py::test_every_command_is_refused_and_the_session_ends",
)
def a_revoked_token() -> None:
    from service.door.auth import Permit

    Permit.check = lambda self: None  # type: ignore[method-assign]


@plant(
    11,
    what='a caller\'s token is logged, without the "Bearer" by which the log would hide it',
    caught_by=LOG,
)
def a_token_in_the_log() -> None:
    from service.door.auth import Authenticator

    by_token = Authenticator.by_token

    def telling(self: Authenticator, method: str, metadata: Any) -> Any:
        token = dict(metadata).get("authorization", "").removeprefix("Bearer ")
        logging.getLogger("service.door.auth").warning("a call with %s", token)
        return by_token(self, method, metadata)

    Authenticator.by_token = telling  # type: ignore[method-assign]


@plant(
    12,
    what="the weights of callers are ignored",
    caught_by="tests/engine/scheduler/test_fair.py::test_weights_are_heeded",
)
def a_weight_that_is_ignored() -> None:
    from engine.scheduler.token_counters import TokenCounters

    TokenCounters.weight = lambda self, share: 1.0  # type: ignore[method-assign]


@plant(
    13,
    what="the same call again starts another request",
    caught_by="tests/service/delivery/test_retries.py::test_addrequest_again_gets_the_first_answer",
)
def a_retry_that_is_forgotten() -> None:
    from service.delivery.registry import Registry

    async def retried(self: Registry, *_: Any) -> None:
        self.requests.pop((_[0], _[1]), None)

    Registry.retried = retried  # type: ignore[method-assign,assignment]


@plant(
    14,
    what="a conversation's prompt loses the blanks at its end",
    caught_by="tests/engine/text/test_chat_template.py::test_renders_as_transformers",
)
def a_stripped_prompt() -> None:
    from engine.text.chat_template import ChatTemplate

    render = ChatTemplate.render

    def stripped(self: ChatTemplate, values: Any) -> str:
        return render(self, values).rstrip()

    ChatTemplate.render = stripped  # type: ignore[method-assign]


@plant(
    15,
    what="text between two calls of a reply is dropped where it is blank",
    caught_by="tests/service/replies/test_any_reply.py",
)
def a_reply_that_loses_blanks() -> None:
    from service.replies.pieces import PieceWriter

    text = PieceWriter.text

    def lossy(self: PieceWriter, raw: str) -> None:
        if not raw.isspace():
            text(self, raw)

    PieceWriter.text = lossy  # type: ignore[method-assign]


@plant(
    9,
    10,
    what="an error about the callers' file shows a digest",
    caught_by="tests/campaign/test_parts.py::test_a_target_takes_its_seeds_and_what_becomes_of_them"
    " tests/service/door/test_auth.py::test_an_error_does_not_end_in_the_callers_file",
)
def a_digest_in_an_error() -> None:
    from engine.contract.errors import ConfigError
    from service.door import callers_file as callers

    def telling(*arguments: Any) -> ConfigError:
        return ConfigError(
            arguments[0], f"{arguments[1]} (0123456789abcdef{'0123456789abcdef' * 3})"
        )

    callers.ConfigError = telling  # type: ignore[misc,assignment]


@plant(
    16,
    what="a client of several servers does not notice that one is gone",
    caught_by="tests/clients/python/test_fleet.py::test_a_server_is_replaced_at_its_address",
)
def a_server_that_is_not_set_aside() -> None:
    from headrace._fleet import FleetState

    FleetState.set_aside = lambda self, server, problem: None  # type: ignore[method-assign]


@plant(
    17,
    what="tokens after a draft that was wrong are kept",
    caught_by="tests/engine/runner/test_drafts.py::test_drafts_change_no_token",
)
def a_wrong_draft_that_is_kept() -> None:
    from engine.core.step_results import StepResults

    append = StepResults._append

    def trusting(self: Any, live: Any, part: Any, tokens: Any, *rest: Any) -> None:
        drafts = tuple(tokens[: len(part.drafts)])
        append(self, live, part._replace(drafts=drafts), tokens, *rest)

    StepResults._append = trusting  # type: ignore[method-assign]
