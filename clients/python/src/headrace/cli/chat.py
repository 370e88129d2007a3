"""`headrace chat`: a conversation at the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from headrace.cli import common
from headrace.cli.conversation import Conversation
from headrace.cli.tool_files import load_functions, read_choice
from headrace.options import TURN_OPTION_NAMES, TurnOptions
from headrace.tools import FunctionTool


@common.tells_errors
def chat(
    context: typer.Context,
    system: common.System = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py",
            help="Let the model call this file's public functions.",
            rich_help_panel=common.TOOLS,
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Run them without asking.", rich_help_panel=common.TOOLS),
    ] = False,
    tool_choice: common.ToolChoice = None,
    max_turns: Annotated[
        int,
        typer.Option(
            min=1, help="How many replies a question may have.", rich_help_panel=common.TOOLS
        ),
    ] = 10,
    reasoning: Annotated[
        bool, typer.Option(help="Show what the model thinks, on a terminal.")
    ] = True,
    max_tokens: common.MaxTokens = None,
    max_reasoning_tokens: common.MaxReasoningTokens = None,
    temperature: common.Temperature = None,
    top_k: common.TopK = None,
    top_p: common.TopP = None,
    seed: common.Seed = None,
    stop: common.Stop = None,
    time_limit: common.TimeLimit = None,
    option: common.OtherOptions = None,
    target: common.Target = None,
    tls: common.Tls = None,
    ca: common.Ca = None,
    token: common.Token = None,
    client_cert: common.ClientCert = None,
    client_key: common.ClientKey = None,
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
    options = common.make_options(
        option,
        max_tokens=max_tokens,
        max_reasoning_tokens=max_reasoning_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        time_limit=time_limit,
        tool_choice=read_choice(tool_choice),
    )
    if unknown := sorted(options.keys() - TURN_OPTION_NAMES):
        common.fail(f"-o {unknown[0]}: it is no option of a conversation", common.EXIT_USAGE)
    interactive = sys.stdin.isatty()
    functions = _functions(tools, asks=not yes, interactive=interactive)
    if "tool_choice" in options and not functions:
        common.fail("--tool-choice needs --tools", common.EXIT_USAGE)
    connection = common.connection(context, target, tls, ca, token, client_cert, client_key)
    with connection.open() as client:
        card = client.model()
        if not card.capabilities.input.chat:
            common.fail(
                f"{card.name} has no chat template; use `headrace generate`"
                if card.capabilities.input.text
                else f"{card.name} has no tokenizer; use `headrace generate --token-ids`"
            )
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
        conversation.run(card.name)
    if conversation.failed and not interactive:
        raise typer.Exit(common.EXIT_FAILED)


def _functions(tools: Path | None, *, asks: bool, interactive: bool) -> list[FunctionTool]:
    """The functions of the file; what cannot be run here ends the command."""
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
