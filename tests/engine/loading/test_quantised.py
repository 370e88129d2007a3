"""Checkpoints whose weights are quantised already: every element, every token, every refusal."""

from __future__ import annotations

import ctypes
import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import PreTrainedModel

from engine.api.offline import from_model, load
from engine.contract.config import LoadConfig
from engine.contract.errors import HeadraceError, ModelRefusedError, WeightsRefusedError
from engine.loading.checkpoint import Checkpoint, read_checkpoint
from engine.loading.loader import load_model
from engine.loading.quantised import awq, gptq, stored_linear
from engine.loading.quantised.awq import Awq
from engine.loading.quantised.gptq import Gptq
from engine.loading.quantised.registry import StoredWeights
from engine.loading.quantised.stored_format import Rows, StoredFormat, unpacked
from engine.loading.quantised.stored_linear import place_stored, stored_modules
from engine.loading.verified import VerifiedModel
from engine.loading.weights import read_weights
from engine.models.formats.codes import Codes
from engine.models.formats.grouped import Grouped
from engine.models.formats.native import native_library, why_missing
from engine.models.held_layer import PackedLinear, held_layers
from engine.native.library import LIBRARY
from engine.planning.outline import read_outline
from tests.engine.mode_sweep import check_every_mode
from tests.model_recipes import RECIPES as FAMILY_RECIPES
from tests.quantised_files import change_config, change_tensors, quantise
from tests.quantised_recipes import RECIPES, Recipe
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

needs_kernels = pytest.mark.skipif(why_missing() is not None, reason="no kernels are built here")
Q = "model.layers.1.self_attn.q_proj"


def _model(family: str = "llama", **settings: Any) -> PreTrainedModel:
    return make_model(FAMILIES[family](eos_token_id=None, **settings))


def _saved(folder: Path, name: str = "gptq", family: str = "llama") -> PreTrainedModel:
    return quantise(_model(family), folder, RECIPES[name])


def _words(*words: int) -> torch.Tensor:
    return torch.tensor([one - (1 << 32) if one >> 31 else one for one in words], dtype=torch.int32)


