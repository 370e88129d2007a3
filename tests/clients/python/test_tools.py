"""What the model sees of a Python function, and what the arguments of its calls become."""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal, NewType, NotRequired, Optional, TypedDict

import headrace
import jsonschema  # type: ignore[import-untyped]  # it ships none
import pytest
from headrace import FunctionTool, tool
from headrace._chat import tools_to_proto
from headrace._shapes import InexpressibleError, UnfitError, shape_of
from headrace.tools import answer_text, read_object, tools_by_name
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.structured.schema import prepare_schema


class Unit(enum.StrEnum):
    METRES = "m"
    FEET = "ft"


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Span:
    start: int
    end: int = 9
    unit: Unit = Unit.METRES
    notes: list[str] = field(default_factory=list)
    known: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError("it ends before it starts")


class Place(TypedDict):
    name: Annotated[str, "a town"]
    river: NotRequired[str]


class Loose(TypedDict, total=False):
    a: int


@dataclass
class Tree:
    branches: list[Tree]


Metres = NewType("Metres", float)
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
SPAN = {
    "type": "object",
    "properties": {
        "start": INTEGER,
        "end": {**INTEGER, "default": 9},
        "unit": {"type": "string", "enum": ["m", "ft"], "default": "m"},
        "notes": {"type": "array", "items": STRING},
    },
    "required": ["start"],
    "additionalProperties": False,
}
HINTS: list[tuple[Any, dict[str, Any], list[tuple[Any, Any]], list[Any]]] = [
    # hint, its schema, JSON values with what they become, values that do not fit
    (str, STRING, [("é", "é")], [1, None, ["a"]]),
    (int, INTEGER, [(2**64, 2**64), (3.0, 3)], [True, 1.5, "1", float("inf")]),
    (float, {"type": "number"}, [(1, 1.0), (0.5, 0.5)], [True, "1", 10**400, float("inf")]),
    (bool, {"type": "boolean"}, [(True, True)], [1, "true", None]),
    (None, {"type": "null"}, [(None, None)], [0, ""]),
    (Any, {}, [({"a": [1]}, {"a": [1]}), (None, None)], []),
    (Metres, {"type": "number"}, [(2, 2.0)], ["2"]),
    (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, [("a", "a")], ["c", ["a"], {}]),
    (Literal[1, True, None], {"enum": [1, True, None]}, [(1, 1), (True, True)], [1.5, False, "1"]),
    (Unit, {"type": "string", "enum": ["m", "ft"]}, [("ft", Unit.FEET)], ["FEET", 1]),
    (Level, {"type": "integer", "enum": [1]}, [(1, Level.LOW)], [True, "1"]),
    (Literal[Unit.FEET], {"type": "string", "enum": ["ft"]}, [("ft", Unit.FEET)], ["m"]),
    (list[int], {"type": "array", "items": INTEGER}, [([1], [1]), ([], [])], [{}, "a", ["a"]]),
    (list, {"type": "array", "items": {}}, [([1, "a"], [1, "a"])], [{}]),
    (Sequence[str], {"type": "array", "items": STRING}, [(["a"], ["a"])], ["a"]),
    (Iterable[str], {"type": "array", "items": STRING}, [(["a"], ["a"])], ["a"]),
    (tuple[int, ...], {"type": "array", "items": INTEGER}, [([1, 2], (1, 2))], [["a"]]),
    (
        tuple[int, str],
        {"type": "array", "minItems": 2, "maxItems": 2, "prefixItems": [INTEGER, STRING]},
        [([1, "a"], (1, "a"))],
        [[1], [1, "a", 2], ["a", 1]],
    ),
    (
        dict[str, int],
        {"type": "object", "additionalProperties": INTEGER},
        [({"a": 1}, {"a": 1})],
        [{"a": "b"}, [1]],
    ),
    (Mapping[str, Any], {"type": "object", "additionalProperties": {}}, [({}, {})], [[]]),
    (
        Optional[int],  # noqa: UP045  # as older code has it
        {"anyOf": [INTEGER, {"type": "null"}]},
        [(1, 1), (None, None)],
        ["a"],
    ),
    (
        int | str | list[Unit],
        {"anyOf": [INTEGER, STRING, {"type": "array", "items": {"type": "string",
         "enum": ["m", "ft"]}}]},
        [("1", "1"), (["m"], [Unit.METRES])],
        [None, ["x"]],
    ),
    (Annotated[int, 5, "how many"], {**INTEGER, "description": "how many"}, [(1, 1)], ["1"]),
    (
        Span,
        SPAN,
        [({"start": 1}, Span(1)), ({"start": 1, "end": 2, "unit": "ft"}, Span(1, 2, Unit.FEET))],
        [{}, {"start": 1, "other": 2}, {"start": 1, "known": True}, {"start": 3, "end": 1}, 5],
    ),
    (
        Place,
        {
            "type": "object",
            "properties": {"name": {**STRING, "description": "a town"}, "river": STRING},
            "required": ["name"],
            "additionalProperties": False,
        },
        [({"name": "Ulm"}, {"name": "Ulm"})],
        [{"river": "Donau"}, {"name": 1}],
    ),
    (
        Loose,
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False},
        [({}, {}), ({"a": 1}, {"a": 1})],
        [{"b": 1}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "schema", "fits", "unfit"), HINTS, ids=[str(h[0]) for h in HINTS])
