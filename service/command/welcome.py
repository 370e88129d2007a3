"""What the server prints when it is ready: its address, and commands to paste. Each command shows
a different feature and works with this address and this model.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.contract.engine_client import ModelInfo
from service.config import ServiceConfig
from service.door.address import Address

_DEFAULT_TARGET = "127.0.0.1:50051"

_TOOLS = Path(__file__).resolve().parents[2] / "clients" / "python" / "examples" / "gauges.py"
_QUESTION = "How high is the Danube in Ulm?"
_FACTS = "Anna is 36 years old and lives in Ulm."
_SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, '
    '"city": {"type": "string"}}, "required": ["name", "age", "city"], '
    '"additionalProperties": false}'
)


@dataclass(frozen=True, slots=True)
class _Example:
    """An example command: a one-line description, the words after `headrace`, and the text before
    it.
    """

    shows: str
    words: str
    before: str = ""


def welcome(
    config: ServiceConfig,
    info: ModelInfo,
    bound: tuple[Address, ...],
    health: Address | None,
    seconds: float,
    capabilities: Container[str],
    http: Address | None = None,
) -> str:
    """Return the text to print. `health`: the separate health address. `capabilities`: the names
    listed in the model card. `http`: the HTTP door's address.
    """
    has_tokenizer = "structured_output" in capabilities  # a form is text
    name = config.served_name or info.name
    where = ", ".join(address.target for address in bound)
    needs = "Try it in another terminal:"
    if config.auth_file is not None:
        needs = f"Try it (who may is in {config.auth_file}; `headrace-server token` makes tokens):"
    lines = [
        f"Ready in {seconds:.1f} s: {name} ({info.architecture}, {info.parameters:,} parameters, "
        f"{_weights(info)} on {info.device}), up to {info.max_running_requests} requests at once, "
        f"{info.max_context_tokens} tokens each.",
        f"Listening on {where}" + (" with TLS" if config.uses_tls else "") + ".",
        *([] if health is None else [f"Health alone on {health.target}."]),
        *_http_lines(config, http),
        *([] if has_tokenizer else ["No tokenizer: prompts and outputs are token ids."]),
        "",
        needs,
    ]
    options = _options(config, bound[0])
    for example in _examples(capabilities, options, has_tokenizer=has_tokenizer):
        command = f"{example.before}{installed('headrace')} {example.words}{options}"
        lines += [f"  {example.shows}:", f"    {command}"]
    if http is not None:
        for shows, command in _http_examples(config, http, name, capabilities):
            lines += [f"  {shows}:", f"    {command}"]
    return "\n".join([*lines, "", "Stop it with Ctrl-C (twice: at once)."])


def _examples(
    capabilities: Container[str], options: str, *, has_tokenizer: bool
) -> Iterator[_Example]:
    """Yield the commands that work with this model. `options`: the options of each command."""
    if has_tokenizer:
        yield _Example("All that follows, in a few seconds, with what happens inside", "tour")
    prompt = '"Once upon a time"' if has_tokenizer else '--token-ids "1 2 3"'
    yield _Example("A stream: each token as it is made", f"generate {prompt}")
    if "typed_replies" in capabilities and _TOOLS.exists():
        required = " --tool-choice required" if "tool_choice" in capabilities else ""
        yield _Example(
            "A tool: the model calls a Python function, and answers with what that returned",
            f"chat --tools {_from_here(_TOOLS)} --yes{required} -t 0",
            before=f'echo "{_QUESTION}" | ',
        )
    if has_tokenizer:
        chat = "--chat " if "chat" in capabilities else ""
        yield _Example(
            "JSON that satisfies a schema, token by token",
            f"generate {chat}\"{_FACTS} As JSON, please.\" --json-schema '{_SCHEMA}' -t 0",
        )
    top = f"{installed('headrace')} top{options}"
    yield _Example(
        f"Eight requests at a time in one batch (to see them there, first start `{top}`)",
        "bench --concurrency 8 --requests 64",
    )


def _url(config: ServiceConfig, http: Address) -> str:
    return f"http{'s' * config.uses_tls}://{http.reached.target}/v1"


def _http_lines(config: ServiceConfig, http: Address | None) -> list[str]:
    if http is not None:
        return [f"OpenAI's API on {_url(config, http)}."]
    if config.openai is not None:
        return [f"OpenAI's API does not answer on {config.openai}: the log tells why."]
    return []


def _http_examples(
    config: ServiceConfig, http: Address, name: str, capabilities: Container[str]
) -> Iterator[tuple[str, str]]:
    """Yield a description and a command for each example."""
    url = _url(config, http)
    asked: dict[str, object] = {"model": name, "prompt": "Once upon a time"}
    path, text = "completions", "text"
    if "chat" in capabilities:
        asked = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
        path, text = "chat/completions", "message.content"
    token = "none" if config.auth_file is None else "TOKEN"
    curl = f"curl {url}/{path} -H 'Content-Type: application/json'"
    python = f"{installed('python')} -c "
    if config.auth_file is not None:
        curl += f" -H 'Authorization: Bearer {token}'"
    if config.uses_tls:
        curl += f" --cacert {config.tls_cert}"
        python = f"SSL_CERT_FILE={config.tls_cert} {python}"
    yield "OpenAI's API, by curl", f"{curl} -d {shlex.quote(json.dumps(asked))}"
    given = ", ".join(f"{key}={json.dumps(value)}" for key, value in asked.items())
    program = (
        f'import openai; client = openai.OpenAI(base_url="{url}", api_key="{token}"); '
        f"print(client.{path.replace('/', '.')}.create({given}).choices[0].{text})"
    )
    yield (
        "The same by its Python package (pip install openai)",
        f"{python}{shlex.quote(program)}",
    )


def _weights(info: ModelInfo) -> str:
    return (
        info.dtype if info.quantization == "none" else f"{info.dtype}, {info.quantization} weights,"
    )


def installed(program: str) -> str:
    """Return how to call a program of this server's environment from a shell: by name if the PATH
    finds it, otherwise by its path (for example if the environment is not activated).
    """
    path = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    if not path.exists() or (found is not None and Path(found).parent == path.parent):
        return program
    return _from_here(path)


def _from_here(path: Path) -> str:
    """Return the path relative to the current directory if it is inside it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _secure(config: ServiceConfig, address: Address) -> bool:
    return config.uses_tls and address.path is None


def _options(config: ServiceConfig, address: Address) -> str:
    """Return the options that a command needs to reach the server. Defaults are left out."""
    target = address.reached.target
    options = "" if target == _DEFAULT_TARGET else f" --target {target}"
    if _secure(config, address):
        options += f" --ca {config.tls_cert}"
        if config.tls_client_ca is not None:
            options += " --client-cert CERT --client-key KEY"
    if config.auth_file is not None:
        options += " --token TOKEN"
    return options
