"""The engine's statistics, for the service's telemetry and for operators, each declared once at its
field. Independent of telemetry libraries.

    holds: int = counter("headrace.holds", "{hold}", "How often a request was held, …")

OpenTelemetry's instruments (`engine.telemetry.instruments`) follow from that, and so do the page of
metrics, the table in docs/operations.md (`service.command.flags`), what ControlService tells and
the line that a busy server logs. `EngineCore.stats` reads the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from engine.contract.types import NO_CALLER, CallerKey

_KEY = "statistic"


@dataclass(frozen=True, slots=True)
class Statistic:
    """What a statistic has in addition to its value.

    Attributes:
        kind: a gauge is true now; a counter counts since the start.
        name, unit, text: of its metric; the unit is OpenTelemetry's, such as {request} or By.
        log: how the line that a busy server logs tells it, with {now} of a gauge, and of a counter
            {grown} or {rate}: since the last line, or a second; empty: not at all.
    """

    kind: Literal["gauge", "counter"]
    name: str
    unit: str
    text: str
    log: str = ""


def gauge(name: str, unit: str, text: str, *, log: str = "", default: Any = 0) -> Any:
    """Declare a dataclass field as a gauge."""
    return _declared(Statistic("gauge", name, unit, text, log), default)


def counter(name: str, unit: str, text: str, *, log: str = "", default: Any = 0) -> Any:
    """Declare a dataclass field as a counter."""
    return _declared(Statistic("counter", name, unit, text, log), default)


def _declared(statistic: Statistic, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: statistic})


def statistics_of(kind: type[Any]) -> Mapping[str, Statistic]:
    """Return the statistics among a dataclass's fields, by field name."""
    return MappingProxyType(
        {one.name: one.metadata[_KEY] for one in dataclasses.fields(kind) if _KEY in one.metadata}
    )


