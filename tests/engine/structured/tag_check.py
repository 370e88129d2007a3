"""An independent reading of structural tags: whether a text is one of a format's, by trying every
way to divide it. Special tokens stand in the text by their names.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.engine.structured.json_check import fits


def is_of(form: dict[str, Any], text: str) -> bool:
    """Whether a text is one of a format's."""
    return len(text) in ends(form, text, 0)


def ends(form: dict[str, Any], text: str, start: int) -> set[int]:
    """Where texts of a format may end that begin at `start`."""
    match form["type"]:
        case "const_string":
            return _literal(form["value"], text, start)
        case "json_schema":
            return _json(form["json_schema"], text, start)
        case "regex":
            stops = range(start, len(text) + 1)
            return {j for j in stops if re.fullmatch(form["pattern"], text[start:j])}
        case "any_text":
            return _free(form.get("excludes", []), text, start)
        case "sequence":
            return _in_a_row(form["elements"], text, start)
        case "or":
            return {j for element in form["elements"] for j in ends(element, text, start)}
        case "tag":
            return _tag(form, text, start)
        case "triggered_tags":
            return _triggered(form, text, start)
        case _:
            return _separated(form, text, start)


def _literal(value: str, text: str, start: int) -> set[int]:
    return {start + len(value)} if text.startswith(value, start) else set()


def _json(schema: Any, text: str, start: int) -> set[int]:
    found = set()
    for stop in range(start + 1, len(text) + 1):
        try:
            value = json.loads(text[start:stop])
        except ValueError:
            continue
        if fits(schema, value) and text[start:stop] == text[start:stop].strip():
            found.add(stop)
    return found


def _free(excludes: list[str], text: str, start: int) -> set[int]:
    stops = range(start, len(text) + 1)
    return {j for j in stops if not any(word in text[start:j] for word in excludes)}


def _in_a_row(elements: list[dict[str, Any]], text: str, start: int) -> set[int]:
    reached = {start}
    for element in elements:
        reached = {j for i in reached for j in ends(element, text, i)}
    return reached


def _tag(tag: dict[str, Any], text: str, start: int) -> set[int]:
    stops = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
    inner = {
        j
        for i in _literal(tag["begin"], text, start)
        for j in ends({"type": "tag", **tag}["content"], text, i)
    }
    return {k for j in inner for stop in stops for k in _literal(stop, text, j)}


def _triggered(form: dict[str, Any], text: str, start: int) -> set[int]:
    excludes = [*form.get("excludes", []), *form["triggers"]]
    reached = set[int]()
    heads, is_first = {start}, True
    while heads:
        texts = {j for i in heads for j in _free(excludes, text, i)}
        if not is_first and form.get("stop_after_first"):
            return reached | heads
        if not is_first or not form.get("at_least_one"):
            reached |= texts
        heads = {k for j in texts for tag in form["tags"] for k in _tag(tag, text, j)}
        is_first = False
    return reached


def _separated(form: dict[str, Any], text: str, start: int) -> set[int]:
    reached = set() if form.get("at_least_one") else {start}
    heads = {start}
    while heads:
        done = {j for i in heads for tag in form["tags"] for j in _tag(tag, text, i)}
        reached |= done
        if form.get("stop_after_first"):
            break
        heads = {j for i in done for j in _literal(form["separator"], text, i)}
    return reached