def test_hints(
    hint: Any, schema: dict[str, Any], fits: list[tuple[Any, Any]], unfit: list[Any]
) -> None:
    shape = shape_of(hint)
    assert shape.schema == schema
    prepare_schema(json.dumps({"type": "object", "properties": {"x": shape.schema}}), {})
    for value, meant in fits:
        found = shape.read(value, "")
        assert (found, type(found)) == (meant, type(meant))
    for value in unfit:
        with pytest.raises(UnfitError):
            shape.read(value, "")


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(-2, 2), st.sampled_from(["m", "a", "b"])
)
NAMES = st.sampled_from(["start", "end", "unit", "notes", "name", "river", "a"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
)


@pytest.mark.parametrize("hint", [hint for hint, *_ in HINTS], ids=[str(h[0]) for h in HINTS])
@given(value=VALUES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_what_is_read_is_what_the_schema_allows(hint: Any, value: Any) -> None:
    shape = shape_of(hint)
    try:
        shape.read(value, "")
        fits = True
    except UnfitError as error:
        fits = "it ends before it starts" in str(error)  # which no schema says
    assert fits == jsonschema.Draft202012Validator(shape.schema).is_valid(value)


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (datetime, "datetime"),
        (bytes, "bytes"),
        (set[str], r"set\[str\]"),
        (complex, "complex"),
        (Callable[[], int], "Callable"),
        (list[bytes], "bytes"),
        (dict[int, str], "keys that are no str"),
        (Literal[b"a"], "no plain ones"),
        (enum.Enum("E", {"A": (1, 2)}), "no plain ones"),
        (enum.Enum("E", {"A": float("nan")}), "no plain ones"),
        (Tree, "refers to itself"),
        (int | bytes, "bytes"),
        ([int], "list|int"),
    ],
)
def test_what_json_has_nothing_for_is_refused_by_name(hint: Any, said: str) -> None:
    with pytest.raises(InexpressibleError, match=said):
        shape_of(hint)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "'start' is missing"),
        ({"start": 1, "notes": ["a", 5]}, r"notes\[1\]: 5 is not a string"),
        ({"start": 1, "x": 1, "y": 2}, "there is no 'x', 'y'"),
        ({"start": 1, "unit": "km"}, "unit: 'km' is not one of 'm', 'ft'"),
        ({"start": 3, "end": 1}, "it ends before it starts"),
        ({"start": "a" * 500}, r"start: 'a{76}\.\.\. is not an integer"),
    ],
)
def test_the_place_of_a_fault_is_told(value: Any, said: str) -> None:
    with pytest.raises(UnfitError, match=f"^{said}$"):
        shape_of(Span).read(value, "")
    with pytest.raises(UnfitError, match=r"^by\[0\]"):
        shape_of(list[Span]).read([value], "by")


def read_gauge(
    place: str, unit: Unit = Unit.METRES, days: Annotated[int, "of the past"] = 1, *, exact: bool
) -> float:
    """How high the river is.

    It is measured every hour.

    Args:
        place: a town
            on the river: its name
        unit (Unit): of the answer
        days, exact: this is not shown for days

    Returns:
        The height.
    """
    return days * 2.0


