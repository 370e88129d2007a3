"""The options that several commands share, each defined once, and the groups in which a command
takes them.

A group is a frozen dataclass whose fields are options. A command takes a group as one keyword
parameter. `grouped` shows typer one option for each field instead, in order, and passes the filled
group to the command.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer

from headrace.cli import common
from headrace.options import OPTION_NAMES, GenerationOptions

_R = TypeVar("_R")


def grouped(command: Callable[..., _R]) -> Callable[..., _R]:
    """Makes typer see the fields of a command's group parameters as separate options."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            shown += _options_of(parameter.annotation)
        else:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def called(**given: Any) -> _R:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)

    called.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in shown}
    return called


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def make_options(pairs: list[str] | None, **named: Any) -> GenerationOptions:
    """Merges a command's own options with `-o name=value` pairs, whose values are JSON or
    strings.
    """
    options = {name: value for name, value in named.items() if value is not None and value != []}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in OPTION_NAMES:
            known = ", ".join(sorted(OPTION_NAMES))
            common.fail(f"-o wants name=value with one of these names: {known}", common.EXIT_USAGE)
        try:
            options[name] = json.loads(text)
        except (ValueError, RecursionError):  # no JSON, or numbers and depths beyond Python's
            options[name] = text
    return cast(GenerationOptions, options)


# ---- the options --------------------------------------------------------------------------------

_REQUEST = "The request"
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-m", min=0, help="The most tokens to generate.", rich_help_panel=_REQUEST
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", "-t", help="0: always the most likely token.", rich_help_panel=_REQUEST
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Keep the k most likely tokens; 0: all.", rich_help_panel=_REQUEST),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Keep the likeliest tokens up to this probability.", rich_help_panel=_REQUEST
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_REQUEST)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        "-s",
        help="Text that ends the output; may be given again.",
        rich_help_panel=_REQUEST,
    ),
]
N = Annotated[
    int | None,
    typer.Option("-n", min=1, help="How many continuations to make.", rich_help_panel=_REQUEST),
]
Priority = Annotated[
    int | None,
    typer.Option(
        help="Requests of a higher number run first; -100 to 100.", rich_help_panel=_REQUEST
    ),
]
TOOLS = "Tools"
ToolChoice = Annotated[
    str | None,
    typer.Option(
        metavar="auto|none|required|NAME",
        help="Which tools the model may or must call, held to their schemas (not by auto); NAME: "
        "this one. Or OpenAI's dictionary, as JSON.",
        rich_help_panel=TOOLS,
    ),
]
MaxReasoningTokens = Annotated[
    int | None,
    typer.Option(
        min=0, help="End the reasoning after so many tokens; 0: at once.", rich_help_panel=_REQUEST
    ),
]
_FORM = "The output's form (at most one)"
JsonSchema = Annotated[
    str | None,
    typer.Option(
        help="A JSON value that satisfies this schema; @FILE reads it from a file.",
        rich_help_panel=_FORM,
    ),
]
JsonObject = Annotated[
    bool, typer.Option("--json-object", help="Any JSON object.", rich_help_panel=_FORM)
]
Regex = Annotated[
    str | None,
    typer.Option(help="Text that matches this expression as a whole.", rich_help_panel=_FORM),
]
Grammar = Annotated[
    str | None,
    typer.Option(
        help="Text of this grammar (Lark syntax); @FILE reads it from a file.",
        rich_help_panel=_FORM,
    ),
]
Choices = Annotated[
    list[str] | None,
    typer.Option(
        "--choice", help="One of these strings; give it again for each.", rich_help_panel=_FORM
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(help="Seconds after which the server ends it.", rich_help_panel=_REQUEST),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The adapter that the model has for it.", rich_help_panel=_REQUEST
    ),
]
OtherOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="NAME=VALUE",
        help="Any other option of a request, the value as JSON, such as min_tokens=5 or "
        "'logit_bias={\"13\": -100}'.",
        rich_help_panel=_REQUEST,
    ),
]  # fmt: skip
_SERVER = "The server"
Target = Annotated[
    str | None,
    typer.Option(
        help="host:port or unix:/path; several servers: dns:///host:port or a list with commas; "
        "default: HEADRACE_TARGET, else "
        "127.0.0.1:50051.",
        rich_help_panel=_SERVER,
    ),
]
Tls = Annotated[
    bool | None,
    typer.Option(
        "--tls/--insecure",
        help="Encrypted, or in clear text even with a token.",
        rich_help_panel=_SERVER,
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        help="The certificate authority to trust (PEM); default: HEADRACE_CA.",
        rich_help_panel=_SERVER,
    ),
]
Token = Annotated[
    str | None,
    typer.Option(help="Sent as a bearer token; default: HEADRACE_TOKEN.", rich_help_panel=_SERVER),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="The file that has the token, read again when it changes; comes before --token.",
        rich_help_panel=_SERVER,
    ),
]
ClientCert = Annotated[
    Path | None,
    typer.Option(
        help="This client's certificate (PEM); default: HEADRACE_CLIENT_CERT.",
        rich_help_panel=_SERVER,
    ),
]
ClientKey = Annotated[
    Path | None,
    typer.Option(
        help="The certificate's key (PEM); default: HEADRACE_CLIENT_KEY.",
        rich_help_panel=_SERVER,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds that a call may take, kept on this side whatever the server does; a batch's "
        "is each request's.",
        rich_help_panel=_SERVER,
    ),
]
System = Annotated[str | None, typer.Option(help="Instructions that come before the conversation.")]


# ---- the groups ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How a reply in a conversation is generated."""

    max_tokens: MaxTokens = None
    max_reasoning_tokens: MaxReasoningTokens = None
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    seed: Seed = None
    stop: Stop = None
    time_limit: TimeLimit = None
    adapter: Adapter = None


@dataclass(frozen=True, slots=True)
class RequestOptions(ReplyOptions):
    """How a request is processed."""

    n: N = None
    priority: Priority = None


@dataclass(frozen=True, slots=True)
class FormOptions:
    """The format of the output."""

    json_schema: JsonSchema = None
    json_object: JsonObject = False
    regex: Regex = None
    grammar: Grammar = None
    choice: Choices = None

    def named(self) -> dict[str, Any]:
        """Returns the options of a request. A file that cannot be read ends the command."""
        return {
            "json_schema": _read_form(self.json_schema, "the schema"),
            "json_object": self.json_object or None,
            "regex": self.regex,
            "grammar": _read_form(self.grammar, "the grammar"),
            "choices": self.choice,
        }


def _read_form(source: str | None, what: str) -> str | None:
    """Returns a schema or grammar: given directly, from a file (`@path`), or None."""
    return None if source is None else common.read_file(source, what)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to reach the server. Options left out are taken from those before the command."""

    target: Target = None
    tls: Tls = None
    ca: Ca = None
    token: Token = None
    client_cert: ClientCert = None
    client_key: ClientKey = None
    timeout: Timeout = None
    token_file: TokenFile = None

    def connection(self, context: typer.Context) -> common.Connection:
        """Returns the connection described by these options and those before the command."""
        before = common.of(context)
        token_file = self.token_file or (None if self.token else before.token_file)
        return common.Connection(
            target=self.target or before.target,
            tls=before.tls if self.tls is None else self.tls,
            ca=self.ca or before.ca,
            token=None if token_file else self.token or before.token,
            token_file=token_file,
            client_cert=self.client_cert or before.client_cert,
            client_key=self.client_key or before.client_key,
            timeout=before.timeout if self.timeout is None else self.timeout,
        )
