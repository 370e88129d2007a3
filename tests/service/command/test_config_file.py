"""Config files, by the command: what they set, what is refused, and what is printed."""

from __future__ import annotations

import os
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.contract.errors import ConfigError
from service.command import cli
from service.command.config_file import MAX_FILE_BYTES, MAX_LINE_BYTES, filled
from service.command.flags import FILE, Given, describe, flags

KEYS = {name: flag for name, flag in flags().items() if name != FILE}


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code of the command, and what it says."""
    result = CliRunner().invoke(cli.app, ["config", *arguments], env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def printed(*arguments: str, **environment: str) -> dict[str, Any]:
    """What `config --print` prints, read as TOML."""
    code, text = run("--print", *arguments, **environment)
    assert code == 0
    return tomllib.loads(text)


def wrong(path: Path, content: str | bytes) -> str:
    """What is said of a file that is refused, without the path at its beginning."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        filled(Given({}), str(path))
    told = describe(caught.value)
    assert told.startswith(f"{path}: ")
    return told.removeprefix(f"{path}: ")


# ---- what is printed -----------------------------------------------------------------------------


def test_all_options_are_printed_with_their_defaults_and_can_be_read_back(tmp_path: Path) -> None:
    code, text = run("--print")
    assert code == 0
    read = tomllib.loads(text)
    assert {key: value for section in read.values() for key, value in section.items()} == {
        flag.name: list(flag.default)
        if isinstance(flag.default, tuple)
        else f"{flag.default:04o}"
        if flag.option.base == 8
        else flag.default
        for flag in KEYS.values()
        if flag.default is not None
    }
    for flag in KEYS.values():
        assert (flag.name in read[flag.section]) is (flag.default is not None)
        block = text.partition(f"\n[{flag.section}]\n")[2].partition("\n[")[0]
        [comment] = re.findall(rf"((?:^# .*\n)+)#?{flag.name} =", block, re.M)
        words = " ".join(comment.replace("#", " ").split())
        assert (
            flag.option.bounds(flag.field) in words.replace("Above", "above") or flag.option.choices
        )
        assert ("SIGHUP changes it" in words) is bool(flag.option.reloads)
        assert ("Without it" in words) is (flag.default is None)
    assert max(map(len, text.splitlines())) <= 100
    assert 2 * len(text.encode()) < MAX_FILE_BYTES
    path = tmp_path / "all.toml"
    path.write_text(text)
    assert run("--check", str(path))[0] == 0
    assert run("--print", "--config", str(path))[1] == text


def test_what_is_set_is_printed_and_can_be_read_back(tmp_path: Path) -> None:
    odd = 'a "quoted"\\ \u20ac \x7f name\t'
    given = (
        *("--served-name", odd, "--listen", "unix:/run/a", "--listen", "127.0.0.1:1"),
        *("--unix-socket-mode", "0600", "--drain-timeout", "0.0001", "--no-prefix-cache"),
        *("--target-step-time", "0", "--control", "--openai"),
    )
    code, text = run("--print", *given, HEADRACE_SERVED_ALIAS="b c")
    assert code == 0
    path = tmp_path / "set.toml"
    path.write_text(text)
    assert run("--print", "--config", str(path)) == (0, text)
    read = tomllib.loads(text)
    assert read["model-and-engine"]["served-name"] == odd
    assert read["model-and-engine"]["served-alias"] == ["b", "c"]
    assert read["network"]["listen"] == ["unix:/run/a", "127.0.0.1:1"]
    assert read["network"]["openai"] == "127.0.0.1:8000"
    assert read["network"]["control"] is True


# ---- which value counts --------------------------------------------------------------------------


def test_a_flag_wins_over_its_variable_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(
        "[network]\nmax-sessions = 1\nmax-watches = 1\nmax-connections = 1\n"
        'listen = ["127.0.0.1:1", "127.0.0.1:2"]\n'
        "[process]\nlog-level = 'debug'\ndrain-timeout = 5\nin-process = true\n"
        "[model-and-engine]\nprefix-cache = false\nasync-batching = false\n"
    )
    by = {"HEADRACE_CONFIG": str(path), "HEADRACE_MAX_SESSIONS": "2", "HEADRACE_MAX_WATCHES": "2"}
    read = printed("--max-sessions", "3", "--no-in-process", "--listen", "127.0.0.1:3", **by)
    network = read["network"]
    assert [network[f"max-{name}"] for name in ("sessions", "watches", "connections")] == [3, 2, 1]
    assert network["listen"] == ["127.0.0.1:3"]
    assert network["message-timeout"] == 20.0
    assert read["process"]["log-level"] == "debug"
    assert read["process"]["drain-timeout"] == 5.0
    assert read["process"]["in-process"] is False
    assert read["model-and-engine"]["prefix-cache"] is False
    assert read["model-and-engine"]["async-batching"] is False
    other = tmp_path / "g.toml"
    other.write_text("[network]\nmax-connections = 7\n")
    assert printed("--config", str(other), **by)["network"]["max-connections"] == 7
    code, said = run("--check", str(path), "--max-sessions", "3", HEADRACE_MAX_WATCHES="2")
    assert (code, "win over what it says of: max-sessions, max-watches." in said) == (0, True)


