"""`headrace chat`: a conversation at the terminal."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer

from headrace.cli import common
from headrace.cli.conversation import Conversation
from headrace.cli.options import (
    TOOLS,
    OtherOptions,
    ReplyOptions,
    ServerOptions,
    System,
    ToolChoice,
    grouped,
    make_options,
)
from headrace.cli.tool_files import load_functions, read_choice
from headrace.client import Client
from headrace.options import TURN_OPTION_NAMES, TurnOptions
from headrace.tools import FunctionTool


@common.tells_errors
@grouped
def chat(
    context: typer.Context,
    *,
    system: System = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py",
            help="Let the model call this file's public functions.",
            rich_help_panel=TOOLS,
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Run them without asking.", rich_help_panel=TOOLS),
    ] = False,
    tool_choice: ToolChoice = None,
    max_turns: Annotated[
        int,
        typer.Option(min=1, help="How many replies a question may have.", rich_help_panel=TOOLS),
    ] = 10,
    reasoning: Annotated[
        bool, typer.Option(help="Show what the model thinks, on a terminal.")
    ] = True,
    reply: ReplyOptions,
    option: OtherOptions = None,
    server: ServerOptions,
) -> None:
    """Hold a conversation. Ctrl-C cancels the running answer, Ctrl-D leaves; /help says more.

    The answers are written to stdout, reasoning and tool calls to stderr. If stdin is not a
    terminal, each line is a question, and the exit code is 1 if one was refused or failed.

    With --tools the model may call the functions that a Python file defines: their names, type
    hints and docstrings tell it how. You are asked before one runs.

    Examples:

        headrace chat

        headrace chat --system "You are a miller." --temperature 0.7

        headrace chat --tools gauges.py --tool-choice read_gauge
    """
    options = make_options(option, **asdict(reply), tool_choice=read_choice(tool_choice))
    if unknown := sorted(options.keys() - TURN_OPTION_NAMES):
        common.fail(f"-o {unknown[0]}: it is no option of a conversation", common.EXIT_USAGE)
    interactive = sys.stdin.isatty()
    functions = _functions(tools, asks=not yes, interactive=interactive)
    if "tool_choice" in options and not functions:
        common.fail("--tool-choice needs --tools", common.EXIT_USAGE)
    with server.connection(context).open() as client:
        model = _model(client)
        conversation = Conversation(
            client,
            cast(TurnOptions, options),
            system,
            tools=functions,
            max_turns=max_turns if functions else 1,
            asks=not yes,
            reasoning=reasoning,
            interactive=interactive,
        )
        conversation.run(model)
    if conversation.failed and not interactive:
        raise typer.Exit(common.EXIT_FAILED)


def _model(client: Client) -> str:
    """Returns the model's name. A model that cannot hold a conversation ends the command."""
    card = client.model()
    if not card.capabilities.input.chat:
        common.fail(
            f"{card.name} has no chat template; use `headrace generate`"
            if card.capabilities.input.text
            else f"{card.name} has no tokenizer; use `headrace generate --token-ids`"
        )
    return card.name


def _functions(tools: Path | None, *, asks: bool, interactive: bool) -> list[FunctionTool]:
    """Returns the functions of the file, or ends the command if they cannot be run here."""
    if tools is None:
        return []
    if asks and not interactive:
        why = "nobody can be asked before one runs: stdin is no terminal; pass --yes"
        common.fail(f"--tools {tools}: {why}", common.EXIT_USAGE)
    functions = load_functions(tools)
    for one in functions:
        if one.is_async:
            common.fail(f"--tools {tools}: {one.name} is a coroutine function", common.EXIT_USAGE)
    return functions
