"""Loading: what is refused before anything runs, and what is read from a model's directory."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, PreTrainedModel, T5Config

from engine.api.offline import load
from engine.contract.config import LoadConfig
from engine.contract.errors import ConfigError, InsufficientMemoryError, ModelRefusedError
from engine.contract.sampling_params import SamplingParams
from engine.core.threads import call_on_own_thread
from engine.loading import loader
from engine.loading.checkpoint import resolve_path
from engine.loading.loader import load_model
from engine.loading.memory import HostLimits
from engine.loading.model_defaults import context_length, default_sampling, eos_token_ids
from engine.loading.verified import VerifiedModel
from engine.loading.weights import model_without_weights
from engine.planning.outline import read_outline
from tests.tiny_models import CONTEXT, FAMILIES, VOCAB, make_model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    make_model(FAMILIES["llama"]()).save_pretrained(path)
    return path


def _load(path: Path | str, **options: Any) -> VerifiedModel:
    return load_model(str(path), LoadConfig(threads=1, **options), lambda line: None)


def test_a_directory_loads(saved: Path) -> None:
    lines: list[str] = []
    verified = load_model(str(saved), LoadConfig(threads=1), lines.append)
    assert verified.vocab_size == VOCAB
    assert verified.context_length == CONTEXT
    assert verified.eos_token_ids == (2,)
    assert verified.path == saved
    first = [line.split()[0].rstrip(":") for line in lines]
    first = [word for word in first if word != "linear"]  # where there are kernels, they are packed
    assert first == ["loading", "loaded", "decoder", "verified"]
    assert (
        load(str(saved), threads=1)
        .generate_batch([[5]], num_blocks=4, block_size=8, max_new_tokens=2, progress_bar=False)[
            "req_0"
        ]
        .is_finished()
    )


@pytest.mark.parametrize("path", ["/not/here", "./not-here", "~/not-here"])
def test_a_directory_that_is_not_there(path: str) -> None:
    with pytest.raises(ModelRefusedError, match="is not a directory"):
        _load(path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelRefusedError, match="is not a directory"):
        resolve_path(str(file), print)


def test_no_config(tmp_path: Path) -> None:
    reason = r"not a model's directory: it has no config\.json; give"
    with pytest.raises(ModelRefusedError, match=reason):
        _load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "nonsense"}', "{}"])
def test_a_broken_config(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(ModelRefusedError, match="no model config"):
        _load(saved)


@pytest.mark.parametrize("text", ["", '{"eos_token_id": [1, ', "[]"])
def test_a_broken_generation_config(saved: Path, text: str) -> None:
    """transformers would take another in its place: other ends, and no sampling."""
    (saved / "generation_config.json").write_text(text)
    reason = r"generation_config\.json cannot be read .*: it is damaged, .*; download it again"
    with pytest.raises(ModelRefusedError, match=reason):
        _load(saved)


def test_pickles_are_not_read(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(weights, saved / "pytorch_model.bin")
    with pytest.raises(ModelRefusedError, match=r"only \*\.safetensors are read.*save_pretrained"):
        _load(saved)


@pytest.mark.parametrize(
    "index", ["{", "[]", '{"weight_map": 1}', '{"weight_map": {"a": 1, "b": "x"}}', "{}"]
)
def test_an_index_that_is_damaged(saved: Path, index: str) -> None:
    (saved / "model.safetensors").rename(saved / "model-00001-of-00001.safetensors")
    (saved / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelRefusedError, match=r"index\.json cannot be read .*download it again"):
        _load(saved)


def test_a_file_that_is_no_model(saved: Path) -> None:
    file = saved / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelRefusedError, match="is not a directory or a GGUF file; give a model"):
        load_model(str(file), LoadConfig(), print)
    (saved / "model-q4.gguf").write_bytes(b"GGUF")
    _load(saved)  # beside safetensors it is not read


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_without_a_model(tmp_path: Path, exists: bool) -> None:
    path = tmp_path if exists else tmp_path / "nowhere"
    words = "it has no config.json; give the directory with" if exists else "is not a"
    with pytest.raises(ModelRefusedError, match=f"{re.escape(str(path))} .*{words}"):
        _load(path)


def test_missing_weights_are_not_made_up(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match=r"1 weights are not in.*layers\.1\.mlp\.up_proj"):
        _load(saved)


def test_weights_of_another_shape(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match="weights cannot be read"):
        _load(saved)


@pytest.mark.parametrize("kept", [0, 4, 2000, -1])
def test_a_truncated_file(saved: Path, kept: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        ModelRefusedError, match=r"model\.safetensors: .* not copied to its end; download it again"
    ):
        _load(saved)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = True
    make_model(config).save_pretrained(tmp_path)
    assert _load(tmp_path).vocab_size == VOCAB


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "gpt_oss", "deepseek_v3", "mixtral"])
def test_other_families_load_from_disk(tmp_path: Path, family: str) -> None:
    make_model(FAMILIES[family]()).save_pretrained(tmp_path)
    assert _load(tmp_path).vocab_size == VOCAB


def test_code_of_the_directory_is_not_run(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    config["model_type"] = "evil"
    (saved / "config.json").write_text(json.dumps(config))
    marker = saved / "ran"
    (saved / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    with pytest.raises(ModelRefusedError):
        _load(saved)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("dtype", "right"),
    [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)],
)
def test_dtype_acts(saved: Path, dtype: Any, right: torch.dtype) -> None:
    verified = _load(saved, dtype=dtype)
    assert verified.model.dtype is right
    assert verified.probe.dtype is right


def test_a_wrong_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype"):
        load("/not/here", dtype="float8")


def test_cuda_that_is_not_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelRefusedError, match="CUDA"):
        _load(saved, device="cuda")
    assert _load(saved, device="auto").device.type == "cpu"


def test_threads_act(saved: Path) -> None:
    before = torch.get_num_threads()
    try:
        load_model(str(saved), LoadConfig(threads=2), lambda line: None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("threads", "cpus"), [(3, 2), (2, 1)])
def test_more_threads_than_cpus_are_told_and_compute_the_same(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    threads: int, cpus: int,
) -> None:  # fmt: skip
    def tokens(number: int) -> list[int]:
        outputs = load(str(saved), threads=number).generate_batch(
            [list(range(3, 40))], num_blocks=16, block_size=8, max_new_tokens=8, progress_bar=False
        )
        return outputs["req_0"].generated_tokens

    before = torch.get_num_threads()
    source = "the container's quota of 0.5 CPUs"
    limits = HostLimits(None, 1 << 34, cpus, source)
    monkeypatch.setattr(loader.HostLimits, "read", lambda: limits)
    words = f"threads is {threads}, more than the CPUs that may be used, {cpus} by {source}"
    try:
        with caplog.at_level(logging.INFO):
            alone = tokens(1)
            assert "more than the CPUs" not in caplog.text
            assert tokens(threads) == alone
            assert call_on_own_thread(torch.get_num_threads, "asked") == threads
        assert words in caplog.text
    finally:
        torch.set_num_threads(before)


def test_half_a_cpu_is_one_thread_and_told(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On any number of CPUs, even if there is one."""
    root, own, before = tmp_path / "cgroup", tmp_path / "self", torch.get_num_threads()
    root.mkdir()
    own.write_text("0::/\n")
    (root / "cpu.max").write_text("50000 100000\n")
    limits = HostLimits.read(root, own)
    monkeypatch.setattr(loader.HostLimits, "read", lambda: limits)
    torch.set_num_threads(2)
    try:
        with caplog.at_level(logging.INFO):
            load_model(str(saved), LoadConfig(), lambda line: None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    told = "CPU threads for the model: 1, because of the container's quota of 0.5 CPUs"
    assert told in caplog.text


def test_encoder_decoder_models_are_refused(tmp_path: Path) -> None:
    T5Config(vocab_size=VOCAB, d_model=16, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelRefusedError, match="'t5' has no causal language model"):
        _load(tmp_path)


def _rope(**rope: Any) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_theta": 1e4, **rope})


def test_length_dependent_rotary_embeddings_limit_the_context(
    caplog: pytest.LogCaptureFixture,
) -> None:
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": [2.0] * 64,
        "original_max_position_embeddings": 1024,
    }
    assert context_length(_rope(**longrope)) == 1024
    assert "context limited to 1024 of 4096" in caplog.text
    assert context_length(_rope(rope_type="default")) == 4096
    assert context_length(_rope(rope_type="dynamic", factor=2.0)) == 4096


