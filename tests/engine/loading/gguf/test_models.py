"""GGUF files are served: every element is the file's, tokens are those of `generate`, and what
does not fit is refused.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import (
    GenerationConfig,
    PreTrainedModel,
)

import engine
from engine.api.offline import LoadedModel
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import ModelRefusedError
from engine.loading.checkpoint import read_checkpoint, resolve_path
from engine.loading.gguf import blocks, folder, naming
from engine.loading.gguf.container import open_container
from engine.loading.gguf.stored import read_gguf
from engine.loading.pages import Pages
from engine.loading.quantised.stored_linear import StoredModule, stored_modules
from engine.loading.weights import read_weights
from engine.planning.outline import read_outline
from engine.text import Tokenizer
from engine.text.text_errors import ChatTemplateUnavailableError
from tests.gguf_files import all_of, write_gguf
from tests.gguf_models import CONFIGS, LONE, METADATA, TOKENS, VOCABULARY, mixed, write
from tests.tiny_models import greedy_reference, make_model, make_prompts


def tokens(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    outputs = loaded.generate_batch(
        prompts,
        GenerationConfig(do_sample=False, max_new_tokens=12),
        ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=32),
        progress_bar=False,
    )
    return [output.generated_tokens for output in outputs.values()]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories around files are made below the test's own."""
    monkeypatch.setattr("engine.loading.gguf.folder.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_generate(name: str, tmp_path: Path) -> None:
    """In float32, computed by the storage modules."""
    file, reference = write(tmp_path / "model", name)
    loaded = engine.load(str(file), dtype="float32")
    prompts = [[1 + one % (VOCABULARY - 1) for one in prompt] for prompt in make_prompts((3, 40))]
    expected = [greedy_reference(reference, prompt, 12) for prompt in prompts]
    assert tokens(loaded, prompts) == expected


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_every_element_is_the_file_s(kind: str, tmp_path: Path) -> None:
    file, reference = write(tmp_path / "model", "llama", all_of(kind))
    assert not differences(file, reference)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_file_without_quantised_weights_is_refused(kind: str, tmp_path: Path) -> None:
    file, _ = write(tmp_path / "model", "llama", all_of(kind))
    with pytest.raises(ModelRefusedError, match="has no quantised weights"):
        differences(file, make_model(CONFIGS["llama"]))


def differences(file: Path, reference: PreTrainedModel) -> list[str]:
    """The weights of a model that are not the reference's in float32."""
    checkpoint = read_checkpoint(resolve_path(str(file), print))
    model, missing = read_weights(checkpoint, torch.float32)
    assert not missing
    wanted = reference.state_dict()
    found = {name: one for name, one in model.state_dict().items() if name in wanted}
    for name, one in stored_modules(model).items():
        found[f"{name}.weight"] = torch.cat([one.values(part) for part in one.slices()])
    assert found.keys() == wanted.keys()
    return [name for name, one in found.items() if not torch.equal(one, wanted[name])]


def test_numbers_of_16_bits_beside_quantised_ones(tmp_path: Path) -> None:
    """An embedding that is not quantised is tied to the output layer as usual."""

    def kind(tensor: str) -> GGMLQuantizationType:
        return GGMLQuantizationType.F16 if tensor == "token_embd.weight" else mixed(tensor)

    file, reference = write(tmp_path / "model", "llama", kind)
    assert not differences(file, reference)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_it_is_packed_and_served_in_bfloat16(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The load gate compares the packed model with the file's."""
    file, reference = write(tmp_path / "model", name)
    with caplog.at_level(logging.INFO):
        loaded = engine.load(str(file))
    told = caplog.text
    assert "GGUF Q4_K, Q6_K" in told or "GGUF Q6_K, Q4_K" in told
    assert "quantized weights: " in told
    assert "linear layers: 0 packed" not in told  # all of them are quantised
    prompt = [1 + one % (VOCABULARY - 1) for one in make_prompts((40,))[0]]
    [found] = tokens(loaded, [prompt])
    assert found[0] == greedy_reference(reference, prompt, 1)[0]
    assert not stored_modules(loaded.model)


def test_a_plan_counts_packed_bytes(tmp_path: Path) -> None:
    file, _ = write(tmp_path / "model", "llama")
    outline = read_outline(resolve_path(str(file), print), LoadConfig())
    size = sum(one.numel() for one in make_model(CONFIGS["llama"]).parameters())
    assert outline.parameters == size
    held = outline.linear.held + outline.head.held + outline.embedding.held
    assert 0.5 < held / size < 1.3


# ---- config and tokenizer ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LONE)
def test_the_config_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    file, _ = write(tmp_path / "model", name)
    found = read_checkpoint(resolve_path(str(file), print)).config
    own = ("architectures", "dtype", "transformers_version", "pad_token_id", "_name_or_path")
    wanted = {"head_dim": 256 // 4, "attention_bias": False} | CONFIGS[name].to_dict()
    made = {field: one for field, one in found.to_dict().items() if field not in own}
    assert made == {field: wanted.get(field) for field in made}


def test_files_beside_it_are_taken(tmp_path: Path) -> None:
    file, _ = write(tmp_path / "model", "llama")
    config = CONFIGS["llama"].to_dict() | {"attention_dropout": 0.25}
    (file.parent / "config.json").write_text(json.dumps(config))
    for path in (file, file.parent):
        made = resolve_path(str(path), print)
        assert read_checkpoint(made).config.attention_dropout == 0.25
        assert (made / "tokenizer.json").is_file()
    (file.parent / "tokenizer.json").write_text((made / "tokenizer.json").read_text())
    assert resolve_path(str(file.parent), print) == file.parent  # nothing has to be made
    assert resolve_path(str(file), print) != made


def test_it_is_made_once_for_a_file_as_it_is(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write(tmp_path / "model", "llama")
    first = resolve_path(str(file), print)
    before = (first / "config.json").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(folder, "open_container", None)  # its head is read with its tensors alone
        assert resolve_path(str(file), print) == first
    assert (first / "config.json").stat().st_mtime_ns == before
    assert (first / file.name).resolve() == file
    write(tmp_path / "model", "qwen2")
    assert resolve_path(str(file), print) != first
    assert len(list((cache / "headrace" / "gguf").iterdir())) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(ModelRefusedError, match=r"cannot be written .*name another folder by HF_H"):
        resolve_path(str(write(tmp_path / "model", "llama")[0]), print)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"llama.rope.scaling.type": "longrope"}, "positions are scaled by 'longrope'"),
        ("llama", {"llama.rope.scaling.type": "linear"}, r"rope\.scaling\.factor is missing"),
        ("llama", {"llama.rope.dimension_count": 32}, "only a part of a head is rotated"),
        ("llama", {"llama.attention.sliding_window": 5}, "sliding_window is not read here"),
        ("llama", {"llama.expert_count": 8}, "expert_count is not read here"),
        ("llama", {"tokenizer.ggml.pre": "tekken"}, "put the tokenizer.json"),
        ("llama", {"tokenizer.ggml.tokens": TOKENS[:-1]}, "it is damaged"),
        ("llama", {"tokenizer.ggml.merges": ["x yy"]}, "tokenizer is damaged"),
        ("llama", {"tokenizer.ggml.merges": ["x y"]}, "tokenizer is damaged"),
    ],
)
def test_what_metadata_do_not_tell_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file, _ = write(tmp_path / "model", name, **changes)
    with pytest.raises(ModelRefusedError, match=message) as caught:
        resolve_path(str(file), print)
    assert str(file) in str(caught.value)


