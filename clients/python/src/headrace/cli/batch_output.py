"""The output of `headrace batch`: existing results, and one complete line for each outcome."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
from contextlib import ExitStack, suppress
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any

from headrace.cli import common
from headrace.cli.batch_input import Id, unbuffered
from headrace.errors import HeadraceError
from headrace.results import FinishReason, Result


def check_output(output: Path, source: RawIOBase, *, resume: bool, overwrite: bool) -> None:
    """Ends the command if the results cannot be written to `output`. Opens and changes nothing."""
    if resume and overwrite:
        common.fail("--resume and --overwrite contradict each other", common.EXIT_USAGE)
    to_stdout = str(output) == "-"
    if resume and to_stdout:
        common.fail("--resume needs a file as OUT", common.EXIT_USAGE)
    try:
        found = os.fstat(sys.stdout.fileno()) if to_stdout else os.stat(output)
    except OSError:  # it is not there, or cannot be looked at: opening it tells
        return
    if not to_stdout and not (resume or overwrite):
        common.fail(f"{output} is there: pass --resume or --overwrite", common.EXIT_USAGE)
    if resume and not stat.S_ISREG(found.st_mode):
        common.fail(f"{output} is no file of results: --resume cannot be", common.EXIT_USAGE)
    given = _stat_of(source)
    # A terminal, or /dev/null, may well be both.
    if given is not None and stat.S_ISREG(found.st_mode) and os.path.samestat(given, found):
        common.fail(f"{output} is the file of the requests itself", common.EXIT_USAGE)


def _stat_of(source: RawIOBase) -> os.stat_result | None:
    try:
        return os.fstat(source.fileno())
    except OSError:  # it is no file of the system's
        return None


def keep_results(output: Path) -> set[Id]:
    """Rewrites the output to contain only complete results. Returns their ids.

    Removes errors, cancelled requests, and the incomplete last line of a killed run.
    """
    if not output.exists():
        return set()
    path = output.resolve()  # a link stays a link
    done: set[Id] = set()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with path.open("rb") as old, open(handle, "wb") as new:
            for line in old:
                fields = _fields(line)
                if "id" in fields and _is_whole(fields):
                    if isinstance(fields["id"], (str, int)):
                        done.add(fields["id"])
                    new.write(line if line.endswith(b"\n") else line + b"\n")
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return done


def _is_whole(fields: dict[str, Any]) -> bool:
    """Whether a line is the result of a request that was not cancelled and did not fail."""
    choices = fields.get("choices", [fields])
    reasons = [one.get("finish_reason") for one in choices if isinstance(one, dict)]
    return "error" not in fields and FinishReason.CANCELLED not in reasons


def _fields(line: bytes) -> dict[str, Any]:
    """Returns a line's JSON object, or an empty dictionary if the line is not a JSON object."""
    try:
        fields = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


class Sink:
    """Writes the outcomes, each immediately and as one complete line."""

    def __init__(self, output: Path, *, resume: bool, overwrite: bool, stack: ExitStack) -> None:
        """Opens the output. The stack closes it. If it cannot be opened, the command ends."""
        if str(output) == "-":
            self._file = unbuffered(sys.stdout)
            return
        mode = "a" if resume else "w" if overwrite else "x"
        try:
            # Unbuffered: nothing is left to be written, and to fail, when it is closed.
            self._file = stack.enter_context(FileIO(output, mode))
        except OSError as error:
            common.fail(f"cannot write the results: {error}", common.EXIT_USAGE)

    def write(self, id_: Id, outcome: Result | HeadraceError) -> None:
        """Writes an outcome. If that fails, the command ends."""
        told = outcome.to_dict()
        fields = {"error": told} if isinstance(outcome, HeadraceError) else told
        line = json.dumps({"id": id_, **fields}, ensure_ascii=False) + "\n"
        left = memoryview(line.encode("utf-8"))
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            common.fail(f"cannot write the results: {error}")
