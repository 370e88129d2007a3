"""The tables of docs/chat.md are true."""

from __future__ import annotations

from service.replies import FORMATS
from tests.chat.families import FAMILIES
from tests.chat.table import PAGE, written


def test_the_tables_are_what_the_code_and_the_tests_know() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "python -m tests.chat.table writes it"
    assert f"[{len(FAMILIES)} model families]" in page
    assert len({family.title for family in FAMILIES.values()} - {""}) == len(FAMILIES)


def test_each_parser_has_a_family() -> None:
    """What no template here writes is read all the same, and is known by other tests."""
    assert FORMATS.keys() - {family.parser for family in FAMILIES.values()} == {"think"}
