"""What is read of a checkpoint with towers, what is refused, and faults that tests must find."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel, core_model_loading

from engine.api.offline import LoadedModel, from_model, load
from engine.contract.config import LoadConfig
from engine.contract.errors import ModelRefusedError
from engine.loading.checkpoint import read_checkpoint
from engine.loading.loader import load_model
from engine.loading.weights import read_weights
from engine.planning.outline import read_outline
from tests.multimodal_recipes import SERVED, Whole, make_whole
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

PROMPTS = make_prompts((40, 90, 7))
NEW_TOKENS = 12


def _saved(folder: Path, recipe: Whole | str, **options: Any) -> PreTrainedModel:
    recipe = SERVED[recipe] if isinstance(recipe, str) else recipe
    whole = make_whole(recipe.config(eos_token_id=None))
    whole.save_pretrained(folder, **options)
    return whole


def _change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _keep(folder: Path, wanted: Callable[[str], bool]) -> None:
    weights = load_file(folder / "model.safetensors")
    left = {name: one for name, one in weights.items() if wanted(name)}
    assert 0 < len(left) < len(weights)
    save_file(left, folder / "model.safetensors", {"format": "pt"})


def _refused(folder: Path, reason: str) -> None:
    with pytest.raises(ModelRefusedError, match=reason):
        load_model(str(folder), LoadConfig(threads=1), lambda line: None)


# ---- what is read --------------------------------------------------------------------------------


def test_what_is_left_out_is_said_and_is_not_in_the_model(tmp_path: Path) -> None:
    whole, lines = _saved(tmp_path, "gemma3"), list[str]()
    verified = load_model(str(tmp_path), LoadConfig(threads=1), lines.append)
    towers = [
        one
        for name, one in whole.named_parameters()
        if not name.startswith(("model.language_model.", "lm_head."))
    ]
    assert verified.parameters == whole.num_parameters() - sum(one.numel() for one in towers)
    [line] = [line for line in lines if line.startswith("left out, as only text is served: ")]
    assert line.endswith(f"; {sum(one.nbytes for one in towers) / 1e6:.1f} MB that are not read")
    assert "vision_tower (" in line
    assert "multi_modal_projector (" in line


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_no_weight_of_a_tower_is_read(
    tmp_path: Path, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped in the file's type, and read and converted to another one."""
    _saved(tmp_path, "mistral3")
    nbytes = {name: one.nbytes for name, one in load_file(tmp_path / "model.safetensors").items()}
    read: list[str] = []
    _watch_slices(monkeypatch, read)
    _, missing = read_weights(read_checkpoint(tmp_path), dtype)
    assert missing == []
    text = {name for name in nbytes if "language_model" in name or "lm_head" in name}
    assert set(read) == text
    assert sum(nbytes[name] for name in read) == sum(nbytes[name] for name in text)


def _watch_slices(monkeypatch: pytest.MonkeyPatch, read: list[str]) -> None:
    """Note the name of each tensor that is read of a file."""
    add = core_model_loading.WeightTransform.add_tensor

    def note(self: Any, target: str, source: str, *rest: Any) -> None:
        read.append(source)
        add(self, target, source, *rest)

    monkeypatch.setattr(core_model_loading.WeightTransform, "add_tensor", note)


