"""`headrace batch`: what is refused before the output is touched, ids, bad lines, and pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.cli.app import app
from headrace.v1 import generation_service_pb2 as s
from typer.testing import CliRunner, Result

from tests.clients.python.command import lines, start, write
from tests.clients.python.scripted import WAIT, ScriptedServer

Run = Callable[..., Result]
OLD = '{"id": "old", "text": "precious"}\n'


@pytest.fixture
def run(server: ScriptedServer) -> Run:
    def call(*words: str | Path, stdin: str | bytes | None = None) -> Result:
        words = ("--target", server.target, "batch", *words)
        return CliRunner().invoke(app, list(map(str, words)), input=stdin)

    return call


def texts(path: Path) -> dict[Any, str]:
    """By id: the text, or the field that an error names."""
    return {
        found["id"]: found["error"]["field_violations"][0]["field"]
        if "error" in found
        else found["text"]
        for found in lines(path)
    }


# ---- what is refused before the output is touched ----


@pytest.mark.parametrize("flag", [None, "--resume", "--overwrite"])
@pytest.mark.parametrize("kind", ["same", "symbolic", "hard"])
def test_the_input_is_never_the_output(
    run: Run, tmp_path: Path, kind: str, flag: str | None
) -> None:
    source = write(tmp_path / "in.jsonl", {"id": "a", "prompt": "x"})
    before = source.read_bytes()
    out = source if kind == "same" else tmp_path / "out.jsonl"
    if kind == "symbolic":
        out.symlink_to(source)
    elif kind == "hard":
        out.hardlink_to(source)
    found = run(source, out, *([flag] if flag else []))
    assert found.exit_code == 2
    assert source.read_bytes() == before
    if flag:
        assert "is the file of the requests itself" in found.stderr


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_the_standard_input_is_never_the_output(
    server: ScriptedServer, tmp_path: Path, flag: str
) -> None:
    source = write(tmp_path / "in.jsonl", {"id": "a", "prompt": "x"})
    before = source.read_bytes()
    with source.open("rb") as stdin, start(server, "batch", "-", source, flag, stdin=stdin) as one:
        assert one.wait(WAIT) == 2
    assert source.read_bytes() == before


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
@pytest.mark.parametrize(
    "words",
    [
        ["-o", "request_id=a"],
        ["-o", "top_k=many"],
        ["-o", "colour=red"],
        ["-o", "tools=5"],
        ["--stop", "\udcff"],
        ["-o", "json_object=true", "-o", "regex=a"],
        ["--max-in-flight", "0"],
        ["--ca", "/no/such/file"],
        ["--ca", "{bad}"],
        ["--client-cert", "{bad}", "--client-key", "{bad}"],
        ["--client-cert", "{bad}"],
        ["--token", "a\nb", "--insecure"],
        ["--target", "http://a.example"],
        ["--resume", "--overwrite"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_leaves_the_output(
    run: Run, tmp_path: Path, words: list[str], flag: str
) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "x"})
    bad = write(tmp_path / "bad.pem", "nothing")
    out = tmp_path / "out.jsonl"
    half = OLD + '{"id": 3, "te'
    out.write_text(half)
    found = run(source, out, flag, *(word.format(bad=bad) for word in words))
    assert found.exit_code == 2, found.output
    assert out.read_text() == half
    assert sorted(os.listdir(tmp_path)) == ["bad.pem", "in.jsonl", "out.jsonl"]


def test_files_that_cannot_be(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "x"})
    out = tmp_path / "out.jsonl"
    out.write_text(OLD)
    for words in (
        (source, tmp_path / "no" / "out.jsonl"),
        (source, tmp_path / "no" / "out.jsonl", "--resume"),
        (source, tmp_path, "--overwrite"),
        (source, tmp_path, "--resume"),
        (source, "-", "--resume"),
        (tmp_path / "no.jsonl", out, "--overwrite"),
        (tmp_path, out, "--overwrite"),
    ):
        found = run(*words)
        assert found.exit_code == 2, (words, found.output)
        assert found.stderr.startswith("headrace: ")
    assert out.read_text() == OLD
    assert server.specs == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_told(run: Run, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "x"})
    found = run(source, "/dev/full", "--overwrite")
    assert found.exit_code == 1
    assert found.stderr.startswith("headrace: cannot write the results: ")


# ---- ids ----


def test_ids_differ_by_type_and_stand_once(run: Run, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"id": "2", "prompt": "text"},
        {"prompt": "second line"},
        {"id": None, "prompt": "third line"},
        {"id": "2", "prompt": "again"},
        {"id": 3, "prompt": "taken by a line"},
        {"id": 7, "prompt": "seven"},
        {"prompt": "its number is taken"},
        {"id": 1.0, "prompt": "no id"},
        {"id": True, "prompt": "no id"},
    )
    out = tmp_path / "out.jsonl"
    assert run(source, out).exit_code == 1
    good = {found["id"]: found["text"] for found in lines(out) if "error" not in found}
    assert good == {"2": "text", 2: "second line", 3: "third line", 7: "seven"}
    bad = [found["id"] for found in lines(out) if "error" in found]
    assert sorted(bad, key=str) == ["2", 3, 7, 8, 9]
    for found in lines(out):
        if "error" in found:
            assert found["error"]["field_violations"][0]["field"] == "id"


def test_resuming_skips_no_failure(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"id": "2", "prompt": "text"},
        {"prompt": "second line"},
        {"id": "2", "prompt": "again"},
        {"id": "r", "prompt": "refuse"},
    )
    out = write(tmp_path / "out.jsonl", {"id": "2", "text": "old"})
    for _ in range(2):
        found = run(source, out, "--resume")
        assert found.exit_code == 1
        results = lines(out)
        assert [r["id"] for r in results if "error" not in r] == ["2", 2]
        assert sorted(r["id"] for r in results if "error" in r) == ["2", "r"]
    assert [spec.text.text for spec in server.specs] == ["second line", "refuse", "refuse"]


def test_an_output_that_ends_amid_a_character(
    run: Run, server: ScriptedServer, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", *({"id": i, "prompt": f"n {i}"} for i in range(3)))
    target = tmp_path / "target.jsonl"
    target.write_bytes('{"id": 1, "text": "né"}\n{"id": 2, "text": "né'.encode()[:-1])
    target.chmod(0o640)
    out = tmp_path / "out.jsonl"
    out.symlink_to(target)
    found = run(source, out, "--resume")
    assert (found.exit_code, found.stderr) == (0, "2 done, 0 failed, 1 skipped\n")
    assert texts(target) == {0: "n 0", 1: "né", 2: "n 2"}
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl", "target.jsonl"]
    assert out.is_symlink()


# ---- bad lines ----


@pytest.mark.parametrize("piped", [False, True])
def test_a_bad_line_is_its_own_error(run: Run, tmp_path: Path, piped: bool) -> None:
    deep = '{"id": "deep", "prompt": "x", "json_schema": ' + "[" * 900 + "]" * 900 + "}"
    nested: dict[str, Any] = {"id": "n", "messages": [{"role": "user", "content": "x"}]}
    nested["template_arguments"] = json.loads('{"a":' * 60 + "1" + "}" * 60)
    given = b"\n".join(
        [
            b'{"id": "a", "prompt": "one"}',
            b'{"id": "b", "prompt": "caf\xe9"}',
            rb'{"id": "\ud800", "prompt": "x"}',
            rb'{"id": "c", "prompt": "\udc00"}',
            rb'{"id": "d", "\ud800": 1, "prompt": "x"}',
            b"{",
            b"[" * 100_000,
            b'{"id": "e", "prompt": "x", "temperature": NaN}',
            b'{"id": "f", "messages": [1, 2]}',
            b'{"id": "g", "token_ids": [{"role": "user", "content": "x"}]}',
            b'{"id": "h", "token_ids": [true]}',
            rb'{"id": "i", "prompt": "\ud83d\ude00"}',
            deep.encode(),
            json.dumps(nested).encode(),
            b'{"id": "z", "prompt": "last"}\r',
        ]
    )
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(given)
    found = run("-" if piped else source, out, stdin=given if piped else None)
    assert found.exit_code == 1
    told = texts(out)
    assert told.pop("deep")  # how deep a value may be is Python's to say
    assert told == {
        "a": "one", 2: "line", 3: "line", 4: "line", 5: "line", 6: "line", 7: "line", 8: "line",
        "f": "messages", "g": "token_ids", "h": "token_ids", "i": "😀", "n": "x", "z": "last",
    }  # fmt: skip


# ---- pipes, and Ctrl-C ----


def test_results_do_not_wait_for_the_next_line(server: ScriptedServer) -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start(server, "batch", "-", "-", **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for word in ("one", "two"):
            process.stdin.write(json.dumps({"prompt": word}) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["text"] == word
        process.send_signal(signal.SIGINT)  # its input is still open
        assert process.wait(WAIT) == 130
        assert process.stderr.read() == "\nheadrace: interrupted\n"
        assert process.stdout.read() == ""


def test_an_interrupt_keeps_what_waits_for_an_earlier_one(
    server: ScriptedServer, tmp_path: Path
) -> None:
    source = write(
        tmp_path / "in.jsonl",
        *({"id": i, "prompt": p} for i, p in enumerate(["hold on", "one", "hold on"])),
    )
    out = tmp_path / "out.jsonl"
    words = ("batch", source, out, "--keep-order", "--max-in-flight", "2")
    with start(server, *words, stderr=subprocess.PIPE) as process:
        # The third is sent when the client knows that the second has ended.
        server.wait_for(lambda: len(server.live) == 2 and len(server.specs) == 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 130
    assert texts(out) == {1: "one"}
    assert len(server.cancelled) == 2


def test_what_the_server_cancelled_runs_again(
    server: ScriptedServer, run: Run, tmp_path: Path
) -> None:
    source = write(
        tmp_path / "in.jsonl", {"id": "a", "prompt": "hold on"}, {"id": "b", "prompt": "x"}
    )
    out = tmp_path / "out.jsonl"
    process = start(server, "batch", str(source), str(out), stderr=subprocess.PIPE)
    with process:
        assert process.stderr is not None
        server.wait_for(lambda: len(server.specs) == 2)
        [held] = [one.request_id for one in server.specs if one.text.text == "hold on"]
        server.wait_for(lambda: server.cancel(held) == s.CANCEL_STATUS_CANCELLED)
        assert process.wait(WAIT) == 1
        assert "1 done, 1 failed" in process.stderr.read()
    assert {one["id"]: one["finish_reason"] for one in lines(out)} == {
        "a": "cancelled",
        "b": "stop",
    }
    write(source, {"id": "a", "prompt": "y"}, {"id": "b", "prompt": "x"})
    assert run(source, out, "--resume").exit_code == 0
    assert {one["id"]: one["text"] for one in lines(out)} == {"a": "y", "b": "x"}
