"""Faults that are planted in our decoder, each found when the model is loaded: the message says in
which layer and part, and how far off.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.contract.types import TokenId
from engine.loading import gate, loader, watching
from engine.loading.watching import observe
from engine.models import choosing, comparison, native_decoder, native_layer, recording
from engine.models.description import Attention, Decoder, DeltaNet, Layer
from engine.models.formats.native import native_library
from engine.models.held_layer import PackedLinear
from tests.engine.models.decoders import difference, make, verify

SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


def _after_packing(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """Change a model between its record and the comparison."""
    right = choosing.NativeDecoder

    def changed(model: Any, described: Decoder) -> Any:
        change(model)
        return right(model, described)

    monkeypatch.setattr(choosing, "NativeDecoder", changed)


def _one_row(model: Any) -> None:
    """An error of 1 % in one row of one product."""
    layer: PackedLinear = model.model.layers[1].mlp.down_proj
    weight = layer.weight.float()
    weight[17] *= 1.01
    layer.held.pack(weight.bfloat16())


def _one_norm(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].post_attention_layernorm.weight[5] *= 1.01


def _last_norm(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight[3] += 0.05


def _embedding(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.01)


def _router(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.neg_()


def _one_element(path: str, *place: int, plus: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with torch.no_grad():
            model.get_parameter(f"model.layers.{path}")[place] += plus

    return change


def _beta(model: Any) -> None:
    layer: PackedLinear = model.model.layers[0].linear_attn.in_proj_b
    weight = layer.weight.float()
    weight[7] *= 1.01
    layer.held.pack(weight.bfloat16())


def _bias(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.padded_bias[3] += 0.5


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("qwen3", _one_row, r"layer 1, down, .* by (0\.9|1\.0)\d% in output 17, 1 of \d+ outputs"),
        ("qwen3", _one_norm, r"layer 2, before_mlp, .* by \d.*% .*, element 5; \d+ of"),
        ("qwen3", _last_norm, r"model\.norm, with inputs times 1 differs .* element 3;"),
        ("qwen3", _embedding, r"embedding differs"),
        ("mixtral", _router, r"layer 1, experts, with inputs times 1 differs"),
        ("qwen2", _bias, r"layer 0, projection, .* in output 67, 1 of"),
        ("lfm2", _one_element("2.conv.conv.weight", 5, 0, 1, plus=0.05),
         r"layer 2, convolution, .* by \d.*% .*, element 5; \d+ of"),
        ("qwen3_5", _one_element("2.linear_attn.A_log", 3, plus=1.0),
         r"layer 2, delta_rule, .* by \d.*% "),
        ("qwen3_5", _one_element("0.linear_attn.norm.weight", 5, plus=0.02),
         r"layer 0, gated_norm, .* by \d.*% "),
        ("qwen3_5", _beta, r"layer 0, projection, .* in output 775, 1 of"),
        ("qwen3_next", _one_element("0.linear_attn.dt_bias", 9, plus=1.0),
         r"layer 0, delta_rule, .* by \d.*% "),
        ("olmo_hybrid", _one_element("0.linear_attn.o_norm.weight", 5, plus=0.02),
         r"layer 0, gated_norm, .* by \d.*% "),
    ],
)  # fmt: skip
def test_wrong_parameters(
    family: str, change: Callable[[Any], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _after_packing(monkeypatch, change)
    assert re.search(said, difference(make(family)))


def _described(monkeypatch: pytest.MonkeyPatch, change: Callable[[Decoder], Decoder]) -> None:
    right = choosing.describe
    monkeypatch.setattr(choosing, "describe", lambda model: change(right(model)))


def _layers(change: Callable[[Layer], Layer]) -> Callable[[Decoder], Decoder]:
    return lambda one: dataclasses.replace(one, layers=tuple(change(layer) for layer in one.layers))


def _attention(**changes: Any) -> Callable[[Decoder], Decoder]:
    return _layers(
        lambda layer: dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.attention, **changes)
        )
    )


def _recurrence(**changes: Any) -> Callable[[Decoder], Decoder]:
    return _layers(
        lambda layer: (
            layer
            if isinstance(layer.mixer, Attention)
            else dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changes))
        )
    )


def _head_norm(**changes: Any) -> Callable[[Decoder], Decoder]:
    def change(layer: Layer) -> Layer:
        one = layer.mixer
        if not isinstance(one, DeltaNet):
            return layer
        norm = dataclasses.replace(one.norm, **changes)
        return dataclasses.replace(layer, mixer=dataclasses.replace(one, norm=norm))

    return _layers(change)


def _rotary(**changes: Any) -> Callable[[Decoder], Decoder]:
    return lambda one: dataclasses.replace(
        one, rotaries=tuple(dataclasses.replace(rotary, **changes) for rotary in one.rotaries)
    )


def _norm_form(form: Any) -> Callable[[Decoder], Decoder]:
    def change(layer: Layer) -> Layer:
        norm = layer.before_attention
        assert norm is not None
        return dataclasses.replace(layer, before_attention=dataclasses.replace(norm, form=form))

    return _layers(change)


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 1e4,
}


@pytest.mark.parametrize(
    ("family", "settings", "change", "said"),
    [
        ("llama", {"rope_parameters": YARN}, _rotary(scaling=1.0), "layer 0, queries, "),
        ("llama", {}, _rotary(paired=True), "layer 0, queries, "),
        ("olmo2", {}, _rotary(rounds_products=True), "layer 0, queries, "),
        ("gemma2", {}, _attention(softcap=None), "layer 0, attention: scaling, softcap and sinks"),
        ("gpt_oss", {}, _attention(sinks=None), "layer 0, attention: scaling, softcap and sinks"),
        ("gemma2", {}, lambda one: dataclasses.replace(one, logits_softcap=None), "logits differs"),
        ("granite", {"logits_scaling": 8.0},
         lambda one: dataclasses.replace(one, logits_divisor=None), "logits differs"),
        ("granite", {"residual_multiplier": 0.22},
         _layers(lambda layer: dataclasses.replace(layer, residual=1.0)), "layer 0, residual, "),
        ("granite", {"embedding_multiplier": 12.0},
         lambda one: dataclasses.replace(one, embedding_factor=None), "embedding differs"),
        ("llama", {}, lambda one: dataclasses.replace(
            one, norm=dataclasses.replace(one.norm, eps=3e-6)),
         "model.norm, with inputs times 0.000976562 differs"),
        ("llama", {}, _norm_form("plain"), "layer 0, before_attention, "),
        ("gemma2", {}, _layers(lambda layer: dataclasses.replace(layer, after_mlp=None)),
         "layer 0, result, "),
        ("smollm3", {}, _attention(rotary=0), "layer 3, queries, "),
        ("hunyuan_v1_dense", {}, _attention(norms_last=False), "layer 0, query_norm, "),
        ("ernie4_5", {}, _rotary(rounds_products=True), "layer 0, queries, "),
        ("jais2", {}, _layers(lambda layer: dataclasses.replace(
            layer, mlp=dataclasses.replace(layer.mlp, activation="silu"))),
         "layer 0, activation, "),
        ("hyperclovax", {"logits_scaling": 8.0},
         lambda one: dataclasses.replace(one, logits_factor=None), "logits differs"),
        ("hyperclovax", {"use_post_norm": True},
         _layers(lambda layer: dataclasses.replace(layer, after_attention=None)),
         "layer 0, residual, "),
        ("qwen3_moe", {}, _layers(lambda layer: dataclasses.replace(layer, residual=0.5)),
         "layer 0, residual, "),
        ("qwen3_5", {}, _recurrence(log_rate="dt_bias"), "layer 0, delta_rule, "),
        ("qwen3_5", {}, _recurrence(rate_bias="A_log"), "layer 0, delta_rule, "),
        ("qwen3_5", {}, _head_norm(eps=1e-2), "layer 0, gated_norm, "),
        ("qwen3_5", {}, _rotary(scaling=1.1), "layer 1, queries, "),
        ("qwen3_next", {}, _recurrence(groups=1), "layer 0, delta_rule, "),
        ("qwen3_next", {}, _recurrence(groups=4), "layer 0, delta_rule, "),
        ("olmo_hybrid", {}, _recurrence(beta_factor=1.0), "layer 0, delta_rule, "),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False}, _recurrence(beta_factor=2.0),
         "layer 0, delta_rule, "),
    ],
)  # fmt: skip
def test_wrong_descriptions(
    family: str,
    settings: dict[str, Any],
    change: Callable[[Decoder], Decoder],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _described(monkeypatch, change)
    assert said in difference(make(family, **settings))


def test_a_rotary_scaling_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions count by a quarter in the model."""
    right = native_decoder.NativeDecoder.tables
    verify(make("llama", rope_parameters=SCALED))
    monkeypatch.setattr(
        native_decoder.NativeDecoder, "tables", lambda self, where: right(self, where * 4)
    )
    text = difference(make("llama", rope_parameters=SCALED))
    assert re.search(r"layer 0, queries, with inputs times 1 differs .* by \d.*% ", text)


