"""`headrace chat`: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import sys

import typer

from headrace.cli import common
from headrace.client import Client
from headrace.errors import HeadraceError, UnavailableError
from headrace.messages import Message
from headrace.options import GenerationOptions

_HELP = """\
/reset          forget the conversation
/system TEXT    change the instructions (and forget the conversation)
/undo           forget the last question and its answer
/history        show the conversation
/quit           leave (so does Ctrl-D); Ctrl-C cancels the running answer"""


@common.tells_errors
def chat(
    context: typer.Context,
    system: common.System = None,
    max_tokens: common.MaxTokens = None,
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

    If stdin is not a terminal, each line is a question, and the exit code is 1 if one was refused
    or failed.

    Examples:

        headrace chat

        headrace chat --system "You are a miller." --temperature 0.7
    """
    options = common.make_options(
        option,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        time_limit=time_limit,
    )
    connection = common.connection(context, target, tls, ca, token, client_cert, client_key)
    with connection.open() as client:
        card = client.model()
        if not card.capabilities.input.chat:
            common.fail(
                f"{card.name} has no chat template; use `headrace generate`"
                if card.capabilities.input.text
                else f"{card.name} has no tokenizer; use `headrace generate --token-ids`"
            )
        conversation = _Chat(client, options, system, interactive=sys.stdin.isatty())
        conversation.run(card.name)
    if conversation.failed and not conversation.interactive:
        raise typer.Exit(common.EXIT_FAILED)


class _Chat:
    """The state of a conversation; `failed`: whether a request was refused or failed."""

    def __init__(
        self, client: Client, options: GenerationOptions, system: str | None, *, interactive: bool
    ) -> None:
        self._client = client
        self._options = options
        self._system = system
        self.interactive = interactive
        self.failed = False
        self._messages: list[Message] = []

    def run(self, model: str) -> None:
        if self.interactive:
            with contextlib.suppress(ImportError):  # not everywhere; only line editing is lost
                import readline  # noqa: F401  # input() uses it once it is imported
            typer.echo(f"{model} - /help for commands, Ctrl-D to leave", err=True)
        while (line := self._read()) is not None:
            line = line.strip()
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._ask(line)

    def _read(self) -> str | None:
        """The next line; None: no more. Ctrl-C at the prompt clears the line."""
        while True:
            try:
                if self.interactive:
                    return input("> ")
                return sys.stdin.readline() or None
            except EOFError:
                typer.echo()
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                typer.echo()

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._messages.clear()
        elif name == "/system":
            self._system = rest.strip() or None
            self._messages.clear()
        elif name == "/undo":
            del self._messages[-2:]
        elif name == "/history":
            for message in self._messages:
                typer.echo(f"{message.role}: {message.content}", err=True)
        elif name == "/help":
            typer.echo(_HELP, err=True)
        else:
            typer.echo(f"no such command: {name}; /help lists them", err=True)

    def _ask(self, line: str) -> None:
        question = Message.user(line)
        first = [Message.system(self._system)] if self._system else []
        stream = self._client.stream([*first, *self._messages, question], **self._options)
        try:
            with stream:
                for chunk in stream:
                    typer.echo(chunk.text, nl=False)
        except KeyboardInterrupt:  # leaving the block has cancelled the request
            typer.echo("\n(cancelled)", err=True)
            if not stream.result().token_ids:
                return
        except HeadraceError as error:
            if isinstance(error, UnavailableError) and not self.interactive:
                raise
            self.failed = True
            typer.echo(f"\nheadrace: {common.explain(error)}", err=True)
            return
        typer.echo()
        reply = stream.result()
        answer = Message(
            "assistant",
            reply.text,
            tool_calls=reply.tool_calls,
            reasoning_content=reply.reasoning,
        )
        self._messages += [question, answer]
