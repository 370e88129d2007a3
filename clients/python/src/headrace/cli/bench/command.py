"""The bench command: turns its options into a job, connects, and handles each way the load can
end.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from headrace.async_client import AsyncClient
from headrace.async_session import AsyncSession
from headrace.cli import common
from headrace.cli.bench.edit_prompts import EditPrompts
from headrace.cli.bench.load import Load, LoadRun
from headrace.cli.bench.measures import Goals, Tally
from headrace.cli.bench.options import LoadOptions, PromptOptions, ReportOptions
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
from headrace.cli.options import ServerOptions, grouped
from headrace.errors import HeadraceError
from headrace.model_card import ModelCard
from headrace.options import GenerationOptions

_INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Job:
    """The options used by the rest of the command.

    Attributes:
        prompts: a file with prompts; None for random token ids, or edits.
        edits: the lengths of files to be edited, in lines; None if there are none.
        changed, prediction: of edits: the share of lines that change, and whether it is predicted.
        prompt_tokens, shared_prefix: the lengths of random prompts.
        output_tokens: how many tokens are requested.
        warmup: the number of requests that are not measured.
        sessions: the number of sessions, which are spread over `connections` connections.
    """

    load: Load
    goals: Goals
    prompts: Path | None
    edits: Lengths | None
    changed: float
    prediction: bool
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
        """Returns a description in words."""
        load = self.load
        how = (
            f"closed loop, {load.concurrency} at a time"
            if load.rate is None
            else f"open loop, {load.rate:g} requests/s, {load.arrivals} arrivals"
        )
        if self.edits is not None:
            beside = "with" if self.prediction else "without"
            what = f"edits of {self.changed:.0%} of {self.edits} lines {beside} predictions"
        elif self.prompts is not None:
            what = f"prompts of {self.prompts.name}"
        else:
            what = f"prompts of {self.prompt_tokens} tokens"
            what += f" behind {self.shared_prefix} shared" if self.shared_prefix else ""
        sessions = "1 session" if self.sessions == 1 else f"{self.sessions} sessions"
        return f"{how}, {sessions}; {what}, outputs of {self.output_tokens} tokens"

    def settings(self) -> dict[str, Any]:
        """Returns the options as JSON values."""
        is_random = self.prompts is None and self.edits is None
        edits = {
            "lines": str(self.edits),
            "changed": self.changed,
            "prediction": self.prediction,
        }
        return {
            **asdict(self.load),
            "prompts": None if self.prompts is None else str(self.prompts),
            "edits": None if self.edits is None else edits,
            "prompt_tokens": str(self.prompt_tokens) if is_random else None,
            "shared_prefix": self.shared_prefix,
            "output_tokens": str(self.output_tokens),
            "options": self.options,
            "warmup": self.warmup,
            "sessions": self.sessions,
            "connections": self.connections,
        }


@common.tells_errors
@grouped
def bench(
    context: typer.Context,
    *,
    load: LoadOptions,
    prompts: PromptOptions,
    output: ReportOptions,
    server: ServerOptions,
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

        headrace bench --concurrency 1 --requests 20 --edits 20:40 --output-tokens 256
    """
    job = _make_job(load, prompts, output)
    report, error = asyncio.run(_measure(server.connection(context), job))
    _write(report, output.json_file, output.svg_file)
    if report.ended == _INTERRUPTED:
        raise typer.Exit(common.EXIT_INTERRUPTED)
    if error is not None:
        raise error
    if report.tally.refused or report.tally.failed:
        raise typer.Exit(common.EXIT_FAILED)


def _make_job(load: LoadOptions, prompts: PromptOptions, output: ReportOptions) -> Job:
    """Makes a job from the options. Invalid options end the command."""
    asked, goals = load.load(), output.goals()
    prompts.check()
    output.check_files()
    return Job(
        load=asked,
        goals=goals,
        prompts=prompts.prompts,
        edits=None if prompts.edits is None else parse_lengths(prompts.edits, "--edits"),
        changed=prompts.changed,
        prediction=prompts.prediction,
        prompt_tokens=parse_lengths(prompts.prompt_tokens or "128", "--prompt-tokens"),
        shared_prefix=prompts.shared_prefix,
        output_tokens=parse_lengths(prompts.output_tokens, "--output-tokens"),
        options=prompts.request_options(),
        seed=asked.seed,
        warmup=load.warmup,
        sessions=load.sessions,
        connections=load.connections,
        progress=output.progress,
    )


async def _measure(connection: common.Connection, job: Job) -> tuple[Report, HeadraceError | None]:
    """Runs the load. Returns the measurements, and why a session ended before the load did.

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
            run = LoadRun(sessions, prompts, job.load, tally)
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
    if job.edits is not None:
        return EditPrompts(
            lines=job.edits,
            changed=job.changed,
            predicted=job.prediction,
            output=job.output_tokens,
            options=job.options,
            seed=job.seed,
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
def _interrupting(run: LoadRun) -> Iterator[None]:
    """Makes the first Ctrl-C end the load in an orderly way. The second one interrupts
    immediately.
    """
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
