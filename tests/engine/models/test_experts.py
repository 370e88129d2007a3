"""Which experts get our implementation, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralForCausalLM, PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

from engine.attention.interface import AttentionBackend
from engine.attention.torch_backend import TorchAttentionBackend
from engine.contract.errors import ModelRefusedError
from engine.loading.loader import verify_model
from engine.loading.view import ModelView
from engine.models.experts import EXPERTS_NAME, choose_experts
from tests.engine.cuda.watch import ADA, AMPERE, CUDA, HOPPER, Watch, fake_cuda, to_fake_cuda
from tests.model_recipes import RECIPES
from tests.tiny_models import make_model

pytest.importorskip("triton", reason="Triton is not installed here")


class OfAnother(MixtralForCausalLM):
    """As transformers sees a model whose file does not name the interface."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return False


def view_of(family: str) -> PreTrainedModel:
    return ModelView.of(make_model(RECIPES[family].config())).model


def choose(model: PreTrainedModel, backend: AttentionBackend | None = None) -> list[str]:
    """What is said."""
    from engine.attention.triton_backend import TritonAttentionBackend

    said: list[str] = []
    choose_experts(model, backend or TritonAttentionBackend(), said.append)
    return said


def experts_of(model: PreTrainedModel) -> Any:
    return next(one for one in model.modules() if hasattr(one, "has_gate"))


@pytest.mark.parametrize(
    ("properties", "dtype", "is_ours"),
    [
        (HOPPER, torch.bfloat16, False),
        (HOPPER, torch.float16, True),
        (HOPPER, torch.float32, True),
        (AMPERE, torch.bfloat16, True),
        (ADA, torch.float16, True),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_ours_are_chosen_where_theirs_would_wait(
    properties: Any, dtype: torch.dtype, is_ours: bool
) -> None:
    original = make_model(RECIPES["mixtral"].config())
    model = ModelView.of(original).model
    with fake_cuda(Watch(), properties=properties):
        to_fake_cuda(model, dtype)
        assert choose(model) == (["experts: our own"] if is_ours else [])
    expected = EXPERTS_NAME if is_ours else "grouped_mm"
    assert experts_of(model).config._experts_implementation == expected
    assert experts_of(original).config._experts_implementation == "grouped_mm"
    assert original.config._experts_implementation == "grouped_mm"


def test_nothing_is_said_where_nothing_is_chosen() -> None:
    assert choose(view_of("mixtral")) == []  # on a CPU
    model = view_of("llama")
    with fake_cuda(Watch()):
        to_fake_cuda(model, torch.float16)
        assert choose(model) == []


def _owners_choice(model: PreTrainedModel) -> None:
    model.set_experts_implementation("batched_mm")


def _another_class(model: PreTrainedModel) -> None:
    model.__class__ = OfAnother


def _norm(model: PreTrainedModel) -> None:
    experts_of(model).has_post_expert_norm = True


def _part(model: PreTrainedModel) -> None:
    experts_of(model)._is_expert_parallel = True


def _strides(model: PreTrainedModel) -> None:
    experts = experts_of(model)
    experts.down_proj = torch.nn.Parameter(experts.down_proj[:, ::2, ::2], requires_grad=False)


def _types(model: PreTrainedModel) -> None:
    experts = experts_of(model)
    wide = torch.empty_like(experts.down_proj, dtype=torch.float32)
    experts.down_proj = torch.nn.Parameter(wide, requires_grad=False)


def _missing(model: PreTrainedModel) -> None:
    del experts_of(model).down_proj


def _fewer(model: PreTrainedModel) -> None:
    experts_of(model).num_experts = 5


@pytest.fixture
def mixtral() -> Iterator[PreTrainedModel]:
    """On a CUDA device that is not there, in float16."""
    model = view_of("mixtral")
    with fake_cuda(Watch()):
        to_fake_cuda(model, torch.float16)
        assert model.device.type == CUDA.type
        yield model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_owners_choice, "the model has batched_mm"),
        (_another_class, "its class does not let them be set"),
        (_norm, "MixtralExperts has a norm behind its experts"),
        (_part, "MixtralExperts has a part of the experts"),
        (_strides, "MixtralExperts has a down_proj that is not in one piece"),
        (_types, "MixtralExperts has weights in torch.float16, torch.float32"),
        (_missing, "MixtralExperts has no down_proj of 4 matrices"),
        (_fewer, "MixtralExperts has no gate_up_proj of 5 matrices"),
    ],
)
def test_others_stay_and_it_is_said(
    change: Callable[[PreTrainedModel], None], reason: str, mixtral: PreTrainedModel
) -> None:
    change(mixtral)
    before = mixtral.config._experts_implementation
    assert choose(mixtral) == [f"experts: transformers', because {reason}"]
    assert mixtral.config._experts_implementation == before


@pytest.mark.parametrize("is_right", [True, False])
def test_the_load_gate_judges_them(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a device that nobody has seen."""

    def forward(self: Any, x: torch.Tensor, *chosen: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = grouped_mm_experts_forward(self, x, *chosen)
        return made if is_right else 1.1 * made

    monkeypatch.setattr("engine.models.experts._waits", lambda *given: True)
    monkeypatch.setattr("engine.models.experts._why_not", lambda *given: None)
    monkeypatch.setattr("engine.models.triton_experts.experts_forward", forward)
    said: list[str] = []
    with nullcontext() if is_right else pytest.raises(ModelRefusedError, match="logits"):
        verify_model(make_model(RECIPES["mixtral"].config()), Path(), said.append, "torch")
    assert "experts: our own" in said


def test_ours_go_with_the_triton_kernels_of_attention(mixtral: PreTrainedModel) -> None:
    said = choose(mixtral, TorchAttentionBackend())
    assert said == ["experts: transformers', because attention does not run on the Triton kernels"]
    assert mixtral.config._experts_implementation == "grouped_mm"
