"""Which model a request is for: the one that is served, by its name or an alias."""

from __future__ import annotations

import grpc
import pytest
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import details, refused, serving, spec

ALIASES = ("other", "org/mine:7b", "other", "mine")


@pytest.mark.parametrize("name", ["", "mine", "other", "org/mine:7b"])
async def test_the_model_is_called_by_its_name_or_an_alias(name: str) -> None:
    async with serving(
        FakeEngine(script=says("abc")), served_name="mine", served_alias=ALIASES
    ) as h:
        card = (await h.models.GetModel(model.GetModelRequest())).model
        result = await h.generate(spec(model=name))
    assert (card.name, list(card.aliases)) == ("mine", ["other", "org/mine:7b"])
    assert result.choices[0].text == "abc"


async def test_another_model_is_refused_with_the_names_of_this_one() -> None:
    async with serving(served_name="mine", served_alias=ALIASES) as h:
        asked = spec(model="Mine")
        session = h.session()
        await session.add(asked, command_id=4)
        [rejection] = (await session.read()).rejections
        errors = [
            await refused(h.generate(asked)),
            await refused(h.generation.AddRequest(rpc.AddRequestRequest(spec=asked))),
            await refused(h.generate(spec(model="x" * 5000))),
        ]
        await session.end()
        assert not h.engine.submitted
    for error in errors:
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert "mine, other, org/mine:7b" in error.message
        assert error.details["ErrorInfo"].metadata["served"] == "mine,other,org/mine:7b"
        assert len(error.message) < 300
    assert errors[0].message.startswith("spec.model: 'Mine' is not served here")
    assert rejection.command_id == 4
    assert rejection.status.message.startswith("add.spec.model: ")
    assert details(rejection.status)["ErrorInfo"].reason == "MODEL_NOT_FOUND"


async def test_a_model_without_aliases_has_one_name() -> None:
    async with serving() as h:
        card = (await h.models.GetModel(model.GetModelRequest())).model
        assert not card.aliases
        await h.generate(spec(model=card.name, stop={"max_tokens": 1}))
        error = await refused(h.generate(spec(model="no")))
    assert error.message.endswith(f": {card.name}")