READ_GAUGE = {
    "type": "object",
    "properties": {
        "place": {**STRING, "description": "a town on the river: its name"},
        "unit": {"type": "string", "enum": ["m", "ft"], "description": "of the answer",
                 "default": "m"},
        "days": {**INTEGER, "description": "of the past", "default": 1},
        "exact": {"type": "boolean", "description": "this is not shown for days"},
    },
    "required": ["place", "exact"],
    "additionalProperties": False,
}  # fmt: skip


def test_a_tool_is_a_function_as_the_model_sees_it() -> None:
    made = tool(read_gauge)
    assert isinstance(made, FunctionTool)
    assert (made.name, made.parameters) == ("read_gauge", READ_GAUGE)
    assert made.description == "How high the river is.\n\nIt is measured every hour."
    assert made("Ulm", days=2, exact=True) == 4.0
    assert made.read({"place": "Ulm", "unit": "ft", "exact": True}) == {
        "place": "Ulm",
        "unit": Unit.FEET,
        "exact": True,
    }
    [sent] = tools_to_proto([made])
    assert (sent.name, sent.description) == (made.name, made.description)
    assert json.loads(sent.parameters_json) == READ_GAUGE
    spec = headrace.build_spec([headrace.Message.user("hi")], {"tools": [made]})
    assert spec.chat.tools[0] == sent


def test_tools_of_all_that_can_be_called() -> None:
    class Gauge:
        """Not shown."""

        def read(self, place: str) -> str:
            """Reads it."""
            return place

        def __call__(self, place: str) -> str:
            return place

        @staticmethod
        async def wait() -> None: ...

    @tool(name="later", description="Waits.")
    async def wait(seconds: int) -> None: ...

    method, called = tool(Gauge().read), tool(Gauge(), name="gauge")
    assert (method.name, method.description) == ("read", "Reads it.")
    assert method.parameters == called.parameters
    assert not method.is_async
    assert (wait.name, wait.description, wait.is_async) == ("later", "Waits.", True)
    assert tool(Gauge.wait).parameters == {
        "type": "object", "properties": {}, "additionalProperties": False,
    }  # fmt: skip
    assert tool(Gauge.wait).description is None  # not shown as an empty text
    bound = tool(functools.partial(read_gauge, exact=True), name="bound")
    assert bound.parameters is not None
    assert bound.parameters["required"] == ["place"]  # type: ignore[index]


def unhinted(place): ...  # type: ignore[no-untyped-def]
def many(*places: str) -> None: ...
def named(**places: str) -> None: ...
def placed(place: str, /) -> None: ...
def dated(day: datetime) -> None: ...
def missing(day: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (unhinted, "unhinted cannot be a tool: 'place' has no type hint"),
        (many, "'places' is variadic positional: it cannot be passed by its name"),
        (named, "'places' is variadic keyword: it cannot be passed by its name"),
        (placed, "'place' is positional-only: it cannot be passed by its name"),
        (dated, "dated cannot be a tool: 'day': JSON has nothing for datetime"),
        (missing, "a type hint cannot be resolved: name 'Nowhere'"),
        (lambda: None, "no name that a model could write"),
        (functools.partial(dated), "no name that a model could write"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_when_it_is_made(function: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        tool(function)


def test_names_are_different() -> None:
    assert list(tools_by_name([read_gauge])) == ["read_gauge"]
    with pytest.raises(TypeError, match="two tools have the name 'read_gauge'"):
        tools_by_name([read_gauge, tool(read_gauge)])
    with pytest.raises(TypeError, match="is a function"):
        tools_by_name([headrace.Tool("f")])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ('{"a": 1', "Expecting"),
        ("[1]", "not an object"),
        ('{"a": 1, "a": 2}', "named twice"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": "\\ud800"}', "half a surrogate"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "digits"),
    ],
)
def test_arguments_that_the_server_would_refuse(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_object(text)


def test_answers_are_text() -> None:
    assert answer_text("é") == "é"
    assert answer_text(Unit.FEET) == '"ft"'
    assert answer_text({"span": Span(1), "é": [None, 1.5, datetime(2026, 1, 2)]}) == (
        '{"span": {"start": 1, "end": 9, "unit": "m", "notes": [], "known": true}, '
        '"é": [null, 1.5, "2026-01-02 00:00:00"]}'
    )
    with pytest.raises(TypeError):
        answer_text({(1, 2): 3})
