"""What becomes of the output that a caller expects."""

from __future__ import annotations

from typing import Any

import pytest

from engine.contract.token_ids import NO_IDS
from tests.service.fake_engine import FakeEngine, model_info, says
from tests.service.helpers import refused, serving, spec


@pytest.mark.parametrize("speculates", [True, False])
@pytest.mark.parametrize("prediction", [{"text": "abc"}, {"tokens": {"ids": [97, 98, 99]}}])
async def test_the_engine_gets_it_where_it_guesses(
    speculates: bool, prediction: dict[str, Any]
) -> None:
    engine = FakeEngine(script=says("abc"), info=model_info(speculates=speculates))
    async with serving(engine) as h:
        await h.generate(spec("Once", prediction=prediction))
    [request] = engine.submitted
    assert list(request.prediction) == ([97, 98, 99] if speculates else list(NO_IDS))


@pytest.mark.parametrize("speculates", [True, False])
async def test_ids_are_checked_in_any_case(speculates: bool) -> None:
    async with serving(FakeEngine(info=model_info(speculates=speculates))) as h:
        wrong = spec("Once", prediction={"tokens": {"ids": [10**6]}})
        error = await refused(h.generate(wrong))
    assert "spec.prediction.tokens.ids[0]" in error.message
