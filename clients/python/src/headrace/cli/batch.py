"""`headrace batch`: a file of requests in, a file of results out.

1. Each line of the input is a request; a line that is none becomes an error of its own.
2. All go through one session with a bounded window (`Client.batch`).
3. Each outcome is written as one whole line, so that the output is valid whenever the command ends.
4. `--resume` keeps the results that are there, forgets error lines (they are tried again) and
   half a last line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer

from headrace._batch import BatchInput
from headrace.cli import common
from headrace.errors import HeadraceError, UnavailableError, invalid_argument
from headrace.options import OPTION_NAMES, GenerationOptions, Request
from headrace.results import Result

_INPUTS = ("prompt", "messages", "token_ids")


@common.tells_errors
def batch(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN", help="JSON lines; - for stdin.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="JSON lines; - for stdout.")],
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="How many requests the server has at a time.")
    ] = 64,
    keep_order: Annotated[
        bool, typer.Option("--keep-order", help="Write results in the order of the input.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the results in OUT; run only what is missing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is there.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on a terminal.")] = True,
    max_tokens: common.MaxTokens = None,
    temperature: common.Temperature = None,
    top_k: common.TopK = None,
    top_p: common.TopP = None,
    seed: common.Seed = None,
    stop: common.Stop = None,
    n: common.N = None,
    priority: common.Priority = None,
    time_limit: common.TimeLimit = None,
    option: common.OtherOptions = None,
    target: common.Target = None,
    tls: common.Tls = None,
    ca: common.Ca = None,
    token: common.Token = None,
    client_cert: common.ClientCert = None,
    client_key: common.ClientKey = None,
) -> None:
    """Run a file of requests, one JSON object a line, and write one JSON object a line.

    A request has "prompt", "messages" or "token_ids"; an "id" (else its line number); and any
    option of a request, such as "max_tokens", which goes before those of the command line.
    A result has "id", "text", "token_ids", "finish_reason" and "usage"; a request that failed
    has "id" and "error" instead, and makes the exit code 1. Ctrl-C cancels what runs; what was
    written stays, and --resume goes on from there.

    Examples:

        headrace batch prompts.jsonl results.jsonl --max-tokens 128

        headrace batch prompts.jsonl results.jsonl --resume --max-in-flight 256
    """
    defaults = common.make_options(
        option,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        n=n,
        priority=priority,
        time_limit=time_limit,
    )
    to_stdout = str(output) == "-"
    if not to_stdout and output.exists() and not (resume or overwrite):
        common.fail(f"{output} is there: pass --resume or --overwrite", common.EXIT_USAGE)
    done = _keep_results(output) if resume and not to_stdout and output.exists() else set()
    reader = _Reader(done)
    failed, lost = 0, None
    with ExitStack() as stack:
        lines = _open_source(source, stack)
        sink = sys.stdout if to_stdout else stack.enter_context(
            output.open("a" if resume else "w", encoding="utf-8")
        )  # fmt: skip
        connection = common.connection(context, target, tls, ca, token, client_cert, client_key)
        client = stack.enter_context(connection.open())
        outcomes = client.batch(
            reader.requests(lines),
            max_in_flight=max_in_flight,
            ordered=keep_order,
            progress=progress,
            **defaults,
        )
        stack.callback(outcomes.close)  # type: ignore[attr-defined]  # it is a generator
        for index, outcome in outcomes:
            failed += isinstance(outcome, HeadraceError)
            if isinstance(outcome, UnavailableError) and not outcome.reached_server:
                lost = outcome
            _write(sink, _line(reader.ids.pop(index), outcome))
    told = f"{reader.count - failed} done, {failed} failed, {reader.skipped} skipped"
    typer.echo(told, err=True)
    if lost is not None:
        raise lost
    if failed:
        raise typer.Exit(common.EXIT_FAILED)


class _Reader:
    """Turns lines into requests and remembers the ids of those that are in flight."""

    def __init__(self, done: set[str]) -> None:
        self.ids: dict[int, Any] = {}
        self.count = 0
        self.skipped = 0
        self._done = done

    def requests(self, lines: IO[str]) -> Iterator[BatchInput]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            id_: Any = number
            request: BatchInput
            try:
                fields = _fields(line)
                id_ = fields.pop("id", number)
                request = _request(fields)
            except HeadraceError as error:
                request = error
            if str(id_) in self._done:
                self.skipped += 1
                continue
            self.ids[self.count] = id_
            self.count += 1
            yield request


def _fields(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise invalid_argument("line", f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid_argument("line", "is not a JSON object")
    return fields


def _request(fields: dict[str, Any]) -> Request:
    given = [name for name in _INPUTS if fields.get(name) is not None]
    if len(given) != 1:
        raise invalid_argument("line", f"has not exactly one of {', '.join(_INPUTS)}")
    kind, prompt = given[0], fields[given[0]]
    options = {name: value for name, value in fields.items() if name not in _INPUTS}
    if not isinstance(prompt, str if kind == "prompt" else list):
        wanted = "a string" if kind == "prompt" else "an array"
        raise invalid_argument(kind, f"is not {wanted}")
    if unknown := sorted(options.keys() - OPTION_NAMES):
        raise invalid_argument(unknown[0], "is no option of a request")
    return Request(prompt, **cast(GenerationOptions, options))


def _line(id_: Any, outcome: Result | HeadraceError) -> str:
    if isinstance(outcome, HeadraceError):
        return json.dumps({"id": id_, "error": outcome.to_dict()}, ensure_ascii=False)
    return json.dumps({"id": id_, **outcome.to_dict()}, ensure_ascii=False)


def _write(sink: IO[str], line: str) -> None:
    """Writes one whole line: what Ctrl-C keeps from being flushed here, closing the file does."""
    sink.write(line + "\n")
    sink.flush()


def _open_source(source: Path, stack: ExitStack) -> IO[str]:
    if str(source) == "-":
        return sys.stdin
    try:
        return stack.enter_context(source.open(encoding="utf-8"))
    except OSError as error:
        common.fail(f"cannot read the requests: {error}", common.EXIT_USAGE)


def _keep_results(output: Path) -> set[str]:
    """Rewrites the output with its good results alone, and returns their ids."""
    done: set[str] = set()
    kept = output.with_name(output.name + ".tmp")
    with output.open(encoding="utf-8") as old, kept.open("w", encoding="utf-8") as new:
        for line in old:
            try:
                fields = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if isinstance(fields, dict) and "id" in fields and "error" not in fields:
                done.add(str(fields["id"]))
                new.write(line if line.endswith("\n") else line + "\n")
    os.replace(kept, output)
    return done
