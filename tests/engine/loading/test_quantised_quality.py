"""What rounding weights costs, and what the kernels add: next to nothing."""

from __future__ import annotations

import pytest

from engine.models.formats.native import why_missing
from tests.quantised_quality import AT_LOAD, FILES, Q4_0, of_kernels, of_weights

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="no kernels are built here")


def test_int4_loses_no_more_than_the_rule_of_llama_cpp() -> None:
    by_search, by_rule = of_weights("int4"), of_weights(Q4_0)
    assert by_search.kl <= by_rule.kl
    assert of_weights("int8").kl < by_search.kl < of_weights("int4-64").kl < 0.035


@pytest.mark.parametrize("kind", ["bfloat16", *AT_LOAD, *FILES])
def test_kernels_add_next_to_nothing_to_the_same_weights_in_float32(kind: str) -> None:
    assert of_kernels(kind).kl <= 2e-4
