"""The same request asked twice, over gRPC and over HTTP, and its answers in one form."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from headrace import AsyncClient, Result

from tests.openai.doors import OpenDoor

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
REASONS = {"context": "length", "time_limit": "length"}
WORDS = [
    "Once", "upon", "a", "time", "there", "was", "a", "small", "fox", "who", "said", "größe", "水",
    "🙂", "{json}", "<tag>", "\n", "and", "then",
]  # fmt: skip


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function that has these parameters, all of them required."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("weather", town={"enum": ["Ulm", "Bonn"]}),
    tool("add", a={"type": "integer", "maximum": 9, "minimum": 0}, b={"enum": [1, 2]}),
]
SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Ulm", "Köln"]}, "far": {"type": "boolean"}},
    "required": ["town", "far"],
    "additionalProperties": False,
}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"json_schema": SCHEMA},
    ),
    ({"response_format": {"type": "text"}}, {}),
    ({"structured_outputs": {"regex": "[ab]{3,9}"}}, {"regex": "[ab]{3,9}"}),
    ({"structured_outputs": {"choice": ["yes", "né"]}}, {"choices": ["yes", "né"]}),
]
CHOICES: list[tuple[Any, bool]] = [
    ("required", False),
    ({"type": "function", "function": {"name": "add"}}, True),
    (
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "weather"}}],
            },
        },
        False,
    ),
    ("none", False),
    ("auto", False),
]
"""Values of tool_choice; whether they name the function."""


@dataclass
class Question:
    """A request in both languages.

    Attributes:
        prompts: of the client.
        options: of the client.
        body: of HTTP.
        is_named: whether one function is to be called.
    """

    route: str
    prompts: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    is_named: bool = False

    def both(self, name: str, value: Any, option: str = "") -> None:
        """A member that both have."""
        self.body[name] = value
        self.options[option or name] = value


def draw(rng: random.Random, number: int) -> Question:
    """A random request."""
    asked = _draw_chat(rng) if number % 2 else _draw_completion(rng)
    asked.both("seed", rng.randrange(1 << 63))
    asked.both("temperature", rng.choice([0, 0.7, 1.0, 1.7]))
    asked.both("max_tokens", rng.randint(1, 24))
    if rng.random() < 0.4:
        asked.both("n", rng.randint(2, 3))
    extras: list[tuple[str, Any, str]] = [
        ("top_p", rng.uniform(0.3, 1), ""), ("top_k", rng.randint(1, 50), ""),
        ("min_p", 0.02, ""), ("presence_penalty", rng.uniform(-2, 2), ""),
        ("frequency_penalty", rng.uniform(-2, 2), ""), ("repetition_penalty", 1.2, ""),
        ("min_tokens", 1, ""), ("ignore_eos", True, ""),
        ("stop", rng.choice(["e", ["e", " the"], ["a", "i"]]), ""),
        ("stop_token_ids", [rng.randrange(200)], ""),
        ("include_stop_str_in_output", True, "include_stop"),
    ]  # fmt: skip
    for name, value, option in rng.sample(extras, rng.randint(0, 4)):
        asked.both(name, value, option)
    if rng.random() < 0.2:
        asked.body["logit_bias"], asked.options["logit_bias"] = (
            {"70": 5, "71": -100},
            {70: 5, 71: -100},
        )
    return asked


def _draw_chat(rng: random.Random) -> Question:
    messages: list[dict[str, Any]] = [{"role": "user", "content": _text(rng)}]
    if rng.random() < 0.5:
        messages.insert(0, {"role": rng.choice(["system", "developer"]), "content": _text(rng)})
    if rng.random() < 0.5:
        messages += [
            {"role": "assistant", "content": _text(rng)},
            {"role": "user", "content": [{"type": "text", "text": _text(rng)}]},
        ]
    asked = Question("chat", [messages], body={"messages": messages})
    if rng.random() < 0.4:
        top = rng.randint(0, 4)
        asked.body |= {"logprobs": True, "top_logprobs": top}
        asked.options["logprobs"] = top
    kind = rng.random()
    if kind < 0.3:
        choice, asked.is_named = rng.choice(CHOICES)
        asked.both("tools", TOOLS)
        asked.both("tool_choice", choice)
        if rng.random() < 0.5 and choice != "none":
            asked.both("parallel_tool_calls", False)
    elif kind < 0.5:
        _form(rng, asked)
    return asked


def _draw_completion(rng: random.Random) -> Question:
    prompts: list[Any] = [
        rng.choice([_text(rng), [rng.randrange(3, 200) for _ in range(rng.randint(1, 9))]])
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    asked = Question("completions", prompts)
    asked.body["prompt"] = prompts if len(prompts) > 1 or rng.random() < 0.2 else prompts[0]
    if rng.random() < 0.5:
        asked.both("logprobs", rng.randint(0, 4))
    if rng.random() < 0.4:
        asked.both("echo", True)
        if "logprobs" in asked.body:
            asked.options["prompt_logprobs"] = asked.body["logprobs"]
    elif rng.random() < 0.3:
        _form(rng, asked)
    return asked


def _form(rng: random.Random, asked: Question) -> None:
    body, options = rng.choice(FORMS)
    asked.body |= body
    asked.options |= options


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))


# ---- answers in one form -------------------------------------------------------------------------


@dataclass
class Answer:
    """What was answered: for each choice, and the cost."""

    choices: list[dict[str, Any]]
    usage: dict[str, Any]
    numbers: list[float] = field(default_factory=list)
    """All log-probabilities, one after the other."""

    def check(self, other: Answer) -> None:
        """Both say the same."""
        assert self.choices == other.choices
        assert _without_drafts(self.usage) == _without_drafts(other.usage)
        assert self.numbers == pytest.approx(other.numbers, abs=1e-4)


def _without_drafts(usage: dict[str, Any]) -> dict[str, Any]:
    """Without how many guesses were tried and kept, which is decided by how long steps take."""
    details = "completion_tokens_details"
    kept = {name: count for name, count in usage[details].items() if "prediction" not in name}
    return usage | {details: kept}


async def over_grpc(client: AsyncClient, asked: Question, salt: str) -> Answer:
    """The answer of the client's own calls."""
    options = asked.options | {"cache_salt": salt}
    results = await asyncio.gather(*(client.generate(one, **options) for one in asked.prompts))
    found = Answer([], {})
    for result in results:
        for choice in result.choices:
            reason = REASONS.get(choice.finish_reason, str(choice.finish_reason))
            if asked.is_named and reason == "tool_calls":
                reason = "stop"
            calls = [(call.name, call.arguments) for call in choice.tool_calls]
            shown = {
                "text": choice.text, "reasoning": choice.reasoning, "calls": calls,
                "reason": reason, "ids": list(choice.token_ids), "logprobs": None,
            }  # fmt: skip
            if "logprobs" in asked.options:
                tokens = list(choice.tokens)
                if asked.options.get("echo") and result.prompt is not None:
                    tokens = [*result.prompt.tokens, *tokens]
                shown["logprobs"] = _of_tokens(asked.route, tokens, found.numbers)
            found.choices.append(shown)
    found.usage = _cost(results)
    return found


