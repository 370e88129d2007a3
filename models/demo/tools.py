"""Tools, and the questions that they fit.

The input is `Words` and the blocks of ``text/tools.txt`` (tools that people have) and
``text/parameters.txt``. The output is a `Use`: a tool and a question that it fits. Most tools are
made of random words, half of which do not exist. The model therefore does not memorise a list of
tools. It learns to find the tool that shares words with the question, and to copy the values that
the question states.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from words import TEXT_DIR, Value, Words, read_blocks

Json = Any
_TYPES = {bool: "boolean", int: "integer", float: "number"}
_LOOKUPS = [
    "get",
    "get",
    "get",
    "get",
    "find",
    "read",
    "look_up",
    "fetch",
    "show",
    "check",
    "list",
    "search",
    "query",
    "retrieve",
    "lookup",
]
_ENDINGS = ["lookup", "info", "of", "by", "search", "status", "for", "finder", "details"]
_VAGUE = ["A useful tool.", "Look something up.", "Reads from the database.", "Internal service."]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a tool, and the value that a question states for it.

    Attributes:
        name: its name.
        about: its description; may be empty.
        value: the JSON value. Unless it is a boolean, the question states it in this form, too.
        choices: the allowed values; empty if any value is allowed.
    """

    name: str
    about: str
    value: Value
    choices: tuple[str, ...] = ()

    def schema(self) -> Json:
        """Return the parameter's JSON schema."""
        found: Json = {"type": _TYPES.get(type(self.value), "string")}
        if self.choices:
            found["enum"] = list(self.choices)
        if self.about:
            found["description"] = self.about
        return found


@dataclass(frozen=True)
class Use:
    """A tool, and a question that it fits.

    Attributes:
        name: the tool's name.
        about: its description; may be empty.
        parameters: its parameters in order.
        question: the question.
        named: the indices of the parameters whose values the question states.
        topic: the words that the tool is made of.
        verdict: how a result is reported; "<r>" is replaced by the result.
    """

    name: str
    about: str
    parameters: tuple[Parameter, ...]
    question: str
    named: tuple[int, ...]
    topic: str
    verdict: str = "The answer is <r>."

    def definition(self) -> Json:
        """Return the tool's definition as in a request."""
        schemas = {parameter.name: parameter.schema() for parameter in self.parameters}
        function: Json = {"name": self.name}
        if self.about:
            function["description"] = self.about
        function["parameters"] = {"type": "object", "properties": schemas}
        return {"type": "function", "function": function}

    def arguments(self) -> Json:
        """Return the arguments that the question states."""
        return {self.parameters[i].name: self.parameters[i].value for i in self.named}


@dataclass(frozen=True)
class _Block:
    names: list[str]
    about: str
    parameters: list[list[str]] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)


def _blocks() -> list[_Block]:
    """Read the tools that people have."""
    blocks = []
    for head, lines in read_blocks(TEXT_DIR / "tools.txt").items():
        names, _, about = head.partition(" :: ")
        block = _Block(names.split("|"), about)
        for line in lines:
            if line.startswith("- "):
                block.parameters.append(line[2:].split(" : "))
            else:
                block.questions.append(line.removeprefix("Q: "))
        blocks.append(block)
    return blocks


def _camel(words: list[str]) -> str:
    return words[0] + "".join(word.title() for word in words[1:])


def _tidy(text: str) -> str:
    """Remove the gaps that an empty slot leaves."""
    text = re.sub(r" +([?.,:!])", r"\1", re.sub(r" {2,}", " ", text)).strip()
    text = re.sub(r"^[:,] (\w)", lambda m: m[1].upper(), text)
    return text[:1].upper() + text[1:]


