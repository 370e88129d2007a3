"""What the server prints when it is ready: its address, and example commands that work with it."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.client import ModelInfo
from service.address import Address
from service.config import ServiceConfig

_DEFAULT_TARGET = "127.0.0.1:50051"

_METHOD = "headrace.v1.GenerationService/GenerateStream"
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class _Example:
    """A prompt as the command, Python and the contract have it, and the name of its output."""

    command: str
    prompt: str
    spec: str
    output: str


_TEXT = _Example(
    '"Once upon a time"',
    '"Once upon a time"',
    '{"spec":{"text":{"text":"Once upon a time"},"stop":{"max_tokens":32}}}',
    "text",
)
_IDS = _Example(
    '--token-ids "1 2 3"',
    "[1, 2, 3]",
    '{"spec":{"tokens":{"ids":[1,2,3]},"stop":{"max_tokens":32}}}',
    "token_ids",
)


def welcome(
    config: ServiceConfig,
    info: ModelInfo,
    bound: tuple[Address, ...],
    health: Address | None,
    seconds: float,
    *,
    has_tokenizer: bool = True,
) -> str:
    """The lines to print. `health`: the separate health address. `has_tokenizer`: whether prompts
    may be text.
    """
    example = _TEXT if has_tokenizer else _IDS
    name = config.served_name or info.name
    where = ", ".join(address.target for address in bound)
    needs = "Try it:"
    if config.auth_file is not None:
        needs = f"Try it (who may is in {config.auth_file}; `headrace-server token` makes tokens):"
    lines = [
        f"Ready in {seconds:.1f} s: {name} ({info.architecture}, {info.parameters:,} parameters, "
        f"{_weights(info)} on {info.device}), up to {info.max_running_requests} requests at once, "
        f"{info.max_context_tokens} tokens each.",
        f"Listening on {where}" + (" with TLS" if config.uses_tls else "") + ".",
        *([] if health is None else [f"Health alone on {health.target}."]),
        *([] if has_tokenizer else ["No tokenizer: prompts and outputs are token ids."]),
        "",
        needs,
        f"  {_command(config, bound[0], example)}",
        f"  {_python(config, bound[0], example)}",
        f"  {_grpcurl(config, bound[0], example)}",
        "",
        "Stop it with Ctrl-C (twice: at once).",
    ]
    return "\n".join(lines)


def _weights(info: ModelInfo) -> str:
    return (
        info.dtype if info.quantization == "none" else f"{info.dtype}, {info.quantization} weights,"
    )


def installed(program: str) -> str:
    """How to call a program of this server's environment from a shell: by name if the PATH finds
    it, else by its path, as when the environment is not activated.
    """
    path = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    if not path.exists() or (found is not None and Path(found).parent == path.parent):
        return program
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _client_target(address: Address) -> str:
    """The target with which a client on this machine reaches the address."""
    return dataclasses.replace(address, host=_ANY_HOST.get(address.host, address.host)).target


def _secure(config: ServiceConfig, address: Address) -> bool:
    return config.uses_tls and address.path is None


def _command(config: ServiceConfig, address: Address, example: _Example) -> str:
    target = _client_target(address)
    options = "" if target == _DEFAULT_TARGET else f" --target {target}"
    if _secure(config, address):
        options += f" --ca {config.tls_cert}"
        if config.tls_client_ca is not None:
            options += " --client-cert CERT --client-key KEY"
    if config.auth_file is not None:
        options += " --token TOKEN"
    return f"{installed('headrace')} generate {example.command}{options}"


def _python(config: ServiceConfig, address: Address, example: _Example) -> str:
    target = _client_target(address)
    arguments = [] if target == _DEFAULT_TARGET else [f'"{target}"']
    if _secure(config, address):
        arguments.append(f'ca="{config.tls_cert}"')
        if config.tls_client_ca is not None:
            arguments.append('client_cert="CERT", client_key="KEY"')
    if config.auth_file is not None:
        arguments.append('token="TOKEN"')
    return (
        f"{installed('python')} -c 'import headrace; print(headrace.Client({', '.join(arguments)})"
        f".generate({example.prompt}, max_tokens=32).{example.output})'"
    )


def _grpcurl(config: ServiceConfig, address: Address, example: _Example) -> str:
    security = f"-cacert {config.tls_cert}" if _secure(config, address) else "-plaintext"
    if _secure(config, address) and config.tls_client_ca is not None:
        security += " -cert CERT -key KEY"
    target = _client_target(address)
    if config.auth_file is not None:
        security += ' -H "authorization: Bearer TOKEN"'
    return f"grpcurl {security} -d '{example.spec}' {target} {_METHOD}"
