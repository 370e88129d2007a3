"""A config file: the options of `headrace-server serve` in TOML.

    [network]                          # a heading of `serve --help`, in lowercase with dashes
    listen = ["0.0.0.0:50051"]         # a flag without its dashes; a repeatable flag is a list
    tls-cert = "/etc/headrace/cert.pem"

    [process]
    log-level = "debug"

    --config FILE ──▶ `filled` ──▶ Given, where flags and variables win
                      `document` ◀── Given, for `headrace-server config --print`
                      `compare`  ◀── two of them: what SIGHUP changes, and what needs a restart

The keys, their types and their bounds are those of the flags (`service.command.flags`). A file is
checked key by key before it is used, and all of its mistakes are reported together. A config file
cannot include another.
"""

from __future__ import annotations

import difflib
import json
import re
import stat
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, get_args

from engine.contract.errors import ConfigError
from engine.contract.option_fields import check_value
from service.command.flags import FILE, Flag, Given, flags, plain
from service.door.watched_files import read as read_file

MAX_FILE_BYTES = 64 << 10
"""The largest size of the file: four times the size of all options with their descriptions."""
MAX_LINE_BYTES = 1024
"""The largest size of a line. The parser's time grows with the square of the number of parts of a
dotted key (a.b.c.…), and a key is on one line. This limit reduces the longest time for a file from
20 s to about one second.
"""
_MAX_PROBLEMS = 10
_MAX_SHOWN = 64
_DOOR_HAS = ("tls_cert", "tls_key")
"""The options that the HTTP door's process received when it was started."""
_MAX_BITS = 64
_BARE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INCLUDES = (FILE, "include", "includes", "import", "extends")
_KINDS = {
    str: 'text in quotes, as in "a"',
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple[str, ...]: 'a list of texts, as in ["a", "b"]',
}
_WIDTH = 98


def filled(given: Given, path: str | None = None) -> Given:
    """Read the config file and return the options with its values. `path`: read this file instead
    of the one that the options name.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong.
    """
    path = given[FILE] if path is None else path
    return given if path is None else given.with_file(path, _read(path))


def _read(path: str) -> dict[str, Any]:
    """Return the values that a file sets, by field, in the same format as flags."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ConfigError(path, "is not a file that SIGHUP could read again")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(path, f"cannot be read: {reason}") from error
    encoded = read_file(FILE, path, MAX_FILE_BYTES)
    for number, line in enumerate(encoded.split(b"\n"), 1):
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(
                path,
                f"has more than {MAX_LINE_BYTES:,} bytes in line {number}; a list may have several "
                "lines",
            )
    try:
        content = tomllib.loads(encoded.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(path, f"is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise ConfigError(path, "has lists or tables that are nested too deeply") from error
    except ValueError as error:  # not only TOMLDecodeError: numbers may be too long for Python
        raise ConfigError(path, f"is not TOML: {error}") from error
    found: dict[str, Any] = {}
    problems: list[str] = []
    for told in _entries(content, found):
        problems.append(told)
        if len(problems) == _MAX_PROBLEMS:
            problems.append("no more is looked at")
            break
    if problems:
        raise ConfigError(path, f"\n{path}: ".join(problems))
    return found


def _entries(content: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Put the values that a file's content sets into `found`, by field. Yield each problem."""
    keys = {flag.name: flag for flag in flags().values() if flag.field != FILE}
    sections = list(dict.fromkeys(flag.section for flag in keys.values()))
    for section, entries in content.items():
        if section not in sections:
            yield _outside(section, entries, keys, sections)
        elif not isinstance(entries, dict):
            yield f"[{section}] is {_shown(entries)}; it must be a section: [{section}], and keys"
        else:
            for key, value in entries.items():
                flag = keys.get(key)
                if flag is None or flag.section != section:
                    yield f"[{section}] {_unknown(key, keys)}"
                    continue
                try:
                    found[flag.field] = _checked(flag, value)
                except ConfigError as error:
                    yield flag.place + str(error).removeprefix(f"{flag.field}:")


def _outside(name: str, value: Any, keys: dict[str, Flag], sections: list[str]) -> str:
    """Return the problem with an entry that is in none of the sections."""
    if not isinstance(value, dict | list):
        return f"(outside of a section) {_unknown(name, keys)}"
    known = ", ".join(f"[{one}]" for one in sections)
    near = difflib.get_close_matches(name[:_MAX_SHOWN], sections, 1)
    meant = f"did you mean [{near[0]}]? There are {known}" if near else f"there are {known}"
    return f"[{_name(name)}] is not a section; {meant}"


