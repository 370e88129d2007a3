"""The options of `headrace bench`, in groups, and their bounds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import common
from headrace.cli.bench.load import Load
from headrace.cli.bench.measures import Goals
from headrace.cli.options import (
    Adapter,
    OtherOptions,
    Priority,
    Temperature,
    TimeLimit,
    make_options,
)
from headrace.errors import HeadraceError
from headrace.options import GenerationOptions, build_spec

_CLOSED_CONCURRENCY = 16
_OPEN_CONCURRENCY = 4096
_REQUESTS = 100
_OWN_OPTIONS = {
    "max_tokens": "it is --output-tokens here",
    "ignore_eos": "it is --ignore-eos or --heed-eos here",
    "request_id": "requests cannot share one",
    "n": "a request has one choice here",
    "delivery": "times are those of the pieces of output",
}
_LOAD = "The load"
_REQUEST = "The requests"
_OUTPUT = "What is told"


class Arrivals(StrEnum):
    """How an open loop's requests are spread over time."""

    POISSON = "poisson"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The number of requests, and when they are sent."""

    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            "-r",
            help="An open loop: so many requests a second, whatever becomes of them. Default: a "
            "closed loop.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    arrivals: Annotated[
        Arrivals,
        typer.Option(help="Of an open loop: at random times, or evenly.", rich_help_panel=_LOAD),
    ] = Arrivals.POISSON
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            max=65536,
            rich_help_panel=_LOAD,
            help="How many requests run at the same time, at most. Default: 16; of an open loop "
            "4096.",
        ),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            "-n",
            min=1,
            help="How many. Default: 100, unless --duration is given.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            "-d",
            rich_help_panel=_LOAD,
            help="Seconds after which no more are sent; those that run are awaited.",
        ),
    ] = None
    warmup: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            rich_help_panel=_LOAD,
            help="So many requests first, which are not measured; if one fails, that is all.",
        ),
    ] = 1
    sessions: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Requests take turns on them.", rich_help_panel=_LOAD),
    ] = 1
    connections: Annotated[
        int,
        typer.Option(
            min=1, max=1024, help="Sessions are divided among them.", rich_help_panel=_LOAD
        ),
    ] = 1
    room_timeout: Annotated[
        float,
        typer.Option(
            rich_help_panel=_LOAD,
            help="For so many seconds a request is sent again for which the server has no room, "
            "as it advises; 0: it counts as refused at once.",
        ),
    ] = 30.0
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            rich_help_panel=_LOAD,
            help="Of all draws: prompts, lengths, arrivals. Default: another one each time, since "
            "a server has the prompts of the last run in its cache.",
        ),
    ] = None

    def load(self) -> Load:
        """Makes a `Load` from the options. Options that are out of bounds end the command."""
        _check_time(self.rate, "--rate", 1e6)
        _check_time(self.duration, "--duration", 1e7)
        common.check_seconds(self.room_timeout, "--room-timeout", 0, 1e7)
        if self.connections > self.sessions:
            common.fail(
                f"--connections is {self.connections}; it must be at most --sessions, "
                f"{self.sessions}",
                common.EXIT_USAGE,
            )
        requests, concurrency, seed = self.requests, self.concurrency, self.seed
        if requests is None and self.duration is None:
            requests = _REQUESTS
        if concurrency is None:
            concurrency = _CLOSED_CONCURRENCY if self.rate is None else _OPEN_CONCURRENCY
        if seed is None:
            seed = random.SystemRandom().randrange(1 << 31)
        return Load(
            requests,
            self.duration,
            concurrency,
            self.rate,
            self.arrivals.value,
            self.room_timeout,
            seed,
        )


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The prompts of the requests, and their options."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            rich_help_panel=_REQUEST,
            help="A file with a prompt a line; if its name ends with .jsonl, with a request a "
            "line, as for `headrace batch`. Default: random token ids.",
        ),
    ] = None
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N|LEAST:MOST",
            help="Of random prompts. Default: 128.",
            rich_help_panel=_REQUEST,
        ),
    ] = None
    shared_prefix: Annotated[
        int,
        typer.Option(
            min=0,
            max=10_000_000,
            rich_help_panel=_REQUEST,
            help="So many tokens more that all random prompts begin with.",
        ),
    ] = 0
    edits: Annotated[
        str | None,
        typer.Option(
            metavar="N|LEAST:MOST",
            rich_help_panel=_REQUEST,
            help="Instead of random prompts: made-up files of so many lines, which are to be "
            "written again with some changes.",
        ),
    ] = None
    changed: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Of edits: the share of lines that change.", rich_help_panel=_REQUEST
        ),
    ] = 0.1
    prediction: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_REQUEST,
            help="Of edits: whether a request has the changed file as the output that it expects.",
        ),
    ] = True
    output_tokens: Annotated[
        str,
        typer.Option(
            metavar="N|LEAST:MOST", help="How many tokens are asked for.", rich_help_panel=_REQUEST
        ),
    ] = "128"
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--heed-eos",
            rich_help_panel=_REQUEST,
            help="Whether outputs go on behind the model's end, so that they are as long as asked "
            "for.",
        ),
    ] = True
    temperature: Temperature = None
    priority: Priority = None
    time_limit: TimeLimit = None
    adapter: Adapter = None
    option: OtherOptions = None

    def check(self) -> None:
        """Ends the command if the options exclude each other."""
        if self.prompts is not None and self.edits is not None:
            common.fail(
                "--edits makes its own prompts: leave it or --prompts out", common.EXIT_USAGE
            )
        is_random = self.prompts is None and self.edits is None
        if not is_random and (self.prompt_tokens is not None or self.shared_prefix):
            other = "--edits" if self.prompts is None else "--prompts"
            common.fail(
                "--prompt-tokens and --shared-prefix are those of random prompts: leave them or "
                f"{other} out",
                common.EXIT_USAGE,
            )

    def request_options(self) -> GenerationOptions:
        """Returns the options of all requests. Invalid ones end the command."""
        named = {
            "temperature": self.temperature,
            "priority": self.priority,
            "time_limit": self.time_limit,
            "adapter": self.adapter,
            "ignore_eos": self.ignore_eos,
        }
        given = make_options(self.option)
        for name, why in _OWN_OPTIONS.items():
            if name in given:
                common.fail(f"-o {name}: {why}", common.EXIT_USAGE)
        options = make_options(self.option, **named)
        try:
            build_spec([0], options)
        except HeadraceError as error:
            common.fail(error.message, common.EXIT_USAGE)
        return options


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is reported, and where."""

    goal_ttft: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=_OUTPUT,
            help="Goodput: a good request has its first token within this time.",
        ),
    ] = None
    goal_itl: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=_OUTPUT,
            help="Goodput: a good request takes at most this from token to token, in its mean.",
        ),
    ] = None
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write everything as JSON; - for stdout, alone.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    svg_file: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Draw a picture.", rich_help_panel=_OUTPUT),
    ] = None
    progress: Annotated[
        bool,
        typer.Option(help="Show a progress bar on a terminal.", rich_help_panel=_OUTPUT),
    ] = True

    def goals(self) -> Goals:
        """Returns the goals of a good request."""
        _check_time(self.goal_ttft, "--goal-ttft", 1e7)
        _check_time(self.goal_itl, "--goal-itl", 1e7)
        return Goals(self.goal_ttft, self.goal_itl)

    def check_files(self) -> None:
        """Checks that the output files can be written before the load starts."""
        for file in (self.json_file, self.svg_file):
            if file is None or str(file) == "-":
                continue
            if file.is_dir() or not file.absolute().parent.is_dir():
                common.fail(f"cannot write {file}: no such folder, or it is one", common.EXIT_USAGE)


def _check_time(value: float | None, name: str, most: float) -> None:
    if value is not None and not 0 < value <= most:
        common.fail(
            f"{name} is {value:g}; it must be above 0 and at most {most:,.0f}", common.EXIT_USAGE
        )
