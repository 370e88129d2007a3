"""Write the tables of docs/models.md from tests/model_recipes.py (`make model-table`).

The recipes say what is served and refused; tests/engine/test_families.py proves each of them. No
model is made here.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.model_recipes import MODES, RECIPES, REFUSALS  # noqa: E402 - after the path is set

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


def with_table(page: str) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: the page has not exactly one place for each.
    """
    for name, table in (("served", served()), ("refused", refused())):
        begin, end = f"<!-- {name}: {_NOTE} -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page must have one line {begin!r} and one {end!r}")
        before, rest = page.split(begin)
        after = rest.split(end)[1]
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
