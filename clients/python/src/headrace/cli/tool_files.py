"""Tools from files: functions of a Python file, or definitions of a JSON file."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.cli import common
from headrace.messages import Tool
from headrace.tools import FunctionTool, tool

_MODULE = "headrace_tool_file"


def load_functions(path: Path) -> list[FunctionTool]:
    """Returns the public functions and `headrace.tool` objects of a Python file, in order.

    The file is executed as `python FILE` would do. A file that cannot be used ends the command.
    """
    found = []
    for name, value in vars(_run(path)).items():
        if name.startswith("_"):
            continue
        if not isinstance(value, FunctionTool):
            if not inspect.isfunction(value) or value.__module__ != _MODULE:
                continue
            try:
                value = tool(value)
            except TypeError as error:
                common.fail(f"--tools {path}: {error}", common.EXIT_USAGE)
        found.append(value)
    if not found:
        common.fail(f"--tools {path}: it defines no public function", common.EXIT_USAGE)
    return found


def read_tools(path: Path) -> Sequence[Tool | Mapping[str, Any]]:
    """Returns the tools in a file: the functions of a Python file, or a JSON array."""
    if path.suffix == ".py":
        return load_functions(path)
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        common.fail(f"--tools {path}: {error}", common.EXIT_USAGE)
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        common.fail(f"--tools {path}: it is not an array of tools", common.EXIT_USAGE)
    return tools


def read_choice(given: str | None) -> str | dict[str, Any] | None:
    """Parses the value of `--tool-choice`: a mode, an OpenAI-style JSON object, or a tool's
    name.
    """
    if given is None or given in ("auto", "none", "required"):
        return given
    if not given.lstrip().startswith("{"):
        return {"type": "function", "function": {"name": given}}
    try:
        choice: dict[str, Any] = json.loads(given)
    except (ValueError, RecursionError) as error:
        common.fail(f"--tool-choice: {error}", common.EXIT_USAGE)
    return choice


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if path.suffix != ".py" or spec is None or spec.loader is None or not path.is_file():
        common.fail(f"--tools {path}: it is no Python file", common.EXIT_USAGE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # where its dataclasses look their types up
    sys.path.insert(0, str(path.resolve().parent))  # as for `python FILE`: it may import others
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it may raise anything
        steps = [step for step in traceback.extract_tb(error.__traceback__) if step.filename]
        own = [step.lineno for step in steps if Path(step.filename) == path]
        line = f", line {own[-1]}" if own else ""
        common.fail(f"--tools {path}{line}: {type(error).__name__}: {error}", common.EXIT_USAGE)
    return module
