"""Requests for edits: a made-up file, and the same file slightly changed as the expected output."""

from __future__ import annotations

import random

from headrace.cli.bench.prompts import Lengths
from headrace.options import GenerationOptions, build_spec
from headrace.v1.generation_pb2 import GenerationSpec

_THINGS = ("basin", "fan", "gate", "heater", "lamp", "mixer", "pump", "sluice", "tank", "valve")
_FIGURES = ("delay", "flow", "height", "level", "limit", "pressure", "speed", "warmth")


class EditPrompts:
    """Requests to write a file of settings again with some values changed.

    Args:
        lines: the number of lines in a file.
        changed: the share of lines whose value changes, 0 to 1.
        predicted: whether each request has the changed file as its prediction.
        output: how many tokens are requested.
        options: further options of each request.
        seed: the random seed.
    """

    def __init__(
        self,
        *,
        lines: Lengths,
        changed: float,
        predicted: bool,
        output: Lengths,
        options: GenerationOptions,
        seed: int,
    ) -> None:
        self._lines = lines
        self._changed = changed
        self._predicted = predicted
        self._output = output
        self._options = options
        self._seed = seed

    def request(self, number: int) -> GenerationSpec:
        """Returns request number 0, 1, …"""
        chance = random.Random(f"{self._seed} {number}")
        count = self._lines.draw(chance)
        names = [
            f"{chance.choice(_THINGS)}_{place}.{chance.choice(_FIGURES)}" for place in range(count)
        ]
        values = {name: chance.randrange(10, 1000) for name in names}
        exchanged = set(chance.sample(names, round(count * self._changed)))
        changes = {name: chance.randrange(1000, 10_000) for name in names if name in exchanged}
        wanted = "; ".join(f"{name} = {value}" for name, value in changes.items()) or "none"
        prompt = (
            f"The file settings_{chance.randrange(10_000)}.txt:\n```\n{_file(values)}```\n\n"
            f"Changes that are to be made in it: {wanted}.\n\n"
            "The whole file after these changes:\n```\n"
        )
        options: GenerationOptions = {**self._options, "max_tokens": self._output.draw(chance)}
        if self._predicted:
            options["prediction"] = _file(values | changes)
        return build_spec(prompt, options)


def _file(values: dict[str, int]) -> str:
    return "".join(f"{name} = {value}\n" for name, value in values.items())
