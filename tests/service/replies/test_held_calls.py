"""Replies that the engine holds to a format's own form of calls are read back as such calls, for
every format that has one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from service.replies import FORMATS, CallGrammar, Context, ToolMode, ToolSchema, tool_types
from tests.engine.structured.following import allowed
from tests.service.replies.cases import parse

DEMO = Path(__file__).parents[3] / "models" / "demo"
V = 4100
END = TokenId(V - 1)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"größe": {"enum": ["m", "cm"]}, "n": {"type": "boolean"}},
    "required": ["größe", "n"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [ToolSchema("look", SCHEMA), ToolSchema("now", NOTHING)]
TYPES = tool_types([{"name": tool.name, "parameters": tool.schema} for tool in TOOLS])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO, V)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, V)


def forms() -> list[Any]:
    return [
        pytest.param(name, form, id=f"{name}-{index}")
        for name, format in FORMATS.items()
        for index, form in enumerate(format.forms)
    ]


@pytest.mark.parametrize("parallel", [False, True], ids=["one", "parallel"])
@pytest.mark.parametrize(("name", "form"), forms())
def test_required_calls_are_read(
    name: str, form: CallGrammar, parallel: bool, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    text = form.structural_tag(ToolMode.REQUIRED, TOOLS, parallel=parallel)
    params = GrammarParams(kind=GrammarKind.STRUCTURAL_TAG, text=text)
    counts = set[int]()
    for seed in range(8):
        matcher = compiler.compile(params, frozenset([END]))()
        draw, output = random.Random(seed), bytearray()
        while not matcher.is_complete:
            ids = allowed(matcher, V)
            assert ids, bytes(output)
            if END in ids and (ids == {END} or len(output) > 300 or draw.random() < 0.5):
                break
            token = draw.choice(sorted(ids - {END}))
            assert matcher.accept(TokenId(token))
            output += tokenizer.token_bytes(token)
            assert len(output) < 4_000
        reply = parse(FORMATS[name], [output.decode()], Context(TYPES))
        assert reply.text == ""
        assert all(call.complete for call in reply.calls)
        for call in reply.calls:
            given = json.loads(call.arguments)
            if call.name == "now":
                assert given == {}
            else:
                assert call.name == "look"
                assert given.keys() == {"größe", "n"}
                assert given["größe"] in ("m", "cm")
                assert isinstance(given["n"], bool)
        counts.add(len(reply.calls))
    assert 0 not in counts
    if not parallel or form.separator is None:
        assert counts == {1}


@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.NONE])
@pytest.mark.parametrize(("name", "form"), forms())
def test_other_forms_can_be_held(
    name: str, form: CallGrammar, mode: ToolMode, compiler: GrammarCompiler
) -> None:
    text = form.structural_tag(mode, TOOLS, parallel=True)
    params = GrammarParams(kind=GrammarKind.STRUCTURAL_TAG, text=text)
    assert not compiler.compile(params, frozenset([END]))().is_complete
