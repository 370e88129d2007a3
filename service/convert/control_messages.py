"""ControlService's messages: statistics, live requests, log levels, limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import timestamp_pb2
from google.protobuf.message import Message
from headrace.v1 import control_service_pb2 as pb
from headrace.v1 import generation_pb2, generation_service_pb2

from engine.contract.stats import EngineStats, statistics_of
from service.admission.phases import Drain, Phase
from service.config import LOG_LEVELS
from service.convert.model import server_version
from service.convert.response import cancel_result
from service.convert.snapshot import OperatorPause, Snapshot
from service.convert.values import interval_seconds, page_size_of, to_duration
from service.delivery.served_request import ServedRequest
from service.errors.call_errors import FieldError

DEFAULT_INTERVAL_S = 1.0
MAX_CANCELS = 1024
MAX_REASON_BYTES = 256

_PHASES = {
    Phase.LOADING: pb.SERVER_PHASE_LOADING,
    Phase.READY: pb.SERVER_PHASE_READY,
    Phase.RESTARTING: pb.SERVER_PHASE_RESTARTING,
    Phase.DRAINING: pb.SERVER_PHASE_DRAINING,
    Phase.FAILED: pb.SERVER_PHASE_FAILED,
}
_LEVELS = {
    "debug": pb.LOG_LEVEL_DEBUG,
    "info": pb.LOG_LEVEL_INFO,
    "warning": pb.LOG_LEVEL_WARNING,
    "error": pb.LOG_LEVEL_ERROR,
}
_LEVEL_NAMES = {number: name for name, number in _LEVELS.items()}
_RATES = [one.name for one in pb.EngineRates.DESCRIPTOR.fields if one.message_type is None]


# ---- requests ----------------------------------------------------------------------------------


def interval_of(request: pb.WatchStatisticsRequest) -> float:
    """Return the interval of a request, in seconds.

    Raises:
        FieldError: it is out of bounds.
    """
    if not request.HasField("interval"):
        return DEFAULT_INTERVAL_S
    return interval_seconds(request.interval, "interval")


def check_reason(reason: str) -> str:
    """Return the reason on one line, because it is logged.

    Raises:
        FieldError: it is too long.
    """
    size = len(reason.encode())
    if size > MAX_REASON_BYTES:
        raise FieldError("reason", f"has {size} bytes; at most {MAX_REASON_BYTES} are allowed")
    return "".join(c if c.isprintable() else " " for c in reason)


def level_of(level: pb.LogLevel.ValueType) -> str:
    """Return the level's name.

    Raises:
        FieldError: it is missing, or unknown (from a newer client).
    """
    if level not in _LEVEL_NAMES:
        raise FieldError(
            "level", f"is {level}; it must be one of {', '.join(LOG_LEVELS)} (1 to {len(_LEVELS)})"
        )
    return _LEVEL_NAMES[level]


def check_names(names: Sequence[pb.RequestName]) -> None:
    """Refuse names that cannot be looked up.

    Raises:
        FieldError: there are too few or too many, or one is incomplete.
    """
    if not 1 <= len(names) <= MAX_CANCELS:
        raise FieldError("requests", f"has {len(names)} entries; give between 1 and {MAX_CANCELS}")
    for index, name in enumerate(names):
        for field in ("identity", "request_id"):
            if not getattr(name, field):
                raise FieldError(
                    f"requests[{index}].{field}", "is empty; ListRequests tells both names"
                )


def page_of(request: pb.ListRequestsRequest) -> tuple[int, int]:
    """Return the page's size, and the serial after which it begins.

    Raises:
        FieldError: the page token was not made by this server.
    """
    size, token = page_size_of(request.page_size), request.page_token
    if token and not (token.isascii() and token.isdigit() and len(token) <= 20):
        raise FieldError("page_token", "is not a next_page_token of this server; leave it out")
    return size, int(token or 0)


# ---- answers -----------------------------------------------------------------------------------


def statistics_message(snapshot: Snapshot, before: Snapshot | None = None) -> pb.Statistics:
    """Return the message for the statistics, with rates if there are earlier statistics."""
    message = pb.Statistics(
        instance_id=snapshot.instance_id,
        server_version=server_version(),
        model=snapshot.model,
        sample_time=to_timestamp(snapshot.taken_at),
        uptime_duration=to_duration(snapshot.uptime_s),
        phase=_PHASES[snapshot.phase],
        log_level=level_number(snapshot.log_level),
        engine_restarts=snapshot.figures["engine_restarts"],
        front_end=_front_end(snapshot),
        startup_phases=[
            pb.StartupPhase(name=name, duration=to_duration(seconds_))
            for name, seconds_ in snapshot.figures["startup"].items()
        ],
    )
    if snapshot.pause is not None:
        message.pause.CopyFrom(pause_message(snapshot.pause))
    if snapshot.drain is not None:
        message.drain.CopyFrom(drain_message(snapshot.drain))
    if snapshot.engine is not None:
        message.engine.CopyFrom(engine_statistics(snapshot.engine))
    if before is not None and (rates := _rates(before, snapshot)) is not None:
        message.rates.CopyFrom(rates)
    return message


def _front_end(snapshot: Snapshot) -> pb.FrontEndStatistics:
    figures = {**dataclasses.asdict(snapshot.front_end), **snapshot.figures}
    figures["refusals"] = [
        pb.RefusalStatistics(
            method=refusal.method, reason=refusal.reason, status_code=refusal.code, count=count
        )
        for refusal, count in sorted(snapshot.figures["refusals"].items())
    ]
    return pb.FrontEndStatistics(**_named(pb.FrontEndStatistics, figures))


def engine_statistics(stats: EngineStats) -> pb.EngineStatistics:
    """Return the message for the engine's statistics. Those that have no field in it are told by
    the names of their metrics.
    """
    same = _named(pb.EngineStatistics, dataclasses.asdict(stats))
    others = {
        one.name: value
        for field, one in statistics_of(EngineStats).items()
        if field not in same and (value := getattr(stats, field))
    }
    took = to_duration(stats.last_step_s)
    return pb.EngineStatistics(last_step_duration=took, others=others, **same)


def _named(message: type[Message], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for which a message has a field of the same name."""
    names = message.DESCRIPTOR.fields_by_name
    return {name: value for name, value in values.items() if name in names}