class Tools:
    """Draws tools with their questions."""

    def __init__(self, words: Words) -> None:
        """words: the words that tools are made of."""
        self.words, self.rng = words, words.rng
        self.blocks = _blocks()
        lines = read_blocks(TEXT_DIR / "parameters.txt")[""]
        self.kinds = [line.split(" : ") for line in lines]

    def use(self) -> Use:
        """Draw a tool and a question for it."""
        pick = self.rng.random()
        return self.known() if pick < 0.3 else self.lookup() if pick < 0.68 else self.action()

    # -- tools that people have ------------------------------------------------------------------

    def known(self) -> Use:
        """Draw one of the tools that people have, occasionally under a meaningless name."""
        rng, words = self.rng, self.words
        block = rng.choice(self.blocks)
        parameters: list[Parameter] = []
        for names, kind, about in block.parameters:
            taken = {parameter.name for parameter in parameters}
            options = [name for name in names.split("|") if name not in taken]
            choices = tuple(kind[5:-1].split(",")) if kind.startswith("enum(") else ()
            value = rng.choice(choices) if choices else words.value(kind)
            shown = words.fill(about) if rng.random() < 0.6 else ""
            name = rng.choice(options[:1] + options)
            parameters.append(Parameter(name, shown, value, choices))
        given = {str(i + 1): str(p.value) for i, p in enumerate(parameters)}
        template = rng.choice(block.questions)
        asked = words.fill(template, name=words.made_up().title(), **{k: f"<{k}>" for k in given})
        named = tuple(i for i in range(len(parameters)) if f"<{i + 1}>" in asked)
        question = words.fill(asked, **given)
        about = words.fill(block.about).replace("s? ", rng.choice(["s ", " "]))
        if rng.random() < 0.06:
            about = ""
        name = words.made_up(2) if about and rng.random() < 0.08 else rng.choice(block.names)
        about = about[:1].upper() + about[1:]
        return Use(name, about, tuple(parameters), question, named, block.about)

    # -- tools of words at random ----------------------------------------------------------------

    def _name(self, words: list[str]) -> str:
        rng = self.rng
        parts = [part for word in words for part in word.split("_") if part]
        pick = rng.random()
        if pick < 0.75:
            return "_".join(parts)
        return _camel(parts) if pick < 0.93 else rng.choice(["-", ""]).join(parts)

    def _parameter(self, line: list[str]) -> tuple[Parameter, str]:
        """Return a parameter of a kind, and the words with which a question states its value."""
        rng, words = self.rng, self.words
        kind, names, phrases, abouts = line
        noun = words.noun(0.6)
        name = words.fill(rng.choice(names.split("|")), n=noun)
        spoken = name.replace("_", " ")
        choices: tuple[str, ...] = ()
        if kind == "enum":
            choices = tuple(dict.fromkeys(words.adjective() for _ in range(rng.randint(2, 4))))
        value = rng.choice(choices) if choices else words.value(kind)
        phrase = rng.choice(phrases.split("|"))
        if isinstance(value, bool):
            phrase = phrase.split("/")[not value]
        phrase = words.fill(phrase, v=str(value), n=noun, name=spoken)
        about = words.fill(rng.choice(abouts.split("|")), n=noun, name=spoken)
        if rng.random() < 0.1:
            name = _camel(name.split("_"))
        return Parameter(name, about if rng.random() < 0.5 else "", value, choices), phrase

    def _parameters(self, count: int) -> list[tuple[Parameter, str]]:
        found: dict[str, tuple[Parameter, str]] = {}
        while len(found) < count:
            parameter, phrase = self._parameter(self.rng.choice(self.kinds))
            found.setdefault(parameter.name, (parameter, phrase))
        return list(found.values())

    def _asked(
        self, block: str, pairs: list[tuple[Parameter, str]], **given: str
    ) -> tuple[str, str, tuple[int, ...]]:
        """Return a question, the words that state values, and the indices of these values."""
        rng = self.rng
        named = [i for i in range(len(pairs)) if i == 0 or rng.random() < 0.75]
        order = rng.sample(named, len(named)) if rng.random() < 0.4 else named
        phrase = " ".join(pairs[i][1] for i in order)
        upper = {key.upper(): value.capitalize() for key, value in given.items()}
        question = self.words.say(
            block, p=phrase, P=phrase[:1].upper() + phrase[1:], **given, **upper
        )
        return question, phrase, tuple(named)

    def _varied(self, topic: str) -> str:
        """Return a topic, occasionally with one word inflected."""
        rng = self.rng
        if rng.random() < 0.6:
            return topic
        words = topic.split()
        at = rng.randrange(len(words))
        return " ".join([*words[:at], self.words.inflected(words[at]), *words[at + 1 :]])

    def _about(self, text: str, pairs: list[tuple[Parameter, str]]) -> str:
        """Return a description, which often mentions the first parameter and is occasionally
        empty.
        """
        rng = self.rng
        if rng.random() < 0.08:
            return ""
        if pairs and rng.random() < 0.35:
            kind = pairs[0][0].name.replace("_", " ")
            text = (
                text.rstrip(".")
                + rng.choice([" of", " for", " in", " by", " with"])
                + f" a {kind}."
            )
        return _tidy(text)

    def lookup(self) -> Use:
        """Make a tool that looks something up."""
        words, rng = self.words, self.rng
        topic = words.phrase()
        parts = topic.split()
        pairs = self._parameters(rng.choices([0, 1, 2, 3], [0.5, 5, 3, 1])[0])
        verb = rng.choice([*_LOOKUPS, "", "", words.verb()])
        spoken = rng.choice([parts, parts, parts[-1:], parts[:1]])
        name = self._name([verb, *spoken])
        if rng.random() < 0.12:
            name = self._name([*spoken, rng.choice(_ENDINGS)])
        about = self._about(words.say("about_lookup", t=topic, T=topic.capitalize()), pairs)
        if spoken == parts and rng.random() < 0.08:
            about = rng.choice(_VAGUE)
        asked = topic
        if len(parts) > 1 and rng.random() < 0.15:  # the question has one of the words alone
            asked = rng.choice(parts if about else spoken)
        asked = self._varied(asked)
        question, phrase, named = self._asked("ask_lookup", pairs, t=asked)
        verdict = "The answer is <r>."
        if question.startswith(("What is the", "What's the", "Tell me the", "Show me the")):
            verdict = _tidy(f"The {asked} {phrase} is <r>.")
        some = tuple(parameter for parameter, _ in pairs)
        return Use(name, about, some, _tidy(question), named, topic, verdict)

    def action(self) -> Use:
        """Make a tool that does something."""
        words, rng = self.words, self.rng
        verb, topic = words.verb(), words.phrase()
        parts = topic.split()
        pairs = self._parameters(rng.choices([0, 1, 2, 3], [1, 5, 3, 1])[0])
        named_verb = self.words.inflected(verb) if rng.random() < 0.08 else verb
        name = self._name([named_verb, *rng.choice([parts, parts, parts[-1:]])])
        if rng.random() < 0.1:
            name = self._name([parts[-1], verb])
        about = self._about(words.say("about_action", t=topic, v=verb, T=topic.capitalize()), pairs)
        question, _, named = self._asked("ask_action", pairs, t=self._varied(topic), v=verb)
        some = tuple(parameter for parameter, _ in pairs)
        return Use(name, about, some, _tidy(question), named, f"{verb} {topic}", "Done: <r>.")

    def near(self, use: Use) -> Use | None:
        """Make another tool that shares a word with this one, so that one word alone is not
        enough.
        """
        other = self.lookup()
        words = [word for word in use.topic.split() if word.isalpha() and len(word) > 3]
        if not words or len(use.topic.split()) > 4:
            return None
        old, new = self.rng.choice(other.topic.split()), self.rng.choice(words)
        name, topic = other.name.replace(old, new), other.topic.replace(old, new)
        if old == new or name == use.name or set(topic.split()) >= set(use.topic.split()):
            return None
        return Use(name, other.about.replace(old, new), other.parameters, "", (), topic)