def test_a_template_that_cannot_be_used(tmp_path: Path) -> None:
    """The model is served, and conversations are refused with the reason."""
    template = {"tokenizer.chat_template": "{{ messages | no_such_filter }}"}
    file, _ = write(tmp_path / "model", "llama", **template)
    tokenizer = Tokenizer.load(resolve_path(str(file), print), VOCABULARY)
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    with pytest.raises(ChatTemplateUnavailableError, match="a syntax error in line 1; send text"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_types_whose_metadata_lack_something_need_a_config(name: str, tmp_path: Path) -> None:
    file, _ = write(tmp_path / "model", name)
    (file.parent / "config.json").unlink()
    with pytest.raises(ModelRefusedError, match=r"lack a part of its config: put the config\.json"):
        resolve_path(str(file), print)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelRefusedError, match="architecture is 'mamba', and from GGUF files llam"
    ):
        resolve_path(str(tmp_path / "m.gguf"), print)


def test_a_config_of_another_model(tmp_path: Path) -> None:
    file, _ = write(tmp_path / "model", "llama")
    (file.parent / "config.json").write_text(json.dumps(CONFIGS["qwen2"].to_dict()))
    with pytest.raises(
        ModelRefusedError, match=r"of architecture 'llama', and config\.json of mod"
    ):
        read_checkpoint(resolve_path(str(file), print))
    larger = CONFIGS["llama"].to_dict() | {"intermediate_size": 768}
    (file.parent / "config.json").write_text(json.dumps(larger))
    with pytest.raises(ModelRefusedError, match=r"config\.json is of another model"):
        engine.load(str(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rms_norm_eps": 0.5},
            r"layer_norm_rms_epsilon is .*, and config\.json beside it says 0\.5",
        ),
        ({"num_attention_heads": 2, "head_dim": 128}, r"head_count is 4, and config\.json beside"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, r"freq_base is 10000"),
    ],
)
def test_a_config_that_contradicts_the_metadata(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Shapes do not show it, and the load gate would compare with the same config."""
    file, _ = write(tmp_path / "model", "llama")
    (file.parent / "config.json").write_text(json.dumps(CONFIGS["llama"].to_dict() | change))
    with pytest.raises(ModelRefusedError, match=message):
        read_checkpoint(resolve_path(str(file), print))


def test_a_weight_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    """Biases in the file, and a config without: results would be wrong, and the gate's, too."""
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "model.gguf"
    write_gguf(file, make_model(CONFIGS["qwen2"]), "llama", mixed, METADATA)
    config = CONFIGS["llama"].to_dict() | {"tie_word_embeddings": False}
    (file.parent / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefusedError, match=r"has model\.layers\.0.*bias, and the model of"):
        engine.load(str(file))


@pytest.mark.parametrize("name", ["blk.00.ffn_up.weight", "foo", "blk.9999999.ffn_up.weight"])
def test_names_that_are_none(name: str, tmp_path: Path) -> None:
    file, _ = write(tmp_path / "model", "llama")
    tensor = open_container(file).tensors["blk.0.ffn_up.weight"]
    with pytest.raises(ModelRefusedError, match="is no tensor of llama"):
        naming._name(dataclasses.replace(tensor, name=name), naming.ARCHITECTURES["llama"])


def test_a_model_is_called_after_the_type_of_most_elements(tmp_path: Path) -> None:
    """Though a tied table is in two places, and has more bytes an element."""
    file, _ = write(tmp_path / "model", "llama")
    config = read_checkpoint(resolve_path(str(file), print)).config
    sizes = dict.fromkeys(("Q4_K", "Q6_K"), 0)
    for tensor in open_container(file).tensors.values():
        if tensor.kind.name in sizes:
            sizes[tensor.kind.name] += tensor.shape[0] * tensor.shape[1]
    most = max(sizes, key=lambda name: sizes[name])
    assert read_gguf(file.parent, config).form.label == f"gguf-{most.lower()}"


def test_pages_of_a_tied_table_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []

    class Watched(Pages):
        def give_back(self, tensor: torch.Tensor) -> int:
            count = super().give_back(tensor)
            given.append((tensor.nbytes, count))
            return count

    monkeypatch.setattr("engine.loading.stored_packing.Pages", Watched)
    file, _ = write(tmp_path / "model", "llama")
    engine.load(str(file))
    table = open_container(file).tensors["token_embd.weight"].data
    counts = [count for size, count in given if size == table.nbytes]
    assert counts
    assert min(counts) > 0


def test_an_output_layer_of_its_own_beside_a_config_that_ties_it(tmp_path: Path) -> None:
    """As files that leave the output layer in 16 bits have it."""

    def kind(tensor: str) -> GGMLQuantizationType:
        return GGMLQuantizationType.F16 if tensor == "output.weight" else mixed(tensor)

    file, reference = write(tmp_path / "model", "mistral", kind)
    config = reference.config.to_dict() | {"tie_word_embeddings": True}
    (file.parent / "config.json").write_text(json.dumps(config))
    assert not differences(file, reference)


@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.0.ffn_up.weight"])
@pytest.mark.parametrize("wrong", [b"\x00\x7e", b"\x00\x7c"], ids=["NaN", "infinity"])
def test_scales_that_are_no_numbers(tensor: str, wrong: bytes, tmp_path: Path) -> None:
    file, _ = write(tmp_path / "model", "mistral", all_of("Q8_0"))
    found = open_container(file).tensors[tensor]
    content = bytearray(file.read_bytes())
    place = content.find(found.data.numpy().tobytes())
    content[place : place + 2] = wrong
    file.write_bytes(content)
    with pytest.raises(ModelRefusedError, match=r"has elements that are NaN or infinite"):
        engine.load(str(file))


def test_a_tensor_too_many_and_one_too_few(tmp_path: Path) -> None:
    file, _ = write(tmp_path / "model", "llama")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelRefusedError, match=r"'blk\.1\.ffn_xx\.weight' is no tensor of llama"):
        engine.load(str(file))
    file.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(ModelRefusedError, match="block_count is 2, and it has 3 layers"):
        engine.load(str(file))
    file.write_bytes(content)
    (file.parent / "config.json").write_text(json.dumps(CONFIGS["llama"].to_dict()))
    file.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(ModelRefusedError, match=r"layers\.(7|1)\.mlp\.up_proj"):
        engine.load(str(file))