def _whole(form: StoredFormat, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight in both ways, which must be the same."""
    outputs = slice(0, tensors["scales"].shape[1])
    layout = form.layout(tensors)
    values = form.values(tensors, outputs)
    assert torch.equal(form.codes(tensors, layout, outputs).values(layout), values)
    return values


def test_the_bytes_of_gptq_by_hand() -> None:
    """Eight inputs, eight outputs. The codes of output 0 are 0 to 7, of output 1 15 to 8, and all
    others 8; the zero of output 0 is 8, of output 1 0, of others 8.
    """
    tensors = {
        "qweight": _words(0x76543210, 0x89ABCDEF, *[0x88888888] * 6)[None],
        "qzeros": _words(0x777777F7)[None],
        "scales": torch.tensor([[0.5, 2.0, *[1.0] * 6]], dtype=torch.float16),
    }
    form = Gptq({"bits": 4, "group_size": -1, "sym": False})
    right = torch.zeros(8, 8)
    right[0] = torch.tensor([-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5])
    right[1] = torch.tensor([30.0, 28, 26, 24, 22, 20, 18, 16])
    assert torch.equal(_whole(form, tensors), right)
    form = Gptq({"bits": 4, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"})
    tensors["qzeros"] = _words(0x88888808)[None]
    assert torch.equal(_whole(form, tensors), right)


def test_the_bytes_of_gptq_in_8_bits_and_in_another_order_by_hand() -> None:
    """Four inputs, four outputs, groups of two: inputs 0 and 3, and 1 and 2. All codes are 0x80,
    0x81, 0x7F and 0xFF, and all zeros 0x80.
    """
    tensors = {
        "qweight": _words(*[0xFF7F8180] * 4)[None],
        "qzeros": _words(0x7F7F7F7F, 0x7F7F7F7F)[:, None],
        "scales": torch.tensor([[1.0] * 4, [0.25] * 4], dtype=torch.float16),
        "g_idx": torch.tensor([0, 1, 1, 0], dtype=torch.int32),
    }
    form = Gptq({"bits": 8, "group_size": 2, "sym": True})
    assert torch.equal(_whole(form, tensors), torch.tensor([[0, 0.25, -0.25, 127.0]]).repeat(4, 1))


def test_the_bytes_of_awq_by_hand() -> None:
    """Two inputs, eight outputs. The codes of input 0 are 0 to 7, those of input 1 all 15; the
    zeros are 1 to 8.
    """
    tensors = {
        "qweight": _words(0x75316420, 0xFFFFFFFF)[:, None],
        "qzeros": _words(0x86427531)[None],
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    right = torch.tensor([[-0.5, (14 - n) / 2] for n in range(8)])
    assert torch.equal(_whole(Awq({"bits": 4, "group_size": -1}), tensors), right)


@pytest.mark.parametrize("name", RECIPES)
def test_every_element_is_that_of_the_formula(tmp_path: Path, name: str) -> None:
    right = _saved(tmp_path, name)
    made, missing = read_weights(read_checkpoint(tmp_path), torch.bfloat16)
    assert missing == []
    layers = stored_modules(made)
    assert len(layers) == 21 + RECIPES[name].lm_head
    for path, layer in layers.items():
        expected = right.get_submodule(path).weight
        values = torch.cat([layer.values(part) for part in layer.slices()])
        assert torch.equal(values, expected), path
        layout = layer.stored.layout
        codes = torch.cat([layer.codes(part).values(layout) for part in layer.slices()])
        assert torch.equal(codes, expected), path
        assert (layout.order is not None) == RECIPES[name].desc_act
        assert layout.has_minima != RECIPES[name].symmetric
    assert {one.dtype for one in made.parameters()} == {torch.bfloat16}


def test_tensors_stay_in_the_mapping_of_the_file(tmp_path: Path) -> None:
    _saved(tmp_path)
    made, _ = read_weights(read_checkpoint(tmp_path), torch.bfloat16)
    file = (tmp_path / "model.safetensors").read_bytes()
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [
        tuple(int(one, 16) for one in line.split()[0].split("-"))
        for line in maps
        if line.endswith(str(tmp_path / "model.safetensors"))
    ]
    assert len(file) > mmap.PAGESIZE
    for layer in stored_modules(made).values():
        assert layer.get_buffer("scales").dtype is torch.float16
        for one in layer.parts.values():
            assert any(start <= one.data_ptr() < end for start, end in ranges)


def test_a_bfloat16_model_computes_in_float32_and_rounds_once(tmp_path: Path) -> None:
    right = _saved(tmp_path, "gptq-4-24-asym")
    made, _ = read_weights(read_checkpoint(tmp_path), torch.bfloat16)
    x = torch.randn((5, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    y = made.get_submodule(Q)(x)
    exact = x.double() @ right.get_submodule(Q).weight.double().T
    assert y.dtype is torch.bfloat16
    assert torch.allclose(y.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("name", ["gptq", "awq-24"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_the_reference_path_gives_the_tokens_of_generate(
    tmp_path: Path, family: str, name: str
) -> None:
    right = _saved(tmp_path, name, family)
    loaded = load(str(tmp_path), dtype="float32", pack_weights=False, threads=1)
    assert stored_modules(loaded.model)
    check_every_mode(right, loaded, FAMILY_RECIPES[family].attention)
    (prompt,) = make_prompts((20,))
    assert greedy_reference(loaded.model, prompt, 8) == greedy_reference(right, prompt, 8)


@pytest.mark.parametrize(
    "name", ["gptq-4-order-asym", "gptq-8--1-sym", "gptq-lm-head", "awq-lm-head"]
)
def test_other_layouts_give_them_too(tmp_path: Path, name: str) -> None:
    right = _saved(tmp_path, name)
    loaded = load(str(tmp_path), dtype="float32", pack_weights=False, threads=1)
    check_every_mode(right, loaded, FAMILY_RECIPES["llama"].attention)


def test_an_output_layer_of_its_own_is_not_tied_to_the_embedding(tmp_path: Path) -> None:
    """Though the config says that it is."""
    model = _model(tie_word_embeddings=True)
    right = quantise(model, tmp_path, RECIPES["gptq-lm-head"])
    change_config(tmp_path, lambda config: config.update(tie_word_embeddings=True))
    assert right.config.tie_word_embeddings
    made, missing = read_weights(read_checkpoint(tmp_path), torch.float32)
    assert missing == []
    ids = torch.tensor(make_prompts((20,)))
    embedding = right.get_input_embeddings().weight
    hidden = right.model(ids).last_hidden_state
    assert not torch.allclose(hidden @ embedding.T, right(ids).logits)
    assert torch.allclose(made(ids).logits, right(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_the_owner_gets(tmp_path: Path) -> None:
    right = _saved(tmp_path)
    loaded = load(str(tmp_path), threads=1)
    assert loaded._verified.parameters == right.num_parameters()
    assert loaded._verified.stored == "gptq-4bit-g128"
    assert loaded._verified.dtype is torch.bfloat16
    with pytest.raises(ModelRefusedError, match=r"is not saved here: copy its directory"):
        loaded.model.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_model_that_another_library_has_loaded_is_refused(tmp_path: Path) -> None:
    model = _model()
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ModelRefusedError, match=r"quantized already.*its files to engine\.load"):
        from_model(model)


def test_tensors_that_the_model_does_not_have_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _saved(tmp_path)
    change_tensors(tmp_path, lambda one: one.update({"vision.weight": torch.ones(3)}))
    with caplog.at_level("INFO"):
        _, missing = read_weights(read_checkpoint(tmp_path), torch.float32)
    assert missing == []
    assert "ignored: 1 tensors that the model does not have (['vision.weight'])" in caplog.text


# What is refused

_METHODS = ["fp8", "compressed-tensors", "bitsandbytes", "mxfp4", "modelopt", "hqq", "aqlm",
            "torchao", "nvfp4", "quark", "never heard of"]  # fmt: skip


def _config(**changes: Any) -> Callable[[Path], None]:
    """Change quantization_config. A value of None takes a field out."""

    def change(folder: Path) -> None:
        def update(config: dict[str, Any]) -> None:
            own = config["quantization_config"] | changes
            config["quantization_config"] = {k: v for k, v in own.items() if v is not None}

        change_config(folder, update)

    return change


def _whole_config(value: object) -> Callable[[Path], None]:
    def update(config: dict[str, Any]) -> None:
        config.pop("quantization_config")
        if value is not None:
            config["quantization_config"] = value

    return lambda folder: change_config(folder, update)


def _tensor(part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Change a tensor of a layer, or take it out."""

    def update(tensors: dict[str, torch.Tensor]) -> None:
        made = change(tensors.pop(f"{Q}.{part}"))
        if made is not None:
            tensors[f"{Q}.{part}"] = made.contiguous()

    return lambda folder: change_tensors(folder, update)


def _added(name: str, tensor: torch.Tensor) -> Any:
    return lambda folder: change_tensors(folder, lambda one: one.update({name: tensor}))


def _set(place: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


def _endless(folder: Path) -> None:
    """Say of a tensor that it ends at infinity."""
    head = b'{"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 1e999]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _moved(folder: Path) -> None:
    file = folder / "model.safetensors"
    other = folder.parent / "other.safetensors"
    file.rename(other)
    file.symlink_to(other)


def _unquantised(folder: Path) -> None:
    _model().save_pretrained(folder)
    change_config(folder, lambda config: config.update(
        quantization_config=Recipe().quantization_config()
    ))  # fmt: skip


_LAYER = r"model\.safetensors: model\.layers\.1\.self_attn\.q_proj\.\w+ "
BAD: dict[str, tuple[str, Any, str]] = {
    **{
        f"method {one}": ("gptq", _config(quant_method=one), f"by '{one}'.* look for GPTQ .* AWQ")
        for one in _METHODS
    },
    "no method": ("gptq", _config(quant_method=None), "by None, which is not served; look for"),
    "config is a list": ("gptq", _whole_config([4]), r"quantization_config is \[4\], not an obj"),
    "config is text": ("gptq", _whole_config("gptq"), "quantization_config is 'gptq', not an ob"),
    **{
        f"bits {one!r}": ("gptq", _config(bits=one), r"has bits .*, and 4 or 8 are served; get it")
        for one in (2, 3, 5, 6, 7, "4", -4, 10**9, 4.0, True, [4])
    },
    "no bits": ("gptq", _config(bits=None), "has bits None, and 4 or 8 are served; get it"),
    **{
        f"group_size {one!r}": ("gptq", _config(group_size=one), "group_size .* must be -1 or the")
        for one in ("128", -2, 0, 10**12, 1.5)
    },
    "marlin": ("gptq", _config(checkpoint_format="marlin"), "order of 'marlin'; get it in"),
    "bitblas": ("gptq", _config(checkpoint_format="bitblas"), "order of 'bitblas'; get it in"),
    "old marlin": ("gptq", _config(is_marlin_format=True), "order of 'marlin'; get it in"),
    "words": ("gptq", _config(pack_dtype="int16"), "packed into 'int16', not int32; get it in"),
    "dynamic": ("gptq", _config(dynamic={"+:.*down": {"bits": 8}}), r"other bits.*dynamic.; get"),
    "auto-round": (
        "gptq", _config(quant_method="auto-round", packing_format="auto_round:marlin"),
        "has packing_format 'auto_round:marlin'; get it with auto_round:auto_gptq",
    ),
    **{
        f"awq {one}": ("awq-32", _config(version=one), f"version '{one}', .* get it in version ge")
        for one in ("gemv", "gemv_fast", "llm-awq")
    },
    "awq without zeros": ("awq-32", _config(zero_point=False), "no zeros.*get it in version gemm"),
    "awq of 8 bits": ("awq-32", _config(bits=8), "has bits 8, and 4 are served"),
    "awq of activations": (
        "awq-32", _added("model.layers.0.mlp.act.scales", torch.ones(64)),
        "mlp.act.scales scales activations, which is not done here; get it",
    ),
    "gptq says awq": ("gptq", _config(quant_method="awq"), "names another method, bits or"),
    "awq says gptq": ("awq-32", _config(quant_method="gptq"), "names another method, bits or"),
    "other bits": ("gptq", _config(bits=8), "names another method, bits or"),
    "other groups": ("gptq-4-32-sym", _config(group_size=64), "group_size; get the config"),
    "no config": ("gptq", _whole_config(None), "is quantized, but config.json has no quantizat"),
    "no tensors": ("gptq", _unquantised, "but no tensor is: take quantization_config out"),
    "no qzeros": ("gptq", _tensor("qzeros", lambda one: None), _LAYER + "has no qzeros beside it"),
    "no qweight": ("gptq", _tensor("qweight", lambda one: None), _LAYER + "has no qweight"),
    "qweight of floats": ("gptq", _tensor("qweight", torch.Tensor.float), _LAYER + ".*type F32"),
    "scales of float32": ("gptq", _tensor("scales", torch.Tensor.float), "F32, which must be F16"),
    "both forms": ("gptq", _added(f"{Q}.weight", torch.ones(64, 64)), "weight beside it that is"),
    "experts": (
        "gptq", _added("model.layers.0.mlp.experts.3.up_proj.qweight", torch.zeros(8, 64).int()),
        "belongs to an expert, and quantized experts are not served; give the model",
    ),
    "NaN": ("gptq", _tensor("scales", _set((0, 3), float("nan"))), _LAYER + ".*NaN or infinite"),
    "infinity": ("awq-32", _tensor("scales", _set((1, 3), float("inf"))), "scales.*NaN or infini"),
    "scale of 0": ("gptq", _tensor("scales", _set((0, 9), 0.0)), "a scale of 0 for codes that are"),
    "awq scale of 0": ("awq-32", _tensor("scales", _set((1, 9), 0.0)), "a scale of 0 for codes th"),
    "mixed zeros": ("gptq-4-32-sym", _tensor("qzeros", _set((1, 2), 0x77777767)), "not all the sa"),
    "wrong zeros": ("gptq", _tensor("qzeros", _set(slice(None), 0)), "zeros are not all the same"),
    "g_idx too large": ("gptq-4-32-sym", _tensor("g_idx", _set(63, 2)), "g_idx that does not divi"),
    "g_idx negative": ("gptq-4-32-sym", _tensor("g_idx", _set(0, -1)), "g_idx that does not divid"),
    "g_idx uneven": ("gptq-4-order", _tensor("g_idx", _set(slice(0, 40), 0)), "g_idx that does no"),
    "g_idx short": ("gptq", _tensor("g_idx", lambda one: one[:-1]), r"g_idx, which has shape \[63"),
    "g_idx of int64": ("gptq", _tensor("g_idx", torch.Tensor.long), "a g_idx of type I64, not I32"),
    "qweight of one dimension": ("gptq", _tensor("qweight", torch.flatten), r"has shape \[512\],"),
    "qweight is empty": ("gptq", _tensor("qweight", lambda one: one[:0]), r"has shape \[0, 64\]"),
    "outputs": (
        "gptq", lambda folder: change_config(folder, lambda one: one.update(intermediate_size=80)),
        r"is of 96 inputs and 64 outputs, and the layer of 80 and 64: config.json is of another",
    ),
    "layers": (
        "gptq", lambda folder: change_config(folder, lambda one: one.update(num_hidden_layers=2)),
        r"LlamaForCausalLM has no such layer, and only linear layers are served quantized; give",
    ),
    "nested": (
        "gptq", lambda folder: (folder / "config.json").write_text('{"a": ' + "[" * 10_000),
        "no model config that this version of transformers knows",
    ),
    "endless": ("gptq", _endless, "not a whole safetensors file"),
    "cut": ("gptq", _cut, "it was not copied to its end; download it again"),
    "elsewhere": ("gptq", _moved, "is outside of the model's directory: put the file itself th"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path: Path, case: str) -> None:
    name, change, reason = BAD[case]
    folder = tmp_path / "model"
    _saved(folder, name)
    change(folder)
    for start in (load_model, lambda path, config, _: read_outline(Path(path), config)):
        started = time.monotonic()
        with pytest.raises(ModelRefusedError, match=reason) as caught:
            start(str(folder), LoadConfig(threads=1), lambda line: None)
        assert time.monotonic() - started < 2
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"quantization": "int4"},
            "quantization: is int4, but .* are GPTQ 4 bits.*already; int8 qu",
        ),
        ({"dtype": "float16"}, "dtype: is float16, but .*served as bfloat16 or float32; set it to"),
        ({"tensor_parallel": "auto"}, "tensor_parallel"),
        ({"device": "cuda"}, "no CUDA device|served on a CPU: set device to cpu, or give"),
    ],
)
def test_options_that_do_not_go_with_them(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    _saved(tmp_path)
    with pytest.raises(HeadraceError, match=reason):
        load_model(str(tmp_path), LoadConfig(threads=1, **options), lambda line: None)
    with pytest.raises(HeadraceError, match=reason):
        read_outline(tmp_path, LoadConfig(threads=1, **options))


def test_a_plan_needs_the_files(tmp_path: Path) -> None:
    _saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    read_checkpoint(tmp_path, needs_weights=False)  # as before a download
    with pytest.raises(ModelRefusedError, match=r"not here; download them first, with headrace-s"):
        read_outline(tmp_path, LoadConfig())


def test_a_hub_s_cache_may_have_links(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "main"
    _saved(folder)
    blob = tmp_path / "models--a--b" / "blobs" / "1"
    blob.parent.mkdir()
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert read_checkpoint(folder).stored is not None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    _saved(folder, "gptq-4-32-asym")
    return folder


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 6000), value=st.integers(0, 255), cut=st.integers(0, 20000))
def test_a_damaged_head_is_read_or_refused(whole: Path, place: int, value: int, cut: int) -> None:
    """Whatever a byte becomes, nothing but the engine's own error is raised."""
    file = whole / "model.safetensors"
    before = file.read_bytes()
    damaged = bytearray(before)
    damaged[place] = value
    try:
        file.write_bytes(damaged[: len(damaged) - (cut if cut < 300 else 0)])
        checkpoint = read_checkpoint(whole)
        assert isinstance(checkpoint, Checkpoint)
        with safe_open(file, framework="pt") as found:
            assert found.keys()
    except ModelRefusedError:
        pass
    finally:
        file.write_bytes(before)