@dataclass(frozen=True, slots=True)
class CallerStats:
    """One caller's requests in the engine, and how much service it has received.

    Attributes:
        caller: the caller's name; NO_CALLER if several are summed.
        weight: how much service the caller is due relative to others; 0 if several are summed.
        service: counted by `engine.scheduler.live_callers`, since the start or since the caller was
            last forgotten.
    """

    caller: CallerKey = NO_CALLER
    weight: float = 0.0
    running: int = gauge("headrace.callers.running", "{request}", "In the batch, by caller.")
    waiting: int = gauge("headrace.callers.waiting", "{request}", "In the queue, by caller.")
    service: int = counter(
        "headrace.callers.service",
        "{token}",
        "Tokens computed, by caller: 1 for each of a prompt, 2 for each of an output.",
    )


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """What requests with one adapter do in the engine, whatever content its name has meant.

    Attributes:
        name: the adapter's name; empty if several are summed.
    """

    name: str = ""
    running: int = gauge("headrace.adapters.running", "{request}", "In the batch, by adapter.")
    waiting: int = gauge("headrace.adapters.waiting", "{request}", "In the queue, by adapter.")
    prompt_tokens: int = counter(
        "headrace.adapters.tokens.prompt",
        "{token}",
        "Computed for prompts, by adapter; again after a preemption.",
    )
    generated_tokens: int = counter(
        "headrace.adapters.tokens.generated", "{token}", "Generated, by adapter."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters (since the start) and gauges (now).

    Attributes:
        blocks_total, blocks_used: of all groups of layers that attend, without the null blocks.
        blocks_cached: evicted when blocks are needed.
        requests_finished: every accepted request is counted once.
        steps_over_target: 0 if there is no target.
        last_step_s: the duration of the last step, in seconds.
        callers: callers by name, up to a fixed number; those with requests come first.
        other_callers: all other callers together, present and past; None if there were none.
        by_adapter: adapters by name, up to a fixed number; see `engine.scheduler.live_adapters`.
        other_adapters: all other adapters together; None if there were none.
        block_size: tokens per block.
    """

    running: int = gauge(
        "headrace.requests.running", "{request}", "In the batch.", log="{now} running"
    )
    waiting: int = gauge(
        "headrace.requests.waiting", "{request}", "In the queue.", log="{now} waiting"
    )
    held: int = gauge(
        "headrace.requests.held",
        "{request}",
        "Neither: their results are not read.",
        log="{now} held",
    )
    blocks_total: int = gauge("headrace.kv_cache.blocks.limit", "{block}", "All there are.")
    blocks_used: int = gauge("headrace.kv_cache.blocks.used", "{block}", "Held by requests.")
    blocks_cached: int = gauge(
        "headrace.kv_cache.blocks.cached",
        "{block}",
        "Held by nobody; they keep a prefix until they are needed.",
    )
    states_total: int = gauge(
        "headrace.states.limit", "{state}", "Recurrent layers: all the states there is room for."
    )
    states_used: int = gauge("headrace.states.used", "{state}", "Held by requests.")
    states_kept: int = gauge(
        "headrace.states.kept",
        "{state}",
        "Held by nobody; they keep what a prefix came to until their room is needed.",
    )
    host_blocks_total: int = gauge(
        "headrace.kv_cache.host_blocks.limit", "{block}", "On the host, for preempted requests."
    )
    host_blocks_used: int = gauge(
        "headrace.kv_cache.host_blocks.used", "{block}", "On the host, in use."
    )
    adapters: int = gauge("headrace.adapters", "{adapter}", "Adapters that requests may name.")
    max_adapters: int = gauge(
        "headrace.adapters.limit", "{adapter}", "The most there may be; 0: none are served."
    )
    adapter_bytes: int = gauge(
        "headrace.adapters.memory", "By", "Taken by these, and by others that requests still have."
    )
    max_adapter_bytes: int = gauge(
        "headrace.adapters.memory.limit", "By", "The most that all of them together may take."
    )
    adapter_loads: int = counter(
        "headrace.adapters.loads", "{load}", "How often one was loaded or replaced."
    )
    adapter_evictions: int = counter(
        "headrace.adapters.evictions",
        "{eviction}",
        "How often one had to go because another needed its memory.",
    )
    steps: int = counter("headrace.steps", "{step}", "Steps executed.")
    steps_with_decodes: int = counter(
        "headrace.steps.with_decodes", "{step}", "Steps in which at least one request decoded."
    )
    steps_over_target: int = counter(
        "headrace.steps.over_target", "{step}", "Those of them that took longer than the target."
    )
    requests_accepted: int = counter("headrace.requests.accepted", "{request}", "Taken in.")
    requests_finished: int = counter(
        "headrace.requests.finished", "{request}", "Ended, whatever the reason."
    )
    generated_tokens: int = counter(
        "headrace.tokens.generated", "{token}", "Generated.", log="{rate:.0f} tokens/s"
    )
    prompt_tokens: int = counter(
        "headrace.tokens.prompt",
        "{token}",
        "Computed for prompts; again after a preemption.",
        log="{rate:.0f} of prompts",
    )
    drafts: int = counter(
        "headrace.drafts", "{draft}", "How often a request had guessed tokens in a step."
    )
    draft_tokens: int = counter("headrace.tokens.drafted", "{token}", "Guessed and computed.")
    accepted_draft_tokens: int = counter(
        "headrace.tokens.drafts_accepted", "{token}", "Those that were right and saved a step."
    )
    history_draft_tokens: int = counter(
        "headrace.tokens.drafted.history", "{token}", "Guessed from the request's own text."
    )
    accepted_history_draft_tokens: int = counter(
        "headrace.tokens.drafts_accepted.history", "{token}", "Those of them that were right."
    )
    prediction_draft_tokens: int = counter(
        "headrace.tokens.drafted.prediction", "{token}", "Guessed from the caller's prediction."
    )
    accepted_prediction_draft_tokens: int = counter(
        "headrace.tokens.drafts_accepted.prediction", "{token}", "Those of them that were right."
    )
    grammar_draft_tokens: int = counter(
        "headrace.tokens.drafted.grammar", "{token}", "Guessed because a grammar forces their text."
    )
    accepted_grammar_draft_tokens: int = counter(
        "headrace.tokens.drafts_accepted.grammar", "{token}", "Those of them that were right."
    )
    steps_with_drafts: int = counter(
        "headrace.steps.with_drafts", "{step}", "Steps with guessed tokens."
    )
    holds: int = counter(
        "headrace.holds",
        "{hold}",
        "How often a request was held, because its results were not read.",
    )
    preemptions: int = counter(
        "headrace.preemptions",
        "{preemption}",
        "How often a request gave up its blocks.",
        log="{grown} preempted",
    )
    offloads: int = counter(
        "headrace.kv_cache.offloads",
        "{offload}",
        "How often a preempted request's KV was kept on the host.",
    )
    restores: int = counter(
        "headrace.kv_cache.restores", "{restore}", "How often it was brought back."
    )
    prefix_queries: int = counter(
        "headrace.prefix_cache.queries",
        "{token}",
        "Prompt tokens that were looked up in the prefix cache.",
    )
    prefix_hits: int = counter(
        "headrace.prefix_cache.hits", "{token}", "Prompt tokens that were found there."
    )
    prefix_tokens_without_state: int = counter(
        "headrace.prefix_cache.without_state",
        "{token}",
        "Prompt tokens that earlier requests had too, but were computed because no state of "
        "recurrent layers was kept behind them.",
    )
    state_copies: int = counter(
        "headrace.states.copies", "{state}", "States that were kept for later requests."
    )
    state_evictions: int = counter(
        "headrace.states.evictions",
        "{state}",
        "Kept states that gave way to others.",
    )
    last_step_s: float = 0.0
    callers: tuple[CallerStats, ...] = ()
    other_callers: CallerStats | None = None
    by_adapter: tuple[AdapterStats, ...] = ()
    other_adapters: AdapterStats | None = None
    block_size: int = 0

    @property
    def kv_usage(self) -> float:
        """The fraction of the KV cache that requests hold, from 0 to 1: of its blocks, or of the
        room for states if no layer attends.
        """
        if not self.blocks_total:
            return self.states_used / max(self.states_total, 1)
        return self.blocks_used / self.blocks_total


_KV_USAGE: Final = Statistic(
    "gauge", "headrace.kv_cache.usage", "1", "The part of the KV cache that requests hold."
)
STATISTICS: Final[Mapping[str, Statistic]] = MappingProxyType(
    {"kv_usage": _KV_USAGE, **statistics_of(EngineStats)}
)
"""The engine's metrics, by the attribute of EngineStats."""
