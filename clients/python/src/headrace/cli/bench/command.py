"""The command: its options, their bounds, the connection, and the end in each case."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.async_client import AsyncClient
from headrace.async_session import AsyncSession
from headrace.cli import common
from headrace.cli.bench.load import Load, Run
from headrace.cli.bench.measures import Goals, Tally
from headrace.cli.bench.plot import draw
from headrace.cli.bench.progress import Bar
from headrace.cli.bench.prompts import (
    FilePrompts,
    Lengths,
    Prompts,
    RandomPrompts,
    parse_lengths,
)
from headrace.cli.bench.report import Report
from headrace.errors import HeadraceError
from headrace.model_card import ModelCard
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
class Job:
    """The options that the rest of the command goes by.

    Attributes:
        prompts: a file; None: random token ids.
        prompt_tokens, shared_prefix: of random prompts.
        output_tokens: how many tokens are asked for.
        warmup: requests that are not measured.
        sessions: how many; `connections`: to how many connections they are divided.
    """

    load: Load
    goals: Goals
    prompts: Path | None
    prompt_tokens: Lengths
    shared_prefix: int
    output_tokens: Lengths
    options: GenerationOptions
    seed: int
    warmup: int
    sessions: int
    connections: int
    progress: bool

    def meaning(self) -> str:
        """In words."""
        load = self.load
        how = (
            f"closed loop, {load.concurrency} at a time"
            if load.rate is None
            else f"open loop, {load.rate:g} requests/s, {load.arrivals} arrivals"
        )
        what = (
            f"prompts of {self.prompt_tokens} tokens"
            + (f" behind {self.shared_prefix} shared" if self.shared_prefix else "")
            if self.prompts is None
            else f"prompts of {self.prompts.name}"
        )
        sessions = "1 session" if self.sessions == 1 else f"{self.sessions} sessions"
        return f"{how}, {sessions}; {what}, outputs of {self.output_tokens} tokens"

    def settings(self) -> dict[str, Any]:
        """As JSON has them."""
        return {
            **asdict(self.load),
            "prompts": None if self.prompts is None else str(self.prompts),
            "prompt_tokens": str(self.prompt_tokens) if self.prompts is None else None,
            "shared_prefix": self.shared_prefix,
            "output_tokens": str(self.output_tokens),
            "options": self.options,
            "warmup": self.warmup,
            "sessions": self.sessions,
            "connections": self.connections,
        }


@common.tells_errors
def bench(
    context: typer.Context,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            "-r",
            help="An open loop: so many requests a second, whatever becomes of them. Default: a "
            "closed loop.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals,
        typer.Option(help="Of an open loop: at random times, or evenly.", rich_help_panel=_LOAD),
    ] = Arrivals.POISSON,
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
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            "-n",
            min=1,
            help="How many. Default: 100, unless --duration is given.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            "-d",
            rich_help_panel=_LOAD,
            help="Seconds after which no more are sent; those that run are awaited.",
        ),
    ] = None,
    warmup: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            rich_help_panel=_LOAD,
            help="So many requests first, which are not measured; if one fails, that is all.",
        ),
    ] = 1,
    sessions: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Requests take turns on them.", rich_help_panel=_LOAD),
    ] = 1,
    connections: Annotated[
        int,
        typer.Option(
            min=1, max=1024, help="Sessions are divided among them.", rich_help_panel=_LOAD
        ),
    ] = 1,
    room_timeout: Annotated[
        float,
        typer.Option(
            rich_help_panel=_LOAD,
            help="For so many seconds a request is sent again for which the server has no room, "
            "as it advises; 0: it counts as refused at once.",
        ),
    ] = 30.0,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            rich_help_panel=_LOAD,
            help="Of all draws: prompts, lengths, arrivals. Default: another one each time, since "
            "a server has the prompts of the last run in its cache.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            rich_help_panel=_REQUEST,
            help="A file with a prompt a line; if its name ends with .jsonl, with a request a "
            "line, as for `headrace batch`. Default: random token ids.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N|LEAST:MOST",
            help="Of random prompts. Default: 128.",
            rich_help_panel=_REQUEST,
        ),
    ] = None,
    shared_prefix: Annotated[
        int,
        typer.Option(
            min=0,
            max=10_000_000,
            rich_help_panel=_REQUEST,
            help="So many tokens more that all random prompts begin with.",
        ),
    ] = 0,
    output_tokens: Annotated[
        str,
        typer.Option(
            metavar="N|LEAST:MOST", help="How many tokens are asked for.", rich_help_panel=_REQUEST
        ),
    ] = "128",
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--heed-eos",
            rich_help_panel=_REQUEST,
            help="Whether outputs go on behind the model's end, so that they are as long as asked "
            "for.",
        ),
    ] = True,
    temperature: common.Temperature = None,
    priority: common.Priority = None,
    time_limit: common.TimeLimit = None,
    option: common.OtherOptions = None,
    goal_ttft: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=_OUTPUT,
            help="Goodput: a good request has its first token within this time.",
        ),
    ] = None,
    goal_itl: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=_OUTPUT,
            help="Goodput: a good request takes at most this from token to token, in its mean.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write everything as JSON; - for stdout, alone.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    svg_file: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Draw a picture.", rich_help_panel=_OUTPUT),
    ] = None,
    progress: Annotated[
        bool,
        typer.Option(help="Show a progress bar on a terminal.", rich_help_panel=_OUTPUT),
    ] = True,
    target: common.Target = None,
    tls: common.Tls = None,
    ca: common.Ca = None,
    token: common.Token = None,
    client_cert: common.ClientCert = None,
    client_key: common.ClientKey = None,
) -> None:
    """Put load on a server, and measure it.

    A closed loop keeps --concurrency requests going. An open loop (--rate) sends each when it is
    due, and measures from then on: what waits behind a slow server counts as slow. Times are those
    that an application sees, which reads each request's output as it comes. Ctrl-C cancels what
    runs, and tells what was measured until then.

    Examples:

        headrace bench --concurrency 64 --requests 1000

        headrace bench --rate 20 --duration 60 --prompt-tokens 100:1000 --json it.json --svg it.svg

        headrace bench --rate 5 --prompts chats.jsonl --goal-ttft 0.3 --goal-itl 0.05
    """  # fmt: skip
    _check_time(rate, "--rate", 1e6)
    for value, name in (
        (duration, "--duration"), (goal_ttft, "--goal-ttft"), (goal_itl, "--goal-itl"),
    ):  # fmt: skip
        _check_time(value, name, 1e7)
    common.check_seconds(room_timeout, "--room-timeout", 0, 1e7)
    if connections > sessions:
        common.fail(
            f"--connections is {connections}; it must be at most --sessions, {sessions}",
            common.EXIT_USAGE,
        )
    if prompts is not None and (prompt_tokens is not None or shared_prefix):
        common.fail(
            "--prompt-tokens and --shared-prefix are those of random prompts: leave them or "
            "--prompts out",
            common.EXIT_USAGE,
        )
    if requests is None and duration is None:
        requests = _REQUESTS
    if concurrency is None:
        concurrency = _CLOSED_CONCURRENCY if rate is None else _OPEN_CONCURRENCY
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 31)
    job = Job(
        load=Load(requests, duration, concurrency, rate, arrivals.value, room_timeout, seed),
        goals=Goals(goal_ttft, goal_itl),
        prompts=prompts,
        prompt_tokens=parse_lengths(prompt_tokens or "128", "--prompt-tokens"),
        shared_prefix=shared_prefix,
        output_tokens=parse_lengths(output_tokens, "--output-tokens"),
        options=_options(
            option,
            temperature=temperature, priority=priority, time_limit=time_limit,
            ignore_eos=ignore_eos,
        ),
        seed=seed,
        warmup=warmup,
        sessions=sessions,
        connections=connections,
        progress=progress,
    )  # fmt: skip
    _check_outputs(json_file, svg_file)
    connection = common.connection(context, target, tls, ca, token, client_cert, client_key)
    report, error = asyncio.run(_measure(connection, job))
    _write(report, json_file, svg_file)
    if report.ended == _INTERRUPTED:
        raise typer.Exit(common.EXIT_INTERRUPTED)
    if error is not None:
        raise error
    if report.tally.refused or report.tally.failed:
        raise typer.Exit(common.EXIT_FAILED)


_INTERRUPTED = "interrupted"


def _check_time(value: float | None, name: str, most: float) -> None:
    if value is not None and not 0 < value <= most:
        common.fail(
            f"{name} is {value:g}; it must be above 0 and at most {most:,.0f}", common.EXIT_USAGE
        )


def _options(pairs: Sequence[str] | None, **named: Any) -> GenerationOptions:
    """The options of all requests; wrong ones end the command."""
    given = common.make_options(list(pairs or ()))
    for name, why in _OWN_OPTIONS.items():
        if name in given:
            common.fail(f"-o {name}: {why}", common.EXIT_USAGE)
    options = common.make_options(list(pairs or ()), **named)
    try:
        build_spec([0], options)
    except HeadraceError as error:
        common.fail(error.message, common.EXIT_USAGE)
    return options


def _check_outputs(*files: Path | None) -> None:
    """Finds files that cannot be written before the load, not after it."""
    for file in files:
        if file is None or str(file) == "-":
            continue
        if file.is_dir() or not file.absolute().parent.is_dir():
            common.fail(f"cannot write {file}: no such folder, or it is one", common.EXIT_USAGE)


async def _measure(connection: common.Connection, job: Job) -> tuple[Report, HeadraceError | None]:
    """Runs the load. Returns what was measured, and why a session ended before the load did.

    Raises:
        HeadraceError: the server cannot be reached, or a request of the warm-up failed.
    """
    tally = Tally(job.goals)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                connection.open_async(
                    # Each has a connection of its own, which gRPC would share.
                    channel_options=(("grpc.use_local_subchannel_pool", 1),)
                )
            )
            for _ in range(job.connections)
        ]
        card = await clients[0].model()
        prompts = await asyncio.to_thread(_prompts, job, card)
        async with _opened(clients, job.sessions) as sessions:
            run = Run(sessions, prompts, job.load, tally)
            with _interrupting(run):
                await run.warm_up(job.warmup)
                if not run.interrupted:
                    async with Bar(job.progress, job.load, tally):
                        await run.run()
    ended = _INTERRUPTED if run.interrupted else str(run.lost or "")
    settings = job.settings()
    return Report(clients[0].target, card, settings, job.meaning(), tally, ended), run.lost


def _prompts(job: Job, card: ModelCard) -> Prompts:
    if job.prompts is not None:
        return FilePrompts(
            job.prompts, output=job.output_tokens, options=job.options, seed=job.seed
        )
    return RandomPrompts(
        card,
        prompt=job.prompt_tokens,
        shared=job.shared_prefix,
        output=job.output_tokens,
        options=job.options,
        seed=job.seed,
    )


@asynccontextmanager
async def _opened(clients: Sequence[AsyncClient], count: int) -> AsyncIterator[list[AsyncSession]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(clients[i % len(clients)].session(room_timeout=0))
            for i in range(count)
        ]


@contextmanager
def _interrupting(run: Run) -> Iterator[None]:
    """Makes the first Ctrl-C end the load in an orderly way; the second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main one's
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    loop = asyncio.get_running_loop()

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        loop.call_soon_threadsafe(run.interrupt)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _write(report: Report, json_file: Path | None, svg_file: Path | None) -> None:
    found = json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n"
    if str(json_file) == "-":
        typer.echo(found, nl=False)
    else:
        typer.echo(report.table())
    try:
        if json_file is not None and str(json_file) != "-":
            json_file.write_text(found, encoding="utf-8")
        if svg_file is not None:
            svg_file.write_text(draw(report), encoding="utf-8")
    except OSError as error:
        common.fail(f"cannot write what was measured: {error}")