# ---- planted faults ------------------------------------------------------------------------------


def changed(number: int, change: Callable[[blocks._Parts], blocks._Parts]) -> Any:
    """A block type that is read with a fault."""
    kind = blocks.BLOCK_TYPES[number]

    def plant(patch: pytest.MonkeyPatch) -> None:
        read = kind.read
        assert read is not None
        wrong = dataclasses.replace(kind, read=lambda data: change(read(data)))
        patch.setitem(blocks.BLOCK_TYPES, number, wrong)

    return plant


def _without_high_bits(parts: blocks._Parts) -> blocks._Parts:
    codes, scales, minima, factors = parts  # type: ignore[misc]  # of K-quants
    is_high = torch.arange(scales.shape[-1]) >= 4
    return codes, torch.where(is_high, scales.int() & 15, scales), minima, factors


def _halves_exchanged(parts: blocks._Parts) -> blocks._Parts:
    codes, *others = parts
    return torch.cat(codes.chunk(2, -1)[::-1], -1), *others  # type: ignore[return-value]


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "the minimum's sign": ("Q4_K", changed(12, lambda p: (*p[:2], -p[2], p[3]))),  # type: ignore
    "high bits of Q4_K's scales": ("Q4_K", changed(12, _without_high_bits)),
    "the order of a block's halves": ("Q4_0", changed(2, _halves_exchanged)),
    "the permutation of queries and keys": (
        "Q8_0", lambda patch: patch.setattr(naming, "_out_of_pairs", lambda *_: None)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, plant = FAULTS[name]
    file, reference = write(tmp_path / "model", "llama", all_of(kind))
    assert not differences(file, reference)
    plant(monkeypatch)
    assert differences(file, reference)


def test_a_tied_embedding_is_one_weight(tmp_path: Path) -> None:
    """It is held once, and found if it is read twice."""
    file, _ = write(tmp_path / "model", "llama")
    config = read_checkpoint(resolve_path(str(file), print)).config
    weights = read_gguf(file.parent, config)
    assert weights.layers["lm_head"] is weights.layers["model.embed_tokens"]
    loaded = engine.load(str(file))
    table, output = loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings()
    assert table.held is output.held


def test_files_are_not_copied(tmp_path: Path) -> None:
    """All quantised tensors lie in the mapping."""
    file, _ = write(tmp_path / "model", "llama")
    checkpoint = read_checkpoint(resolve_path(str(file), print))
    assert checkpoint.stored is not None
    assert checkpoint.stored.tensors is not None
    model, _ = read_weights(checkpoint, torch.bfloat16)
    for module in model.modules():
        if isinstance(module, StoredModule):
            name = next(name for name, one in model.named_modules() if one is module)
            mapped = checkpoint.stored.tensors[f"{name}.blocks"]
            assert module.parts["blocks"].data_ptr() == mapped.data_ptr()