# What packing makes of them


def _load(folder: Path, **options: Any) -> tuple[VerifiedModel, list[str]]:
    lines: list[str] = []
    return load_model(str(folder), LoadConfig(threads=1, **options), lines.append), lines


@needs_kernels
@pytest.mark.parametrize("name", RECIPES)
def test_packed_layers_hold_what_the_file_says(tmp_path: Path, name: str) -> None:
    right = _saved(tmp_path, name)
    verified, lines = _load(tmp_path)
    assert verified.decoder is not None
    assert not stored_modules(verified.original)
    told = f"quantized weights: {21 + RECIPES[name].lm_head} packed for"
    assert any(line.startswith(told) for line in lines)
    for path, layer in verified.original.named_modules():
        if isinstance(layer, PackedLinear) and isinstance(layer.held, Grouped):
            held, expected = layer.held, right.get_submodule(path).weight
            found = held.codes(torch.arange(held.shape[0])).values(held.layout)
            assert torch.equal(found, expected), path
            assert torch.equal(layer.weight.clone(), expected.bfloat16())


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_our_decoder_computes_them(tmp_path: Path, family: str, quantization: str) -> None:
    right = _saved(tmp_path, "awq-24", family).bfloat16()
    verified, lines = _load(tmp_path, quantization=quantization)
    assert verified.decoder is not None, lines
    ids = torch.tensor(make_prompts((40,)))
    with torch.inference_mode():
        ours, theirs = verified.original(ids).logits.float(), right(ids).logits.float()
    assert (ours - theirs).norm() / theirs.norm() < 0.1
    outline = read_outline(tmp_path, LoadConfig(quantization=quantization))
    held = {
        one.data_ptr(): one.nbytes
        for layer in held_layers(verified.original)
        for one in layer.held.tensors().values()
    }
    rest = sum(one.nbytes for one in verified.original.parameters())
    assert outline.weight_bytes == pytest.approx(sum(held.values()) + rest, rel=0.01)
    assert outline.own_decoder


