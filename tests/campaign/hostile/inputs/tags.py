"""Structural tags and JSON objects with nested formats and nested triggers, in the group of
structured outputs.
"""

from __future__ import annotations

import json
from typing import Any

from tests.campaign.hostile.inputs.kinds import OK, Case, generates, invalid
from tests.campaign.hostile.inputs.structured import EXPLODING, SLOW, STRUCTURED
from tests.campaign.hostile.sending import Sender

TAG = "spec.structured_output.structural_tag"


def _tag(*answers: str, form: object) -> Case:
    text = form if isinstance(form, str) else _whole(form)
    return generates(*answers, structured_output={"structural_tag": text}, stop={"max_tokens": 16})


def _wrong(form: object) -> Case:
    return _tag(*invalid(TAG), form=form)


def _either(form: object) -> Case:
    """Return a case that is taken, or refused."""
    return _tag(OK, *invalid(TAG), form=form)


def _whole(form: object) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _one(begin: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": _text("x"), "end": "</a>"}


def _triggered(triggers: list[str], begins: list[str], **more: Any) -> dict[str, Any]:
    tags = [_one(begin) for begin in begins]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **more}


def _deep(levels: int) -> str:
    opening = '{"type":"sequence","elements":['
    inner = opening * levels + json.dumps(_text("a")) + "]}" * levels
    return '{"type":"structural_tag","format":' + inner + "}"


def _new(s: Sender) -> dict[str, str]:
    """Return 200 structural tags that have new names."""
    number = s.source.getrandbits(40)
    tags = _triggered(["<f"], [f"<f{number:x}_{n}>" for n in range(200)], at_least_one=True)
    return {"structural_tag": _whole(tags)}


_ANY = {"type": "any_text"}
_BEGINS = [f"<{'a' * n}>" for n in range(1, 150)]

STRUCTURED.tries(
    "many-tags",
    "structural tags of as many tags as there may be, and of thousands",
    _tag(form=_triggered(["<"], [f"<t{n}>" for n in range(160)])),
    _wrong(_triggered(["<"], [f"<t{n}>" for n in range(2000)])),
    _wrong({"type": "sequence", "elements": [_text("a")] * 5000}),
    _tag(form={"type": "or", "elements": [_text("a" * n) for n in range(1, 500)]}),
    _wrong({"type": "any_text", "excludes": [f"x{n}" for n in range(10_000)]}),
    seconds=4.0,
)
STRUCTURED.tries(
    "new-tags",
    "structural tags of 200 tags, others each time",
    generates(structured_output=_new, stop={"max_tokens": 16}, each=True),
    width=4,
    seconds=4.0,
)
STRUCTURED.tries(
    "deep-tags",
    "formats in formats: as deep as they may be, 100 times deeper, and without an end",
    _tag(form=_deep(30)),
    _wrong(_deep(3000)),
    _wrong('{"type":"structural_tag","format":' * 5000),
    _wrong("[" * 100_000),
    _wrong('{"type":"structural_tag","type":"structural_tag"}'),
    _wrong('{"type":"structural_tag"}'),
)
STRUCTURED.tries(
    "overlapping-triggers",
    "tags whose triggers begin within each other, and texts that end within each other",
    _either(_triggered(["<", "<a", "<aa"], _BEGINS)),
    _either(_triggered(["<a"], _BEGINS, excludes=["a>", ">"])),
    _either(
        {"type": "sequence", "elements": [_ANY, _text("aab"), _ANY, _text("ab")] * 60},
    ),
    _wrong({"type": "sequence", "elements": [_ANY, _ANY]}),
    _wrong(_triggered([""], ["<a>"])),
    _wrong(_triggered(["<b"], ["<a>"])),
    seconds=4.0,
)
STRUCTURED.tries(
    "slow-tags",
    "regular expressions, grammars and schemas within tags that explode, or are ambiguous",
    *(_either({"type": "regex", "pattern": pattern}) for pattern in EXPLODING),
    _either({"type": "grammar", "grammar": SLOW}),
    _wrong({"type": "grammar", "grammar": "start: start start | "}),
    _either(
        {
            "type": "json_schema",
            "json_schema": {
                "type": "object",
                "properties": {f"p{n}": {"type": "string"} for n in range(2000)},
                "required": [f"p{n}" for n in range(2000)],
            },
        },
    ),
    _wrong({"type": "regex", "pattern": "a" * 200_000}),
    seconds=6.0,
)
STRUCTURED.tries(
    "json-objects",
    "any JSON object and deep ones, with blanks as the model likes, of each choice",
    *(
        generates(
            stop={"max_tokens": 12},
            sampling={"temperature": 2.0},
            structured_output={"json_object": {}, "flexible_whitespace": blanks},
            n=lambda s: s.limits.max_choices,
        )
        for blanks in (True, False)
    ),
    width=2,
    seconds=4.0,
)