def test_greedy_is_the_default() -> None:
    assert default_sampling(None) == SamplingParams(top_k=50)
    assert default_sampling(GenerationConfig()) == SamplingParams(top_k=50)
    assert default_sampling(GenerationConfig()).is_greedy


def test_sampling_from_a_generation_config() -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1
    )
    assert default_sampling(config) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1
    )


def test_without_do_sample_it_is_greedy_and_sampling_has_the_configs_bounds() -> None:
    config = GenerationConfig(repetition_penalty=1.1)
    config.temperature, config.top_k, config.top_p = 0.6, 20, 0.9
    assert default_sampling(config) == SamplingParams(
        temperature=0.0, top_k=20, top_p=0.9, repetition_penalty=1.1
    )


def test_an_unusable_generation_config(caplog: pytest.LogCaptureFixture) -> None:
    config = GenerationConfig(do_sample=True)
    config.temperature = -3.0
    assert default_sampling(config) == SamplingParams(top_k=50)
    assert "not usable" in caplog.text


def test_eos_ids(caplog: pytest.LogCaptureFixture) -> None:
    model_config = FAMILIES["llama"]()
    assert eos_token_ids(GenerationConfig(eos_token_id=[9, 3]), model_config, VOCAB) == (3, 9)
    assert eos_token_ids(GenerationConfig(), model_config, VOCAB) == (2,)
    assert eos_token_ids(None, model_config, VOCAB) == (2,)
    assert eos_token_ids(GenerationConfig(eos_token_id=[3, 50256]), model_config, VOCAB) == (3,)
    assert "50256" in caplog.text


