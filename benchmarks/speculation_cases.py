"""The requests that speculation is measured on: random weights, and a real small model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.cli.bench.edit_prompts import EditPrompts
from headrace.cli.bench.prompts import FilePrompts, Lengths
from headrace.options import GenerationOptions, build_spec
from headrace.v1.generation_pb2 import GenerationSpec

from benchmarks.models import SHAPES
from benchmarks.processes import ROOT
from benchmarks.workloads import FIRST_TOKEN, WORKLOADS, make_prompts

SHAPE = "qwen3-0.6b"
_VOCABULARY = SHAPES[SHAPE]["vocab_size"]
_GREEDY: GenerationOptions = {"temperature": 0.0}
_SCHEMA = {
    "type": "object",
    "properties": {
        "article_number": {"type": "integer", "minimum": 0, "maximum": 9999},
        "description": {"type": "string", "maxLength": 12},
        "availability": {"enum": ["in stock", "on order", "sold out"]},
        "is_discounted": {"type": "boolean"},
    },
    "required": ["article_number", "description", "availability", "is_discounted"],
    "additionalProperties": False,
}
_NEIGHBOURS = 0.97
"""The aim of requests beside others that have predictions."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that are measured with and without speculation.

    Attributes:
        model: random weights in this form, or smollm2.
        aim: the least ratio of times, without to with.
        at_once: how many run at the same time.
        changed: of requests with predictions, which are their own outputs: the share of tokens that
            differ; None: there are none.
        every: each so many requests one has a prediction, from the first.
        turns: the most that count.
    """

    name: str
    model: str
    aim: float | None
    requests: Callable[[], list[GenerationSpec]]
    at_once: int = 1
    changed: float | None = None
    every: int = 1
    turns: int = 9

    def parts(self, count: int) -> list[tuple[str, float | None, Sequence[int]]]:
        """Return whose times are told together: what they are, their aim, and their numbers."""
        predicted = range(0, count, self.every)
        if self.every == 1:
            return [("", self.aim, predicted)]
        others = [number for number in range(count) if number not in predicted]
        return [("those", self.aim, predicted), ("the others", _NEIGHBOURS, others)]

    def predict(self, specs: Sequence[GenerationSpec], outputs: Sequence[Sequence[int]]) -> None:
        """Give requests their predictions. outputs: their token ids."""
        assert self.changed is not None
        chance = random.Random(self.name)
        for number in range(0, len(specs), self.every):
            for token in outputs[number]:
                kept, exchanged = chance.random() >= self.changed, chance.random() < 0.5
                other = chance.randrange(FIRST_TOKEN, _VOCABULARY)
                if kept or exchanged:  # else it is left out
                    specs[number].prediction.tokens.ids.append(token if kept else other)


def of_workload(name: str) -> list[GenerationSpec]:
    """Return the requests of a named workload."""
    lengths = WORKLOADS[name].lengths()
    return [
        build_spec(prompt, {**_GREEDY, "max_tokens": one.output, "ignore_eos": True})
        for prompt, one in zip(make_prompts(lengths, _VOCABULARY, name), lengths, strict=True)
    ]


def of_file(name: str) -> list[GenerationSpec]:
    """Return the requests of a file of prompts."""
    path = ROOT / "benchmarks" / "prompts" / f"{name}.jsonl"
    prompts = FilePrompts(path, output=Lengths(128, 128), options=_GREEDY, seed=0)
    return [prompts.request(number) for number in range(len(path.read_text().splitlines()))]


def of_schema() -> list[GenerationSpec]:
    """Return requests whose output is JSON."""
    options: GenerationOptions = {**_GREEDY, "json_schema": _SCHEMA, "max_tokens": 160}
    return [build_spec(f"Article {number}: ", options) for number in range(2)]


def of_edits(*, predicted: bool) -> list[GenerationSpec]:
    """Return edits, as `headrace bench` makes them."""
    prompts = EditPrompts(
        lines=Lengths(8, 16),
        changed=0.1,
        predicted=predicted,
        output=Lengths(128, 128),
        options=_GREEDY,
        seed=0,
    )
    return [prompts.request(number) for number in range(10)]


def _all() -> list[Case]:
    w1, w2, w3 = (partial(of_workload, name) for name in ("W1", "W2", "W3"))
    found = []
    for model in ("bfloat16", "int8"):
        for share, aim in ((0.0, 3.5), (0.1, 2.2), (0.3, 1.4), (0.5, 1.1), (1.0, 0.98)):
            name = f"own output {share:.0%} changed"
            found.append(Case(name, model, aim, w3, changed=share))
        found.append(Case("W3", model, 0.98, w3))
    copying, chat = partial(of_file, "copying"), partial(of_file, "chat")
    return [
        *found,
        Case("W1 half predicted", "bfloat16", 1.2, w1, 16, changed=0.1, every=2),
        Case("W1", "bfloat16", 0.98, w1, 16),
        Case("JSON by schema", "bfloat16", 1.3, of_schema, turns=5),
        Case("W2", "bfloat16", 0.98, w2, 32, turns=3),
        Case("copying", "smollm2", 2.2, copying, turns=3),
        Case("chat", "smollm2", 1.05, chat, turns=3),
        Case("copying 4 at once", "smollm2", 2.0, copying, 4),
        Case("chat 4 at once", "smollm2", 1.0, chat, 4),
        Case("edits", "smollm2", None, partial(of_edits, predicted=False)),
        Case("edits predicted", "smollm2", None, partial(of_edits, predicted=True)),
    ]


CASES = {f"{case.model} {case.name}": case for case in _all()}
"""All cases, by name."""
