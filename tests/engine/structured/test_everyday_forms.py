"""What the libraries of this field write as a schema is taken, and whatever is written by it is
valid to a validator of JSON Schema that knows nothing of how forms are held.
"""

from __future__ import annotations

import json

import pytest
from jsonschema.validators import Draft202012Validator, validator_for

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import GrammarKind
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from tests.engine.structured.conftest import form
from tests.engine.structured.everyday_forms import FORMS, REFUSED
from tests.engine.structured.following import walk

SCHEMA = GrammarKind.JSON_SCHEMA


def check_walks(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId, name: str, seeds: range
) -> None:
    schema = FORMS[name]
    validator = validator_for(schema, Draft202012Validator)(schema)
    make_matcher = compiler.compile(form(SCHEMA, json.dumps(schema)), frozenset([eos]))
    num_whole = 0
    for seed in seeds:
        text = walk(make_matcher(), tokenizer, seed, endings=[eos], closes_after=40)
        if text is not None:
            num_whole += 1
            errors = [error.message for error in validator.iter_errors(json.loads(text))]
            assert not errors, (text, errors)
    assert num_whole >= len(seeds) / 2


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_is_valid(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId, name: str
) -> None:
    check_walks(compiler, tokenizer, eos, name, range(10))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_is_valid_two_hundred_times(
    compiler: GrammarCompiler, tokenizer: Tokenizer, eos: TokenId, name: str
) -> None:
    check_walks(compiler, tokenizer, eos, name, range(10, 210))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_held_is_refused_with_what_to_write_instead(
    compiler: GrammarCompiler, name: str
) -> None:
    schema, remedy = REFUSED[name]
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(form(SCHEMA, json.dumps(schema)), frozenset())
    assert caught.value.field == "grammar.json_schema"
    assert remedy in caught.value.description


def test_nine_of_ten_are_held() -> None:
    assert len(FORMS) >= 50
    assert len(FORMS) >= 9 * len(REFUSED)
