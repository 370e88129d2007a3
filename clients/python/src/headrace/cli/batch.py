"""`headrace batch`: a file of requests in, a file of results out.

1. The command's arguments are checked before the output is changed.
2. Each line of the input is a request. The outcome of an invalid line is an error (`batch_input`).
3. All requests go through one session (over all servers of the target) with a bounded window
   (`run_batch`), as they arrive.
4. Each outcome is written as one complete line, so that the output is valid whenever the command
   ends (`batch_output`).
5. `--resume` keeps existing results. It drops error lines, whose requests are tried again, and an
   incomplete last line.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headrace._batch import BatchFeed, run_batch
from headrace.cli import common
from headrace.cli.batch_input import InputReader, open_source, split_lines
from headrace.cli.batch_output import Sink, check_output, keep_results
from headrace.cli.options import OtherOptions, RequestOptions, ServerOptions, grouped, make_options
from headrace.client import Client
from headrace.errors import HeadraceError, InvalidArgumentError, UnavailableError
from headrace.messages import Message
from headrace.options import GenerationOptions, build_spec


@dataclass(frozen=True, slots=True)
class _Job:
    source: Path
    output: Path
    max_in_flight: int
    keep_order: bool
    resume: bool
    overwrite: bool
    progress: bool
    options: GenerationOptions


@common.tells_errors
@grouped
def batch(
    context: typer.Context,
    *,
    source: Annotated[Path, typer.Argument(metavar="IN", help="JSON lines; - for stdin.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="JSON lines; - for stdout.")],
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="How many requests the server has at a time.")
    ] = 64,
    keep_order: Annotated[
        bool, typer.Option("--keep-order", help="Write results in the order of the input.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep the results in OUT; run what is missing or failed."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is there.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on a terminal.")] = True,
    request: RequestOptions,
    option: OtherOptions = None,
    server: ServerOptions,
) -> None:
    """Run a file of requests, one JSON object a line, and write one JSON object a line.

    A request has "prompt", "messages" or "token_ids"; an "id", a string or an integer (default: its
    line number); and any options of a request, such as "max_tokens", which override those of the
    command line. A result has "id", "text", "token_ids", "finish_reason" and "usage"; a request
    that failed has "id" and "error" instead, and the exit code is then 1. The same is true of an
    invalid line, and of one with the id of an earlier line (2 and "2" are different ids): the
    others run. A request that was cancelled at the server counts as failed; its result has what
    came until then, and the finish_reason "cancelled".

    Results are written as they end, even while more requests are awaited from a pipe. Ctrl-C writes
    finished results and cancels running requests; --resume continues from there: it keeps the
    results in OUT and runs requests whose results are missing or failed.

    Examples:

        headrace batch prompts.jsonl results.jsonl --max-tokens 128

        headrace batch prompts.jsonl results.jsonl --resume --max-in-flight 256
    """
    defaults = make_options(option, **asdict(request))
    job = _Job(source, output, max_in_flight, keep_order, resume, overwrite, progress, defaults)
    _check_options(defaults)
    with server.connection(context).open() as client:
        _run(client, job)


def _check_options(options: GenerationOptions) -> None:
    """Ends the command if an option is invalid for every request."""
    if "request_id" in options:
        common.fail("-o request_id: a batch's requests cannot share one", common.EXIT_USAGE)
    reasons: dict[str, None] = {}
    for prompt in ("x", [Message.user("x")]):  # some options belong to one of these alone
        try:
            build_spec(prompt, options)
            return
        except InvalidArgumentError as error:
            reasons[error.message] = None
    common.fail("; or: ".join(reasons), common.EXIT_USAGE)


def _run(client: Client, job: _Job) -> None:
    """Runs the job. Any exception it raises has the exit code."""
    done = failed = 0
    lost = None
    with ExitStack() as stack:
        source = open_source(job.source, stack)
        check_output(job.output, source, resume=job.resume, overwrite=job.overwrite)
        try:
            kept = keep_results(job.output) if job.resume else set()
        except OSError as error:
            common.fail(f"cannot keep the results: {error}", common.EXIT_USAGE)
        sink = Sink(job.output, resume=job.resume, overwrite=job.overwrite, stack=stack)
        reader = InputReader(kept)
        feed = BatchFeed(reader.requests(split_lines(source)), ahead=job.max_in_flight)
        stack.enter_context(_interrupting(feed))
        outcomes = run_batch(
            partial(client._servers.batch_session, room_timeout=None),
            feed,
            max_in_flight=job.max_in_flight,
            ordered=job.keep_order,
            progress=job.progress,
            options=job.options,
            timeout=client.timeout,
        )
        stack.callback(outcomes.close)  # type: ignore[attr-defined]  # it is a generator
        for index, outcome in outcomes:
            if isinstance(outcome, HeadraceError) or common.was_cancelled(outcome):
                failed += 1
            else:
                done += 1
            if isinstance(outcome, UnavailableError) and not outcome.reached_server:
                lost = outcome
            sink.write(reader.ids.pop(index), outcome)
    typer.echo(f"{done} done, {failed} failed, {reader.skipped} skipped", err=True)
    if lost is not None:
        raise lost
    if failed:
        raise typer.Exit(common.EXIT_FAILED)


@contextmanager
def _interrupting(feed: BatchFeed) -> Iterator[None]:
    """Makes the first Ctrl-C end the batch in an orderly way, so that every outcome is written.

    The second Ctrl-C interrupts immediately.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main one's
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        feed.interrupt()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
