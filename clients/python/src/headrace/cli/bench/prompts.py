"""The requests of a load: random token ids, or the lines of a file.

Request number i is the same in every run with the same options and seed, regardless of the order in
which requests are sent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.cli import common
from headrace.cli.batch_input import make_request, parse_fields
from headrace.errors import HeadraceError
from headrace.model_card import ModelCard
from headrace.options import GenerationOptions, Request, build_spec
from headrace.v1.generation_pb2 import GenerationSpec

MOST_TOKENS = 10_000_000
"""The maximum length that can be requested, in tokens."""
_MOST_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Lengths:
    """An inclusive range of lengths."""

    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        """Returns a random length, uniformly distributed."""
        return chance.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


def parse_lengths(text: str, what: str) -> Lengths:
    """Parses `128` or `64:256`. Anything else ends the command."""
    first, colon, last = text.partition(":")
    try:
        found = Lengths(int(first), int(last) if colon else int(first))
    except ValueError:
        common.fail(f"{what} is {text!r}; it must be a number or LEAST:MOST", common.EXIT_USAGE)
    if not 1 <= found.least <= found.most <= MOST_TOKENS:
        common.fail(
            f"{what} is {text}; its numbers must be 1 to {MOST_TOKENS:,}, the lesser one first",
            common.EXIT_USAGE,
        )
    return found


class Prompts(Protocol):
    """A source of requests."""

    def request(self, number: int) -> GenerationSpec:
        """Returns request number 0, 1, …"""


class RandomPrompts:
    """Random token ids of the model's vocabulary, except those that end an output.

    Args:
        card: the model card.
        prompt: the number of random ids in a prompt.
        shared: the number of ids that all prompts begin with, before the random ones.
        output: how many tokens are requested.
        options: further options of each request.
        seed: the random seed.
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        prompt: Lengths,
        shared: int,
        output: Lengths,
        options: GenerationOptions,
        seed: int,
    ) -> None:
        _check_lengths(card, prompt.most + shared, output.most)
        ends = set(card.eos_token_ids)
        self._ids: Sequence[int] = [one for one in range(card.vocab_size) if one not in ends]
        if not self._ids:
            common.fail("the server tells no vocabulary: use --prompts FILE")
        self._shared = random.Random(f"{seed} shared").choices(self._ids, k=shared)
        self._prompt = prompt
        self._output = output
        self._options = options
        self._seed = seed

    def request(self, number: int) -> GenerationSpec:
        """Returns request number 0, 1, …"""
        chance = random.Random(f"{self._seed} {number}")
        ids = chance.choices(self._ids, k=self._prompt.draw(chance))
        max_tokens = self._output.draw(chance)
        return build_spec([*self._shared, *ids], {**self._options, "max_tokens": max_tokens})


class FilePrompts:
    """The lines of a file, repeated if there are not enough.

    A line is a prompt, or, in a file whose name ends with .jsonl, a request as in `headrace batch`.
    A request's own `max_tokens` is kept. An invalid file ends the command.
    """

    def __init__(
        self, path: Path, *, output: Lengths, options: GenerationOptions, seed: int
    ) -> None:
        self._output = output
        self._seed = seed
        self._specs: list[GenerationSpec] = []
        try:
            if path.stat().st_size > _MOST_FILE_BYTES:
                common.fail(
                    f"--prompts {path} is larger than {_MOST_FILE_BYTES >> 20} MiB: take a part",
                    common.EXIT_USAGE,
                )
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            common.fail(f"cannot read --prompts: {error}", common.EXIT_USAGE)
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._specs.append(_read_line(path, number, line.rstrip(b"\r"), options))
        if not self._specs:
            common.fail(f"--prompts {path} has no lines", common.EXIT_USAGE)

    def request(self, number: int) -> GenerationSpec:
        """Returns request number 0, 1, …"""
        spec = GenerationSpec()
        spec.CopyFrom(self._specs[number % len(self._specs)])
        if not spec.stop.HasField("max_tokens"):
            spec.stop.max_tokens = self._output.draw(random.Random(f"{self._seed} {number}"))
        return spec


def _read_line(path: Path, number: int, line: bytes, options: GenerationOptions) -> GenerationSpec:
    try:
        if path.suffix == ".jsonl":
            fields = parse_fields(line)
            fields.pop("id", None)
            request = make_request(fields)
        else:
            request = Request(line.decode("utf-8"))
        spec = build_spec(request.prompt, {**options, **request.options})
    except UnicodeDecodeError:
        common.fail(f"{path}, line {number}: is not UTF-8", common.EXIT_USAGE)
    except (HeadraceError, TypeError) as error:
        common.fail(f"{path}, line {number}: {error}", common.EXIT_USAGE)
    if spec.n > 1:
        common.fail(f"{path}, line {number}: n is {spec.n}; it must be 1", common.EXIT_USAGE)
    if spec.request_id:
        common.fail(
            f"{path}, line {number}: request_id cannot be given, since lines are sent again",
            common.EXIT_USAGE,
        )
    return spec


def _check_lengths(card: ModelCard, prompt: int, output: int) -> None:
    limits = card.limits
    if limits.max_prompt_tokens and prompt > limits.max_prompt_tokens:
        common.fail(
            f"prompts of up to {prompt} tokens are asked for (--prompt-tokens and "
            f"--shared-prefix); this server takes {limits.max_prompt_tokens}",
            common.EXIT_USAGE,
        )
    if limits.max_context_tokens and prompt + output > limits.max_context_tokens:
        common.fail(
            f"up to {prompt + output} tokens are asked for (--prompt-tokens, --shared-prefix and "
            f"--output-tokens); this server's requests have {limits.max_context_tokens} at most",
            common.EXIT_USAGE,
        )
