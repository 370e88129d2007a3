"""Converts results to OpenAI's objects: whole answers, and the events of streams.

An event of a stream is a template with the new text inserted. Most events of a stream differ only
in their text, so the rest is built once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.openai.asked import Asked
from headrace.results import Choice, Chunk, FinishReason, Result, TokenInfo, Usage

_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.TIME_LIMIT: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}
_MISSING = -9999.0
"""The value that OpenAI shows for a log-probability too small to report."""
_LEVELS = 5
"""The nesting depth of a token in a choice's log-probabilities. A token has few candidates."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Serializes a value as compact JSON."""
    return _ENCODER.encode(value)


def dumps_in_pieces(value: Any) -> str:
    """Serializes a large value as compact JSON in several chunks.

    Other threads can run between the chunks, but not while the encoder runs.
    """
    return "".join(_pieces(value, _LEVELS))


def _pieces(value: Any, levels: int) -> Iterator[str]:
    if not (levels and value and isinstance(value, (dict, list))):
        yield dumps(value)
        return
    is_dict, before = isinstance(value, dict), ""
    yield "{" if is_dict else "["
    for one in value:
        yield before + (dumps(one) + ":" if is_dict else "")
        yield from _pieces(value[one] if is_dict else one, levels - 1)
        before = ","
    yield "}" if is_dict else "]"