def test_serve_and_plan_read_it(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text("[network]\nmax-sessions = 0\n")
    for command in ("serve", "plan"):
        result = CliRunner().invoke(cli.app, [command, "--config", str(path)])
        assert result.exit_code == 2
        assert "[network] max-sessions is 0; it must be a whole number, 1 to 1,0" in result.stderr
    path.write_text('[network]\nlisten = ["0.0.0.0:1"]\ntls-cert = "c"\n')
    told = CliRunner().invoke(cli.app, ["serve", "--config", str(path)]).stderr
    assert told.startswith(f"headrace-server: {path}: [network] tls-cert: and --tls-key belong")


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[network]\nmax-sessions = 2026-01-02\n", "[network] max-sessions is a date or a time, "),
        ("[network]\nmax-sessions = 07:30:00\n", "time, 07:30:00; it must be a whole number, 1 to"),
        ("[network]\nmax-sessions = true\n", "is true; it must be a whole number, 1 to 1,000,000"),
        ("[network]\nmax-sessions = 1.0\n", "is 1.0; it must be a whole number, 1 to 1,000,000"),
        ("[network]\nmax-sessions = '5'\n", "is '5'; it must be a whole number, 1 to 1,000,000"),
        ("[network]\nmax-sessions = 0\n", "max-sessions is 0; it must be a whole number, 1 to 1,0"),
        (f"[network]\nmax-sessions = 0x{'f' * 900}\n", "is a number of more than 64 bits; it must"),
        ("[network.max-sessions]\na = 1\n", "[network] max-sessions is a table; it must be a whol"),
        ("[[network.max-sessions]]\n", "[network] max-sessions is a list; it must be a whole numb"),
        ("[network]\nkeepalive-interval = nan\n", "is nan; it must be 10 to a day"),
        ("[network]\nkeepalive-interval = '9'\n", "is '9'; it must be a number, 10 to a day"),
        ("[network]\nlisten = 'a:1'\n", 'is \'a:1\'; it must be a list of texts, as in ["a", "b"]'),
        ("[network]\nlisten = [1]\n", "[network] listen is a list; it must be a list of texts"),
        ("[network]\ninsecure = 'yes'\n", "[network] insecure is 'yes'; it must be true or false"),
        ("[network]\ntls-cert = {}\n", "[network] tls-cert is a table; it must be text in quotes"),
        ("[network]\nunix-socket-mode = 660\n", 'an octal number in quotes, as in "0660", 0000 to'),
        ("[network]\nunix-socket-mode = '8'\n", "is '8'; it must be an octal number, 0000 to 0777"),
        ("[process]\nlog-level = 'loud'\n", "log-level is 'loud'; it must be one of debug, info, "),
        (f"[process]\nlog-level = '{'x' * 900}'\n", "x…; it must be one of debug, info, "),
        ("[process]\nlog-level = 3\n", 'log-level is 3; it must be text in quotes, as in "a", one'),
        ("[network]\nmax-sesions = 1\n", "is not an option; did you mean [network] max-sessions?"),
        (
            "[network]\nmax_sessions = 1\n",
            "max_sessions is not an option; did you mean [network] m",
        ),
        ("[network]\n--listen = 1\n", "--listen is not an option; did you mean [network] listen?"),
        ("[process]\nno-prefix-cache = true\n", "mean [model-and-engine] prefix-cache = false?"),
        ("[process]\nmax-sessions = 1\n", "[process] max-sessions belongs in the section [network"),
        ("[process]\nzzz = 1\n", "zzz is not an option; `headrace-server config --print` shows al"),
        ("[process]\n'\\u001b[1m' = 1\n", "'\\\\u001b[1m' is not an option"),
        (
            "max-sessions = 1\n",
            "(outside of a section) max-sessions belongs in the section [networ",
        ),
        (
            "[netwrok]\n",
            "[netwrok] is not a section; did you mean [network]? There are [network], ",
        ),
        ("[[network]]\n", "[network] is a list; it must be a section: [network], and keys"),
        ("network = 1\n", "[network] is 1; it must be a section"),
        (
            "[process]\nconfig = 'f.toml'\n",
            "config is not a key: a config file includes no other; ",
        ),
        ("include = 'f.toml'\n", "include is not a key: a config file includes no other; "),
        (
            "[network]\nmax-sessions = 1\nmax-sessions = 2\n",
            "is not TOML: Cannot overwrite a value",
        ),
        ("[network]\n[network]\n", "is not TOML: Cannot declare ('network',) twice"),
        ("[network]\nmax-sessions 1\n", "is not TOML: "),
        ("a = " + "[" * 900, "has lists or tables that are nested too deeply"),
        (f"a = {'1' * 1000}\n" * 5, "is not TOML: Cannot overwrite"),
        (b"[network]\nlisten = ['\xff']\n", "is not UTF-8 (byte 21)"),
        (f"a = '{'x' * MAX_LINE_BYTES}'\n", "has more than 1,024 bytes in line 1; a list may have"),
        ("\n[process]\n" + "a." * 600 + "b = 1", "has more than 1,024 bytes in line 3; a list may"),
    ],
)
def test_mistakes_are_told_with_the_place_and_the_remedy(
    content: str | bytes, words: str, tmp_path: Path
) -> None:
    told = wrong(tmp_path / "f.toml", content)
    assert words in told.replace("\\x1b", "\\\\u001b")
    assert len(told) < 400
    assert "\x1b" not in told