def _unknown(key: str, keys: dict[str, Flag]) -> str:
    """Return the problem with a key that is in the wrong section or does not exist."""
    if key in keys:
        return f"{key} belongs in the section [{keys[key].section}]"
    if key in _INCLUDES:
        return f"{key} is not a key: a config file includes no other; write all options into one"
    wanted = key[:_MAX_SHOWN].replace("_", "-").lstrip("-")
    near = [wanted.removeprefix("no-")]
    if near[0] not in keys:
        near = difflib.get_close_matches(wanted, keys, 1)
    if not near:
        return f"{_name(key)} is not an option; `headrace-server config --print` shows all"
    off = " = false" if wanted == f"no-{near[0]}" else ""
    return f"{_name(key)} is not an option; did you mean {keys[near[0]].place}{off}?"


def _name(key: str) -> str:
    return key if _BARE.fullmatch(key) else repr(key[:_MAX_SHOWN])


def _checked(flag: Flag, value: Any) -> Any:
    """Return the value of a key, in the same format as its flag. Raises ConfigError."""
    [kind] = [one for one in _kinds(flag) if one is not NoneType]
    octal = flag.option.base == 8
    if octal:
        kind = str  # a number would be another one without its 0o
    fits = {
        str: isinstance(value, str),
        bool: isinstance(value, bool),
        int: _is_number(value) and isinstance(value, int),
        float: _is_number(value),
    }
    if (kind in fits and not fits[kind]) or (kind not in fits and not _is_texts(value)):
        bounds = flag.option.bounds(flag.field)
        words = f'an octal number in quotes, as in "{flag.default:04o}"' if octal else _KINDS[kind]
        told = f"is {_shown(value)}; it must be {words}"
        raise ConfigError(flag.field, f"{told}, {bounds}" if bounds else told)
    check_value(flag.field, flag.option, flag.read(value), flag.default)
    return float(value) if kind is float else value


def _kinds(flag: Flag) -> tuple[Any, ...]:
    return (flag.kind,) if flag.kind in _KINDS else get_args(flag.kind)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or value.bit_length() <= _MAX_BITS


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _shown(value: Any) -> str:
    """Return a value in words, shortened for display."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, datetime | date | time):
        return f"a date or a time, {value}"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "a number of more than 64 bits"
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"


def document(given: Given) -> str:
    """Return a config file with all options, their values and their descriptions, which `filled`
    can read.

    Raises:
        ConfigError: a value is text that UTF-8 cannot encode.
    """
    lines = _comment(
        "The options of `headrace-server serve --config FILE`. A flag wins over its variable, "
        "that over this file. SIGHUP reads it again; what it changes then is said at the key, and "
        "all else needs a restart."
    )
    section = ""
    for flag in flags().values():
        if flag.field == FILE:
            continue
        if flag.section != section:
            section = flag.section
            lines += ["", f"[{section}]"]
        value = given[flag.field]
        lines += ["", *_comment(" ".join(filter(None, (flag.told(), flag.option.more))))]
        if flag.option.reloads:
            lines += _comment(f"SIGHUP changes it {flag.option.reloads}.")
        if value is None:
            lines += [*_comment(f"Without it: {flag.absent}."), f"#{flag.name} ="]
        else:
            lines.append(f"{flag.name} = {_toml(flag, value)}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        plain(text),
        _WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _toml(flag: Flag, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_toml(flag, one) for one in value)}]"
    if not isinstance(value, str):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(flag.field, f"is {value!r}, which a file in UTF-8 cannot say") from error
    return text


class _Values(Protocol):
    def __getitem__(self, field: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Changes:
    """The differences between two readings of the options: the values before and after, by field.

    Attributes:
        now: the options that a server can change while it serves.
        later: the options that need a restart.
    """

    now: Mapping[str, tuple[Any, Any]]
    later: Mapping[str, tuple[Any, Any]]

    @staticmethod
    def told(changes: Mapping[str, tuple[Any, Any]]) -> str:
        """Return some of these changes in words."""
        return ", ".join(
            f"{flags()[field].name} ({_told(before)} → {_told(after)})"
            for field, (before, after) in changes.items()
        )


def compare(before: _Values, after: _Values) -> Changes:
    """Return the differences between two readings of the options. An option that is set in only one
    of them needs a restart, as does a limit per identity that changes to or from 0.
    """
    now: dict[str, tuple[Any, Any]] = {}
    later: dict[str, tuple[Any, Any]] = {}
    for field, flag in flags().items():
        change = before[field], after[field]
        if field == FILE or change[0] == change[1]:
            continue
        is_there = None not in change and not (field.endswith("_per_identity") and 0 in change)
        may = flag.option.reloads and is_there
        if field in _DOOR_HAS and before["openai"] is not None:
            may = False
        (now if may else later)[field] = change
    return Changes(now, later)


def _told(value: Any) -> str:
    if value is None:
        return "none"
    text = " ".join(value) or "none" if isinstance(value, list) else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
