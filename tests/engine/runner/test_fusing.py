"""Exchanging a model's modules: what is, what it yields, and what is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from engine.config import LoadConfig
from engine.errors import ConfigError
from engine.native.library import NativeUnavailableError
from engine.offline import from_model, load
from engine.runner import fused, fusing
from engine.runner.fused import is_exchanged
from engine.runner.fusing import FusingReport, choose_fusing, fuse_model
from engine.runner.likeness import PROBES
from engine.runner.loader import load_model, verify_model
from engine.runner.packing import pack_model
from tests.families import EVERY_FAMILY
from tests.model_recipes import RECIPES
from tests.tiny_models import FAMILIES, make_model

# Family: norms, gated layers and attentions that are exchanged, of 3 layers (gemma3: 6).
FUSED = {
    "arcee": (7, 0, 3),
    "cohere": (0, 3, 0),
    "cohere2": (0, 3, 1),
    "exaone4": (13, 3, 3),
    "gemma": (7, 3, 3),
    "gemma2": (13, 3, 3),
    "gemma3": (37, 6, 6),
    "glm4_moe": (7, 3, 3),
    "gpt_oss": (7, 0, 0),
    "granite": (7, 3, 3),
    "llama": (7, 3, 3),
    "mistral": (7, 3, 3),
    "nanochat": (0, 0, 0),
    "olmo2": (13, 3, 0),
    "ministral3": (7, 3, 0),
    "phi3": (7, 0, 0),
    "phimoe": (0, 0, 3),
    "qwen2": (7, 3, 3),
    "qwen3": (13, 3, 3),
    "smollm3": (9, 4, 4),
}


def _model(family: str = "qwen3", seed: int = 0, **settings: object) -> PreTrainedModel:
    model = make_model(FAMILIES[family](**settings), seed).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:  # all 1, or 0, where nothing was learnt
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.arange(3, 40).unsqueeze(0)).logits
    return logits.float()


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", sorted(FUSED))
def test_a_model_yields_what_it_did(family: str, packed: bool) -> None:
    if not RECIPES[family].is_known:
        pytest.skip("this version of transformers does not know it")
    model = _model(family)
    if packed:
        pack_model(model, "native")
    expected, state = _logits(model), copy.deepcopy(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    report = fuse_model(model)
    assert (report.norms, report.gates, report.attentions) == FUSED[family]
    assert _difference(_logits(model), expected) < 1e-2
    assert model.dtype == torch.bfloat16
    assert [name for name, _ in model.named_parameters()] == names
    fused_state = model.state_dict()
    assert set(fused_state) == set(state)
    assert all(torch.equal(fused_state[name], state[name]) for name in state)
    assert fuse_model(model) == report, "a second time, nothing changes"


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family_passes_the_gate_fused(family: str) -> None:
    if not RECIPES[family].is_known:
        pytest.skip("this version of transformers does not know it")
    # In bfloat16, random weights may bring a router so near a tie that another expert is taken.
    seed = 3 if family == "gemma4 with experts" else 0
    model = make_model(FAMILIES[family](), seed).to(torch.bfloat16)
    lines: list[str] = []
    verify_model(model, Path(), lines.append, packing="native", fuse="kernels")
    assert any(line.startswith("fused: ") for line in lines)


def test_the_two_halves_of_a_gated_layer_are_one() -> None:
    model = _model(intermediate_size=128)
    pack_model(model, "native")
    expected = _logits(model)
    fuse_model(model)
    plans = [vars(one)[fused.PLAN] for one in model.modules() if hasattr(one, "gate_proj")]
    assert [plan.joined.outputs for plan in plans] == [256] * 3
    assert _difference(_logits(model), expected) < 1e-2


class _Norm(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def test_a_norm_of_any_name_is_exchanged() -> None:
    models = nn.ModuleList([_Norm(), nn.RMSNorm(64, eps=1e-5)]).bfloat16()
    assert fuse_model(models) == FusingReport(2, 0, 0, 0, 0, ())
    x = torch.randn(5, 64).bfloat16()
    for one in models:
        assert torch.equal(one(x), type(one).forward(one, x))
    assert torch.equal(models[0](x=x), models[0](x)), "the class's own name of its argument"


class _MeanTaken(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class _Clamped(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-1e9, 1e9)


class _OtherEps(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-4)
        return self.weight * wide.to(x.dtype)


class _Gated(_Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        result = super().forward(x)
        return result if gate is None else result * gate


class _Failing(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not for such input")


class _Buffered(_Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


class _InHalves(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.unflatten(-1, (2, -1)).float()
        halves = halves * torch.rsqrt(halves.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * halves.flatten(-2).to(x.dtype)


class _TwiceFromOne(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.weight)


@pytest.mark.parametrize(
    "kind", [_MeanTaken, _Clamped, _OtherEps, _Gated, _Failing, _Buffered, _InHalves, _TwiceFromOne]
)
def test_norms_that_are_left_alone(kind: Callable[[], nn.Module]) -> None:
    model = nn.ModuleList([kind()]).bfloat16()
    assert fuse_model(model) == FusingReport(0, 0, 0, 0, 0, (type(model[0]).__name__,))
    assert not is_exchanged(model[0])


class _ToAPower(_Norm):
    power = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(self.power).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def test_the_first_of_a_kind_is_probed_in_every_way_and_the_others_once() -> None:
    calls: list[nn.Module] = []

    class Counted(_Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(self)
            return super().forward(x)

    model = nn.ModuleList([Counted() for _ in range(4)]).bfloat16()
    assert fuse_model(model).norms == 4
    assert [calls.count(one) for one in model] == [len(PROBES), 1, 1, 1]


def test_the_odd_norm_out_is_left_alone() -> None:
    model = nn.ModuleList([_ToAPower() for _ in range(4)]).bfloat16()
    model[2].power = 4
    assert fuse_model(model) == FusingReport(3, 0, 0, 0, 0, ("_ToAPower",))
    assert [is_exchanged(one) for one in model] == [True, True, False, True]


def test_a_norm_of_another_type_is_left_alone() -> None:
    assert fuse_model(nn.ModuleList([_Norm()])).norms == 0


class _Mlp(nn.Module):
    def __init__(self, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 64, bias=bias)
        self.up_proj = nn.Linear(32, 64, bias=bias)
        self.down_proj = nn.Linear(64, 32, bias=bias)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class _Limited(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=1e9)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class _Scaled(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.0


class _Crossed(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class _Dropping(_Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)


class _Added(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class _OwnLinear(nn.Linear):
    pass


def _of_own_linears() -> nn.Module:
    model = _Mlp()
    model.up_proj = _OwnLinear(32, 64)
    return model


def _hooked() -> nn.Module:
    model = _Mlp()
    model.gate_proj.register_forward_hook(lambda *arguments: None)
    return model


class _PerhapsCrossed(_Mlp):
    is_crossed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.gate_proj, self.up_proj)
        gate, up = reversed(layers) if self.is_crossed else layers
        return self.down_proj(self.act_fn(gate(x)) * up(x))


def test_the_odd_gated_layer_out_is_left_alone() -> None:
    model = nn.ModuleList([_PerhapsCrossed() for _ in range(4)]).bfloat16()
    model[1].is_crossed = True
    assert fuse_model(model) == FusingReport(0, 3, 0, 0, 0, ("_PerhapsCrossed",))
    assert [is_exchanged(one) for one in model] == [True, False, True, True]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_layers(activation: str, bias: bool, pack: bool) -> None:
    model = nn.ModuleList([_Mlp(activation, bias)]).bfloat16()
    if pack:
        pack_model(model, "native")
    assert fuse_model(model) == FusingReport(0, 1, 0, 0, 0, ())
    (layer,) = model
    assert (vars(layer)[fused.PLAN].joined is not None) == pack
    with torch.no_grad():
        for shape in ((32,), (1, 32), (0, 32), (2, 3, 32)):
            x = torch.randn(shape).bfloat16()
            expected = type(layer).forward(layer, x)
            torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-3)
        assert torch.equal(layer(x=x), layer(x))


@pytest.mark.parametrize(
    "make",
    [_Limited, _Scaled, _Crossed, _Dropping, _Added, _of_own_linears, _hooked]
    + [
        lambda name=name: _Mlp(name) for name in ("gelu", "relu2", "gelu_new", "quick_gelu", "mish")
    ],
)
@pytest.mark.parametrize("pack", [False, True])
def test_gated_layers_that_are_left_alone(make: Callable[[], nn.Module], pack: bool) -> None:
    model = nn.ModuleList([make()]).eval().bfloat16()
    if pack:
        pack_model(model, "native")
    assert fuse_model(model) == FusingReport(0, 0, 0, 0, 0, (type(model[0]).__name__,))
    assert not is_exchanged(model[0])
    assert fused.PLAN not in vars(model[0])


class _Attention(LlamaAttention):
    """Llama's, in parts. Exchanged as it is."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: object | None = None,
        **kwargs: Any,
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            layer(hidden_states).view(shape).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key, value = self.prepare(query, key, value, *position_embeddings)
        output, weights = self.attend(query, key, value, attention_mask, **kwargs)
        return self.finish(output.reshape(*shape[:-2], -1)), weights

    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        return *apply_rotary_pos_emb(query, key, cos, sin), value

    def attend(self, *arguments: Any, **options: Any) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        return attend(self, *arguments, dropout=0.0, scaling=self.scaling, **options)

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        return self.o_proj(output)