def test_all_mistakes_are_told_at_once_up_to_a_number(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    told = wrong(path, "[network]\nmax-sessions = 0\nmax-watches = 0\nlistn = []\n")
    assert [line.rpartition("] ")[2].split()[0] for line in told.splitlines()] == [
        "max-sessions",
        "max-watches",
        "listen?",
    ]
    began = time.process_time()
    told = wrong(path, "[network]\n" + "".join(f"max-session{i} = 0\n" for i in range(3000)))
    assert len(told.splitlines()) == 11
    assert told.endswith("no more is looked at")
    assert time.process_time() - began < 5


def test_what_is_no_file_of_a_modest_size_is_not_read(tmp_path: Path) -> None:
    big = tmp_path / "big.toml"
    with big.open("wb") as file:
        file.truncate(10 << 20)
    for path, words in (
        (str(big), f"{big} has more than 64 KiB"),
        (str(tmp_path), f"{tmp_path}: is not a file that SIGHUP could read again"),
        ("/dev/zero", "/dev/zero: is not a file that SIGHUP could read again"),
        (str(tmp_path / "none"), "none: cannot be read: No such file or directory"),
        ("a\0b", "cannot be read: "),
    ):
        code, said = run("--check", path)
        assert (code, words in said) == (2, True), said
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is not a file that SIGHUP could read again" in run("--check", str(pipe))[1]
    if os.geteuid():  # root may read everything
        big.write_text("")
        big.chmod(0)
        assert "cannot be read: Permission denied" in run("--check", str(big))[1]


def test_the_files_that_it_names_are_checked_too(tmp_path: Path) -> None:
    callers = tmp_path / "callers.toml"
    callers.write_text("[[callers]]\nidentity = 1\n")
    path = tmp_path / "f.toml"
    for content, words in (
        (f"auth-file = '{callers}'", "auth-file: callers[0].identity must be 1 to 64 characters"),
        ("tls-cert = 'no'\ntls-key = 'no'", "tls-cert: no cannot be read: No such file or direct"),
        ("listen = ['x']", "listen: 'x' is not an address; write host:port, [IPv6]:port or"),
    ):
        path.write_text(f"[network]\n{content}\n")
        code, said = run("--check", str(path))
        assert code == 2
        assert said.startswith(f"headrace-server: {path}: [network] {words}")


# ---- what a reload could not do ------------------------------------------------------------------


def test_two_files_are_compared(tmp_path: Path) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text("[network]\nmax-sessions = 5\n[process]\nlog-level = 'info'\n")
    new.write_text("[network]\nmax-sessions = 6\n")
    assert run("--check", str(new), "--against", str(old)) == (
        0,
        f"{new} is in order and sets 1 options.\nSIGHUP would change: max-sessions (5 → 6).\n",
    )
    new.write_text("[network]\nmax-queue-size = 6\n".replace("network", "requests-and-results"))
    code, said = run("--check", str(new), "--against", str(old))
    assert code == 3
    assert said.splitlines()[1:] == [
        "SIGHUP would change: max-sessions (5 → 1024).",
        "A restart would be needed for: max-queue-size (1024 → 6).",
    ]
    assert run("--check", str(old), "--against", str(tmp_path / "none"))[0] == 2


@pytest.mark.parametrize("arguments", [(), ("--against", "f"), ("--print", "--against", "f")])
def test_the_command_says_what_it_takes(arguments: tuple[str, ...]) -> None:
    code, said = run(*arguments)
    assert (code, "give --print or --check FILE" in said) == (2, True)
