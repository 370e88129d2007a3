from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import headrace
import pytest
from headrace.cli.app import app
from typer.testing import CliRunner, Result

from tests.clients.python.command import lines, start, write
from tests.clients.python.scripted import WAIT, ScriptedServer

Run = Callable[..., Result]


@pytest.fixture
def run(server: ScriptedServer) -> Run:
    def call(*words: str | Path, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, ["--target", server.target, *map(str, words)], input=stdin)

    return call


# ---- generate ----


def test_generate(run: Run, tmp_path: Path) -> None:
    assert run("generate", "to be or", "-m", "2").stdout == "to be\n"
    assert run("generate", stdin="from stdin").stdout == "from stdin\n"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("from a file")
    assert run("generate", f"@{prompt}").stdout == "from a file\n"
    found = json.loads(run("generate", "a b", "--stop", "b", "--json").stdout)
    assert (found["text"], found["stop_string"], found["usage"]["completion_tokens"]) == (
        "a b",
        "b",
        2,
    )
    assert "2 generated, ended by stop" in run("generate", "a b", "--stats").stderr


def test_generate_as_chat(run: Run, server: ScriptedServer) -> None:
    assert run("generate", "hi there", "--system", "Be brief.", "-o", "n=2").exit_code == 0
    spec = server.specs[0]
    assert [message.content for message in spec.chat.messages] == ["Be brief.", "hi there"]
    assert spec.n == 2


def test_generate_with_a_form(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    words = ("generate", "a b", "-n", "2", "--priority", "-3")
    said = run(*words, "--json-schema", f"@{schema}").stdout
    assert said == "a b\n--- 1\n\n"
    run("generate", "a", "--choice", "x", "--choice", "y")
    run("generate", "a", "--json-object")
    run("generate", "a", "--regex", "a+")
    run("generate", "a", "--grammar", "start: x")
    first, *rest = server.specs
    assert (first.n, first.scheduling.priority) == (2, -3)
    assert first.structured_output.json_schema == '{"type": "object"}'
    assert list(rest[0].structured_output.choice.choices) == ["x", "y"]
    assert rest[1].structured_output.json_object
    assert rest[2].structured_output.regex == "a+"
    assert rest[3].structured_output.grammar == "start: x"
    assert run("generate", "a", "--regex", "a", "--json-object").exit_code == 1
    assert run("generate", "a", "--json-schema", "@/no/such/file").exit_code == 2


def test_errors_are_lines_and_codes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run("generate", "refuse")
    assert refused.exit_code == 1
    assert "sampling.top_p: must be above 0" in refused.stderr
    assert "e-1" in run("generate", "fail").stderr
    assert run("generate", "x", "-o", "colour=1").exit_code == 2
    assert run("generate", "@/no/such/file").exit_code == 2
    gone = CliRunner().invoke(app, ["--target", "127.0.0.1:1", "generate", "x"])
    assert gone.exit_code == 3
    assert "cannot reach a Headrace server at 127.0.0.1:1" in gone.stderr
    assert "make run" in gone.stderr
    clear = CliRunner().invoke(app, ["--target", "a.example:1", "--token", "t", "generate", "x"])
    assert (clear.exit_code, "clear text" in clear.stderr) == (2, True)


def test_the_target_comes_from_the_environment(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TARGET", server.target)
    assert CliRunner().invoke(app, ["generate", "hello"]).stdout == "hello\n"


def test_the_target_may_follow_the_command(server: ScriptedServer) -> None:
    words = ["generate", "hello", "--target", server.target]
    assert CliRunner().invoke(app, words).stdout == "hello\n"


def test_help_and_version(run: Run) -> None:
    for command in ((), ("generate",), ("chat",), ("batch",), ("tour",)):
        found = run(*command, "--help")
        assert (found.exit_code, "Exit codes" in found.stdout) == (0, True)
    assert run("--version").stdout == f"headrace {headrace.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        *(["top", "-i", value] for value in ("nan", "inf", "-inf", "1e20", "0.01", "-1")),
        *(["control", "drain", "--timeout", value] for value in ("nan", "inf", "1e30", "-1")),
        ["control", "drain", "--reason", "\udcff"],
        ["control", "pause", "--reason", "\udcff"],
        ["control", "cancel", "a", "--identity", "\udcff"],
        ["control", "cancel", "\udcff"],
        ["control", "list", "--identity", "\udcff"],
    ],
    ids=lambda words: repr(" ".join(words)),
)
def test_a_value_that_cannot_be_sent_is_wrong_usage(run: Run, words: list[str]) -> None:
    found = run(*words)
    assert found.exit_code == 2, found.exception
    [line] = found.stderr.splitlines()
    assert line.startswith("headrace: ")