def _rates(before: Snapshot, now: Snapshot) -> pb.EngineRates | None:
    """Return how fast the counters grew, or None if that is unknown."""
    window_s = now.moment - before.moment
    if (
        before.engine is None
        or now.engine is None
        or before.figures["engine_restarts"] != now.figures["engine_restarts"]
        or window_s <= 0
    ):
        return None
    grown = {name: getattr(now.engine, name) - getattr(before.engine, name) for name in _RATES}
    if min(grown.values()) < 0:  # another engine's counters
        return None
    return pb.EngineRates(
        window=to_duration(window_s), **{name: value / window_s for name, value in grown.items()}
    )


def live_request(request: ServedRequest, now: float) -> pb.LiveRequest:
    """Return the message for a live request. `now`: monotonic seconds."""
    log = request.log
    output_tokens = log.output_tokens
    if request.cancel_wanted:
        state = pb.REQUEST_STATE_CANCELLING
    elif log.accepted is None:
        state = pb.REQUEST_STATE_SUBMITTED
    elif request.is_held:
        state = pb.REQUEST_STATE_HELD
    elif output_tokens == 0:
        state = pb.REQUEST_STATE_WAITING
    else:
        state = pb.REQUEST_STATE_GENERATING
    return pb.LiveRequest(
        identity=request.identity,
        request_id=request.request_id,
        state=state,
        age_duration=to_duration(now - log.arrival),
        prompt_tokens=log.prompt_tokens,
        output_tokens=output_tokens,
        n=log.n,
        priority=request.priority,
        time_limit=None if request.time_limit_s is None else to_duration(request.time_limit_s),
        streaming=request.stream is not None,
        labels=[
            generation_pb2.Label(name=name, value=value) for name, value in request.labels.items()
        ],
        adapter=request.adapter,
    )


def cancellation(name: pb.RequestName, status: str) -> pb.RequestCancellation:
    """Return the answer to a cancel."""
    result: generation_service_pb2.CancelResult = cancel_result(name.request_id, status)
    return pb.RequestCancellation(
        identity=name.identity, request_id=name.request_id, status=result.status
    )


def pause_message(pause: OperatorPause) -> pb.PauseState:
    """Return the message for a pause."""
    return pb.PauseState(reason=pause.reason, start_time=to_timestamp(pause.since))


def drain_message(drain: Drain) -> pb.DrainState:
    """Return the message for a drain."""
    return pb.DrainState(
        reason=drain.reason,
        start_time=to_timestamp(drain.since),
        timeout=to_duration(drain.timeout_s),
    )


def level_number(level: str) -> pb.LogLevel.ValueType:
    """Return the number of a level."""
    return _LEVELS[level]


def to_timestamp(wall: float) -> timestamp_pb2.Timestamp:
    """Return wall-clock seconds as a timestamp."""
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(int(wall * 1e9))
    return stamp
