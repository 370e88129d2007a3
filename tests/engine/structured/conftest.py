"""The demo model's tokenizer, and a compiler for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.text import Tokenizer

DEMO = Path(__file__).parents[3] / "models" / "demo"
V = 4100
"""The width of the logits: more than the tokenizer has, and no multiple of 32."""


def form(
    kind: GrammarKind, what: str | tuple[str, ...] = "", *, flexible: bool = False
) -> GrammarParams:
    """A form: of CHOICE its strings, else its text."""
    if isinstance(what, tuple):
        return GrammarParams(kind=kind, choices=what)
    return GrammarParams(kind=kind, text=what, flexible_whitespace=flexible)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO, V)


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, V)


@pytest.fixture(scope="session")
def eos(tokenizer: Tokenizer) -> TokenId:
    found = tokenizer.token_id(tokenizer.eos_token or "")
    assert found is not None
    return TokenId(found)
