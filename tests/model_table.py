"""Write the tables of docs/models.md from tests/model_recipes.py and
tests/multimodal_recipes.py (`make model-table`).

The recipes say what is served and refused; tests/engine/test_families.py and
test_text_parts.py prove each of them. No model is made here.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.model_recipes import MODES, RECIPES, REFUSALS  # noqa: E402 - after the path is set
from tests.multimodal_recipes import REFUSED, SERVED  # noqa: E402
from tests.quantised_recipes import RECIPES as FILES  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
_NOTE = "written by `make model-table` from tests/model_recipes.py"


def served() -> str:
    """The families that are served, a line each."""
    rows = [
        f"| {name}{_from(recipe.since)} | {recipe.attention} | {recipe.special} |"
        for name, recipe in sorted(RECIPES.items())
    ]
    modes = ", ".join(MODES)
    head = f"{len(rows)} recipes, each tested: {modes}.\n\n| family | attention | special |"
    return "\n".join([head, "|---|---|---|", *rows])


def _from(version: str | None) -> str:
    return "" if version is None else f" (from transformers {version})"


def refused() -> str:
    """The reasons for refusals, a line each, with the families that have them."""
    families: dict[str, list[str]] = {}
    for name, refusal in REFUSALS.items():
        before = "" if refusal.until is None else f" (before transformers {refusal.until})"
        families.setdefault(refusal.why, []).append(name + before)
    rows = [f"| {', '.join(sorted(names))} | {why} |" for why, names in families.items()]
    return "\n".join(["| refused | reason |", "|---|---|", *rows])


def quantized() -> str:
    """The forms of quantised files that are served, a line each."""
    rows = []
    for method in dict.fromkeys(one.told for one in FILES.values()):
        files = [one for one in FILES.values() if one.told == method]
        bits = ", ".join(map(str, sorted({one.bits for one in files})))
        groups = sorted({one.group for one in files if one.group > 0})
        others = ", ".join(dict.fromkeys(one.special for one in files if one.special))
        rows.append(f"| {method} | {bits} | {', '.join(map(str, groups))}, a row | {others} |")
    head = f"{len(FILES)} recipes, each tested element by element.\n"
    columns = "| form | bits | groups that are tested; others are served | tested with |"
    return "\n".join([head, columns, "|---|---|---|---|", *rows])


def text_parts() -> str:
    """The models with towers, a line each."""
    rows = [
        f"| {name} | {one.text_type} | {one.attention} | {one.special} |"
        for name, one in sorted(SERVED.items())
    ]
    return "\n".join(
        ["| model | its text part | attention | special |", "|---|---|---|---|", *rows]
    )


def refused_text_parts() -> str:
    """The models with towers that are refused, by reason."""
    models: dict[str, list[str]] = {}
    for name, one in REFUSED.items():
        models.setdefault(one.why, []).append(name)
    rows = [f"| {', '.join(sorted(names))} | {why} |" for why, names in models.items()]
    return "\n".join(["| refused | reason: its text part |", "|---|---|", *rows])


def with_table(page: str) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: the page has not exactly one place for each.
    """
    tables = {
        "served": served(),
        "text parts": text_parts(),
        "refused text parts": refused_text_parts(),
        "refused": refused(),
        "quantized": quantized(),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: {_NOTE} -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page must have one line {begin!r} and one {end!r}")
        before, rest = page.split(begin)
        after = rest.split(end)[1]
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