@needs_kernels
@pytest.mark.parametrize("name", ["gptq-4-order-asym", "awq-32", "int4", "int4-64"])
def test_a_processor_without_bfloat16_serves_them_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With AVX2 alone the kernels convert bfloat16 in registers, so no other type is chosen."""
    handle, best = ctypes.CDLL(str(LIBRARY)), native_library().isa
    handle.headrace_use.restype = ctypes.c_bool
    if not handle.headrace_use(b"avx2"):
        pytest.skip("this machine has no avx2")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    try:
        if name in RECIPES:
            right = _saved(tmp_path, name).bfloat16()
            verified, lines = _load(tmp_path)
        else:
            right = _model().bfloat16()
            right.save_pretrained(tmp_path)
            verified, lines = _load(tmp_path, quantization=name)
        assert verified.dtype is torch.bfloat16
        assert verified.decoder is not None, lines
        held = [type(one.held) for one in held_layers(verified.original)]
        assert sum(issubclass(one, Grouped) for one in held) >= 14, "all layers'"
        ids = torch.tensor(make_prompts((40,)))
        with torch.inference_mode():
            ours, theirs = verified.original(ids).logits.float(), right(ids).logits.float()
        assert (ours - theirs).norm() / theirs.norm() < (0.1 if name in RECIPES else 0.5)
    finally:
        assert handle.headrace_use(best.encode())


@needs_kernels
def test_other_weights_are_not_written_into_them(tmp_path: Path) -> None:
    _saved(tmp_path)
    loaded = load(str(tmp_path), threads=1)
    before = loaded.model.state_dict()
    with pytest.raises(WeightsRefusedError, match=r"is quantized in its file; load a file that"):
        loaded.load_weights(_model().state_dict())
    after = loaded.model.state_dict()
    assert all(torch.equal(after[name], one) for name, one in before.items())


def _lowest_bits_last(words: torch.Tensor, bits: int) -> torch.Tensor:
    codes = unpacked(words, bits)
    return codes.view(len(codes), -1, 2).flip(-1).flatten(1)


def _moved_along(dim: int) -> Callable[..., Rows]:
    def rows(self: Gptq, tensors: Any, outputs: slice) -> Rows:
        one = _ROWS(self, tensors, outputs)
        return replace(one, scales=one.scales.roll(1, dim))

    return rows


_ROWS = Gptq.rows


def _rounded(self: Gptq, tensors: Any, outputs: slice) -> Rows:
    one = _ROWS(self, tensors, outputs)
    return replace(one, scales=one.scales.bfloat16().float())


def _without_last(self: Gptq, tensors: Any, outputs: slice) -> Rows:
    one = _ROWS(self, tensors, outputs)
    scales = one.scales.clone()
    scales[:, -1] = 0
    return replace(one, scales=scales)


PLANTED: dict[str, tuple[str, Any, str, object]] = {
    "zero off by one": ("gptq-4-32-asym", Gptq, "__init__", None),
    "nibbles exchanged": ("gptq", gptq, "unpacked", _lowest_bits_last),
    "AWQ in natural order": ("awq-32", awq, "_PLACES", tuple(range(8))),
    "order ignored": ("gptq-4-order", Gptq, "_order", lambda self, tensors: None),
    "scales one group off": ("gptq-4-32-asym", Gptq, "rows", _moved_along(1)),
    "scales one output off": ("gptq-4-32-asym", Gptq, "rows", _moved_along(0)),
    "scale rounded to bfloat16": ("gptq-4-32-asym", Gptq, "rows", _rounded),
    "narrow last group dropped": ("gptq-4-24-sym", Gptq, "rows", _without_last),
}


def _less_one_forgotten(self: Gptq, config: Any) -> None:
    _INIT(self, config)
    self.zeros_less_one = False


_INIT = Gptq.__init__


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_reading_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """By the comparison with the formula, which knows nothing of the readers."""
    name, owner, attribute, instead = PLANTED[fault]
    monkeypatch.setattr(owner, attribute, instead or _less_one_forgotten)
    with pytest.raises(AssertionError):
        test_every_element_is_that_of_the_formula(tmp_path, name)


@needs_kernels
@pytest.mark.parametrize("fault", ["order", "scales", "minima", "codes", "values"])
def test_a_planted_fault_of_packing_is_found_by_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    _saved(tmp_path, "gptq-4-order-asym")
    pack = Grouped.pack_codes

    def wrong(self: Grouped, first: int, codes: Codes) -> None:
        if fault == "codes":
            codes = replace(codes, codes=codes.codes ^ (torch.arange(codes.codes.shape[1]) == 5))
        elif fault == "scales":
            scales = codes.scales.clone()
            scales[3, 1] = torch.nextafter(scales[3, 1].half(), torch.tensor(9.0).half())
            codes = replace(codes, scales=scales)
        elif fault == "minima" and codes.minima is not None:
            codes = replace(codes, minima=codes.minima.roll(1, 1))
        pack(self, first, codes)

    if fault == "order":
        monkeypatch.setattr(Gptq, "_order", lambda self, tensors: None)
    elif fault == "values":  # both ways of reading must agree
        read = StoredFormat.codes

        def one_off(self: StoredFormat, tensors: Any, layout: Any, outputs: slice) -> Codes:
            found = read(self, tensors, layout, outputs)
            return replace(found, codes=found.codes.roll(1, 0))

        monkeypatch.setattr(StoredFormat, "codes", one_off)
    else:
        monkeypatch.setattr(Grouped, "pack_codes", wrong)
    with pytest.raises(ModelRefusedError, match=r"its packed weights are not those of the check"):
        _load(tmp_path)


def test_a_quantised_layer_that_is_read_as_a_plain_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weight would be random numbers."""
    _saved(tmp_path)

    def leave_out(model: PreTrainedModel, weights: StoredWeights) -> None:
        layers = {path: one for path, one in weights.layers.items() if path != Q}
        place_stored(model, StoredWeights(weights.form, layers))

    monkeypatch.setattr(stored_linear, "place_stored", leave_out)
    with pytest.raises(ModelRefusedError, match=rf"1 weights are not in the checkpoint .{Q}\.we"):
        _load(tmp_path)


def test_the_line_of_the_log(tmp_path: Path) -> None:
    _saved(tmp_path)
    _, lines = _load(tmp_path)
    [line] = [line for line in lines if line.startswith("quantized in the file")]
    assert line.startswith(
        "quantized in the file: 21 weights, GPTQ 4 bits, groups of 128; not: "
        "model.embed_tokens, lm_head, 0.00 of 0.00 GiB"
    )