def test_interrupting_generate_cancels(server: ScriptedServer) -> None:
    process = start(server, "generate", "hold on", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == "hold"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 130
        assert "interrupted" in process.stderr.read()
    server.wait_for(lambda: len(server.cancelled) == 1)


def test_what_the_server_cancelled_is_not_whole(server: ScriptedServer, tmp_path: Path) -> None:
    process = start(server, "generate", "hold on", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == "hold"
        server.cancel(server.specs[0].request_id)
        assert process.wait(WAIT) == 1
        assert "the output is not whole" in process.stderr.read()


def test_the_adapter_of_each_command(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "a line"},
        {"prompt": "its own", "adapter": "other"},
    )
    assert run("generate", "a b", "--adapter", "team").exit_code == 0
    assert run("chat", "--adapter", "team", stdin="hello\n").exit_code == 0
    assert run("batch", source, tmp_path / "out.jsonl", "--adapter", "team").exit_code == 0
    assert [spec.adapter for spec in server.specs[:2]] == ["team", "team"]
    assert sorted(spec.adapter for spec in server.specs[2:]) == ["other", "team"]


# ---- chat ----


def test_chat(run: Run, server: ScriptedServer) -> None:
    said = "hello you\n/history\nand again\n/reset\nrefuse\n/nonsense\nlast\n/quit\nnever\n"
    found = run("chat", "--system", "Be kind.", stdin=said)
    assert found.exit_code == 1  # one was refused
    assert found.stdout == "hello you\nand again\nlast\n"
    assert "assistant: hello you" in found.stderr
    assert "top_p is wrong" in found.stderr
    assert "no such command: /nonsense" in found.stderr
    contents = [[m.content for m in spec.chat.messages] for spec in server.specs]
    assert contents == [
        ["Be kind.", "hello you"],
        ["Be kind.", "hello you", "hello you", "and again"],
        ["Be kind.", "refuse"],
        ["Be kind.", "last"],
    ]


def test_chat_that_goes_well_or_fails_on_its_way(run: Run) -> None:
    assert run("chat", stdin="hello you\n/nonsense\n").exit_code == 0
    assert run("chat", stdin="fail now\nhello you\n").exit_code == 1


def test_interrupting_chat_cancels_the_answer_alone(server: ScriptedServer) -> None:
    process = start(
        server, "chat", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hold on\n")
        process.stdin.flush()
        assert process.stdout.read(4) == "hold"
        process.send_signal(signal.SIGINT)
        server.wait_for(lambda: len(server.cancelled) == 1)
        out, err = process.communicate("still there\n", timeout=WAIT)
    assert out == "\nstill there\n"
    assert "(cancelled)" in err
    assert process.returncode == 0


# ---- batch ----


def test_batch(run: Run, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "one two three", "max_tokens": 2},
        "not json",
        {"prompt": "no id"},
        "",
        {"id": "c", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "d", "token_ids": [5]},
        {"id": "e", "prompt": "refuse"},
        {"id": "f", "prompt": "x", "colour": 1},
        {"id": "g"},
        "[1]",
    )
    out = tmp_path / "out.jsonl"
    found = run("batch", source, out, "--keep-order")
    assert found.exit_code == 1
    assert "4 done, 5 failed, 0 skipped" in found.stderr
    results = lines(out)
    assert [r["id"] for r in results] == ["a", 2, 3, "c", "d", "e", "f", "g", 10]
    assert [r.get("text") or r["error"]["code"] for r in results] == [
        "one two", "INVALID_ARGUMENT", "no id", "hi", "5",
        *["INVALID_ARGUMENT"] * 4,
    ]  # fmt: skip
    assert results[5]["error"]["field_violations"][0]["field"] == "sampling.top_p"
    assert run("batch", source, out).exit_code == 2


def test_batch_resumes(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *({"id": i, "prompt": f"n {i}"} for i in range(5)))
    out = write(
        tmp_path / "out.jsonl", {"id": 1, "text": "old"}, {"id": 2, "error": {}}, '{"id": 3, "te'
    )
    found = run("batch", source, out, "--resume")
    assert (found.exit_code, "4 done, 0 failed, 1 skipped" in found.stderr) == (0, True)
    assert {r["id"]: r["text"] for r in lines(out)} == {
        0: "n 0", 1: "old", 2: "n 2", 3: "n 3", 4: "n 4",
    }  # fmt: skip
    assert len(server.specs) == 4


def test_batch_through_pipes(run: Run) -> None:
    found = run("batch", "-", "-", stdin='{"id": "p", "prompt": "a b"}\n')
    assert json.loads(found.stdout)["text"] == "a b"


def test_interrupting_a_batch_leaves_a_valid_file(server: ScriptedServer, tmp_path: Path) -> None:
    prompts = [f"n {i}" for i in range(20)] + ["hold on"] * 10
    source = write(tmp_path / "in.jsonl", *({"id": i, "prompt": p} for i, p in enumerate(prompts)))
    out = tmp_path / "out.jsonl"
    process = start(server, "batch", source, out, stderr=subprocess.PIPE)
    with process:
        server.wait_for(lambda: len(server.live) == 10)
        while len(out.read_text().splitlines()) < 20:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 130
    assert not server.live
    assert len(server.cancelled) == 10
    assert sorted(r["id"] for r in lines(out)) == list(range(20))


@pytest.mark.parametrize("count", [5, 500])
def test_a_batch_without_a_server(tmp_path: Path, count: int) -> None:
    source = write(tmp_path / "in.jsonl", *({"prompt": "x"} for _ in range(count)))
    found = CliRunner().invoke(
        app, ["--target", "127.0.0.1:1", "batch", str(source), str(tmp_path / "out.jsonl")]
    )
    assert found.exit_code == 3
    assert "cannot reach" in found.stderr
