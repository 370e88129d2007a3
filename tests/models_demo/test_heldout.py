"""`models/demo/heldout.jsonl`: what it holds, and that its right answers fit its own schemas."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from models.demo.scores import Reply, marks

FILE = Path(__file__).parents[2] / "models/demo/heldout.jsonl"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def _reply(row: dict[str, Any]) -> Reply:
    """A right one."""
    expect = row["expect"]
    if row["kind"] == "call":
        return Reply(calls=((expect["name"], json.dumps(expect["arguments"])),))
    if row["kind"] == "form":
        return Reply(json.dumps(expect["object"]))
    return Reply(expect.get("text", "It says: " + ", ".join(expect.get("contains", ()))))


def test_kinds_and_ids(rows: list[dict[str, Any]]) -> None:
    kinds = {"call": 220, "no_call": 80, "result": 80, "copy": 100, "form": 80, "edit": 40}
    assert Counter(row["kind"] for row in rows) == kinds
    assert Counter(row["size"] for row in rows if row["kind"] == "copy") == {30: 50, 60: 50}
    assert len({row["id"] for row in rows}) == 600
    assert len({json.dumps(row["messages"]) for row in rows}) == 600


def test_calls_are_of_tools_that_are_there_and_fit_their_parameters(
    rows: list[dict[str, Any]],
) -> None:
    called = set()
    for row in rows:
        assert ("tools" in row) == (row["kind"] in ("call", "no_call", "result")), row["id"]
        tools = {tool["function"]["name"]: tool["function"] for tool in row.get("tools", ())}
        assert len(tools) == len(row.get("tools", ())) <= 3, row["id"]
        for tool in tools.values():
            jsonschema.Draft202012Validator.check_schema(tool["parameters"])
        for message in row["messages"]:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                jsonschema.validate(
                    json.loads(function["arguments"]), tools[function["name"]]["parameters"]
                )
        if row["kind"] == "call":
            name, given = row["expect"]["name"], row["expect"]["arguments"]
            called.add(name)
            assert given.keys() <= tools[name]["parameters"]["properties"].keys(), row["id"]
            jsonschema.validate(given, tools[name]["parameters"])
            question = row["messages"][-1]["content"]
            for value in given.values():
                assert not isinstance(value, str) or value in question, row["id"]
    assert len(called) >= 150


def test_forms_fit_their_schemas(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert ("schema" in row) == (row["kind"] == "form"), row["id"]
        if row["kind"] == "form":
            schema, wanted = row["schema"], row["expect"]["object"]
            jsonschema.Draft202012Validator.check_schema(schema)
            jsonschema.validate(wanted, schema)
            assert set(schema["required"]) == wanted.keys(), row["id"]
            assert schema["additionalProperties"] is False, row["id"]


def test_what_is_to_be_told_stands_in_the_prompt(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        last = row["messages"][-1]["content"]
        if row["kind"] == "copy":
            assert row["expect"]["text"] in last, row["id"]
        if row["kind"] == "edit":
            assert row["expect"]["text"] not in last, row["id"]
        if row["kind"] == "result":
            assert row["messages"][-1]["role"] == "tool", row["id"]
            assert all(value in last for value in row["expect"]["contains"]), row["id"]


def test_a_right_reply_has_all_marks_and_a_wrong_one_not(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert set(marks(row, _reply(row)).values()) == {1.0}, row["id"]
        wrong = Reply("no", calls=(("no_such_tool", "{}"),))
        assert set(marks(row, wrong).values()) == {0.0}, row["id"]


def test_no_tool_is_one_that_the_model_has_read_of(rows: list[dict[str, Any]]) -> None:
    heads = re.findall("^@(.*?) ::", (FILE.parent / "text/tools.txt").read_text(), re.MULTILINE)
    read = {name for head in heads for name in head.split("|")}
    assert "get_weather" in read
    names = [tool["function"]["name"] for row in rows for tool in row.get("tools", ())]
    assert not read.intersection(names)
