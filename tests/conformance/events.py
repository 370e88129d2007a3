"""The events that a vector's steps send: from a few words to the contract's messages.

| in a vector | the event |
|---|---|
| `"accept"` | answers the request's arrival: Accepted |
| `{"refuse": {"code", "reason", "retry_ms", "fields"}}` | answers it: a refusal |
| `{"attach": 4}` | answers an attach, which must ask for event 4; what follows there comes again |
| `{"text": "$w é"}`, with `ids`, `choice`, `reasoning`, `tool_calls`, `pieces` | a Delta |
| `{"prompt": 5, "cached": 2}` | PromptProcessed |
| `{"finish": "STOP"}`, with `choice`, `stop_string`, `stop_token`, `usage` | Finished |
| `{"finish": 99}` | Finished, for a reason that nobody knows |
| `{"fail": {"code", "reason"}}` | Failed |
| `"unknown"` | an event of a kind that nobody knows |
"""

from __future__ import annotations

import base64
from typing import Any

from headrace.v1 import generation_pb2 as g

from tests.conformance.chance import Chance
from tests.conformance.stage import make_status

UNKNOWN_FIELD = b"\xba\x3e\x04\x0a\x02hi"  # number 999, a message
_DELTA = ("text", "ids", "reasoning", "tool_calls", "pieces")


def accepted(spec: g.GenerationSpec, command_id: int, chance: Chance) -> g.ResultEvent:
    """The acceptance of a request; an adapter's digest is random, as is a seed that it lacks."""
    event = g.ResultEvent()
    made = event.accepted
    made.request_id, made.command_id = spec.request_id, command_id
    made.n = spec.n if spec.HasField("n") else 1
    made.prompt_tokens = 3
    made.sampling.CopyFrom(spec.sampling)
    if not spec.sampling.HasField("seed"):
        made.sampling.seed = chance.number(2**63)
    if spec.adapter:
        made.adapter_digest = chance.identifier()
    return event


class EventMaker:
    """Makes a vector's events."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._completed: dict[tuple[str, int], int] = {}

    def make(self, told: Any, request_id: str) -> g.ResultEvent:
        """The event of what a vector says."""
        event = g.ResultEvent()
        if told == "unknown":
            event.MergeFromString(UNKNOWN_FIELD)
            return event
        event.choice_index = told.get("choice", 0)
        key = (request_id, event.choice_index)
        if any(name in told for name in _DELTA):
            self._delta(event.delta, told)
            count = len(event.delta.token_ids) + len(event.delta.tokens)
            self._completed[key] = self._completed.get(key, 0) + count
            if told.get("unknown_fields"):
                event.delta.MergeFromString(UNKNOWN_FIELD)
        elif "prompt" in told:
            event.prompt.prompt_tokens = told["prompt"]
            event.prompt.cached_tokens = told.get("cached", 0)
        elif "finish" in told:
            self._finish(event.finished, told, self._completed.get(key, 0))
        elif "fail" in told:
            event.failed.status.CopyFrom(make_status(told["fail"])[0])
        else:
            raise ValueError(f"no event: {told}")
        return event

    def _delta(self, delta: g.Delta, told: dict[str, Any]) -> None:
        delta.text = self._chance.text(told.get("text", ""))
        if "big" in told:
            delta.text += "あ€z" * told["big"]
        delta.reasoning = self._chance.text(told.get("reasoning", ""))
        for call in told.get("tool_calls", ()):
            delta.tool_calls.add(
                index=call["index"],
                id=call.get("id", ""),
                name=call.get("name", ""),
                arguments_json=self._chance.text(call.get("arguments", "")),
            )
        if "pieces" in told:
            for piece in told["pieces"]:
                token = self._chance.token(base64.b64decode(piece), told.get("candidates", 0))
                delta.tokens.append(token)
            return
        ids = told.get("ids")
        delta.token_ids.extend(ids if isinstance(ids, list) else self._chance.token_ids(ids))

    def _finish(self, finished: g.Finished, told: dict[str, Any], completed: int) -> None:
        reason = told["finish"]
        if isinstance(reason, int):
            finished.MergeFromString(bytes([0x08, reason]))  # an open enum keeps it
        else:
            finished.reason = g.FinishReason.Value(f"FINISH_REASON_{reason}")
        if "stop_string" in told:
            finished.stop_string = told["stop_string"]
        if "stop_token" in told:
            finished.stop_token_id = told["stop_token"]
        finished.usage.prompt_tokens = 3
        finished.usage.completion_tokens = completed
        for name, count in told.get("usage", {}).items():
            setattr(finished.usage, name, count)
