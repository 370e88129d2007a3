"""Linear layers with the same input as one product: what is joined, that the owner's model is not
changed, and what steps yield. Here on a CPU, where it is only done in tests.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.contract.types import TokenId
from engine.loading.joined_linears import JoinedLinear, join_linears
from engine.loading.loader import verify_model
from engine.loading.verified import VerifiedModel
from engine.loading.view import ModelView
from engine.loading.watching import observe
from engine.models import choosing
from engine.runner.runner_options import StepPath
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build_verified, make_core, make_request, run, tokens_of
from tests.model_recipes import RECIPES
from tests.tiny_models import WINDOW, greedy_reference, make_model, make_prompts

PROMPTS = make_prompts((1, 31, WINDOW + 20))
NEW = 6


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choosing, "TORCH_DEVICES", frozenset({"cpu"}))
    return


def make(family: str) -> PreTrainedModel:
    return make_model(RECIPES[family].config(eos_token_id=None))


def verify(model: PreTrainedModel, lines: list[str]) -> VerifiedModel:
    return verify_model(model, Path(), lines.append, "torch", own_decoder=True)


def generate(verified: VerifiedModel) -> tuple[list[list[int]], Any]:
    """The tokens of PROMPTS, and the runner that made them."""
    built = build_verified(
        verified, graphs=RecordingBackend(), use_cuda_graph=(True, True), max_batch_tokens=40,
        max_requests_per_batch=6, q_padding_interval_size=8, kv_padding_interval_size=48,
    )  # fmt: skip
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(PROMPTS)]
    outputs = run(make_core(built), requests)
    return [tokens_of(outputs[request.request_id]) for request in requests], built.runner


def joined(model: nn.Module) -> list[set[str]]:
    """The names of the layers of each product, of the first block of layers."""
    found: dict[int, set[str]] = {}
    for path, one in model.named_modules():
        if isinstance(one, JoinedLinear):
            found.setdefault(id(one.product), set()).add(path.rpartition(".")[2])
    return sorted(set(map(frozenset, found.values())), key=sorted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "products", "parts"),
    [
        ("granitemoe", 3, [{"k_proj", "q_proj", "v_proj"}]),
        ("bert", 3, [{"key", "query", "value"}]),
        ("olmo", 6, [{"gate_proj", "up_proj"}, {"k_proj", "q_proj", "v_proj"}]),
        ("deepseek_v3", 6, [{"gate_proj", "up_proj"}, {"kv_a_proj_with_mqa", "q_a_proj"}]),
    ],
)
def test_a_family_outside_the_table(family: str, products: int, parts: list[set[str]]) -> None:
    """It yields what `generate` does, in steps that are replayed, and the log says what is done."""
    model, lines = make(family), []
    expected = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    verified = verify(model, lines)
    assert verified.decoder is None
    assert f"joined: {products} products of linear layers that have the same input" in lines
    assert joined(verified.model) == parts
    tokens, runner = generate(verified)
    assert tokens == expected
    assert {kind.path for kind in runner.steps if kind.is_replayed} == set(StepPath)


def test_the_owners_model_is_as_it_was() -> None:
    """But for where its weights are."""
    model = make("granitemoe")
    size, before = held(model), {name: one.clone() for name, one in model.state_dict().items()}
    kinds = [type(one) for one in model.modules()]
    verified = verify(model, [])
    assert joined(verified.model)
    assert [type(one) for one in model.modules()] == kinds
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert held(model) == held(verified.model) == size
    verified.refresh()


def held(model: nn.Module) -> int:
    """Bytes of all that a model holds."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({id_of(one): one.untyped_storage().nbytes() for one in tensors}.values())


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("in_place", [True, False])
def test_other_weights_are_computed(in_place: bool) -> None:
    """Those that are written in place, and those that replace the joined ones."""
    model = make("granitemoe")
    verified = verify(model, [])
    layer: Any = model.get_submodule("model.layers.1.self_attn.k_proj")
    if in_place:
        with torch.no_grad():
            layer.weight.neg_()
    else:
        layer.weight = nn.Parameter(-layer.weight.detach())
    verified.refresh()
    expected = [greedy_reference(copy.deepcopy(model), prompt, NEW) for prompt in PROMPTS]
    assert generate(verified)[0] == expected


def test_nothing_is_joined_where_transformers_alone_is_wanted() -> None:
    lines: list[str] = []
    verified = verify_model(make("granitemoe"), Path(), lines.append, "torch")
    assert not joined(verified.model)
    assert not any("joined" in line for line in lines)


class _Block(nn.Module):
    """Two layers, and what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(8, 10, bias=False)


@torch.inference_mode()
def test_a_layer_by_itself() -> None:
    """Each yields what it would alone, in any order and with any inputs, and keeps nothing."""
    block = _Block().requires_grad_(False)
    plain, x, y = copy.deepcopy(block), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert join_linears(block, [("first", "second")]) == 1
    one, other = block.first, block.second
    assert isinstance(one, JoinedLinear)

    def check(layer: str, given: torch.Tensor) -> None:
        made, expected = (getattr(which, layer)(given) for which in (block, plain))
        torch.testing.assert_close(made, expected)

    for layer, given in (
        ("first", x), ("second", x),  # as they are meant
        ("second", x), ("first", x),
        ("first", x), ("second", y), ("first", y),
        ("first", x), ("first", x), ("second", x),
    ):  # fmt: skip
        check(layer, given)
    assert one.product is other.product  # type: ignore[attr-defined]
    assert (one.product._given, one.product._made) == (None, None)


def test_what_shares_a_parameter_or_has_hooks_is_left() -> None:
    model: Any = make("llama")
    first, second, _ = model.model.layers
    first.mlp.up_proj.weight = first.mlp.gate_proj.weight
    second.self_attn.q_proj.register_forward_hook(lambda *given: None)
    view = ModelView.of(model).model
    groups = observe(view, [[TokenId(3), TokenId(4), TokenId(5)]]).joinable
    assert [len(group) for group in groups] == [3, 2, 2, 3, 2]
    assert "model.layers.1.self_attn.q_proj" not in {one for group in groups for one in group}
