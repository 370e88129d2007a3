"""The tables of docs/chat.md are true."""

from __future__ import annotations

import re

import pytest

from service.replies import FORMATS, Format
from tests.chat.families import FAMILIES
from tests.chat.table import PAGE, written

_ROWS = (
    PAGE.read_text(encoding="utf-8")
    .partition("\n| parser | what it reads ")[2]
    .partition("\n\n")[0]
)
PARSERS = dict(re.findall(r"^\| `(\w+)` (.*) \|$", _ROWS, re.MULTILINE))


def test_the_table_of_families_is_what_the_tests_know() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "python -m tests.chat.table writes it"
    assert f"[{len(FAMILIES)} model families]" in page
    assert len({family.title for family in FAMILIES.values()} - {""}) == len(FAMILIES)


def test_the_table_of_parsers_has_each_format() -> None:
    assert PARSERS.keys() == FORMATS.keys()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_a_parsers_row_shows_its_marks(format: Format) -> None:
    row = PARSERS[format.name].replace("\\|", "|")
    form = format.form
    if form is not None and format.name != "harmony":
        assert form.marks[0] in row
    if format.name == "harmony":
        assert all(word in row for word in ("functions.name", "analysis"))
    else:
        opening, closing = format.reasoning.opening, format.reasoning.closing
        assert f"`{opening}…{closing}`" in row