class Replies:
    """The answer to one body.

    Args:
        asked: the parsed body.
        id: the id of the answer, without its prefix.
        model: the model's name in the answer.
        created: the time of creation, in seconds since 1970.
    """

    def __init__(self, asked: Asked, id: str, model: str, created: int) -> None:
        self._asked = asked
        self._is_chat = asked.route == "chat"
        kind = "chat.completion" if self._is_chat else "text_completion"
        id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{id}"
        self._head: dict[str, Any] = {"id": id, "object": kind, "created": created, "model": model}
        chunk = self._head | {"object": kind + (".chunk" if self._is_chat else "")}
        self._start = dumps(chunk)[:-1] + ',"choices":['
        usage = ',"usage":null' if asked.wants_usage else ""
        self._end = f"]{usage}}}\n\n"
        self._begun: set[int] = set()
        # Most events are a text between these.
        self._heads: dict[int, str] = {}
        self._tail = f'}},"logprobs":null,"finish_reason":null}}{self._end}'
        self._offsets: dict[int, int] = {}

    # ---- whole ----------------------------------------------------------------------------------

    def whole(self, results: list[Result], prompt_ids: list[list[int]]) -> dict[str, Any]:
        """Returns the answer for all prompts. `prompt_ids` are their token ids, if requested."""
        choices = []
        for number, result in enumerate(results):
            for choice in result.choices:
                shown = self._chat_choice(choice) if self._is_chat else self._text(choice, result)
                shown["index"] = number * self._asked.n + choice.index
                if self._asked.wants_ids:
                    shown["token_ids"] = list(choice.token_ids)
                    if not self._is_chat:
                        shown["prompt_token_ids"] = prompt_ids[number]
                choices.append(shown)
        found = self._head | {"choices": choices, "usage": usage_of(results)}
        if self._asked.wants_ids and self._is_chat:
            found["prompt_token_ids"] = prompt_ids[0]
        if self._asked.has_prompt:
            shown_prompts = [_prompt_logprobs(result) for result in results]
            if self._is_chat:
                found["prompt_logprobs"] = shown_prompts[0]
            else:
                for i, choice_shown in enumerate(choices):
                    choice_shown["prompt_logprobs"] = shown_prompts[i // self._asked.n]
        return found

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": [],
        }
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.tool_calls
            ]
        if choice.reasoning and self._asked.wants_reasoning:
            message["reasoning_content"] = choice.reasoning
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._chat_logprobs(choice.tokens),
            "finish_reason": self._reason(choice),
        }

    def _text(self, choice: Choice, result: Result) -> dict[str, Any]:
        before = result.prompt.tokens if self._asked.echo and result.prompt else ()
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._text_logprobs([*before, *choice.tokens], 0),
            "finish_reason": self._reason(choice),
        }

    def _reason(self, choice: Choice) -> str:
        if self._asked.is_forced and choice.finish_reason is FinishReason.TOOL_CALLS:
            return "stop"
        return _REASONS.get(choice.finish_reason, "stop")

    # ---- streamed -------------------------------------------------------------------------------

    def event(self, number: int, chunk: Chunk, before: Iterable[TokenInfo] = ()) -> str:
        """Returns the events for a chunk.

        Args:
            number: the index of the chunk's prompt.
            chunk: the new output.
            before: the prompt's tokens, if they are shown with the first chunk of a choice.
        """
        index = number * self._asked.n + chunk.choice_index
        head = self._heads.get(index)
        if head is not None and chunk.text and not (chunk.reasoning or chunk.tool_calls):
            return head + dumps(chunk.text) + self._tail
        logprobs = "null"
        if not self._is_chat:
            if self._asked.logprobs is not None:
                tokens = [*before, *chunk.tokens]
                offset = self._offsets.get(index, 0)
                logprobs = dumps(self._text_logprobs(tokens, offset))
                self._offsets[index] = offset + sum(len(token.text) for token in tokens)
            elif not chunk.text and not self._asked.wants_ids:
                return ""
            return self._choice(index, f'"text":{dumps(chunk.text)}', logprobs, chunk)
        if self._asked.logprobs is not None:
            logprobs = dumps(self._chat_logprobs(chunk.tokens))
        first = self._first(index)
        if chunk.text and not chunk.reasoning and not chunk.tool_calls:
            delta = '"delta":{"content":' + dumps(chunk.text) + "}"
            return first + self._choice(index, delta, logprobs, chunk)
        parts: dict[str, Any] = {"content": chunk.text} if chunk.text else {}
        if chunk.reasoning and self._asked.wants_reasoning:
            parts["reasoning_content"] = chunk.reasoning
        if chunk.tool_calls:
            parts["tool_calls"] = [_call_delta(call) for call in chunk.tool_calls]
        if not parts and logprobs == "null" and not self._asked.wants_ids:
            return first
        return first + self._choice(index, '"delta":' + dumps(parts), logprobs, chunk)

    def finish(self, number: int, result: Result) -> str:
        """Returns the events that end the choices of a prompt."""
        found = []
        for choice in result.choices:
            index = number * self._asked.n + choice.index
            empty = '"delta":{}' if self._is_chat else '"text":""'
            head = self._first(index) if self._is_chat else ""
            reason = f'"{self._reason(choice)}"'
            found.append(head + self._choice(index, empty, "null", None, reason))
        return "".join(found)

    def usage(self, results: list[Result]) -> str:
        """Returns the event with the token usage, which has no choices."""
        return self._data(self._start + "]" + ',"usage":' + dumps(usage_of(results)) + "}\n\n")

    def _first(self, index: int) -> str:
        """Returns the event that names the role, the first time it is called for a choice."""
        if index in self._begun:
            return ""
        self._begun.add(index)
        if self._asked.logprobs is None and not self._asked.wants_ids:
            start = f'data: {self._start}{{"index":{index},"delta":{{"content":'
            self._heads[index] = start
        return self._choice(index, '"delta":{"role":"assistant","content":""}', "null", None)

    def _choice(
        self, index: int, delta: str, logprobs: str, chunk: Chunk | None, reason: str = "null"
    ) -> str:
        ids = ""
        if chunk is not None and self._asked.wants_ids:
            ids = f',"token_ids":{dumps(chunk.token_ids)}'
        inner = f'{{"index":{index},{delta},"logprobs":{logprobs},"finish_reason":{reason}{ids}}}'
        return self._data(self._start + inner + self._end)

    @staticmethod
    def _data(text: str) -> str:
        return "data: " + text

    # ---- log-probabilities ----------------------------------------------------------------------

    def _chat_logprobs(self, tokens: Iterable[TokenInfo]) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        content = [
            {
                **_token(token.text, token.bytes, token.logprob),
                "top_logprobs": [
                    _token(one.text, one.bytes, one.logprob) for one in token.candidates
                ],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, tokens: Iterable[TokenInfo], offset: int) -> dict[str, Any] | None:
        """Returns log-probabilities in the older format. `offset` is the first token's text
        offset.
        """
        if self._asked.logprobs is None:
            return None
        found: dict[str, list[Any]] = {
            "text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": [],
        }  # fmt: skip
        for token in tokens:
            found["text_offset"].append(offset)
            found["token_logprobs"].append(token.logprob)
            found["tokens"].append(token.text)
            tops = {one.text: one.logprob for one in reversed(token.candidates)}
            if token.logprob is not None:
                tops.setdefault(token.text, token.logprob)
            found["top_logprobs"].append(None if token.logprob is None else tops)
            offset += len(token.text)
        return found


def usage_of(results: list[Result]) -> dict[str, Any]:
    """Returns the token usage of all prompts together."""
    return _usage(
        Usage(
            sum(result.usage.prompt_tokens for result in results),
            sum(result.usage.cached_tokens for result in results),
            sum(result.usage.completion_tokens for result in results),
            sum(result.usage.reasoning_tokens for result in results),
            prediction_draft_tokens=sum(one.usage.prediction_draft_tokens for one in results),
            accepted_prediction_draft_tokens=sum(
                one.usage.accepted_prediction_draft_tokens for one in results
            ),
        )
    )


def _usage(usage: Usage) -> dict[str, Any]:
    accepted = usage.accepted_prediction_draft_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": usage.prediction_draft_tokens - accepted,
        },
    }


def _call_delta(call: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"index": call.index}
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.id or call.name:
        found |= {"id": call.id, "type": "function"}
        function = {"name": call.name} | function
    return found | {"function": function}


def _token(text: str, bytes_: bytes, logprob: float | None) -> dict[str, Any]:
    shown = _MISSING if logprob is None else max(logprob, _MISSING)
    return {"token": text, "logprob": shown, "bytes": list(bytes_)}


def _prompt_logprobs(result: Result) -> list[Mapping[str, Any] | None]:
    """Returns a prompt's log-probabilities in vLLM's format.

    Each token has an entry with the log-probabilities of the token and its candidates, by id.
    """
    found: list[Mapping[str, Any] | None] = []
    for token in result.prompt.tokens if result.prompt else ():
        if token.logprob is None:
            found.append(None)
            continue
        shown = {
            str(one.id): {"logprob": one.logprob, "rank": rank, "decoded_token": one.text}
            for rank, one in enumerate(token.candidates, 1)
        }
        own = {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text}
        found.append({str(token.id): own} | shown)
    return found
