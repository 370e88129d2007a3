"""`headrace generate`: one request, its text streamed to stdout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import common
from headrace.cli.options import (
    TOOLS,
    FormOptions,
    OtherOptions,
    RequestOptions,
    ServerOptions,
    System,
    ToolChoice,
    grouped,
    make_options,
)
from headrace.cli.tool_files import read_choice, read_tools
from headrace.messages import Message, Prompt
from headrace.results import Choice, Chunk, Result


@common.tells_errors
@grouped
def generate(
    context: typer.Context,
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; @FILE reads it from a file, - or nothing from stdin."),
    ] = None,
    request: RequestOptions,
    option: OtherOptions = None,
    form: FormOptions,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Tools that the model may call, which are not run (implies --chat): a JSON array "
            "of their definitions, or FILE.py, whose public functions are described.",
            rich_help_panel=TOOLS,
        ),
    ] = None,
    tool_choice: ToolChoice = None,
    server: ServerOptions,
    chat: Annotated[
        bool, typer.Option("--chat", help="Lay the prompt out by the model's chat template.")
    ] = False,
    system: System = None,
    token_ids: Annotated[
        bool,
        typer.Option(
            "--token-ids",
            help="The prompt is token ids (blanks or commas between them), and so is what is "
            "written; all that a model without a tokenizer takes.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the whole result as one JSON object.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Tell tokens and times on stderr.")
    ] = False,
) -> None:
    """Continue a prompt, or answer it (--chat). Ctrl-C cancels the request.

    The text is written to stdout, then each tool call as a line of JSON; reasoning is in --json.

    Examples:

        headrace generate "Once upon a time" --max-tokens 64

        headrace generate @prompt.txt --temperature 0 --stop "END" --json

        echo "What is a headrace?" | headrace generate --system "Be brief."

        headrace generate "Is water wet? " --choice yes --choice no

        headrace generate "A mill, as JSON: " --json-schema @mill.json -n 3

        headrace generate "How high is the Danube in Ulm?" --tools tools.json --json

        headrace generate --token-ids "5 17 42" --max-tokens 8
    """
    text = common.read_text(prompt)
    options = make_options(
        option,
        **asdict(request),
        **form.named(),
        tools=read_tools(tools) if tools else None,
        tool_choice=read_choice(tool_choice),
    )
    in_chat = chat or system is not None or tools is not None
    if token_ids and in_chat:
        common.fail("--token-ids excludes --chat, --system and --tools", common.EXIT_USAGE)
    asked: Prompt = text
    if token_ids:
        asked = _ids(text)
    elif in_chat:
        messages = [Message.system(system)] if system is not None else []
        asked = [*messages, Message.user(text)]
    with server.connection(context).open() as client, client.stream(asked, **options) as stream:
        last = _write_as_it_comes(stream, silent=as_json, token_ids=token_ids)
        result = stream.result()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), ensure_ascii=False))
    else:
        _write_rest(result, last, token_ids=token_ids)
    if stats:
        typer.echo(describe(result), err=True)
    if common.was_cancelled(result):
        common.fail(
            "the output is not whole: the request was cancelled at the server, by somebody else or "
            "because the server stops"
        )


def _write_as_it_comes(stream: Iterable[Chunk], *, silent: bool, token_ids: bool) -> str:
    """Writes the first choice while it is generated. Returns the last text that was written."""
    last = ""
    for chunk in stream:
        if silent or chunk.choice_index != 0:
            continue
        new = "".join(f"{i} " for i in chunk.token_ids) if token_ids else chunk.text
        if new:
            typer.echo(new, nl=False)
            last = new
    return last


def _write_rest(result: Result, last: str, *, token_ids: bool) -> None:
    """Ends the first choice's line, then writes its tool calls and the other choices."""
    if not last.endswith("\n") and (last or not result.tool_calls):
        typer.echo()
    _write_calls(result.choices[0])
    for other in result.choices[1:]:
        said = " ".join(map(str, other.token_ids)) if token_ids else other.text
        typer.echo(f"--- {other.index}")
        if said or not other.tool_calls:
            typer.echo(said)
        _write_calls(other)


def _write_calls(choice: Choice) -> None:
    """Writes each tool call as a line of JSON."""
    for call in choice.message.get("tool_calls", ()):
        typer.echo(json.dumps(call, ensure_ascii=False))


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        common.fail(f"--token-ids: {error}", common.EXIT_USAGE)


def describe(result: Result) -> str:
    """Describes the tokens and times of a request in one line."""
    usage, timings = result.usage, result.timings
    words = [
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)",
        f"{usage.completion_tokens} generated",
        f"ended by {result.finish_reason}",
    ]
    if timings.first_token is not None:
        words.append(f"first after {timings.first_token:.3f} s")
    if timings.first_token is not None and timings.last_token is not None:
        spread = timings.last_token - timings.first_token
        if spread > 0 and usage.completion_tokens > 1:
            words.append(f"then {(usage.completion_tokens - 1) / spread:.1f} tokens/s")
    return ", ".join(words)