def _cost(results: list[Result]) -> dict[str, Any]:
    prompt = sum(result.usage.prompt_tokens for result in results)
    completion = sum(result.usage.completion_tokens for result in results)
    tried = sum(result.usage.prediction_draft_tokens for result in results)
    kept = sum(result.usage.accepted_prediction_draft_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(result.usage.cached_tokens for result in results)
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(result.usage.reasoning_tokens for result in results),
            "accepted_prediction_tokens": kept,
            "rejected_prediction_tokens": tried - kept,
        },
    }


def _of_tokens(route: str, tokens: Iterable[Any], numbers: list[float]) -> list[Any]:
    found: list[Any] = []
    offset = 0
    for token in tokens:
        if route == "chat":
            numbers += [token.logprob, *(one.logprob for one in token.candidates)]
            tops: Any = [(one.text, list(one.bytes)) for one in token.candidates]
            found.append((token.text, list(token.bytes), tops))
            continue
        if token.logprob is not None:
            numbers.append(token.logprob)
        names = {one.text for one in token.candidates} | {token.text}
        found.append((token.text, offset, None if token.logprob is None else names))
        offset += len(token.text)
    return found


def _of_json(route: str, shown: Any, numbers: list[float]) -> list[Any] | None:
    if shown is None:
        return None
    if route == "chat":
        assert shown["refusal"] is None
        found: list[Any] = []
        for token in shown["content"]:
            tops = token["top_logprobs"]
            numbers += [token["logprob"], *(one["logprob"] for one in tops)]
            found.append(
                (token["token"], token["bytes"], [(one["token"], one["bytes"]) for one in tops])
            )
        return found
    numbers += [one for one in shown["token_logprobs"] if one is not None]
    tops = [None if one is None else set(one) for one in shown["top_logprobs"]]
    return list(zip(shown["tokens"], shown["text_offset"], tops, strict=True))


