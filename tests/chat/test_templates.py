"""Prompts of conversations against those of transformers, for templates in the form of families:
by the tokenizer itself, and by servers in two processes with different hash seeds, asked from
Python and from Go.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import headrace
import pytest

from engine.text import ChatTemplateError, JsonObject, Tokenizer
from tests.chat.families import (
    CONVERSATIONS,
    DEMO,
    FAMILIES,
    NOW,
    Conversation,
    make_directory,
    reference,
)
from tests.service.real_server import ROOT, clean_environment, real_server

HASH_SEEDS = ("1", "2")
Prompts = dict[str, dict[str, list[int] | None]]
"""By family and conversation; None where it was refused."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_directory(family, made)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Prompts:
    return {
        family: {name: reference(folder / family, c) for name, c in CONVERSATIONS.items()}
        for family in FAMILIES
    }


def test_the_families_and_the_conversations_show_something(folder: Path, expected: Prompts) -> None:
    """transformers makes a prompt of each conversation, but for what a family is known to refuse,
    and what it is about is in it.
    """
    assert len(FAMILIES) >= 12
    for family, prompts in expected.items():
        refused = {name for name, prompt in prompts.items() if prompt is None}
        assert refused == FAMILIES[family].refuses, family
        read = Tokenizer.load(folder / family)
        if family in ("gemma", "smollm3"):
            continue  # they show no calls
        [shown] = [read.decode(prompts[n] or (), skip_special_tokens=False) for n in ("call",)]
        assert "read_gauge" in shown
        assert str(2**53 + 1) in shown
        assert "größe" in shown


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_makes_transformers_prompts(
    family: str, folder: Path, expected: Prompts
) -> None:
    tokenizer = Tokenizer.load(folder / family, clock=lambda: NOW)
    made = {name: _prompt(tokenizer, c) for name, c in CONVERSATIONS.items()}
    assert made == expected[family]


def _prompt(tokenizer: Tokenizer, conversation: Conversation) -> list[int] | None:
    messages = json.loads(json.dumps(conversation.messages))
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            text = json.dumps(arguments, ensure_ascii=False)
            call["function"]["arguments"] = JsonObject(arguments, text)
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=conversation.tools,
            template_arguments=conversation.arguments,
            **conversation.options,
        )
    except ChatTemplateError:
        return None
    return tokenizer.encode(text, add_special_tokens=False)


# ---- through servers ---------------------------------------------------------------------------


@contextmanager
def _servers(folder: Path, hash_seed: str) -> Iterator[dict[str, str]]:
    """The addresses of a server for each family, in one process."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chat.template_server", str(folder)],
        cwd=ROOT,
        env=clean_environment(PYTHONHASHSEED=hash_seed),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the servers did not start"
        yield json.loads(line)
        process.communicate()  # ends its input, and so the servers
    assert process.returncode == 0


@pytest.fixture(scope="module")
def processes(folder: Path) -> Iterator[list[dict[str, str]]]:
    """The addresses by family, of each of the processes."""
    with ExitStack() as stack:
        yield [stack.enter_context(_servers(folder, seed)) for seed in HASH_SEEDS]


@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "texts"])
def test_servers_make_transformers_prompts_of_dictionaries(
    processes: list[dict[str, str]], expected: Prompts, as_text: bool
) -> None:
    """Of dictionaries as they are, arguments of calls as objects and as the text that OpenAI's API
    has.
    """
    for addresses in processes:
        made: Prompts = {}
        for family, address in addresses.items():
            with headrace.Client(address) as client:
                made[family] = {
                    name: _ask(client, c, as_text=as_text) for name, c in CONVERSATIONS.items()
                }
        assert made == expected


def _ask(client: headrace.Client, conversation: Conversation, *, as_text: bool) -> list[int] | None:
    messages = json.loads(json.dumps(conversation.messages))
    for message in messages if as_text else ():
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    options: dict[str, Any] = {"template_arguments": conversation.arguments}
    options |= conversation.options
    if conversation.tools is not None:
        options["tools"] = conversation.tools
    try:
        return list(client.tokenize(messages, **options).token_ids)
    except headrace.InvalidArgumentError as error:
        if "the model's chat template" in str(error):
            return None
        raise


def test_a_request_has_the_same_prompt(processes: list[dict[str, str]], expected: Prompts) -> None:
    conversation = CONVERSATIONS["call_answered"]
    for addresses in processes:
        with headrace.Client(addresses["qwen3"]) as client:
            result = client.generate(
                conversation.messages, tools=conversation.tools, max_tokens=0, prompt_logprobs=0
            )
        assert result.prompt is not None
        prompt = [token.id for token in result.prompt.tokens]
        assert prompt == expected["qwen3"]["call_answered"]


@pytest.mark.slow
def test_the_command_serves_the_same_prompts_and_outputs(folder: Path, expected: Prompts) -> None:
    """The demo model with a family's template, as it is served, started twice."""
    family, names = "qwen2_5", ("system", "call_without_tools", "turns")
    with TemporaryDirectory() as made:
        for path in (*DEMO.iterdir(), *(folder / family).iterdir()):
            if path.is_file():
                shutil.copy(path, made)
        outputs = []
        for seed in HASH_SEEDS:
            with real_server(
                "--model", made, "--listen", "127.0.0.1:0", PYTHONHASHSEED=seed
            ) as server:
                server.wait_until_ready()
                with headrace.Client(server.addresses[0]) as client:
                    for name in names:
                        assert (
                            _ask(client, CONVERSATIONS[name], as_text=True)
                            == (expected[family][name])
                        )
                    conversation = CONVERSATIONS["call_answered"]
                    result = client.generate(
                        conversation.messages,
                        tools=conversation.tools or [],
                        truncate_prompt_to=1500,
                        temperature=0,
                        max_tokens=16,
                    )
                    outputs.append((result.usage.prompt_tokens, result.token_ids))
        assert outputs[0] == outputs[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_go_programs_get_transformers_prompts(
    processes: list[dict[str, str]], expected: Prompts, tmp_path: Path
) -> None:
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    program = tmp_path / "tokenize"
    built = subprocess.run(
        ["go", "build", "-o", str(program), "./cmd/tokenize"],
        cwd=ROOT / "clients" / "go",
        env=os.environ | {"CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    lines = [
        json.dumps(
            {
                "messages": conversation.messages,
                "tools": conversation.tools or [],
                "template_arguments": conversation.arguments,
                **conversation.options,
            },
            ensure_ascii=False,
        )
        for conversation in CONVERSATIONS.values()
    ]
    for addresses in processes:
        made: Prompts = {}
        for family, address in addresses.items():
            done = subprocess.run(
                [str(program), "--target", address],
                input="\n".join(lines),
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode in (0, 1), done.stderr
            answers = [json.loads(line) for line in done.stdout.splitlines()]
            made[family] = {
                name: answer.get("token_ids")
                for name, answer in zip(CONVERSATIONS, answers, strict=True)
            }
        assert made == expected
