"""What the documents have to paste works as it stands against `make run`, and says what it should:
each shell command and each Python block of README.md, docs/chat.md, docs/offline.md and
clients/python/README.md, and the commands that a server prints when it is ready. (docs/recipes.md:
tests/service/test_recipes.py.)

A command or block without an expectation fails the test of its document. Those whose expectation is
what the demo model says are marked `answers`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.service.readme import README, ROOT, code_blocks, lay_out, shell_commands
from tests.service.real_server import (
    WAIT_S,
    RealServer,
    clean_environment,
    demo_server,
    real_server,
)

CHAT = ROOT / "docs" / "chat.md"
OFFLINE = ROOT / "docs" / "offline.md"
PYTHON = ROOT / "clients" / "python" / "README.md"
EXAMPLES = ROOT / "clients" / "python" / "examples"
DEFAULT = "127.0.0.1:50051"
TOOLS = f"{ROOT / '.tools' / 'bin'}:{os.environ['PATH']}"
STORY = r"(\w+\W+){12}"
"""A dozen words or more."""
NOTHING = r"\A\Z"
RIVER = "A river is a long stream of water"


@dataclass(frozen=True)
class Pasted:
    """A command or a block, and what it says.

    Attributes:
        begins: how it begins.
        says: a regular expression that is found in what it writes (stdout, then stderr); None: it
            is not run here.
        answers: whether that is what the demo model says.
        instead: what is replaced in it so that it ends, or needs no terminal.
        stdin: what is typed.
        why: why it is not run here.
    """

    begins: str
    says: str | None
    answers: bool = False
    instead: tuple[tuple[str, str], ...] = ()
    stdin: str = ""
    why: str = ""


def run(begins: str, says: str, **more: Any) -> Pasted:
    return Pasted(begins, says, **more)


def answer(begins: str, says: str, **more: Any) -> Pasted:
    return Pasted(begins, says, answers=True, **more)


def not_run(begins: str, why: str) -> Pasted:
    return Pasted(begins, None, why=why)


CALLED = r'(?s)\b3 m\b.*read_gauge \{"place": "Ulm"\}\nread_gauge: 3 m\n'
ULM = r'^\{"name": "Anna", "age": 36, "city": "Ulm"\}\n'
SERVES = "it serves; a server of the tests stands for it"
COMMANDS: dict[Path, tuple[Pasted, ...]] = {
    README: (
        not_run("make run", SERVES),
        answer(".venv/bin/headrace tour", r"\n5 of 5 parts in \d+ s\."),
        run('.venv/bin/headrace generate "Once', STORY),
        answer('echo "How high is', CALLED),
        answer(".venv/bin/headrace generate --chat", ULM),
        run(".venv/bin/headrace bench --concurrency 8", r"requests +64 done, 0 refused, 0 failed"),
        not_run("make run MODEL=", SERVES),
        run(
            ".venv/bin/headrace-server models",
            r"^(no models in .*pull OWNER/NAME|MODEL +SIZE +REVISION +SERVED$)",
        ),
        not_run("make test", "it is what runs this"),
        not_run("make test-slow", "it is what runs this"),
        not_run("make test-clients", "CI runs it"),
        run('.venv/bin/headrace generate "The river"', STORY),
        run(
            '.venv/bin/headrace generate "Is the river',
            r"^(yes|no)\n--- 1\n(yes|no)\n--- 2\n(yes|no)\n$",
        ),
        answer(
            ".venv/bin/headrace chat",
            r"(?i)headrace.*(water|text)",
            stdin="What is a headrace?\n",
        ),
        run(".venv/bin/headrace batch", r"1 done, 0 failed, 0 skipped"),
        run(".venv/bin/headrace bench --concurrency 8", r"requests +50 done, 0 refused, 0 failed"),
        run("grpcurl -plaintext 127.0.0.1:50051 list", r"^headrace\.v1\.GenerationService$"),
        run("grpcurl -plaintext 127.0.0.1:50051 describe", r"rpc StreamResult \("),
        run(
            "grpcurl -plaintext 127.0.0.1:50051 headrace.v1.ModelService/GetModel",
            r'"name": "demo"',
        ),
        run("grpcurl -plaintext -d @", r'(?s)("finished": \{.*){2}'),
        run("grpcurl -plaintext -d @", r'(?s)("text": "(yes|no)".*){2}'),
    ),
    CHAT: (
        answer(
            "grpcurl -plaintext -d @",
            r'(?s)"FINISH_REASON_TOOL_CALLS".*'
            r'"name": "read_gauge",\s+"arguments_json": "\{\\"place\\": \\"Ulm\\"\}"',
        ),
        answer("grpcurl -plaintext -d @", r'(?s)"text": "[^"]*\b3 m\b.*"FINISH_REASON_STOP"'),
        answer("grpcurl -plaintext -d @", r'^\{"place": "Ulm"\}$'),
    ),
    PYTHON: (
        not_run("pip install headrace", "it is not published yet, as it says"),
        run('headrace generate "Once', STORY),
        run('headrace generate "Once', STORY),
        run(
            "headrace generate @prompt.txt", r'^\{"request_id": .*"finish_reason": "(stop|length)"'
        ),
        run(
            'headrace generate "Is the river',
            r"^(yes|no)\n--- 1\n(yes|no)\n--- 2\n(yes|no)\n$",
        ),
        run("headrace generate --token-ids", r"^\d+ \d+ (\d+ )+\n$"),
        answer("headrace chat --system", f"^{RIVER}", stdin="What is a river?\n"),
        answer(
            "headrace chat --tools",
            CALLED,
            instead=(("gauges.py ", "gauges.py --yes "),),  # nobody is there to be asked
            stdin="How high is the Danube in Ulm?\n",
        ),
        answer(
            'headrace generate "How high',
            r'"function": \{"name": "read_gauge", "arguments": "\{\\"place\\": \\"Ulm\\"\}"\}',
        ),
        run("headrace batch requests.jsonl", r"2 done, 0 failed, 0 skipped"),
        run(
            "headrace bench --rate 20",
            r"requests +\d+ done, 0 refused, 0 failed",
            instead=(("--rate 20 --duration 60", "--rate 2 --duration 3"),),
        ),
        run("headrace top", r" ready live=\d+ running=\d+", instead=(("top  ", "top -c 1 "),)),
        answer("headrace tour", r"\n5 of 5 parts in \d+ s\."),
        run("headrace control list", NOTHING),
    ),
}
BLOCKS: dict[Path, tuple[Pasted, ...]] = {
    README: (
        answer("import headrace\n", rf"(?s)\w+ \w+ \w+.*{RIVER}.*A volcano is.*An owl is"),
        run("import engine\n", r"(?i)^req_0 \[\d+(, \d+)*\] \S*(stop|length)\nreq_1 \["),
    ),
    CHAT: (
        answer("import headrace\n", r"\b3 m\b"),
        answer(
            "import json\n",
            r"'name': 'read_gauge', 'arguments': '\{\"place\": \"Ulm\"\}'.*'content': '3 m'\}\]$",
        ),
    ),
    PYTHON: (
        run("import headrace\n", r"(?s)\w+ \w+ \w+.* (length|stop) \d+\n$"),
        answer("import headrace\nfrom", r"(?i)headrace|water|channel"),
        run(
            "import headrace\n",
            r"^(\['\{\"deep\": (true|false)\}', '\{\"deep\": (true|false)\}'\])\n"
            r"\[\('Once', None\), .*(-\d+\.\d+.*){4}\]\n$",
        ),
        answer(
            "from typing import Literal\n",
            r'(?s)^read_gauge \{"place": "Ulm"(, "unit": "m")?\} 3\.0\n.*\b3(\.0)?\b.* answered\n$',
        ),
        run("import headrace\n", r"(?s)\w+ \w+ \w+.*(length|stop)\n$"),
        answer("import asyncio\n", rf"(?s)\w+ \w+ \w+.*What is a river\? {RIVER}"),
        answer("import headrace\nfrom", r"\A(?s:cancelled .*(stop .*){7})\Z"),
        answer("import headrace\nfrom", r"\A(\d+ [A-Z].*\n){100}\Z"),
        run("import headrace\n", r"\w+ \w+ \w+"),
        run("import headrace\n", r"top_k .*"),
        run("import headrace\n", r"(?s)\w+ \w+ \w+.*\n.*\w+"),
    ),
    OFFLINE: (
        run("import engine\n", NOTHING),
        run(
            "from transformers import AutoTokenizer",
            r"(?i)\A(req_[01] .*\w+ \w+ \w+.* \S*(stop|length)\n){2}\Z",
        ),
        run("from transformers import AutoModel", NOTHING),
        run("with model.continuous_batching", r"^\[\d+(, \d+)*\]\n(\[\d+(, \d+)*\]\n)+$"),
        run("from engine.contract.sampling_params", NOTHING),
        run("from opentelemetry.sdk.metrics", r"headrace\.step\.tokens"),
    ),
}  # fmt: skip


def cases(found: Sequence[str], expected: Sequence[Pasted]) -> list[Any]:
    """Each with its expectation, as far as both go; `assert_each` compares them."""
    return [
        pytest.param(one, pasted, id=pasted.begins, marks=[pytest.mark.answers] * pasted.answers)
        for one, pasted in zip(found, expected, strict=False)
        if pasted.says is not None
    ]


@pytest.fixture(scope="module")
def demo() -> RealServer:
    return demo_server()


@pytest.mark.parametrize("document", COMMANDS, ids=lambda path: path.name)
def test_no_command_is_left_out(document: Path) -> None:
    assert_each(shell_commands("", document), COMMANDS[document])


@pytest.mark.parametrize("document", BLOCKS, ids=lambda path: path.name)
def test_no_block_is_left_out(document: Path) -> None:
    assert_each(code_blocks("python", document), BLOCKS[document])


def assert_each(found: Sequence[str], expected: Sequence[Pasted]) -> None:
    assert [one[: len(pasted.begins)] for one, pasted in zip(found, expected, strict=True)] == [
        pasted.begins for pasted in expected
    ]
    assert all(pasted.says or pasted.why for pasted in expected)


# ---- shell ---------------------------------------------------------------------------------------


def paste(command: str, pasted: Pasted, folder: Path, server: RealServer) -> str:
    """What a command writes: stdout, then stderr."""
    tool = command.split()[0]
    if tool == "grpcurl" and shutil.which(tool, path=TOOLS) is None:
        pytest.skip("needs grpcurl on the PATH")
    if "| jq " in command and shutil.which("jq") is None:
        pytest.skip("needs jq on the PATH")
    for old, new in ((DEFAULT, server.addresses[0]), *pasted.instead):
        assert old == DEFAULT or old in command
        command = command.replace(old, new)
    path = f"{Path(sys.executable).parent}:{TOOLS}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=clean_environment(HEADRACE_TARGET=server.addresses[0], PATH=path),
        input=pasted.stdin,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def check(said: str, pasted: Pasted) -> None:
    assert re.search(pasted.says or "", said, re.M), said


@pytest.mark.parametrize(("command", "pasted"), cases(shell_commands("", README), COMMANDS[README]))
def test_the_readme_s_commands(
    demo: RealServer, command: str, pasted: Pasted, tmp_path: Path
) -> None:
    lay_out(tmp_path)
    if (example := re.search(r"#\s*(\{.*\}) a line$", command)) is not None:
        (tmp_path / "requests.jsonl").write_text(f"{example[1]}\n")
    check(paste(command, pasted, tmp_path, demo), pasted)
    if example is not None:
        [line] = (tmp_path / "results.jsonl").read_text().splitlines()
        assert json.loads(line)["id"] == "a"
        assert json.loads(line)["text"]


@pytest.mark.parametrize(("command", "pasted"), cases(shell_commands("", CHAT), COMMANDS[CHAT]))
def test_the_lines_about_tools(
    demo: RealServer, command: str, pasted: Pasted, tmp_path: Path
) -> None:
    check(paste(command, pasted, tmp_path, demo), pasted)


@pytest.mark.parametrize(("command", "pasted"), cases(shell_commands("", PYTHON), COMMANDS[PYTHON]))
def test_the_python_client_s_commands(
    demo: RealServer, command: str, pasted: Pasted, tmp_path: Path
) -> None:
    """In its folder of examples, as the document says."""
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder)
    check(paste(command, pasted, folder, demo), pasted)


# ---- what a server prints ------------------------------------------------------------------------


def printed(said: str) -> list[str]:
    """The commands that a server prints when it is ready."""
    block = said.partition("Try it")[2].partition("Stop it")[0]
    return [line.strip() for line in block.splitlines() if line.startswith("    ")]


def as_the_readme_has_it(command: str, server: RealServer) -> str:
    target = f" --target {server.addresses[0]}"
    assert command.endswith(target)
    return re.sub(r"\S*headrace (?=\w)", ".venv/bin/headrace ", command.removesuffix(target))


@pytest.mark.answers  # one that calls no tools has one command less
def test_a_server_prints_the_readme_s_commands(demo: RealServer) -> None:
    own = [as_the_readme_has_it(command, demo) for command in printed(demo.said)]
    assert own == shell_commands()[1:6]


@pytest.mark.parametrize("pasted", [
    pytest.param(one, marks=[pytest.mark.answers] * one.answers, id=one.begins)
    for one in COMMANDS[README][1:6]
])  # fmt: skip
def test_the_commands_that_a_server_prints(demo: RealServer, pasted: Pasted) -> None:
    [command] = [
        command
        for command in printed(demo.said)
        if as_the_readme_has_it(command, demo).startswith(pasted.begins)
    ]
    check(paste(command, pasted, ROOT, demo), pasted)


def test_openai_s_lines_that_a_server_prints() -> None:
    """With the engine in the server's own process; its end is as clean as without them."""
    with real_server(
        "--in-process", "--listen", "127.0.0.1:0", "--openai", "127.0.0.1:0"
    ) as server:
        server.wait_until_ready()
        curl, python = printed(server.said)[-2:]
        pasted = run("curl", r'"role":"assistant","content":"\w+\W+\w+')
        assert curl.startswith(pasted.begins)
        check(paste(curl, pasted, ROOT, server), pasted)
        pasted = run("python", r"^\w+\W+\w+")
        assert " -c 'import openai; " in python
        check(paste(python, pasted, ROOT, server), pasted)
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "ERROR" not in server.said


