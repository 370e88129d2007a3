"""No family's steps launch more than the table says; those that wait for the device are known, with
where they do. See `launches`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers

from tests.engine.cuda import choices
from tests.engine.cuda.launches import (
    DECODERS,
    KINDS,
    count,
    measure,
    read_table,
    trace,
    traced,
)
from tests.families import EVERY_FAMILY
from tests.long_rope import MODELS
from tests.model_recipes import RECIPES

MOST = 11
"""Launches of a layer of a plain decoder."""
MOST_OF_A_CHOICE = 4
"""Launches of a captured choice of tokens, whatever the rows' options."""
MOST_FOR_LENGTHS = 10
"""Launches that find the frequencies of a step's tokens."""


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_step_launches_no_more_than_the_table_says(family: str) -> None:
    table = read_table()
    if transformers.__version__ != table["transformers"]:
        pytest.skip(f"the table is of transformers {table['transformers']}")
    if family not in traced():
        pytest.skip(f"{family} is not traced: it is not there, or has recurrent layers")
    found, known = measure(family), table["families"][family]
    assert found.keys() == known.keys(), "the table has its decoders"
    for decoder, most in known.items():
        if "waits" in most or "waits" in found[decoder]:
            assert found[decoder] == most
            continue
        for kind in KINDS:
            for name in most[kind]:
                assert found[decoder][kind][name] <= most[kind][name], (decoder, kind, name)


def test_a_choice_launches_no_more_than_the_table_says() -> None:
    found, known = choices.measure(), read_table()["choices"]
    for where, most in known.items():
        assert found[where].keys() == most.keys(), "run `make launch-table`"
    for dtype, kinds in known["captured"].items():
        for kind, most in kinds.items():
            assert found["captured"][dtype][kind] == most
            assert max(most.values()) <= MOST_OF_A_CHOICE
    for name, most in known["sampler"].items():
        for rows, launches in most.items():
            assert found["sampler"][name][rows] <= launches, (name, rows)


def test_every_family_is_in_the_table() -> None:
    table = read_table()
    if transformers.__version__ != table["transformers"]:
        pytest.skip(f"the table is of transformers {table['transformers']}")
    assert list(table["families"]) == traced(), "run `make launch-table`"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma2", "gemma3"])
def test_our_decoder_is_within_the_bound(family: str) -> None:
    found = read_table()["families"][family]["own"]
    assert found["decode"]["layer"] <= MOST
    assert found["prefill"]["layer"] <= MOST


@pytest.mark.parametrize("name", MODELS)
def test_lengths_are_looked_up_once_a_step(name: str) -> None:
    """Rotary frequencies of each token's length add nothing to a layer, and no wait."""
    family, settings = MODELS[name]
    recipe = RECIPES[family]
    lengthened = replace(recipe, settings={**recipe.settings, **settings})
    for decoder, serve in DECODERS.items():
        plain, found = serve(recipe), serve(lengthened)
        assert (plain is None) == (found is None) == (decoder == "own" and family == "phimoe")
        if plain is None or found is None:
            continue
        expected, launched = trace(plain), trace(found)
        for kind in KINDS:
            ours, usual = count(launched[kind], kind), count(expected[kind], kind)
            assert ours.layer == usual.layer
            assert ours.step - usual.step <= MOST_FOR_LENGTHS


def test_a_layer_is_from_one_attention_to_the_next() -> None:
    first, last = ["embedding", "mm", "decode_kernel"], ["mm", "argmax"]
    launches = [*first, "merge_kernel", "mm", "decode_kernel", "mm", "decode_kernel", *last]
    assert count(launches, "decode") == (3, 10)
