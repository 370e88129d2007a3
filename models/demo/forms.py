"""Documents that fill a small form: a text states values, and the answer is a line of JSON with
them.

The input is `Words` and the facts of ``text/forms.txt``; the output is pairs of a question and a
line of JSON. The JSON has the format that the server enforces for structured output (", " and ": "
between elements). The names of the members are in the question, in the text, or only in the answer,
as if a schema enforced them.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass

from words import TEXT_DIR, Value, Words, read_blocks

FACTS = read_blocks(TEXT_DIR / "forms.txt")
_NAMES = ["name", "name", "name", "person", "who", "first_name", "full_name", "customer"]
_TITLES = ["name", "item", "product", "thing", "title", "object", "what"]


@dataclass(frozen=True)
class Fact:
    """A value that a text states.

    Attributes:
        name: the name of the JSON member.
        said: how the text states it, after its subject.
        value: the JSON value.
    """

    name: str
    said: str
    value: Value


def _row(parts: list[str], last: str = " and ") -> str:
    return last.join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _fact(words: Words, line: str) -> Fact:
    names, kind, says = line.split(" : ")
    noun = words.noun(0.6)
    name = words.fill(words.rng.choice(names.split("|")), n=noun)
    value = words.value(kind)
    # Choices of a template have the same mark between them as the ways to say it.
    said = words.rng.choice(re.split(r"\|(?![^{]*\})", says))
    if isinstance(value, bool):
        said = said.split("/")[not value]
    shown = _row(value) if isinstance(value, list) else str(value)
    return Fact(name, words.fill(said, v=shown, n=noun, name=name.replace("_", " ")), value)


def _told(rng: random.Random, subject: str, again: list[str], said: list[str]) -> str:
    """Return the facts as one or more sentences about a subject."""
    if len(said) > 1 and rng.random() < 0.3:
        return f"{subject} {_row(said)}."
    if len(said) > 1 and rng.random() < 0.3:
        cut = rng.randint(1, len(said) - 1)
        first, second = " and ".join(said[:cut]), " and ".join(said[cut:])
        return f"{subject} {first}. {rng.choice(again)} {second}."
    return " ".join(f"{rng.choice(again) if i else subject} {one}." for i, one in enumerate(said))


def form(words: Words) -> tuple[str, str]:
    """Return a text with a request for its facts, and a line of JSON."""
    rng = words.rng
    person = rng.random() < 0.45
    lines = FACTS["person" if person else "thing"]
    lines = lines + lines[-4:]  # what has a name that nobody knows comes more often
    facts: dict[str, Fact] = {}
    for line in rng.sample(lines, rng.choice([1, 2, 2, 3, 3, 4, 5])):
        fact = _fact(words, line)
        if line not in facts and fact.name not in {f.name for f in facts.values()}:
            facts[line] = fact
    if person:
        subject = words.person()
        again = [rng.choice(["She", "He"])] * 2 + [subject]
        key, main = rng.choice(_NAMES), subject
    else:
        main = words.item()
        named = rng.random() < 0.2
        subject = (
            main.title() if named else f"{rng.choice(['The', 'The', 'A', 'Our', 'My'])} {main}"
        )
        again = ["It", "It", f"The {main}"]
        key, main = rng.choice(_TITLES), subject if named else main
    told = _told(rng, subject, again, [fact.said for fact in facts.values()])
    members: list[tuple[str, Value]] = [(f.name, f.value) for f in facts.values()]
    members = [m for m in members if rng.random() < 0.9] or members
    if key not in {name for name, _ in members} and rng.random() < 0.7:
        members.insert(0, (key, main))
    if rng.random() < 0.3:
        rng.shuffle(members)
    if rng.random() < 0.08:
        members = [(name.capitalize(), value) for name, value in members]
    keys = [n.replace("_", " ") if rng.random() < 0.5 else n for n, _ in members]
    wish = words.say("json_named", k=_row(keys)) if rng.random() < 0.5 else words.say("json")
    order = rng.random()
    ask = f"{told}{rng.choice([' ', ' ', chr(10)])}{wish}"
    if order > 0.7:
        ask = f"{wish} {told}" if wish.endswith("?") else f"{wish.rstrip('.')}: {told}"
    return told if order > 0.9 else ask, json.dumps(dict(members), ensure_ascii=False)