async def whole(door: OpenDoor, asked: Question, salt: str) -> Answer:
    """The whole answer of HTTP."""
    body = asked.body | {"cache_salt": salt, "return_token_ids": True}
    got = await door.ask(PATHS[asked.route], body)
    assert got["object"] == ("chat.completion" if asked.route == "chat" else "text_completion")
    found = Answer([], got["usage"])
    assert [one["index"] for one in got["choices"]] == list(range(len(got["choices"])))
    for choice in got["choices"]:
        message = choice.get("message", {})
        calls = message.get("tool_calls", ())
        assert all(call["id"] and call["type"] == "function" for call in calls)
        found.choices.append(
            {
                "text": choice["text"] if "text" in choice else message["content"] or "",
                "reasoning": message.get("reasoning_content", ""),
                "calls": [
                    (call["function"]["name"], call["function"]["arguments"]) for call in calls
                ],
                "reason": choice["finish_reason"],
                "ids": choice["token_ids"],
                "logprobs": _of_json(asked.route, choice["logprobs"], found.numbers),
            }
        )
    return found


async def joined(door: OpenDoor, asked: Question, salt: str) -> Answer:
    """The answer of a stream, put together."""
    body = asked.body | {
        "cache_salt": salt, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return join(asked.route, await door.events(PATHS[asked.route], body))


def join(route: str, events: list[dict[str, Any]]) -> Answer:
    """The answer of a stream's events, which must follow OpenAI's laws."""
    *events, last = events
    assert last["choices"] == []
    assert len({json.dumps([one[name] for name in ("id", "object", "created", "model")])
                for one in [*events, last]}) == 1  # fmt: skip
    choices: dict[int, dict[str, Any]] = {}
    shown: dict[int, list[Any]] = {}
    numbers: dict[int, list[float]] = {}
    for event in events:
        assert event["usage"] is None
        [choice] = event["choices"]
        index, delta = choice["index"], choice.get("delta", {})
        if index not in choices:
            choices[index] = {
                "text": "", "reasoning": "", "calls": [], "reason": None, "ids": [],
                "logprobs": None,
            }  # fmt: skip
            assert route != "chat" or delta == {"role": "assistant", "content": ""}
        else:
            assert "role" not in delta
        found = choices[index]
        assert found["reason"] is None, "an event after the end of its choice"
        found["reason"] = choice["finish_reason"]
        found["text"] += choice["text"] if "text" in choice else delta.get("content", "")
        found["reasoning"] += delta.get("reasoning_content", "")
        found["ids"] += choice.get("token_ids", ())
        for call in delta.get("tool_calls", ()):
            _join_call(found["calls"], call)
        if choice["logprobs"] is not None:
            more = _of_json(route, choice["logprobs"], numbers.setdefault(index, []))
            found["logprobs"] = shown.setdefault(index, [])
            shown[index] += more or ()
    ordered = [choices[index] for index in sorted(choices)]
    assert sorted(choices) == list(range(len(choices)))
    for one in ordered:
        one["calls"] = [(name, arguments) for name, arguments in one["calls"]]
    return Answer(ordered, last["usage"], [n for i in sorted(numbers) for n in numbers[i]])


def _join_call(calls: list[Any], call: dict[str, Any]) -> None:
    if call["index"] == len(calls):
        assert call["id"]
        assert call["type"] == "function"
        calls.append([call["function"]["name"], call["function"]["arguments"]])
        return
    assert call["index"] < len(calls), "a call was left out"
    assert not {"id", "type"} & call.keys()
    assert "name" not in call["function"]
    calls[call["index"]][1] += call["function"]["arguments"]
