"""The table of families in docs/chat.md, made of what the tests here know of them.

`python -m tests.chat.table` writes it; `test_table.py` checks it.
"""

from __future__ import annotations

from pathlib import Path

from service.replies import FORMATS
from service.replies.proof import Writings
from tests.chat.families import CONVERSATIONS, FAMILIES, Family
from tests.chat.test_replies import SPECIAL, templates

PAGE = Path(__file__).resolve().parents[2] / "docs" / "chat.md"
_BEGIN, _END = "<!-- families -->\n", "<!-- end of families -->\n"
_COLUMNS = (
    "family", "prompts", "parser", "reasoning", "calls", "put back", "calls can be required"
)  # fmt: skip


def table() -> str:
    """The table, in Markdown."""
    rows = [
        _row(name, family)
        for name, family in sorted(FAMILIES.items(), key=lambda item: item[1].title.lower())
    ]
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(name: str, family: Family) -> tuple[str, ...]:
    refused = len(family.refuses)
    prompts = f"{len(CONVERSATIONS) - refused} equal"
    if refused:
        prompts += f", {refused} refused by both"
    if not family.parser:
        return family.title, prompts, "none", "no", "no", "as text", "no"
    format = FORMATS[family.parser]
    proof = Writings(templates(name), SPECIAL).prove(format)
    form = None if proof is None else proof.form
    if form is None:
        required = "no"
    else:
        required = "one" if form.separator is None or family.calls == 1 else "several"
    return (
        family.title,
        prompts,
        f"`{format.name}`",
        "yes",
        "one" if family.calls == 1 else "several",
        _put_back(family),
        required,
    )


def _put_back(family: Family) -> str:
    if not family.put_back:
        return "no"
    return {
        "yes": "yes",
        "no": "yes, without reasoning",
        "beside calls": "yes, reasoning beside calls alone",
    }[family.reasoning]


def written(page: str) -> str:
    """The page with the table."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{table()}{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