# ---- Python --------------------------------------------------------------------------------------


@pytest.fixture
def in_the_root(demo: RealServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where blocks run. What one sets for the whole process is put back."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("HEADRACE_TARGET", demo.addresses[0])
    monkeypatch.chdir(ROOT)
    yield
    torch.set_num_threads(threads)


def execute(block: str, document: Path, names: dict[str, Any]) -> None:
    exec(compile(block, str(document), "exec"), names)


@pytest.mark.parametrize(
    ("document", "block", "pasted"),
    [
        pytest.param(
            document, *case.values, id=f"{document.parent.name}-{case.id}", marks=case.marks
        )
        for document in (README, CHAT, PYTHON)
        for case in cases(code_blocks("python", document), BLOCKS[document])
    ],
)
@pytest.mark.usefixtures("in_the_root")
def test_the_python_blocks(
    document: Path,
    block: str,
    pasted: Pasted,
    capsys: pytest.CaptureFixture[str],
) -> None:
    execute(block, document, {"__name__": "example"})
    check(capsys.readouterr().out, pasted)


@pytest.mark.usefixtures("in_the_root")
def test_the_blocks_of_the_engine_s_document_run_one_after_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    for block, pasted in zip(code_blocks("python", OFFLINE), BLOCKS[OFFLINE], strict=True):
        execute(block, OFFLINE, names)
        check(capsys.readouterr().out, pasted)
    assert len(names["outputs"]) == 2
    assert names["grammar"].reasoning.max_tokens == 200
