"""Packing a model: what is exchanged, what it yields, and what is left alone."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.api.offline import from_model, load
from engine.contract.config import LoadConfig
from engine.contract.errors import ConfigError, ModelRefusedError, NoGradientsError
from engine.loading import loader, packing
from engine.loading.checkpoint import read_checkpoint
from engine.loading.loader import load_model, verify_model
from engine.loading.model_watch import ModelWatch
from engine.loading.packing import (
    DtypeChoice,
    choose_dtype,
    choose_packing,
    pack_model,
)
from engine.models.formats import native
from engine.models.formats.int4 import Int4
from engine.models.formats.int4_64 import Int4Of64
from engine.models.formats.int8 import Int8
from engine.models.formats.native import Native
from engine.models.formats.onednn import OneDnn
from engine.models.formats.registry import Format
from engine.models.held_layer import PackedEmbedding, PackedLinear
from engine.native.library import NativeUnavailableError
from engine.planning.outline import read_outline
from tests.families import EVERY_FAMILY
from tests.model_recipes import RECIPES
from tests.tiny_models import FAMILIES, make_model

LINEARS = 3 * 7 + 1
_needs_onednn = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here"
)
HOW = (Native, pytest.param(OneDnn, marks=_needs_onednn))
TIED = (("llama", False), ("llama", True), ("gemma3", True))
"""Families with and without tied weights. Gemma's embedding scales what it reads."""


def _model(family: str = "llama", *, tied: bool = False, seed: int = 0) -> PreTrainedModel:
    config = FAMILIES[family]()
    config.tie_word_embeddings = tied
    model: PreTrainedModel = make_model(config, seed).to(torch.bfloat16)
    return model


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.arange(3, 40).unsqueeze(0)).logits
    return logits.float()


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("family", "tied"), TIED)
def test_a_model_yields_what_it_did(how: Format, family: str, tied: bool) -> None:
    model = _model(family, tied=tied)
    expected, weights = _logits(model), copy.deepcopy(model.state_dict())
    report = pack_model(model, how)
    assert report.embeddings == int(tied and how is Native)
    assert report.linears == 7 * model.config.num_hidden_layers + 1
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    assert _difference(_logits(model), expected) < 2e-2
    packed = model.state_dict()
    assert set(packed) == set(weights)
    assert all(torch.equal(packed[name], weights[name]) for name in weights)
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family_passes_the_gate_packed(family: str) -> None:
    if not RECIPES[family].is_known:
        pytest.skip("this version of transformers does not know it")
    # In bfloat16, random weights may bring a router so near a tie that another expert is taken.
    near_ties = ("gemma4 with experts", "granitemoeshared")
    model = _model(family, seed=3 if family in near_ties else 0)
    verify_model(model, Path(), lambda line: None, packing=Native)
    assert any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize(("family", "tied"), TIED)
def test_weights_are_not_held_twice(family: str, tied: bool) -> None:
    model = _model(family, tied=tied)
    before = model.num_parameters() * 2
    report = pack_model(model, Native)
    packed = [one.held.packed for one in model.modules() if isinstance(one, PackedLinear)]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers(), *packed)
        if tensor.numel()
    }
    assert sum(storages.values()) >= before
    assert report.copied_bytes == 0
    assert sum(storages.values()) <= before * 1.02 + 4096


