"""Our experts against those of transformers, in modules of its models: the results of one and of
many tokens, of experts that nobody chose, and of one that everybody chose.
"""

from __future__ import annotations

import copy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.models.description import ClampedGate, Routing
from engine.models.operations import BoundMixture, Gate, TorchOperations, routed
from engine.models.triton_experts import (
    choose_tiles,
    experts_forward,
    experts_product,
    most_tiles,
    route,
    sort_pairs,
)
from engine.models.triton_operations import TritonOperations
from tests.gpu.conftest import INTERPRETED

pytestmark = pytest.mark.gpu

EXPERTS, CHOSEN = 6, 2
TYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest element, for everything that a module computes: some roundings."""
FAMILIES = ("mixtral.Mixtral", "qwen3_moe.Qwen3Moe", "gpt_oss.GptOss", "aria.Aria")
UNGATED = "nemotron_h.NemotronH"
SHAPES = ["one token", "few", "more than a tile", "one expert", "half of the experts"]


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def module_of(family: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A module of experts of transformers', with random weights."""
    config = SimpleNamespace(
        hidden_size=72,
        intermediate_size=100,
        moe_intermediate_size=100,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        moe_num_experts=EXPERTS,
        n_routed_experts=EXPERTS,
        moe_latent_size=None,
        hidden_act="silu",
        mlp_hidden_act="relu2",
        swiglu_alpha=1.702,
        swiglu_limit=1.5,  # reached by random numbers
        _experts_implementation="eager",
    )
    folder, _, name = family.partition(".")
    file = import_module(f"transformers.models.{folder}.modeling_{folder}")
    module = getattr(file, f"{name}Experts")(config)
    if not hasattr(module, "is_transposed"):
        pytest.skip("in this version of transformers it does not ask the interface")
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        scale = 1.0 if parameter.dim() == 2 else 0.15
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return module.to(device, dtype).requires_grad_(False)