@pytest.mark.parametrize("first", [51, 300, 511])
@pytest.mark.parametrize("family", ["llama", "cohere", "gemma3", "ernie4_5"])
def test_a_rotation_that_is_wrong_far_behind_the_prompt(
    family: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the longest position that the model allows, 511."""
    right = native_decoder.NativeDecoder.tables

    def tables(self: Any, where: torch.Tensor) -> Any:
        return right(self, where + (where >= first))

    monkeypatch.setattr(native_decoder.NativeDecoder, "tables", tables)
    text = difference(make(family))
    assert re.search(
        r"layer 0, queries, with inputs times (64|0\.000976562) differs .* by \d", text
    )


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_end_where_frequencies_depend_on_the_length(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope |= {**factors, "original_max_position_embeddings": 128}
    lines: list[str] = []
    verified = verify(make("llama", rope_parameters=rope), lines=lines)
    assert verified.rope is not None
    assert "decoder: our own, for llama" in lines


def test_far_positions_are_spread() -> None:
    found = recording.spread(11, 131072, torch.bfloat16)
    assert found[0].tolist() == list(range(11))
    far = sorted(found[1:].flatten().tolist())
    assert (far[0], far[-1], len(set(far))) == (11, 131071, 22)
    assert all(later < 1.6 * earlier for earlier, later in itertools.pairwise(far))
    assert recording.spread(11, 7, torch.bfloat16).max() == 10


class _Wrong:
    """The library, one of whose kernels is not what it was."""

    def __init__(self, name: str, after: Callable[..., None]) -> None:
        self._name = name
        self._after = after

    def __getattr__(self, name: str) -> Any:
        right = getattr(native_library(), name)
        if name != self._name:
            return right

        def call(*arguments: Any) -> Any:
            result = right(*arguments)
            self._after(*arguments)
            return result

        return call


def _elements(address: int, count: int) -> torch.Tensor:
    place = (ctypes.c_uint16 * count).from_address(address)
    return torch.frombuffer(place, dtype=torch.bfloat16)


def _large_values(
    weight: Any, x: int, stride: int, y: int, y_stride: int, rows: int, _: int
) -> None:
    """A product saturates: only large results are wrong."""
    made = _elements(y, rows * y_stride)
    made.clamp_(-300.0, 300.0)


def _small_values(norm: Any, x: int, y: int, width: int, rows: int, *_: int) -> None:
    """A norm whose eps is another matters for small inputs alone."""
    given, made = (_elements(place, rows * width).view(rows, width) for place in (x, y))
    made[given.abs().amax(dim=1) < 0.02] *= 1.05


@pytest.mark.parametrize(
    ("kernel", "fault", "said"),
    [
        ("linear", _large_values, r"layer \d, \w+, with inputs times 64 differs .* in output \d+"),
        ("norm", _small_values, r"layer \d, \w+, with inputs times 0\.000976562 differs .* by \d"),
    ],
)
def test_a_fault_that_depends_on_values(
    kernel: str, fault: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_layer, "native_library", lambda: _Wrong(kernel, fault))
    text = difference(make("olmo2"))
    assert re.search(said, text), text


def test_a_fault_of_whole_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_bit(reference: Any) -> None:
        call = reference._obj
        if call.tokens == 1:
            _elements(call.y, 4).view(torch.int16)[0] ^= 1

    monkeypatch.setattr(native_decoder, "native_library", lambda: _Wrong("layers", one_bit))
    assert "layer 0, in one call, with inputs times 1 differs" in difference(make())


def test_what_is_recorded_is_the_unmodified_model() -> None:
    """Its linear layers are not packed yet; each layer has rows for each magnitude of its input,
    of which the first go on to the next layer.
    """
    model = make()
    prompt = [TokenId(3), TokenId(4), TokenId(5)]
    found = observe(model, [prompt], decoder=choosing.describe(model)).record
    assert found is not None
    assert len(found.layers) == 3
    for one in found.layers:
        assert one.x.shape == (9, 64)
        for rows, magnitude in zip(
            one.x.chunk(3), recording.MAGNITUDES[torch.bfloat16], strict=True
        ):
            assert torch.equal(rows, one.x[:3] * magnitude)
        assert {len(part) for part in one.parts.values()} == {9}
    expected = model(input_ids=torch.tensor([[3, 4, 5]])).logits[0]
    expected[0] *= 64
    torch.testing.assert_close(found.logits, expected, atol=0.05, rtol=0.05)
    assert torch.equal(found.layers[1].x[:3], found.layers[0].parts["result"][:3])
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_what_was_recorded_is_gone_when_memory_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is as large as a layer or two, in many pieces: the system gets it back."""
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    right = gate.observe

    def observed(*arguments: Any) -> recording.Observation:
        found = right(*arguments)
        assert found.record is not None
        kept.append(weakref.ref(found.record.layers[0].parts["inner"]))
        return found

    monkeypatch.setattr(gate, "observe", observed)
    monkeypatch.setattr(loader, "trim", lambda: alive.append(kept[0]() is not None))
    verify(make())
    assert alive == [True, False]


def test_the_unmodified_model_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading waits for it: what is recorded is also what the load gate knows of that prompt."""
    prompts: list[int] = []
    eager_forward = watching.eager_forward

    def watched(model: Any, ids: torch.Tensor, **named: bool) -> Any:
        prompts.append(ids.shape[1])
        return eager_forward(model, ids, **named)

    monkeypatch.setattr(watching, "eager_forward", watched)
    verify(make())
    assert prompts == [43, 11]


def test_a_weight_is_read_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading waits for the comparison: a layer's products are computed once for all magnitudes,
    then with the whole layer in one call: for the prompt, and for one token more.
    """
    seen: dict[str, list[int]] = {"linear": [], "layers": []}

    def linear(weight: Any, x: int, stride: int, y: int, y_stride: int, rows: int, _: int) -> None:
        seen["linear"].append(weight._obj.packed)

    def layers(reference: Any) -> None:
        seen["layers"].append(reference._obj.tokens)

    monkeypatch.setattr(native_layer, "native_library", lambda: _Wrong("linear", linear))
    monkeypatch.setattr(native_decoder, "native_library", lambda: _Wrong("layers", layers))
    make_decoder = choosing.make_decoder

    def counted(*arguments: Any) -> Any:
        seen["layers"].clear()
        found = make_decoder(*arguments)
        seen["compared"] = list(seen["layers"])
        return found

    monkeypatch.setattr(loader, "make_decoder", counted)
    verify(make())
    assert len(seen["linear"]) == len(set(seen["linear"])) > 3
    assert seen["compared"] == [10, 1] * 3


def test_one_rounding_of_a_product_is_no_fault() -> None:
    """An output differs by more than half a percent if its largest element is rounded otherwise."""
    theirs = torch.full((11, 8), 0.01).bfloat16()
    theirs[3] = 1.0
    rounded, wrong = theirs.clone(), theirs.clone()
    rounded[3, 5] += 2.0**-7
    wrong[3, 5] += 2.0**-6
    assert comparison._product(rounded, theirs) is None
    assert comparison._product(wrong, theirs) is not None
    theirs = torch.randn((11, 2000), generator=torch.Generator().manual_seed(0)).bfloat16()
    wrong = (theirs.float() * 1.01).bfloat16()
    assert all(
        comparison._product(wrong[:, [one]], theirs[:, [one]]) is not None for one in range(2000)
    )


@pytest.mark.parametrize("seed", range(4))
def test_what_sure_attention_loses_where_its_scores_are_rounded_is_no_fault(seed: int) -> None:
    """Two keys are nearly as good as each other, with scores of 60. A fault of one key is found."""
    generator = torch.Generator().manual_seed(seed)
    scores = 60 + torch.randn((64, 12), generator=generator)
    value = torch.randn((12, 32), generator=generator)
    ours = (scores.softmax(-1) @ value).bfloat16()
    theirs = (scores.bfloat16().float().softmax(-1) @ value).bfloat16()
    assert comparison._attention(ours, theirs) is not None
    assert comparison._attention(ours, theirs, 63.0) is None
    scores[:, 5] = -torch.inf
    missing = (scores.softmax(-1) @ value).bfloat16()
    assert comparison._attention(missing, theirs, 63.0) is not None


def test_attention_is_judged_by_the_scores_of_its_own_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    judge = comparison._attention

    def noted(actual: torch.Tensor, expected: torch.Tensor, score: float = 0.0) -> str | None:
        seen.append(score)
        return judge(actual, expected, score)

    monkeypatch.setattr(comparison, "_attention", noted)
    verify(make())
    plain, sure = list(seen), make()
    seen.clear()
    with torch.no_grad():
        sure.model.layers[0].self_attn.q_norm.weight *= 8
    verify(sure)
    each = len(recording.MAGNITUDES[torch.bfloat16])
    assert len(plain) == len(seen) == each * len(sure.model.layers)
    assert seen[:each] == pytest.approx([8 * score for score in plain[:each]], rel=0.02)
    assert min(plain) > 1.0
    assert max(seen[each:]) < 8 * min(plain)


def test_what_is_rounded_twice_may_be_two_apart() -> None:
    """An element that is rounded the other way before it is multiplied by the norm's weight may end
    two away; an error of 1 % in one element of the weight is another thing.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((53, 4096), generator=generator).bfloat16()
    weight = (1 + 0.3 * torch.randn(4096, generator=generator)).bfloat16()

    def norm(factor: float, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * factor
        return (wide * root).bfloat16() * weight

    theirs, ours = norm(1.0, weight), norm(1 + 2.0**-22, weight)
    apart = (comparison._in_order(ours) - comparison._in_order(theirs)).abs()
    assert apart.max() == 2
    assert comparison._norm(ours, theirs) is None
    for place in range(0, 4096, 64):
        other = weight.clone()
        other[place] *= 1.01
        if other[place] != weight[place]:
            assert f"element {place};" in str(comparison._norm(norm(1.0, other), theirs))
