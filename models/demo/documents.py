"""What the demo model reads while it is trained: the mixture of all documents, as text.

The input is the stories and chats of ``corpus``, the tasks of ``copying`` and ``forms``, and the
conversations of ``tools``. The output is texts in the chat template's format, each with a flag that
says whether all of it is learned or only the replies. A reply is the text between
``<|assistant|>`` and ``<|eos|>``. The topic of a task is drawn at random, so there is nothing to
learn from a question.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import copying
import jinja2.sandbox
from conversations import Conversations
from corpus import Writer
from forms import form
from words import Words

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIALS = [PAD, BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|tools|>", "<|tool|>"]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TEMPLATE = (Path(__file__).resolve().parent / "chat_template.jinja").read_text(encoding="utf-8")
TALES = 0.33
"""The share of stories and chats."""
Message = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """A training text.

    Attributes:
        text: the text with all marks.
        replies_only: whether only the replies are learned.
        repeats: whether it repeats itself, for the first phase of the training.
    """

    text: str
    replies_only: bool = False
    repeats: bool = False


def _compiled() -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


class Mixture:
    """Draws texts of every kind."""

    def __init__(self, seed: int, tales: float = TALES) -> None:
        """seed: decides everything that is drawn; tales: the share of stories and chats."""
        self.tales = tales
        self.rng = random.Random(seed)
        self.writer = Writer(seed)
        self.words = Words(self.rng)
        self.words.slots["told"] = self._sentence
        self.tools = Conversations(self.words, self.writer.turn)
        self.template = _compiled()

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """Return a conversation in the chat template's format."""
        return self.template.render(messages=messages, tools=tools, bos_token=BOS, eos_token=EOS)

    def _sentence(self) -> str:
        """Return a sentence of a story, as an example of English that makes sense."""
        sentences = re.findall(r"[^.?!]+[.?!]+", self.writer.story()[0].replace("\n", " "))
        return str(self.rng.choice(sentences)).strip(' "') if sentences else self.words.sentence()

    def text(self) -> Text:
        """Draws a text."""
        pick = self.rng.random()
        if pick < self.tales:
            return self._tale()
        pick = (pick - self.tales) / (1 - self.tales)
        if pick < 0.50:
            drawn = self.tools.draw()
            return Text(self.render(drawn.messages, drawn.tools), replies_only=True)
        if pick < 0.64:
            return self._task(form, "the facts")
        if pick < 0.78:
            return self._task(copying.edit, "the changed text", repeats=True)
        if pick < 0.82:
            return self._task(copying.extraction, "the answer from the text")
        if pick < 0.84:
            return self._task(copying.listing, "the list")
        return self.repeating()

    def repeating(self) -> Text:
        """Draws a text that repeats itself."""
        pick = self.rng.random()
        if pick < 0.4:
            return Text(
                self.rng.choice([BOS, ""]) + copying.repetition(self.words) + EOS, repeats=True
            )
        task = copying.copy if pick < 0.85 else copying.edit
        return self._task(task, "the same text again", repeats=True)

    def _task(
        self, task: Callable[[Words], tuple[str, str]], what: str, *, repeats: bool = False
    ) -> Text:
        rng = self.rng
        messages: list[Message] = []
        if rng.random() < 0.1:
            messages.append(
                {
                    "role": "system",
                    "content": rng.choice(
                        [
                            "You are a helpful assistant.",
                            "Answer briefly.",
                            "Do what the user asks.",
                        ]
                    ),
                }
            )
        for _ in range(rng.choices([1, 2], [9, 1])[0]):
            ask, answer = task(self.words)
            reply: Message = {"role": "assistant", "content": answer}
            messages += [{"role": "user", "content": ask}, reply]
        if rng.random() < 0.06:
            reply["reasoning_content"] = f"The user wants {what}."
        if rng.random() < 0.06:  # without the marks of a chat
            gap = rng.choice([" ", "\n"])
            return Text(rng.choice([BOS, ""]) + ask + gap + answer + EOS, repeats=repeats)
        return Text(self.render(messages), replies_only=True, repeats=repeats)

    def _tale(self) -> Text:
        """Draw a story, a description or a chat. Plain text has a start mark half the time and
        sometimes begins in the middle, at a sentence or at any word. The model thus learns to
        accept prompts with and without the mark and to continue any text.
        """
        rng = self.rng
        if rng.random() < 0.04:
            number = rng.choice(
                [str(rng.randint(0, 30)), rng.choice(["One", "Two", "Three", "Four", "Five"])]
            )
            title = rng.choice(
                [f"Chapter {number}", f"Chapter {number}\n\n", f"Chapter {number}: "]
            )
            return Text(
                rng.choice([BOS, ""])
                + title.rstrip(" ")
                + (" " if title.endswith((" ", number)) else "")
                + self.writer.story()[0]
                + EOS
            )
        doc = self.writer.document()
        if doc.messages:
            messages: list[Message] = list(doc.messages)
            if rng.random() < 0.12:
                asked = " ".join(messages[-2]["content"].split()[:12]).rstrip(".?!,")
                thought = rng.choice(
                    [
                        f"The user asks: {asked}.",
                        "The user wants a simple answer.",
                        f"I am asked: {asked}.",
                    ][:1]
                )
                messages[-1] = {**messages[-1], "reasoning_content": thought}
            return Text(self.render(messages))
        text, pick = doc.text, rng.random()
        if pick < 0.45:
            starts = [m.end() for m in re.finditer(r"[.!?]\"?\s" if pick < 0.35 else r"\s", text)]
            early = [start for start in starts if start < 0.7 * len(text)]
            text = text[rng.choice(early) :] if early else text
        return Text((BOS if rng.random() < 0.5 else "") + text + EOS)


def main() -> None:
    """Prints a few texts, to show what the model will be trained on."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the generator")
    parser.add_argument("--count", type=int, default=8, help="texts to print")
    args = parser.parse_args()
    mixture = Mixture(args.seed)
    for _ in range(args.count):
        print(mixture.text().text)
        print("-" * 40)


if __name__ == "__main__":
    main()