class _ByPosition(_Attention):
    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        query, key, value = super().prepare(query, key, value, cos, sin)
        return query * torch.ones(query.shape[2], 1).bfloat16(), key, value


class _ClippedQuery(_Attention):
    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        query, key, value = super().prepare(query, key, value, cos, sin)
        return query.clamp(-1e9, 1e9), key, value


class _KeysNotTurned(_Attention):
    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        return super().prepare(query, key, value, cos, sin)[0], key, value


class _Turned(_Attention):
    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        return super().prepare(query, key, value, sin, cos)


class _TurnedInFloat32(_Attention):
    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        wide = super().prepare(*(one.float() for one in (query, key, value, cos, sin)))
        return tuple(one.bfloat16() for one in wide)


class _TurnedByPairs(_Attention):
    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        query, key = (
            one.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for one in (query, key)
        )
        return super().prepare(query, key, value, cos, sin)


class _ValuesDoubled(_Attention):
    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        return *super().prepare(query, key, value, cos, sin)[:2], value + value


class _KeysAsValues(_Attention):
    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        return *super().prepare(query, key, value, cos, sin)[:2], key


class _ScaledByLength(_Attention):
    def attend(self, query: Any, *arguments: Any, **options: Any) -> Any:
        options["softcap"] = float(query.shape[2])
        return super().attend(query, *arguments, **options)