def test_the_context_of_a_model_without_a_limit() -> None:
    class Endless:
        max_position_embeddings = None

    assert context_length(Endless()) == 1 << 20


def test_make_model_is_a_pretrained_model(loaded: Callable[[str], Any]) -> None:
    assert isinstance(loaded("llama").model, PreTrainedModel)


def _held_bytes(path: Path, **options: Any) -> int:
    """What a plan says of weights that are not tied, without buffers."""
    outline = read_outline(path, LoadConfig(**options))
    return outline.weight_bytes - sum(
        one.nbytes for one in model_without_weights(outline.checkpoint, outline.dtype).buffers()
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        {"dtype": "bfloat16", "quantization": "int4-64"},
    ],
)
def test_weights_for_which_there_is_no_memory(
    saved: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Counted as they are held: an embedding of its own, for example, stays as it is."""
    size = _held_bytes(saved, **options)

    def read(available: int) -> Any:
        return lambda: HostLimits(None, available, 1, "")

    monkeypatch.setattr(loader.HostLimits, "read", read(size + 1))
    assert _load(saved, **options).vocab_size == VOCAB
    monkeypatch.setattr(loader.HostLimits, "read", read(size - 1))
    with pytest.raises(InsufficientMemoryError, match=r"the weights take .* give more memory"):
        _load(saved, **options)


def test_float32_for_which_there_is_no_memory(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by hand, of a bfloat16 checkpoint: refused before anything is read."""
    path = tmp_path / "bfloat16"
    make_model(FAMILIES["llama"]()).to(torch.bfloat16).save_pretrained(path)
    size = _held_bytes(path, dtype="float32")

    def read_weights(*_: Any) -> None:
        raise AssertionError("weights were read")

    limits = HostLimits(None, size - 1, 1, "")
    monkeypatch.setattr(loader.HostLimits, "read", lambda: limits)
    monkeypatch.setattr(loader, "read_weights", read_weights)
    gib = f"{size / 2**30:.2f} GiB as torch.float32, and {size / 2**30:.2f} GiB are free"
    with pytest.raises(InsufficientMemoryError, match=gib + ".*or dtype bfloat16, with which"):
        _load(path, dtype="float32")