_MEASURED = """
import re, sys
from pathlib import Path
from engine.contract.config import LoadConfig
from engine.loading.loader import load_model

def number(file, name):
    return int(re.search(name + r":\\s+(\\d+)", Path(file).read_text())[1])

config = LoadConfig(threads=1, decoder="transformers", pack_weights=False, dtype=sys.argv[3])
load_model(sys.argv[1], config, lambda line: None)  # what is imported by and by
before = [1024 * number("/proc/self/status", "VmRSS"), number("/proc/self/io", "rchar")]
load = load_model(sys.argv[2], config, lambda line: None)
held, read = 1024 * number("/proc/self/status", "VmRSS"), number("/proc/self/io", "rchar")
print(load.parameters, held - before[0], read - before[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tower_of_500_megabytes_takes_no_memory(tmp_path: Path, dtype: str) -> None:
    """The same text model alone takes as much. In bfloat16 the file is mapped; in float32 each
    tensor is read and converted.
    """
    recipe = SERVED["gemma3"]
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 2048}
    tower = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5}
    text = {**recipe.text, **sizes}
    _saved(tmp_path / "small", recipe)
    config = Whole("gemma3", text, tower, recipe.settings).config()
    make_whole(config).to(torch.bfloat16).save_pretrained(tmp_path / "large")
    alone = make_model(config.text_config).to(torch.bfloat16)  # type: ignore[arg-type]
    alone.save_pretrained(tmp_path / "alone")
    assert sum(read_checkpoint(tmp_path / "large").left_out.values()) > 500e6
    found = []
    for folder in ("alone", "large"):
        command = [sys.executable, "-c", _MEASURED, tmp_path / "small", tmp_path / folder, dtype]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append([int(number) for number in result.stdout.split()])
    (parameters, held, read), (found_parameters, with_tower, read_with_tower) = found
    assert found_parameters == parameters == alone.num_parameters()
    assert with_tower < held + 0.02 * 2 * parameters
    assert read_with_tower < read + 0.02 * 2 * parameters


@pytest.mark.parametrize("shards", ["20KB", "1GB"])
def test_shards_that_hold_only_towers(tmp_path: Path, shards: str) -> None:
    whole = _saved(tmp_path, "gemma3", max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "20KB")
    assert _served(load(str(tmp_path), threads=1)) == _expected(whole)


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("fast_vlm", "qwen2"), ("gemma3n", "gemma3n"), ("perception_lm", "llama")],
)
def test_the_text_of_a_class_whose_towers_need_packages(
    model_type: str, family: str, tmp_path: Path
) -> None:
    """They need timm, which is not here. The names of the weights are those of checkpoints."""
    text = make_model(FAMILIES[family](eos_token_id=None))
    weights = {
        name.replace("model.", "model.language_model.", 1): one.contiguous()
        for name, one in text.state_dict().items()
    }
    weights["model.vision_tower.timm_model.weight"] = torch.zeros(1000, 1000)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = AutoConfig.for_model(model_type, text_config=text.config.to_dict())
    config.save_pretrained(tmp_path)
    lines: list[str] = []
    verified = load_model(str(tmp_path), LoadConfig(threads=1), lines.append)
    assert any("vision_tower (4.0 MB)" in line for line in lines)
    assert _served(LoadedModel(verified)) == _expected(text)


def test_a_class_that_cannot_be_made(tmp_path: Path) -> None:
    _saved(tmp_path, "gemma3")
    vision = {"model_type": "siglip_vision_model", "hidden_size": 33, "num_attention_heads": 2}
    _change_config(tmp_path, vision_config=vision)
    _refused(tmp_path, "Gemma3ForConditionalGeneration cannot be made with this config: embed_dim")


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3_vl", "internvl"])
def test_a_plan_is_of_the_text_part(tmp_path: Path, name: str) -> None:
    _saved(tmp_path, name)
    outline = read_outline(tmp_path, LoadConfig(threads=1))
    verified = load_model(str(tmp_path), LoadConfig(threads=1), lambda line: None)
    assert outline.parameters == verified.parameters
    assert outline.shapes == verified.probe.shapes
    assert outline.own_decoder == (verified.decoder is not None)
    assert outline.vocab_size == verified.vocab_size


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_text_part_is_packed(tmp_path: Path, quantization: str) -> None:
    _saved(tmp_path, "gemma3")
    lines: list[str] = []
    config = LoadConfig(threads=1, dtype="bfloat16", quantization=quantization)
    assert load_model(str(tmp_path), config, lines.append).decoder is not None
    assert any(quantization in line for line in lines)


# ---- what is refused -----------------------------------------------------------------------------


def test_towers_alone(tmp_path: Path) -> None:
    _saved(tmp_path, "gemma3")
    _keep(tmp_path, lambda name: "language_model" not in name and "lm_head" not in name)
    _refused(tmp_path, r"none of the checkpoint's weights is of the text model: .*vision_tower")


def test_a_text_weight_that_is_missing(tmp_path: Path) -> None:
    _saved(tmp_path, "gemma3")
    _keep(tmp_path, lambda name: not name.endswith("model.layers.1.mlp.up_proj.weight"))
    _refused(tmp_path, r"1 weights are not in the checkpoint \(.*layers\.1\.mlp\.up_proj\.weight")


def test_a_text_part_of_another_architecture_than_the_weights(tmp_path: Path) -> None:
    whole = _saved(tmp_path, "internvl")
    other = {**whole.config.text_config.to_dict(), "model_type": "qwen3", "head_dim": 16}
    _change_config(tmp_path, text_config=other)
    _refused(tmp_path, r"weights are not in the checkpoint \(.*_norm\.weight")


def test_two_text_configs(tmp_path: Path) -> None:
    whole = _saved(tmp_path, "gemma3")
    _change_config(tmp_path, text_encoder=whole.config.text_config.to_dict())
    _refused(tmp_path, "the config has several text models, and only one can be served")


def test_a_class_that_only_the_repository_has(tmp_path: Path) -> None:
    _saved(tmp_path, "gemma3")
    (tmp_path / "modeling_new.py").write_text("raise SystemExit('this was run')")
    (tmp_path / "configuration_new.py").write_text("raise SystemExit('this was run')")
    code = {
        "AutoConfig": "configuration_new.NewConfig",
        "AutoModelForCausalLM": "modeling_new.NewForConditionalGeneration",
    }
    _change_config(tmp_path, model_type="newest_vl", auto_map=code)
    reason = r"'newest_vl' .*auto_map: .*modeling_new\.NewForCond.* such code is not run here"
    _refused(tmp_path, reason)


# ---- faults that the comparison with the whole model must find -----------------------------------


def _take_a_weight_of_the_tower(model: Any, whole: Any) -> None:
    """Of the same name and size."""
    name = "layers.0.self_attn.q_proj.weight"
    [tower] = [
        one for path, one in whole.model.vision_tower.named_parameters() if path.endswith(name)
    ]
    model.model.language_model.get_parameter(name).copy_(tower)


def _tie_the_head_to_another_embedding(model: Any, whole: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(whole.get_input_embeddings().weight.roll(1, 0))


def _use_positions_of_the_first_axis_alone(model: Any, _whole: Any) -> None:
    rotary = model.model.language_model.rotary_emb
    compute = type(rotary).forward

    def first(x: torch.Tensor, positions: torch.Tensor) -> Any:
        axes = positions if positions.dim() == 3 else positions.expand(3, *positions.shape)
        one = torch.tensor([1, 0, 0], device=axes.device).view(3, 1, 1)
        return compute(rotary, x, axes * one)

    rotary.forward = first


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("gemma3", _take_a_weight_of_the_tower),
        ("gemma3", _tie_the_head_to_another_embedding),
        ("qwen3_vl", _use_positions_of_the_first_axis_alone),
    ],
)
@torch.no_grad()
def test_a_fault_changes_the_tokens(
    name: str, plant: Callable[[Any, Any], None], tmp_path: Path
) -> None:
    recipe = SERVED[name]
    if name == "gemma3":  # heads of the tower's as of the text's
        tower = {"hidden_size": 64, "num_attention_heads": 4}
        recipe = Whole("gemma3", recipe.text, {**recipe.vision, **tower}, recipe.settings)
    whole = _saved(tmp_path, recipe)
    expected = _expected(whole)
    model, _ = read_weights(read_checkpoint(tmp_path), None)
    assert _served(from_model(model.eval())) == expected
    plant(model, whole)
    assert _served(from_model(model)) != expected


def _expected(whole: PreTrainedModel) -> list[list[int]]:
    return [greedy_reference(whole, prompt, NEW_TOKENS) for prompt in PROMPTS]


def _served(loaded: LoadedModel) -> list[list[int]]:
    outputs = loaded.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS, progress_bar=False)
    return [list(outputs[f"req_{index}"].generated_tokens) for index in range(len(PROMPTS))]


def test_a_head_that_is_tied_is_tied_to_the_text_s_embedding(tmp_path: Path) -> None:
    recipe = SERVED["gemma3"]
    tied = {"tie_word_embeddings": True}
    whole = _saved(
        tmp_path, Whole("gemma3", {**recipe.text, **tied}, {}, {**recipe.settings, **tied})
    )
    assert not any("lm_head" in name for name in load_file(tmp_path / "model.safetensors"))
    verified = load_model(str(tmp_path), LoadConfig(threads=1, pack_weights=False), print)
    text: Any = verified.original
    assert text.lm_head.weight is text.model.language_model.embed_tokens.weight
    assert torch.equal(text.lm_head.weight, whole.get_input_embeddings().weight)


@pytest.mark.parametrize(
    "name", [name for name, one in SERVED.items() if "three-part" in one.special and one.is_known]
)
@torch.inference_mode()
def test_positions_of_three_parts_are_one_number_for_text(name: str) -> None:
    """What the model makes of a prompt without positions has three parts, by its own rules."""
    whole = make_whole(SERVED[name].config())
    ids = torch.tensor(PROMPTS[:1])
    one = torch.arange(len(PROMPTS[0])).unsqueeze(0)
    three = one.unsqueeze(0).expand(3, 1, -1)
    expected = whole(input_ids=ids).logits
    assert torch.equal(whole(input_ids=ids, position_ids=one).logits, expected)
    if name != "hunyuan_vl":  # its positions have four parts
        assert torch.equal(whole(input_ids=ids, position_ids=three).logits, expected)
    shifted = torch.stack([one, one, one + 1])
    if name != "hunyuan_vl":
        assert not torch.equal(whole(input_ids=ids, position_ids=shifted).logits, expected)