def tokens(
    shape: str, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts and the weights of these, as a router gives them."""
    generator = torch.Generator().manual_seed(1)
    count = {"one token": 1, "few": 5}.get(shape, 70)
    x = torch.randn(count, 72, generator=generator)
    scores = torch.rand(count, EXPERTS, generator=generator)
    if shape == "half of the experts":
        scores[:, ::2] -= 1.0
    if shape == "one expert":
        scores[:, 3] += 1.0
    weights, chosen = torch.topk(scores, 1 if shape == "one expert" else CHOSEN)
    return x.to(device, dtype), chosen.to(device), weights.to(device, dtype)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest element."""
    return float((actual.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", [*FAMILIES, UNGATED])
def test_a_module_computes_what_transformers_does(
    family: str, shape: str, dtype: torch.dtype, device: torch.device
) -> None:
    """As its eager code does in the same type, and in float64 with the same weights."""
    is_rare = shape in ("few", "half of the experts") or dtype is torch.bfloat16
    if INTERPRETED and is_rare and family != FAMILIES[0]:
        pytest.skip("the interpreter is slow")
    module = module_of(family, dtype, device)
    given = tokens(shape, dtype, device)
    made = experts_forward(module, *given)
    assert made.dtype is dtype
    assert error(made, module(*given)) < 2 * TOLERANCE[dtype]
    exact = copy.deepcopy(module).double()
    x, chosen, weights = given
    assert error(made, exact(x.double(), chosen, weights.double())) < TOLERANCE[dtype]


@pytest.mark.parametrize("given", [torch.float32, torch.float16], ids=str)
def test_results_are_rounded_where_their_weights_are(
    given: torch.dtype, device: torch.device
) -> None:
    """Where a router gives float32, only sums are rounded."""
    module = module_of(FAMILIES[0], torch.float16, device)
    x, chosen, weights = tokens("few", torch.float16, device)
    made = experts_forward(module, x, chosen, weights.to(given))
    alone = [
        experts_forward(module, x, chosen[:, i : i + 1], torch.ones_like(weights[:, :1]))
        for i in range(CHOSEN)
    ]
    parts = [one * weights[:, i : i + 1].to(given) for i, one in enumerate(alone)]
    assert {part.dtype for part in parts} == {given}
    assert torch.equal(made, torch.stack(parts).float().cumsum(0)[-1].half())


@pytest.mark.parametrize("family", ["mixtral.Mixtral", "gpt_oss.GptOss"])
def test_a_token_does_not_depend_on_its_neighbours(
    family: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Bit by bit, wherever it is in a tile, and however many tiles there are."""
    module = module_of(family, dtype, device)
    x, chosen, weights = tokens("more than a tile", dtype, device)
    together = experts_forward(module, x, chosen, weights)
    for place in (0, 17, 69):
        one = slice(place, place + 1)
        alone = experts_forward(module, x[one], chosen[one], weights[one])
        assert torch.equal(alone[0], together[place])
    turned = [one.flip(0) for one in (x, chosen, weights)]
    assert torch.equal(experts_forward(module, *turned).flip(0), together)


def test_what_is_no_number_stays_where_it_is(device: torch.device) -> None:
    module = module_of(FAMILIES[0], torch.float32, device)
    x, chosen, weights = tokens("few", torch.float32, device)
    expected = experts_forward(module, x, chosen, weights)
    x[2] = float("nan")
    made = experts_forward(module, x, chosen, weights)
    assert made[2].isnan().all()
    assert torch.equal(made[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


# ---- a mixture: routing, and all the rest -------------------------------------------------------


def routing_of(chosen: int, *, normed: bool, rounds: bool, activation: Gate = "silu") -> Routing:
    return Routing("gate", "experts", chosen, normed, rounds, activation)


@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (6, 2), (33, 33), (128, 8), (512, 10)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
def test_routes(
    experts: int, chosen: int, normed: bool, rounds: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """As torch does; of equal scores the first ones are chosen."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, experts, generator=generator)
    scores[1] = scores[1].round()
    scores[2] = 3.0
    scores[3] *= 300.0
    scores = scores.to(device, dtype)
    routing = routing_of(chosen, normed=normed, rounds=rounds)
    ids, weights = route(scores, routing)
    expected = torch.sort(scores, stable=True, descending=True).indices[:, :chosen]
    assert torch.equal(ids, expected.int())
    right = routed(scores, routing)[1].float()
    torch.testing.assert_close(weights, right, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    assert not rounds or torch.equal(weights, weights.to(dtype).float())


def test_a_token_that_is_no_number_has_experts(device: torch.device) -> None:
    """Its weights are none; other tokens are as they were."""
    scores = torch.randn(3, 6, device=device)
    routing = routing_of(4, normed=True, rounds=False)
    expected = route(scores, routing)
    scores[1, 2] = float("nan")
    ids, weights = route(scores, routing)
    assert ((ids >= 0) & (ids < 6)).all()
    assert weights[1].isnan().all()
    for made, wanted in zip((ids, weights), expected, strict=True):
        assert torch.equal(made[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("family", ["mixtral.Mixtral", "qwen3_moe.Qwen3Moe", "gpt_oss.GptOss"])
@pytest.mark.parametrize("count", [1, 5, 70])
def test_a_mixture(family: str, count: int, dtype: torch.dtype, device: torch.device) -> None:
    """As our plain operations compute it with the module's own code, and as in float64."""
    module = module_of(family, dtype, device)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 72, generator=generator).to(device, dtype)
    router = torch.randn(EXPERTS, 72, generator=generator).to(device, dtype)
    bias: torch.Tensor | None = None
    activation: Gate = "silu"
    if family == "gpt_oss.GptOss":
        bias, activation = router[:, 0].clone(), ClampedGate(module.alpha, module.limit)
    routing = routing_of(
        CHOSEN, normed=True, rounds=family != "mixtral.Mixtral", activation=activation
    )
    made = TritonOperations().mix(x, BoundMixture(router, bias, module, routing))
    assert made.dtype is dtype
    plain = TorchOperations().mix(x, BoundMixture(router, bias, module, routing))
    assert error(made, plain) < 2 * TOLERANCE[dtype]
    exact = copy.deepcopy(module).double()
    chosen, weights = routed(torch.nn.functional.linear(x, router, bias), routing)
    assert error(made, exact(x.double(), chosen, weights.double())) < TOLERANCE[dtype]


def test_too_many_experts_for_a_program_are_routed_by_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.triton_operations.MOST_EXPERTS", EXPERTS - 1)
    monkeypatch.setattr(TritonOperations, "multiply", lambda *given: pytest.fail("its own"))
    module = module_of(FAMILIES[0], torch.float32, device)
    router, x = torch.randn(EXPERTS, 72, device=device), torch.randn(3, 72, device=device)
    mixture = BoundMixture(router, None, module, routing_of(CHOSEN, normed=True, rounds=False))
    assert torch.equal(TritonOperations().mix(x, mixture), TorchOperations().mix(x, mixture))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("count", "experts"), [(1, 1), (7, 3), (5000, 9), (2048, 200)])
def test_pairs_are_sorted_by_expert(
    count: int, experts: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(0, experts, (count, 2), generator=generator, dtype=dtype).to(device)
    order, ends = sort_pairs(chosen, experts)
    assert torch.equal(order.long(), chosen.flatten().sort(stable=True).indices)
    counts = chosen.flatten().long().bincount(minlength=experts)
    assert torch.equal(ends.long(), counts.cumsum(0))


# ---- the product -------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("pairs", "experts", "inputs", "outputs"),
    [(1, 1, 16, 16), (7, 3, 33, 65), (150, 2, 64, 64), (40, 33, 130, 8), (700, 3, 72, 136)],
)
def test_a_product(
    pairs: int,
    experts: int,
    inputs: int,
    outputs: int,
    transposed: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Each pair's row by its expert's weights, rounded, plus its bias; what is beside is not
    written. The last case has large tiles in 16 bits.
    """
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, biases = numbers(pairs, inputs), numbers(experts, outputs)
    weights = numbers(experts, *((inputs, outputs) if transposed else (outputs, inputs)))
    chosen = torch.randint(0, experts, (pairs, 1), generator=generator).to(device)
    order, ends = sort_pairs(chosen, experts)
    assert ends.tolist() == [int((chosen <= one).sum()) for one in range(experts)]
    whole = x.new_full((pairs + 2, outputs), 7.0)
    experts_product(x, order, ends, weights, biases, whole[1:-1], 1, transposed)
    assert (whole[0] == 7.0).all()
    assert (whole[-1] == 7.0).all()
    own = (weights if transposed else weights.mT)[chosen[:, 0]].double()
    product = (x.double().unsqueeze(1) @ own)[:, 0]
    expected = product.to(dtype) + biases[chosen[:, 0]]
    allowed = torch.finfo(dtype).eps * product.abs().max().clamp(min=1.0)
    allowed *= 16 if dtype is torch.float32 else 2  # sums are float32
    assert ((whole[1:-1].double() - expected.double()).abs() <= allowed).all()
    assert dtype is torch.float32 or (whole[1:-1] == expected).float().mean() > 0.97


def test_pairs_of_a_token_read_the_same_row(device: torch.device) -> None:
    x, weights = torch.randn(3, 16, device=device), torch.randn(4, 16, 16, device=device)
    chosen = torch.tensor([[0, 3, 2], [3, 1, 0], [1, 0, 3]], device=device)
    order, ends = sort_pairs(chosen, 4)
    made = x.new_empty((9, 16))
    experts_product(x, order, ends, weights, None, made, 3, False)
    expected = torch.stack([x[t] @ weights[e].T for t, row in enumerate(chosen) for e in row])
    torch.testing.assert_close(made, expected)


def test_there_are_never_more_tiles_than_programs() -> None:
    """Whatever is chosen, and no program more than the worst case needs."""
    rows = choose_tiles(2, 1, 1).rows
    for pairs, experts in ((1, 8), (8, 8), (200, 3), (200, 128), (64, 1), (65, 1), (4096, 60)):
        few = min(pairs, experts)
        single = [1] * (few - 1)
        worst = sum(-(-count // rows) for count in (*single, pairs - len(single)))
        assert worst <= most_tiles(pairs, experts, rows)
        spread = torch.randint(0, experts, (pairs,)).bincount().tolist()
        assert sum(-(-count // rows) for count in spread) <= most_tiles(pairs, experts, rows)
    assert most_tiles(64, 1, 64) == 1
    assert most_tiles(65, 1, 64) == 2
    assert most_tiles(3, 128, 64) == 3