@pytest.mark.parametrize("how", [Native, Int8, Int4])
def test_a_large_weight_is_packed_and_given_back_in_slices(
    how: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one slice is in memory in both forms."""
    events: list[tuple[str, int]] = []
    pack, give_back = Native.pack, packing.Pages.give_back

    def packed(self: Native, weight: torch.Tensor) -> None:
        events.append(("packed", len(weight)))
        pack(self, weight)

    def given(self: Any, weight: torch.Tensor) -> int:
        events.append(("given", len(weight)))
        return give_back(self, weight)

    whole, sliced = _model(tied=True), _model(tied=True)
    pack_model(whole, how)
    monkeypatch.setattr(native, "_SLICE_BYTES", 64 * 64 * 2)
    monkeypatch.setattr(Native, "pack", packed)
    monkeypatch.setattr(packing.Pages, "give_back", given)
    pack_model(sliced, how)
    assert events[:4] == [("packed", 64), ("given", 64)] * 2  # an embedding of 128 rows
    assert torch.equal(_logits(sliced), _logits(whole))
    for name, weight in whole.state_dict().items():
        assert torch.equal(sliced.state_dict()[name], weight)


@pytest.mark.parametrize("how", [*HOW, Int8, Int4])
def test_new_elements_of_a_packed_weight_are_noticed(how: Format) -> None:
    model, changes = _model(), []
    pack_model(model, how)
    watch = ModelWatch(model, lambda module, name: False)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert watch.look(changes.append) == (1, 0)
    assert "model.layers.0.mlp.down_proj.packed" in changes[0].names


def test_the_checkpoint_is_let_go_of(tmp_path: Path) -> None:
    _model(tied=True).save_pretrained(tmp_path)
    file = str(tmp_path / "model.safetensors")

    def is_mapped() -> bool:
        return file in Path("/proc/self/maps").read_text()

    plain = load_model(str(tmp_path), LoadConfig(threads=1, pack_weights=False), lambda line: None)
    was_mapped = is_mapped()
    parameters = plain.model.num_parameters()
    del plain
    gc.collect()
    assert not is_mapped()
    packed = load_model(str(tmp_path), LoadConfig(threads=1), lambda line: None)
    assert packed.parameters == parameters
    gc.collect()
    assert not is_mapped()
    assert packed.model.device.type == "cpu"
    if not was_mapped:
        pytest.skip("this version of transformers maps no files")


def test_a_weight_that_others_hold_is_copied_for_them() -> None:
    class Scaled(torch.nn.Embedding):
        pass

    model = torch.nn.Module()
    model.head = torch.nn.Linear(32, 40, bias=False).bfloat16()
    model.table = Scaled(40, 32, _weight=model.head.weight)
    model.table.weight = model.head.weight
    expected = model.head.weight.detach().clone()
    report = pack_model(model, Native)
    assert report.copied_bytes == expected.nbytes
    assert "held twice" in str(report)
    assert isinstance(model.head, PackedLinear)
    assert type(model.table) is Scaled
    assert torch.equal(model.table.weight, expected)
    assert torch.equal(model.head.weight, expected)
    # It is one weight, whichever of them it is written to.
    x = torch.ones(1, 32).bfloat16()
    with torch.no_grad():
        model.table.weight.mul_(2)
        assert torch.equal(model.head(x), torch.nn.functional.linear(x, 2 * expected))
        model.head.weight.copy_(expected * 4)
    assert torch.equal(model.table.weight, expected * 4)


def test_what_is_not_plainly_a_linear_layer_is_left_alone() -> None:
    class Own(torch.nn.Linear):
        pass

    hooked = torch.nn.Linear(32, 32).bfloat16()
    hooked.register_forward_hook(lambda *arguments: None)
    model = torch.nn.Sequential(
        Own(32, 32).bfloat16(),
        torch.nn.Linear(32, 32),
        torch.nn.Linear(32, 8).bfloat16(),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 32).bfloat16()),
        hooked,
    )
    kinds = [type(module) for module in model]
    assert pack_model(model, Native).linears == 0
    assert [type(module) for module in model] == kinds


def test_a_model_from_disk_is_packed_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    _model(tied=True).save_pretrained(tmp_path)
    lines: list[str] = []
    verified = load_model(str(tmp_path), LoadConfig(threads=1), lines.append)
    assert f"linear layers: {LINEARS} packed for" in "\n".join(lines)
    assert isinstance(verified.model.get_input_embeddings(), PackedEmbedding)
    prompt = [5, 6, 7]
    plain = load(str(tmp_path), threads=1, pack_weights=False)
    packed = load(str(tmp_path), threads=1, pack_weights=True)
    outputs = [
        one.generate_batch([prompt], max_new_tokens=6, progress_bar=False)["req_0"].generated_tokens
        for one in (plain, packed)
    ]
    assert outputs[0] == outputs[1]
    model = packed.model
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    own = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    assert own == outputs[1]
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    original = plain.model.state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in again.state_dict().items())


def test_a_compiled_model_yields_the_same() -> None:
    model = _model(tied=True)
    pack_model(model, Native)
    expected = _logits(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert _difference(_logits(compiled), expected) < 2e-2


def test_a_users_model_is_left_alone() -> None:
    model = _model()
    kinds = [type(module) for module in model.modules()]
    parameters = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    from_model(model).generate_batch([[5, 6]], max_new_tokens=2, progress_bar=False)
    assert [type(module) for module in model.modules()] == kinds
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == parameters


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedLinear.forward

    def wrong(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        y = right(self, x)
        y[..., -1] += y.abs().max()
        return y

    monkeypatch.setattr(PackedLinear, "forward", wrong)
    with pytest.raises(ModelRefusedError, match="packed results are not those"):
        pack_model(_model(), Native)


def test_wrong_packing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Native.pack

    def wrong(self: Native, weight: torch.Tensor) -> None:
        right(self, weight)
        self.packed[0] ^= 16

    monkeypatch.setattr(Native, "pack", wrong)
    for how in (Native, Int8, Int4):
        with pytest.raises(ModelRefusedError, match="packed weights are not those"):
            pack_model(_model(), how)


def test_a_wrong_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedEmbedding.forward

    def wrong(self: PackedEmbedding, token_ids: torch.Tensor) -> torch.Tensor:
        return right(self, token_ids).roll(1, 0)

    monkeypatch.setattr(PackedEmbedding, "forward", wrong)
    with pytest.raises(ModelRefusedError, match="packed rows are not those"):
        pack_model(_model(tied=True), Native)


def test_a_scale_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedEmbedding, "scaled", lambda _, rows: rows)
    with pytest.raises(ModelRefusedError, match="packed rows are not those"):
        pack_model(_model("gemma3", tied=True), Native)


@pytest.mark.parametrize("how", HOW)
def test_gradients_are_refused(how: Format) -> None:
    """They would be those of norms and biases alone. Without a backward pass nothing is refused."""
    model = _model("qwen2")
    pack_model(model, how)
    made = model(input_ids=torch.tensor([[5, 6, 7]]))
    with pytest.raises(NoGradientsError, match="pack_weights=False"):
        made.logits.sum().backward()
    assert all(one.grad is None for one in model.parameters())


def test_the_packed_model_is_judged_by_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []

    def watch(model: PreTrainedModel, *arguments: object) -> None:
        packed.append(isinstance(model.get_output_embeddings(), PackedLinear))

    for stage in ("probe_layers", "self_check"):
        right = getattr(loader, stage)
        monkeypatch.setattr(
            loader,
            stage,
            lambda *args, right=right, **named: (watch(*args), right(*args, **named))[1],
        )
    verify_model(_model(), Path(), lambda line: None, packing=Native)
    assert packed == [False, True]


def test_choosing() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_packing(cpu, torch.bfloat16, False) is None
    assert choose_packing(cpu, torch.float32, False) is None
    assert choose_packing(cuda, torch.bfloat16, None) is None
    assert choose_packing(cpu, torch.bfloat16, None) == choose_packing(cpu, torch.bfloat16, True)
    for wanted in (None, True):
        assert choose_packing(cpu, torch.float32, wanted) is Native
    for device, dtype in ((cpu, torch.float16), (cuda, torch.bfloat16)):
        with pytest.raises(ConfigError, match="pack_weights: is True, but only bfloat16 and float"):
            choose_packing(device, dtype, True)


@pytest.mark.parametrize(("name", "how"), [("int8", Int8), ("int4", Int4), ("int4-64", Int4Of64)])
def test_choosing_integers(name: str, how: type[Native], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for wanted in (None, True):
        assert choose_packing(cpu, torch.bfloat16, wanted, name) is how
    with pytest.raises(ConfigError, match=f"quantization: is {name}, but pack_weights is False"):
        choose_packing(cpu, torch.bfloat16, False, name)
    for device, dtype in ((cpu, torch.float32), (cuda, torch.bfloat16)):
        with pytest.raises(ConfigError, match=f"quantization: is {name}, but it is for bfloat16"):
            choose_packing(device, dtype, None, name)

    def unavailable() -> None:
        raise NativeUnavailableError("they were not built")

    monkeypatch.setattr(native, "native_library", unavailable)
    with pytest.raises(ConfigError, match=f"quantization: is {name}, but they were not built"):
        choose_packing(cpu, torch.bfloat16, None, name)


@pytest.mark.parametrize(("name", "how"), [("int8", Int8), ("int4", Int4), ("int4-64", Int4Of64)])
def test_a_model_is_loaded_as_integers(tmp_path: Path, name: str, how: type[Native]) -> None:
    """The output layer is int8 in either."""
    _model().save_pretrained(tmp_path)
    lines: list[str] = []
    loaded = load_model(str(tmp_path), LoadConfig(threads=1, quantization=name), lines.append).model
    formats = {
        layer: type(one.held)
        for layer, one in loaded.named_modules()
        if isinstance(one, PackedLinear)
    }
    assert formats.pop("lm_head") is Int8
    assert set(formats.values()) == {how}
    assert any(f"as {name}" in line for line in lines)
    assert any("decoder: our own" in line for line in lines)


def test_choosing_by_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    # Tiles that the library cannot use, as it was built without them, or the system forbids it.
    for isa, chosen in (("amx", Native), ("avx512_bf16", OneDnn), ("avx2", OneDnn)):
        monkeypatch.setattr(native, "native_library", lambda isa=isa: SimpleNamespace(isa=isa))
        assert choose_packing(cpu, torch.bfloat16, None) is chosen
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    def unavailable() -> None:
        raise NativeUnavailableError("they were not built")

    monkeypatch.setattr(native, "native_library", unavailable)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert choose_packing(cpu, torch.bfloat16, None) is OneDnn
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert choose_packing(cpu, torch.bfloat16, None) is None
    with pytest.raises(ConfigError, match="not built"):
        choose_packing(cpu, torch.bfloat16, True)


def _hide_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AVX2 and no instructions for bfloat16, without our kernels."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)

    def unavailable() -> None:
        raise NativeUnavailableError("they were not built")

    monkeypatch.setattr(native, "native_library", unavailable)


def test_auto_is_float32_where_bfloat16_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model().save_pretrained(tmp_path)
    _hide_instructions(monkeypatch)
    lines: list[str] = []
    loaded = load_model(str(tmp_path), LoadConfig(threads=1), lines.append)
    assert loaded.dtype is torch.float32
    assert any("float32 in place of the checkpoint's bfloat16" in line for line in lines)
    assert read_outline(tmp_path, LoadConfig()).dtype is torch.float32
    lines.clear()
    loaded = load_model(str(tmp_path), LoadConfig(threads=1, dtype="bfloat16"), lines.append)
    assert loaded.dtype is torch.bfloat16
    assert not any("in place of" in line for line in lines)


def test_auto_is_the_checkpoints_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, room = torch.device("cpu"), 1 << 40
    _model().save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert choose_dtype(checkpoint, LoadConfig(), cpu, room).dtype is torch.bfloat16  # kernels
    _hide_instructions(monkeypatch)
    assert choose_dtype(checkpoint, LoadConfig(), cpu, room).dtype is torch.float32
    assert choose_dtype(checkpoint, LoadConfig(), torch.device("cuda"), room).why == ""
    tight = choose_dtype(checkpoint, LoadConfig(), cpu, 4 * checkpoint.file_bytes - 1)
    assert tight.dtype is torch.bfloat16
    assert "are too few" in tight.why
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert choose_dtype(checkpoint, LoadConfig(), cpu, room) == DtypeChoice(torch.bfloat16)


@_needs_onednn
def test_onednn_layers_compile() -> None:
    linear = torch.nn.Linear(32, 40).bfloat16()
    held = OneDnn((40, 32), torch.bfloat16)
    held.pack(linear.weight)
    layer = PackedLinear(held, linear)
    x = torch.randn(3, 32).bfloat16()
    with torch.inference_mode():
        assert torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x))
