"""The table of members in docs/openai.md, from the one that the door works by.

`python -m tests.openai.field_table` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

from headrace.openai.fields import FIELDS, ROUTES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "openai.md"
PLACE = re.compile(r"(?<=<!-- fields -->\n).*?(?=<!-- /fields -->)", re.DOTALL)
USES = {"obeyed": "", "ignored": "no effect: ", "refused": "refused: "}


def table() -> str:
    """A row for each member."""
    lines = ["| member | of | value | |", "|---|---|---|---|"]
    for name, field in FIELDS.items():
        route = "both" if field.routes == ROUTES else field.routes[0]
        kind = field.kind if field.use != "refused" else ""
        lines.append(f"| `{name}` | {route} | {kind} | {USES[field.use]}{field.note} |")
    return "\n".join(lines) + "\n"


def shown() -> str:
    """The table in the document."""
    [found] = PLACE.findall(DOCUMENT.read_text(encoding="utf-8"))
    return str(found)


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(PLACE.sub(lambda _: table(), text), encoding="utf-8")
