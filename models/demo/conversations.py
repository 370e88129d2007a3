"""Generates conversations with tools: which tool fits, its arguments, and what its result means.

The input is the uses of ``tools``, the output is conversations. A conversation has a call, the
tool's answer, how the model reports it, and perhaps a second question. Others have questions that
no tool fits, which are answered without one. In a fifth of them the template opens reasoning, and
the model thinks for one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from copying import copy, edit, extraction, listing
from tools import Json, Tools, Use
from words import Words

Message = dict[str, Any]
_SYSTEMS = [
    "You are a helpful assistant.",
    "Use the tools.",
    "You are a helpful assistant with tools.",
    "Answer briefly.",
    "You help people.",
]


@dataclass(frozen=True)
class Conversation:
    """Messages, the last one from the model, and the tools that are available."""

    messages: list[Message]
    tools: list[Json]


def call(*uses: Use, thought: str = "") -> Message:
    """Return a reply that calls tools."""
    calls = [
        {"type": "function", "function": {"name": use.name, "arguments": use.arguments()}}
        for use in uses
    ]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": calls,
        "reasoning_content": thought,
    }


def _row(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


class Conversations:
    """Draws conversations with tools."""

    def __init__(self, words: Words, chat: Callable[[], tuple[str, str]]) -> None:
        """chat: draws a question that needs no tool, and its answer."""
        self.words, self.rng, self.chat = words, words.rng, chat
        self.tools = Tools(words)

    def draw(self) -> Conversation:
        """Draw a conversation."""
        rng = self.rng
        thinks = rng.random() < 0.2
        messages: list[Message] = []
        if rng.random() < 0.15:
            messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
        if rng.random() < 0.12:
            ask, answer = self.chat()
            messages.append({"role": "user", "content": ask})
            messages.append({"role": "assistant", "content": answer})
        if rng.random() < 0.34:
            return self._without(messages, thinks)
        return self._with(messages, thinks)

    def _with(self, messages: list[Message], thinks: bool) -> Conversation:
        """Draw a conversation in which one of the tools fits. Often it answers, and sometimes there
        is a second question.
        """
        rng = self.rng
        use = self.tools.use()
        others = self._others(rng.choices([0, 1, 2, 3], [1, 3, 6, 2])[0], {use.name})
        near = self.tools.near(use)
        if others and near and near.name != use.name and rng.random() < 0.5:
            others[0] = near
        tools = self._definitions([use, *others])
        asked = [other for other in others if other.question]
        if asked and rng.random() < 0.05:
            both = f"{use.question} {asked[-1].question}"
            reply = call(use, asked[-1], thought="Two tools fit." if thinks else "")
            return Conversation([*messages, {"role": "user", "content": both}, reply], tools)
        self._question(messages, use, thinks)
        if rng.random() < 0.4:
            raw, told = self._result(use)
            thought = f"The tool {use.name} has answered." if thinks else ""
            messages.append({"role": "tool", "content": raw})
            messages.append({"role": "assistant", "content": told, "reasoning_content": thought})
        # Tools are long and a call is short: more questions about the same tools teach more.
        more: list[Use | None] = [other for other in asked if rng.random() < 0.6]
        more += [None] * rng.choices([0, 1, 2], [6, 3, 1])[0]
        for other in rng.sample(more, len(more)):
            if other:
                self._question(messages, other, thinks)
            else:
                self._refused(messages, [use, *others], thinks)
        return Conversation(messages, tools)

    def _without(self, messages: list[Message], thinks: bool) -> Conversation:
        """Draw a conversation that starts with a question that no tool fits; a tool may fit the
        next one.
        """
        rng = self.rng
        there = self._others(rng.choice([1, 1, 2, 2, 3]), set())
        self._refused(messages, there, thinks)
        for use in there:
            if rng.random() < 0.3:
                self._question(messages, use, thinks)
        return Conversation(messages, self._definitions(there))

    def _refused(self, messages: list[Message], there: list[Use], thinks: bool) -> None:
        """Add a question that none of these tools fits, and its answer."""
        rng = self.rng
        pick = rng.random()
        if pick < 0.5:
            known = {word for other in there for word in other.topic.lower().split()}
            wanted = self.tools.use()
            while known & set(wanted.topic.lower().split()) - {"the", "a", "of", "in"}:
                wanted = self.tools.use()
            ask, thought = self._ask(wanted.question), "None of the tools fits this question."
            row = _row([use.name for use in there])
            answer = self.words.say("no_tool")
            answer += f" I only have {row}." if rng.random() < 0.3 else ""
        elif pick < 0.68:
            ask, answer = self._ask(self.words.say("nothing")), self.words.say("no_tool")
            thought = "None of the tools fits this question."
        elif pick < 0.85:
            ask, answer = rng.choice([copy, copy, edit, extraction, listing])(self.words)
            thought = "This needs no tool."
        else:
            ask, answer = self.chat()
            thought = "This needs no tool."
        messages.append({"role": "user", "content": ask})
        reply: Message = {"role": "assistant", "content": answer}
        reply["reasoning_content"] = thought if thinks else ""
        messages.append(reply)

    def _question(self, messages: list[Message], use: Use, thinks: bool) -> None:
        thought = f"The tool {use.name} fits this question." if thinks else ""
        messages.append({"role": "user", "content": self._ask(use.question)})
        messages.append(call(use, thought=thought))

    def _definitions(self, uses: list[Use]) -> list[Json]:
        return [use.definition() for use in self.rng.sample(uses, len(uses))]

    def _others(self, count: int, taken: set[str]) -> list[Use]:
        found: dict[str, Use] = {}
        while len(found) < count:
            use = self.tools.use()
            if use.name not in taken:
                found[use.name] = use
        return list(found.values())

    def _ask(self, question: str) -> str:
        """Vary a question slightly, as people do."""
        rng = self.rng
        if rng.random() < 0.12:
            some = self.words.say("context")
            question = f"{some} {question}" if rng.random() < 0.7 else f"{question} {some}"
        pick = rng.random()
        if pick < 0.06 and question[-1] in ".?":
            return question[:-1]
        if pick < 0.12:
            return self.words.say("greeting") + " " + question
        if pick < 0.15:
            return question + rng.choice([" Thanks!", " Thank you.", " Please."])
        return question[0].lower() + question[1:] if pick < 0.2 else question

    def _result(self, use: Use) -> tuple[str, str]:
        """Return a tool's answer and how the model reports it."""
        words, rng = self.words, self.rng
        pick = rng.random()
        if pick < 0.1:
            why = words.say("wrong")
            raw = rng.choice([json.dumps({"error": why}), f"error: {why}", f"Error: {why}"])
            return raw, f"That did not work: {why}."
        if pick < 0.16:
            return rng.choice(["ok", "done", "OK", "success", "true", '{"ok": true}']), "Done."
        if pick < 0.24:
            sentence = words.sentence()
            return sentence, sentence
        if pick < 0.58:
            value = words.say("result")
            return value, use.verdict.replace("<r>", value)
        kinds = ["number", "money", "noun", "place", "person", "time", "item", "code", "date"]
        members: dict[str, Json] = {}
        for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
            key = words.fill("{<noun>|<noun>|<noun>|<noun>_<noun>|<measure>}")
            value = words.value(rng.choice(kinds))
            members[key] = words.fill("<number> <unit>") if rng.random() < 0.15 else value
        raw = json.dumps(members, ensure_ascii=False)
        told = [f"{key.replace('_', ' ')} is {value}" for key, value in members.items()]
        told[0] = f"the {told[0]}"
        row = " and the ".join([", the ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
        return raw, row[0].upper() + row[1:] + "."
