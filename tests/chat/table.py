"""The tables of parsers and of families in docs/chat.md, made of the formats and of what the tests
here know of the families.

`python -m tests.chat.table` writes it; `test_table.py` checks it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.replies import FORMATS, CallGrammar
from service.replies.proof import Writings
from tests.chat.families import CONVERSATIONS, FAMILIES, SPECIAL, Family, templates

PAGE = Path(__file__).resolve().parents[2] / "docs" / "chat.md"
_COLUMNS = (
    "family", "prompts", "parser", "reasoning", "calls", "put back", "calls can be required"
)  # fmt: skip
_ARGUMENTS = '{"key": "value"}'


def parsers() -> str:
    """The table of parsers, in Markdown."""
    lines = [("parser", "a call", "reasoning", "calls are held"), ("---",) * 4]
    for name, format in sorted(FORMATS.items()):
        calls = [_call(form) for form in format.forms]
        marks = format.reasoning
        lines.append(
            (
                f"`{name}`",
                "<br>".join(_code(call) for call in dict.fromkeys(calls) if call) or "none",
                _code(f"{marks.opening}…{marks.closing}") if marks.closing else "none",
                "yes" if format.forms else "no",
            )
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _call(form: CallGrammar) -> str:
    """A call with one argument, as it is written."""
    match form.content["type"]:
        case "json_schema":
            given = _ARGUMENTS
        case "python_arguments":
            given = 'key="value"'
        case "bare_object":
            quote = form.content["quote"]
            given = f"key:{quote}value{quote}"
        case _:
            after: Any = form.content["after_name"]
            after = after if isinstance(after, str) else after["string"]
            given = f"{form.content['before_name']}key{after}value{form.content['after_value']}"
            given = given.replace("{name}", "key")
    return f"{form.begun('name')}{given}{form.end}{form.closing}"


def _code(text: str) -> str:
    """A text as a cell's code; a line break is shown as such."""
    shown = text.strip("\n").replace("\n", "⏎").replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def families() -> str:
    """The table of families, in Markdown."""
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
    """The page with the tables."""
    for name, table in (("parsers", parsers()), ("families", families())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{table}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
