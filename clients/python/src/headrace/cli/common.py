"""Shared by the commands: the connection, and how errors are printed."""

from __future__ import annotations

import functools
import math
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import typer

from headrace.async_client import AsyncClient
from headrace.client import Client
from headrace.errors import (
    HeadraceError,
    UnauthenticatedError,
    UnavailableError,
    is_about_tls,
)
from headrace.results import FinishReason, Result

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", Client, AsyncClient)


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach the server, from the options before the command."""

    target: str
    tls: bool | None
    ca: Path | None
    token: str | None
    client_cert: Path | None = None
    client_key: Path | None = None
    timeout: float | None = None
    token_file: Path | None = None

    def open(self) -> Client:
        """Opens a client of the server. Invalid arguments end the command."""
        return self._opened(Client)

    def open_async(self, target: str | None = None, **options: Any) -> AsyncClient:
        """Opens an asyncio client with further options, optionally of another `target`."""
        return self._opened(AsyncClient, target, **options)

    def _opened(self, kind: Callable[..., _C], target: str | None = None, **options: Any) -> _C:
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            fail("the token may hold printable ASCII characters alone", EXIT_USAGE)
        try:
            self._check_certificates()
            return kind(
                target or self.target,
                tls=self.tls,
                ca=self.ca,
                client_cert=self.client_cert,
                client_key=self.client_key,
                token=self.token,
                token_file=self.token_file,
                timeout=self.timeout,
                **options,
            )
        except (ValueError, OSError) as error:
            fail(str(error), EXIT_USAGE)

    def _check_certificates(self) -> None:
        """Finds certificate files that gRPC cannot use; gRPC itself would only log the problem
        later.

        Raises:
            ValueError: a file has invalid content, or the key does not match the certificate.
            OSError: a file cannot be read.
        """
        # What is no regular file, such as a shell's pipe, can be read only once: by gRPC.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        cert, key = self.client_cert, self.client_key
        try:
            if self.ca and self.ca.is_file():
                what = f"--ca {self.ca}"
                context.load_verify_locations(cadata=self.ca.read_text(encoding="latin-1"))
            if cert and key and cert.is_file() and key.is_file():
                what = f"--client-cert {cert} with --client-key {key}"
                # gRPC takes no password: none is asked for.
                context.load_cert_chain(cert, key, password=lambda: "")
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"{what} cannot be used: {error}") from None


def of(context: typer.Context) -> Connection:
    """Returns the connection described by the options before the command."""
    return cast(Connection, context.obj)


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Prints the error to stderr and ends the command."""
    typer.echo(f"headrace: {message}", err=True)
    raise typer.Exit(code)


def check_text(value: str, what: str) -> None:
    """Ends the command if an argument is not valid text and cannot be put in a message."""
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        fail(f"{what} is not UTF-8: {value!r}", EXIT_USAGE)


def check_seconds(value: float, what: str, least: float, most: float) -> None:
    """Ends the command if a time is out of bounds or not a number."""
    if math.isnan(value) or not least <= value <= most:
        fail(f"{what} is {value:g}; it must be {least:g} to {most:.12g} seconds", EXIT_USAGE)


def explain(error: HeadraceError) -> str:
    """Describes an error for a person at a terminal."""
    if isinstance(error, UnavailableError) and not error.reached_server:
        if is_about_tls(error):
            return error.message
        return f"{error.message}\nstart one with `make run`, or pass --target"
    lines = [error.message]
    lines += [
        f"  {violation.field}: {violation.description}"
        for violation in error.fields
        if violation.description not in error.message
    ]
    if isinstance(error, UnauthenticatedError):
        lines.append("pass --token, or set HEADRACE_TOKEN; or show a certificate: --client-cert")
    if error.retry_after is not None:
        lines.append(f"try again in {error.retry_after:g} s")
    if error_id := error.metadata.get("error_id"):
        lines.append(f"the server's log knows it as {error_id}")
    return "\n".join(lines)


def was_cancelled(result: Result) -> bool:
    """Whether the request was cancelled by someone else or by a stopping server."""
    return any(choice.finish_reason == FinishReason.CANCELLED for choice in result.choices)


def exit_code(error: HeadraceError) -> int:
    """Returns the exit code for an error."""
    return EXIT_UNAVAILABLE if isinstance(error, UnavailableError) else EXIT_FAILED


def tells_errors(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a command report errors as a line on stderr and an exit code, without a traceback."""

    @functools.wraps(command)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except HeadraceError as error:
            fail(explain(error), exit_code(error))
        except KeyboardInterrupt:
            typer.echo("\nheadrace: interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return told


def read_text(source: str | None) -> str:
    """Returns a prompt: given directly, from a file (`@path`), or from stdin (None or `-`)."""
    if source is None or source == "-":
        if source is None and sys.stdin.isatty():
            fail("no prompt: give one, or @file, or pipe it in", EXIT_USAGE)
        return sys.stdin.read()
    return read_file(source, "the prompt")


def read_file(source: str, what: str) -> str:
    """Returns a text: given directly, or from a file (`@path`)."""
    if source.startswith("@"):
        try:
            return Path(source[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fail(f"cannot read {what}: {error}", EXIT_USAGE)
    return source
