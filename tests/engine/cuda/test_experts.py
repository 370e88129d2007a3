"""Experts on CUDA, traced without a device: where transformers' wait, ours take their place, and
steps are captured; where theirs do not wait, they stay, but in our decoder.
"""

from __future__ import annotations

import pytest
import torch

from engine.contract.sampling_params import SamplingParams
from engine.models.experts import EXPERTS_NAME
from tests.engine.cuda import launches, steps
from tests.engine.cuda.launches import Served, by_ours, by_transformers, count, trace
from tests.engine.cuda.watch import AMPERE, HOPPER, DeviceFault, Properties
from tests.engine.runner.steps import make_request
from tests.model_recipes import RECIPES
from tests.recurrent_recipes import RECURRENT
from tests.tiny_models import make_prompts

pytest.importorskip("triton", reason="Triton is not installed here")

FAST = ("mixtral", "gpt_oss")
MIXED = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")
"""Those whose mixtures our decoder computes."""
OWN_ROUTES = {"dbrx", "jetmoe", "longcat_flash"}
"""Their experts are not asked for by transformers' interface, and look at what was chosen."""
DENSE = {"beam"}
"""Its first layers have no experts, and the tiny model has no others."""
FAMILIES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name, recipe in RECIPES.items()
    if "experts" in recipe.special and name not in OWN_ROUTES | DENSE | RECURRENT.keys()
]
WAITING = [
    pytest.param(torch.float16, HOPPER, id="float16"),
    pytest.param(torch.float32, HOPPER, id="float32"),
    pytest.param(torch.bfloat16, AMPERE, id="bfloat16 on 8.0"),
]
PRODUCT = "experts_product_kernel"


def served(family: str, dtype: torch.dtype) -> Served:
    """As a server has it."""
    return by_ours(RECIPES[family], dtype) or by_transformers(RECIPES[family], dtype)


@pytest.fixture
def _theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' experts everywhere."""
    for module in (launches, steps):
        monkeypatch.setattr(module, "choose_experts", lambda *given: None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "properties"), WAITING)
def test_nothing_waits(family: str, dtype: torch.dtype, properties: Properties) -> None:
    for kind, found in trace(served(family, dtype), properties).items():
        assert found.count(PRODUCT) > 0, kind
        assert found.count(PRODUCT) % 2 == 0, kind


@pytest.mark.usefixtures("_theirs")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "properties"), WAITING)
def test_transformers_experts_wait(family: str, dtype: torch.dtype, properties: Properties) -> None:
    with pytest.raises(DeviceFault, match=r"_grouped_mm in .* waits for the device"):
        trace(by_transformers(RECIPES[family], dtype), properties)


@pytest.mark.parametrize("family", FAST)
def test_where_they_do_not_wait_they_stay(family: str) -> None:
    for found in trace(by_transformers(RECIPES[family])).values():
        assert PRODUCT not in found
        assert "_grouped_mm" in found


@pytest.mark.parametrize("family", MIXED)
def test_our_decoder_has_its_own_everywhere(family: str) -> None:
    """A layer's router and what chooses, sorts, multiplies, gates, multiplies and adds up."""
    ours = by_ours(RECIPES[family])
    assert ours is not None
    for kind, found in trace(ours).items():
        begin = found.index("route_kernel") - 1
        assert found[begin + 1 : begin + 7] == [
            "route_kernel",
            "sort_kernel",
            PRODUCT,
            "clamped_gate_kernel" if family == "gpt_oss" else "gate_kernel",
            PRODUCT,
            "weighted_sum_kernel",
        ]
        assert count(found, kind).layer == (14 if kind == "decode" else 13)


@pytest.mark.parametrize("name", sorted(OWN_ROUTES))
def test_what_the_interface_does_not_reach_waits_as_before(name: str) -> None:
    with pytest.raises(DeviceFault, match="waits for the device"):
        trace(served(name, torch.float16))


def few(rig: steps.Engine) -> None:
    """Prompts, and tokens after them."""
    greedy = SamplingParams(temperature=0.0)
    for index, prompt in enumerate(make_prompts((20, 9, 40))):
        rig.add(make_request(str(index), prompt, 6, sampling=greedy))
        rig.steps(2)
    rig.steps()
    assert rig.failures == []


@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize(("dtype", "properties"), WAITING[::2])
def test_steps_of_an_engine_are_captured(
    family: str, dtype: torch.dtype, properties: Properties
) -> None:
    model = steps.verified(family)
    with steps.engine(model, dtype=dtype, properties=properties, max_batch_tokens=64) as rig:
        assert model.model.config._experts_implementation == EXPERTS_NAME
        assert model.original.config._experts_implementation == "grouped_mm"
        few(rig)
        assert rig.watch.faults == []
        assert rig.capture.captured > 0
        assert rig.capture.replays > 0


@pytest.mark.usefixtures("_theirs")
def test_with_transformers_experts_none_is() -> None:
    with steps.engine(steps.verified("mixtral"), properties=AMPERE, decoder="transformers") as rig:
        assert rig.capture.captured == 0
        assert any("_grouped_mm" in fault for fault in rig.watch.faults)
