"""What holds of any reply in any format: nothing is lost, the division does not matter, and a
hostile text costs no more than another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.replies import FORMATS, Context, Format, fold
from service.replies.pieces import Mark
from service.replies.reader import MAX_BLANKS, MAX_HELD, ReplyMarks, ReplyReader, Steps
from tests.service.replies.cases import parse, spelled
from tests.service.replies.corpus import CORPORA

EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
TOOLS = {"f": {"n": frozenset({"integer"}), "o": frozenset({"object", "null"})}}
SNIPPETS = [
    '{"name": "f", "arguments": {"a": [1, true]}}', '{"name": "f", "parameters": {}}',
    '{"name": "f"', '"arguments": {', '"x": "', '"', "\\", "{", "}", "[", "]", ",", ":", ";", "<",
    "f", "function", "n>", "o", "12", " to=functions.f", "analysis", "commentary", "final", "json",
    "```json\n", "```", "\n", " ", "\n\n", "text", "é🙂", "nul", "<|", "</", "x" * 40, " " * 70,
]  # fmt: skip


@EVERY_FORMAT
@settings(deadline=None)
@given(data=st.data())
def test_any_text(format: Format, data: st.DataObject) -> None:
    marks = sorted(format.marks)
    begun = [mark[: len(mark) // 2] for mark in marks]
    parts = st.lists(st.sampled_from([*SNIPPETS, *marks, *marks, *marks, *begun]), max_size=24)
    raw = "".join(data.draw(parts))
    tools = data.draw(st.sampled_from([{}, TOOLS]))
    context = Context(tools, data.draw(st.booleans()), "seed")
    whole = parse(format, [raw], context)
    assert parse(format, list(raw), context) == whole
    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    divided = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]
    assert parse(format, divided, context) == whole


@EVERY_FORMAT
def test_what_spells_special_tokens_is_text(format: Format) -> None:
    """Where the marks are special tokens, no other tokens make one."""
    cases = CORPORA[format.name].CASES
    for case in cases:
        reply = spelled(format, case)
        assert reply.raw == case.raw
        if format.name.startswith("llama") and case.tools:
            continue  # a call without a mark is one
        if format.name == "functionary_v3_2":
            continue  # so is one at the beginning, and so is to whom text goes
        assert not reply.calls, case.id
        if not case.in_reasoning:
            assert (reply.text, reply.reasoning) == (case.raw, ""), case.id


@EVERY_FORMAT
@settings(deadline=None)
@given(data=st.data())
def test_special_tokens_among_texts_that_spell_them(format: Format, data: st.DataObject) -> None:
    """It comes to the same however it is divided, and whenever the tokens' places are told."""
    marks = sorted(format.marks)
    parts = st.lists(st.sampled_from([*SNIPPETS, *marks, *marks, *marks]), max_size=24)
    raw, places = "", list[int]()
    for part in data.draw(parts):
        if part in format.marks and data.draw(st.booleans()):
            places.append(len(raw))
        raw += part
    tools = data.draw(st.sampled_from([{}, TOOLS]))
    context = Context(tools, data.draw(st.booleans()), "seed", special=format.marks)
    parser = format.begin(context)
    parser.told(places)
    whole = fold(parser.push(raw) + parser.finish())
    assert whole.raw == raw
    parser, pieces = format.begin(context), []
    for place, character in enumerate(raw):
        if place in places:
            parser.told([place])
        pieces += parser.push(character)
    assert fold(pieces + parser.finish()) == whole


def test_places_that_were_passed_are_dropped() -> None:
    reader = ReplyReader(frozenset({"<a>"}))
    marks = ReplyMarks({"<a>"})
    found: list[str] = []

    def read() -> Steps:
        while (yield from reader.until(marks, found.append)):
            reader.take()

    steps, sizes = read(), set()
    for count in range(1, 5_000):
        reader.told([5 * count - 3])
        reader.add("xx<a>")
        next(steps)
        sizes.add(len(reader.places))
    assert "".join(found) == "xx" * 4_999
    assert max(sizes) < 100


HOSTILE: dict[str, Callable[[Format], str]] = {
    "every mark": lambda format: "".join(sorted(format.marks)),
    "first mark": lambda format: min(format.marks),
    "marks begun": lambda format: "".join(mark[:-1] for mark in sorted(format.marks)),
    "braces": lambda format: '{"name":',
    "calls": lambda format: (
        "<tool_call>[TOOL_CALLS]<|python_tag|>" + '{"name":"f","arguments":{"a":"\\u0041"}};'
    ),
    "functions": lambda format: "<function=f><parameter=n>1</parameter></function>",
    "blanks": lambda format: " \n",
    "brackets": lambda format: "<[",
    "quotes": lambda format: '"\\',
}


def steps(format: Format, raw: str, prefix: str) -> int:
    """Lines of the package's code that a text takes, given by character."""
    count = 0

    def traced(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return traced if "replies" in frame.f_code.co_filename else None

    parser = format.begin(Context(TOOLS))
    parser.push(prefix)
    before = sys.gettrace()
    sys.settrace(traced)  # type: ignore[arg-type]
    try:
        for character in raw:
            parser.push(character)
        parser.finish()
    finally:
        sys.settrace(before)
    return count


@EVERY_FORMAT
@pytest.mark.parametrize("kind", HOSTILE)
def test_time_is_linear(format: Format, kind: str) -> None:
    unit = HOSTILE[kind](format)
    once = unit * (600 // len(unit) + 1)
    for prefix in ("", min(format.marks)):
        short, long = steps(format, once, prefix), steps(format, once * 4, prefix)
        assert long <= 4.4 * short
        assert long <= 400 * len(once * 4)


@EVERY_FORMAT
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_held_is_bounded(format: Format, kind: str) -> None:
    unit = HOSTILE[kind](format)
    part = unit * (1000 // len(unit) + 1)
    for prefix in ("", *sorted(format.marks)):
        parser = format.begin(Context(TOOLS))
        handed_on = len(prefix)
        pieces = parser.push(prefix)
        for _ in range(2 * MAX_HELD // len(part)):
            pieces += parser.push(part)
            handed_on += len(part)
            assert parser.size <= MAX_HELD + MAX_BLANKS + 64
        pieces += parser.finish()
        assert len(fold(pieces).raw) == handed_on


def test_a_long_answer_is_handed_on_as_it_comes() -> None:
    for format in FORMATS.values():
        parser = format.begin(Context())
        parser.push(
            {"harmony": "<|channel|>final<|message|>", "functionary_v3_2": "all\n"}.get(
                format.name, ""
            )
        )
        for word in ["Hello", " world", " and", " more"]:
            assert "".join(p.raw for p in parser.push(word) if not isinstance(p, Mark)) == word


def test_arguments_are_handed_on_as_they_come() -> None:
    parser = FORMATS["hermes"].begin(Context())
    parser.push('<tool_call>{"name": "f", "arguments": ')
    assert [p.raw for p in parser.push('{"a": ')][-1] == '{"a": '
    assert [p.raw for p in parser.push("1")] == ["1"]
    assert parser.size == 0


def test_marks_that_could_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        ReplyMarks(["<a>", "<a><b>"])
    with pytest.raises(ValueError, match="overlap"):
        ReplyMarks(["<a><b>c", "<b>"])