class _Computing(_Attention):
    def attend(self, *arguments: Any, **options: Any) -> Any:
        return super().attend(*arguments, **options, s_aux=torch.ones(4))


class _NotHandingOn(_Attention):
    def attend(self, *arguments: Any, **options: Any) -> Any:
        return super().attend(*arguments)


class _OwnMask(_Attention):
    def attend(self, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return super().attend(query, key, value, None, **options)


class _Twice(_Attention):
    def attend(self, *arguments: Any, **options: Any) -> Any:
        super().attend(*arguments, **options)
        return super().attend(*arguments, **options)


class _OutputScaled(_Attention):
    def finish(self, output: torch.Tensor) -> torch.Tensor:
        return super().finish(output) * 2


class _OutputGated(_Attention):
    def finish(self, output: torch.Tensor) -> torch.Tensor:
        return super().finish(output.sigmoid())


class _PerhapsTurned(_Attention):
    is_turned = False

    def prepare(self, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        cos, sin = (sin, cos) if self.is_turned else (cos, sin)
        return super().prepare(query, key, value, cos, sin)


def test_the_odd_attention_out_is_left_alone() -> None:
    model = _model("llama")
    layers = [one for one in model.modules() if isinstance(one, LlamaAttention)]
    for layer in layers:
        layer.__class__ = _PerhapsTurned
    layers[1].is_turned = True
    report = fuse_model(model)
    assert (report.attentions, report.left) == (len(layers) - 1, ("_PerhapsTurned",))
    assert [is_exchanged(one) for one in layers] == [i != 1 for i in range(len(layers))]


class _MoreArguments(_Attention):
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: object | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        return super().forward(
            hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )


def _with_attention(kind: type[_Attention]) -> PreTrainedModel:
    model = _model("llama")
    model.get_submodule("model.layers.1.self_attn").__class__ = kind
    return model


def test_attention_of_any_name_is_exchanged() -> None:
    model = _with_attention(_Attention)
    expected = _logits(model)
    assert fuse_model(model).attentions == 3
    assert torch.equal(_logits(model), expected)


@pytest.mark.parametrize(
    "kind",
    [
        *(_ByPosition, _ClippedQuery, _KeysNotTurned, _Turned, _TurnedInFloat32, _TurnedByPairs),
        *(_ValuesDoubled, _KeysAsValues, _ScaledByLength, _Computing, _NotHandingOn, _OwnMask),
        *(_Twice, _OutputScaled, _OutputGated, _MoreArguments),
    ],
)
def test_attention_that_is_left_alone(kind: type[_Attention]) -> None:
    model = _with_attention(kind)
    report = fuse_model(model)
    assert report.attentions == 2, "its neighbours are exchanged"
    assert report.left == (kind.__name__,)
    layer = model.get_submodule("model.layers.1.self_attn")
    assert not is_exchanged(layer)
    assert fused.PLAN not in vars(layer)
    assert model.config._attn_implementation == "eager"


def _add_child(layer: Any) -> None:
    layer.g_proj = nn.Linear(64, 64)


def _add_buffer(layer: Any) -> None:
    layer.register_buffer("scale", torch.ones(()))


def _hook(layer: Any) -> None:
    layer.v_proj.register_forward_pre_hook(lambda *arguments: None)


def _own_norm(layer: Any) -> None:
    layer.q_norm.__class__ = _Clamped
    layer.q_norm.eps = vars(layer.q_norm).pop("variance_epsilon")


def _in_training(layer: Any) -> None:
    layer.train()


@pytest.mark.parametrize("change", [_add_child, _add_buffer, _hook, _own_norm, _in_training])
def test_attention_with_anything_else_is_left_alone(change: Callable[[Any], None]) -> None:
    model = _model("qwen3")
    layer = model.get_submodule("model.layers.1.self_attn")
    change(layer)
    assert fuse_model(model).attentions == 2
    assert not is_exchanged(layer)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"head_dim": 32}),
        ("qwen2", {"hidden_size": 128}),
        ("gemma3", {"head_dim": 32}),
        ("glm4_moe", {"head_dim": 32}),
        ("smollm3", {"hidden_size": 128}),
    ],
)
def test_queries_keys_and_values_are_one(family: str, settings: dict[str, int]) -> None:
    model = _model(family, **settings)
    pack_model(model, "native")
    ids = torch.randint(3, 100, (2, 40))
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.float()
        report = fuse_model(model)
        actual = model(input_ids=ids).logits.float()
    plans = [vars(one)[fused.PLAN] for one in model.modules() if hasattr(one, "q_proj")]
    assert report.attentions == len(plans) > 0
    assert all(plan.joined is not None for plan in plans)
    assert _difference(actual, expected) < 1e-2


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2 with windows", "granite", "mistral"])
def test_attention_is_told_what_it_was(family: str) -> None:
    """Layer by layer, to the last keyword."""
    model = _model(family)
    told: list[tuple[int, dict[str, object]]] = []

    def note(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        told.append((module.layer_idx, options))
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("noted", note)
    model.set_attn_implementation("noted")
    _logits(model)
    expected, told = told, []
    report = fuse_model(model)
    assert report.attentions == len(expected)
    assert model.config._attn_implementation == "noted"
    _logits(model)
    for (layer, actual), (other, options) in zip(told, expected, strict=True):
        assert layer == other
        assert actual.keys() == options.keys()
        for name, value in options.items():
            assert isinstance(value, torch.Tensor) or actual[name] == value


def test_hooks_and_classes_stay() -> None:
    model = _model()
    norm = model.get_submodule("model.norm")
    seen: list[torch.Tensor] = []
    norm.register_forward_hook(lambda module, arguments, result: seen.append(result))
    kinds = [type(module) for module in model.modules()]
    fuse_model(model)
    seen.clear()
    _logits(model)
    assert [type(module) for module in model.modules()] == kinds
    assert len(seen) == 1


def test_a_copy_of_a_model_is_its_own() -> None:
    model = _model()
    pack_model(model, "native")
    fuse_model(model)
    expected = _logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for module in other.modules():
            if is_exchanged(module) and "weight" in module._parameters:
                module._parameters["weight"].zero_()
    assert _logits(other).abs().max() == 0
    assert torch.equal(_logits(model), expected)


def test_other_types_and_strides_take_the_models_own_way() -> None:
    model = nn.ModuleList([_Norm(), _Mlp()]).bfloat16()
    fuse_model(model)
    swapped = torch.randn(64, 5).bfloat16().T
    assert torch.equal(model[0](swapped), _Norm.forward(model[0], swapped))
    assert model[0](torch.randn(3, 64)).dtype == torch.float32
    model.float()
    x = torch.randn(3, 32)
    assert torch.equal(model[1](x), _Mlp.forward(model[1], x))
    with pytest.raises(RuntimeError, match="size"):
        model[0](torch.randn(3, 60).bfloat16())


def test_a_compiled_model_yields_the_same() -> None:
    model = _model(num_hidden_layers=1)
    pack_model(model, "native")
    fuse_model(model)
    expected = _logits(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert _difference(_logits(compiled), expected) < 1e-2


def test_a_model_from_disk_is_fused_and_generates(tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path)
    lines: list[str] = []
    load_model(str(tmp_path), LoadConfig(threads=1), lines.append)
    assert "fused: 13 norms, 3 gated layers, 3 attentions" in lines
    lines.clear()
    load_model(str(tmp_path), LoadConfig(threads=1, fuse_layers=False), lines.append)
    assert not any("fused" in line for line in lines)
    prompt = [5, 6, 7]
    plain = load(str(tmp_path), threads=1, fuse_layers=False)
    whole = load(str(tmp_path), threads=1, fuse_layers=True)
    outputs = [
        one.generate_batch([prompt], max_new_tokens=6, progress_bar=False)["req_0"].generated_tokens
        for one in (plain, whole)
    ]
    assert outputs[0] == outputs[1]
    model = whole.model
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    own = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    assert own == outputs[1]


def test_a_users_model_is_left_alone() -> None:
    model = _model()
    from_model(model).generate_batch([[5, 6]], max_new_tokens=2, progress_bar=False)
    assert not any(is_exchanged(module) for module in model.modules())


@pytest.mark.parametrize("kernel", ["rms_norm", "apply_gate"])
def test_a_wrong_kernel_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would have taken the place of stays."""
    right = getattr(fused, kernel)

    def wrong(x: torch.Tensor, *arguments: object) -> torch.Tensor | None:
        result = right(x, *arguments)
        (x if result is None else result)[..., -1] *= 1.05
        return result

    for module in (fused, fusing):
        monkeypatch.setattr(module, kernel, wrong)
    model = _model("llama")
    report = fuse_model(model)
    kind = "LlamaRMSNorm" if kernel == "rms_norm" else "LlamaMLP"
    assert report.left == (kind,)
    assert not any(is_exchanged(one) for one in model.modules() if type(one).__name__ == kind)


def test_the_report() -> None:
    line = "fused: 3 norms, 1 gated layers, 2 attentions"
    assert str(FusingReport(3, 1, 2, 0, 0, ())) == line
    assert str(FusingReport(3, 1, 2, 0, 0, ("A", "B"))) == f"{line}; left as they are: A, B"


def test_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_fusing(cpu, torch.bfloat16, None) == "kernels"
    assert choose_fusing(cpu, torch.bfloat16, True) == "kernels"
    assert choose_fusing(cpu, torch.float32, None) is None
    assert choose_fusing(cpu, torch.float32, True) == "products"
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_fusing(cuda, dtype, None) == "products"
        assert choose_fusing(cuda, dtype, True) == "products"
        assert choose_fusing(cpu, dtype, False) is None
        assert choose_fusing(cuda, dtype, False) is None

    def unavailable() -> None:
        raise NativeUnavailableError("they were not built")

    monkeypatch.setattr(fusing, "native_library", unavailable)
    assert choose_fusing(cpu, torch.bfloat16, None) is None
    with pytest.raises(ConfigError, match="not built"):
        choose_fusing(cpu, torch.bfloat16, True)
