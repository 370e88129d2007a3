"""What is read of an adapter's directory, and what is refused: by name, and in bounded time."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.offline import LoadedModel
from engine.contract.adapters import AdapterLoad, at_start
from engine.contract.config import LoadConfig
from engine.contract.errors import AdapterRefusedError, AdapterRoomError, ConfigError
from engine.contract.loaded_adapters import LoadedAdapters
from engine.loading.adapters.adapter_files import AdapterFolder
from engine.loading.adapters.adapter_loading import (
    AdapterLoader,
    load_adapters,
    read_adapter,
    why_no_adapters,
)
from engine.loading.adapters.name_patterns import NamePattern, NamePatternError
from tests.adapter_files import PeftAdapter
from tests.engine.mode_sweep import load_family
from tests.model_recipes import RECIPES
from tests.tiny_models import make_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_family("llama", "own")[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = make_model(RECIPES["llama"].config(eos_token_id=None))
    PeftAdapter(model, tmp_path / "a", target_modules=["q_proj", "down_proj"])
    return tmp_path / "a"


def read(loaded: LoadedModel, folder: Path, max_bytes: int = 2**30, max_rank: int = 64) -> Any:
    modules = loaded._verified.adapted
    assert modules is not None
    place = AdapterFolder.at(folder)
    return read_adapter("a", place, modules, max_rank=max_rank, max_bytes=max_bytes)


def configured(folder: Path, **options: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **options}))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"use_dora": True}, "use_dora is DoRA"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is an activated LoRA"),
        ({"bias": "all"}, "bias is all"),
        ({"lora_bias": True}, "lora_bias gives B a bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save replaces whole modules"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices changes embeddings"),
        ({"target_parameters": ["experts.w"]}, "target_parameters changes parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication repeats layers"),
        ({"use_qalora": True}, "use_qalora is QALoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which changes the base"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is loftq"),
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"task_type": "SEQ_CLS"}, "task_type is SEQ_CLS"),
        ({"from_tomorrow": {"a": 1}}, "from_tomorrow is an option that is not known here"),
        ({"r": 65}, "r is 65; it must be a whole number from 1 to 64 (max_adapter_rank)"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"rank_pattern": {"q_proj": 1000}}, "rank_pattern['q_proj'] is 1000"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern is no regular expression"),
        ({"lora_alpha": "16"}, "lora_alpha is 16; it must be a number"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e+300"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ["nothing"]}, "name no module that the model has"),
        ({"target_modules": ["embed_tokens"]}, "include model.embed_tokens, which is"),
        ({"target_modules": ["lm_head"]}, "include lm_head, which is the output layer"),
        ({"target_modules": r"(?=a)q_proj"}, "uses assert, which is not supported"),
        ({"target_modules": r"(q)\1"}, "uses groupref, which is not supported"),
        ({"target_modules": ["q_proj"]}, "has 6 tensors that adapter_config.json and the model"),
        ({"target_modules": ["q_proj", "down_proj", "k_proj"]}, "lacks 6 tensors"),
        ({"layers_to_transform": [0]}, "has 8 tensors"),
        ({"r": 4}, "has shape [8, 64], and here it must be [4, 64]"),
    ],
)
def test_configs_that_are_refused(
    options: dict[str, Any], told: str, loaded: LoadedModel, folder: Path
) -> None:
    configured(folder, **options)
    with pytest.raises(AdapterRefusedError, match=re.escape(told)):
        read(loaded, folder)


def rewritten(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def replaced(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])


def piped(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def linked(folder: Path) -> None:
    outside = folder.parent / "outside"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (rewritten(lambda one: one[Q].fill_(float("nan"))), "q_proj.lora_A.weight has elements"),
        (rewritten(lambda one: one.pop(Q)), f"lacks 1 tensors that {CONFIG} and the model need"),
        (rewritten(lambda one: one.update(other=torch.ones(1))), "do not have: other"),
        (rewritten(lambda one: one.update({Q: one[Q].double()})), "is torch.float64"),
        (rewritten(lambda one: one.update({Q: one[Q][:, :8].contiguous()})), "another base model"),
        (cut, f"{WEIGHTS} is damaged"),
        (piped, f"{CONFIG} is not a file"),
        (linked, f"{WEIGHTS} is a link that leaves the adapter's directory"),
        (lambda folder: (folder / WEIGHTS).unlink(), "only safetensors are read"),
        (replaced(WEIGHTS, b""), "is damaged"),
        (replaced(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"), "its head says that it has"),
        (replaced(CONFIG, b"[" * 100_000), "is not JSON"),
        (replaced(CONFIG, b"{" + b" " * (100 << 20) + b"}"), "than any config needs"),
        (replaced(CONFIG, b'{"lora_alpha": NaN}'), "NaN is no number"),
        (replaced(CONFIG, b"[]"), "is not an object"),
    ],
)
def test_files_that_are_refused(
    damage: Callable[[Path], None], told: str, loaded: LoadedModel, folder: Path
) -> None:
    damage(folder)
    started = time.monotonic()
    with pytest.raises(AdapterRefusedError, match=re.escape(told)):
        read(loaded, folder)
    assert time.monotonic() - started < 5


def test_memory_is_bounded_for_all_of_them(loaded: LoadedModel, folder: Path) -> None:
    size = read(loaded, folder).nbytes
    two = (f"a={folder}", f"b={folder}")
    for most in (2 * size, 2 * size - 1):
        verified = dataclasses.replace(loaded._verified, adapters=LoadedAdapters())
        config = LoadConfig(adapters=two, max_adapter_bytes=most)
        if most == 2 * size:
            load_adapters(verified, config, lambda line: None)
            assert verified.adapters.figures()["adapter_bytes"] == most
            continue
        with pytest.raises(AdapterRefusedError, match=r"adapter 'b'.*free of max_adapter_bytes"):
            load_adapters(verified, config, lambda line: None)
    os.truncate(folder / WEIGHTS, 64 << 20)
    with pytest.raises(AdapterRoomError, match="1,048,576 are free of max_adapter_bytes") as raised:
        read(loaded, folder, max_bytes=1 << 20)
    assert raised.value.missing_bytes == 63 << 20


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        r".*\.(q_proj|down_proj)",
        r"(?:.*?(?:self_attn|mlp).*?(?:\bq_proj|down_proj).*?)|nothing",
        ["q_proj", "mlp.down_proj"],
        ["model.layers.1.mlp.down_proj", "q_proj"],
    ],
)
@pytest.mark.parametrize("layers", [None, 1, [0, 2]])
def test_targets_are_those_of_peft(
    targets: Any, layers: Any, loaded: LoadedModel, tmp_path: Path
) -> None:
    if layers is not None and isinstance(targets, str):
        pytest.skip("peft refuses layers with a pattern")
    model = make_model(RECIPES["llama"].config(eos_token_id=None))
    PeftAdapter(model, tmp_path, target_modules=targets, layers_to_transform=layers)
    found = read(loaded, tmp_path)
    assert found.modules == len(load_file(tmp_path / WEIGHTS)) // 2


NAMES = ("model.layers.0.self_attn.q_proj", "a", "", "aaaa", "x.10.y", "h.3.mlp", "q_proj")


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.q_proj", r"a*", r"(a|b)*", r"(a|aa)+$", r"^a{2,4}$", r".*\.\d+\..*", r"[^.]+",
        r"[a-z_]*", r"x\.\d{1,}\.y", r"h\.[0-9]\.(mlp|attn)", r"(.*\.)?(q_proj)", r"\bq\w+",
        r"a?a?a?a?aaaa", r"", r"(?:.*?(?:layers|h).*?(?:q_proj|mlp).*?)",
    ],
)  # fmt: skip
def test_patterns_match_as_python_does(pattern: str) -> None:
    own = NamePattern(pattern)
    for name in NAMES:
        assert own.fits(name) == (re.fullmatch(pattern, name) is not None), name


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(.*)*(.*)*x", r"(((a*)*)*)*b"])
def test_no_pattern_takes_long(pattern: str) -> None:
    started = time.monotonic()
    assert not NamePattern(pattern).fits("a" * 200)
    assert time.monotonic() - started < 2


def test_a_pattern_that_takes_too_much_work() -> None:
    with pytest.raises(NamePatternError, match="too much work"):
        NamePattern(r"(a*b?)*" * 500).fits("a" * 400)


@pytest.mark.parametrize(
    "pattern", ["a" * 5000, "(", "a{2000}", "(?i)a", "(?P<n>a)(?P=n)", "(?<=a)b"]
)
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(NamePatternError):
        NamePattern(pattern)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["a"], "NAME=DIR"),
        (["a="], "NAME=DIR"),
        (["=/x"], "1 to 128 letters"),
        (["a" * 129 + "=/x"], "1 to 128 letters"),
        (["a b=/x"], "1 to 128 letters"),
        (["a\n=/x"], "1 to 128 letters"),
        (["a=/x", "a=/y"], "two adapters with the name 'a'"),
    ],
)
def test_names_that_are_refused(given: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        LoadConfig(adapters=tuple(given))


def test_names_and_directories() -> None:
    found = at_start(["team/a:1=/x=y", "b=z"])
    assert {one.name: one.source for one in found} == {"team/a:1": "/x=y", "b": "z"}
    for options in ({"adapters": ("a=/x",)}, {"adapter_root": "/x"}):
        with pytest.raises(ConfigError, match="tensor_parallel is auto, which has none"):
            LoadConfig(**options, tensor_parallel="auto")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "choose bfloat16 or float32"),
        ({"device": torch.device("cuda")}, "computed on a CPU alone"),
        ({"ranks": object()}, "leave tensor_parallel out"),
    ],
)
def test_where_adapters_are_not_computed_they_are_refused(
    loaded: LoadedModel, change: dict[str, Any], reason: str
) -> None:
    verified = loaded._verified
    assert why_no_adapters(verified) is None
    with pytest.raises(AdapterRefusedError, match=reason):
        load_adapters(dataclasses.replace(verified, **change), LoadConfig(adapter_root="/"), print)


# ---- sources below a root -------------------------------------------------------------------


def loader_below(loaded: LoadedModel, root: Path) -> AdapterLoader:
    verified = dataclasses.replace(loaded._verified, adapters=LoadedAdapters())
    return AdapterLoader(verified, LoadConfig(adapter_root=str(root)))


def named(source: str, digest: str = "") -> AdapterLoad:
    return AdapterLoad(name="x", source=source, digest=digest)


@pytest.mark.parametrize(
    "source",
    ["", "/", "/etc", "..", "a/..", "../a", "a//b", "./a", "a/", "a\n", "a\0b", "x" * 1025],
)
def test_sources_that_are_no_names(source: str, loaded: LoadedModel, folder: Path) -> None:
    with pytest.raises(AdapterRefusedError, match="it must be the name of a directory below"):
        loader_below(loaded, folder.parent).read(named(source))


def test_a_source_is_below_the_root(loaded: LoadedModel, folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "team").mkdir(parents=True)
    folder.rename(root / "team" / "v1")
    (root / "current").symlink_to("team/v1")
    (root / "out").symlink_to(tmp_path)
    (root / "file").write_text("")
    loader = loader_below(loaded, root)
    found = loader.read(named("team/v1"))
    assert loader.read(named("current")).digest == found.digest
    assert loader.read(named("team/v1", found.digest.hex())).digest == found.digest
    with pytest.raises(AdapterRefusedError, match="files are others than those that were loaded"):
        loader.read(named("team/v1", "00" * 32))
    with pytest.raises(AdapterRefusedError, match="source is a link that leaves adapter_root"):
        loader.read(named("out"))
    for source in ("nothing", "file", "x" * 300, "team/v1/" + CONFIG):
        with pytest.raises(AdapterRefusedError, match="there is no such directory"):
            loader.read(named(source))
    with pytest.raises(AdapterRefusedError, match=r"adapter_root.*there is no such directory"):
        loader_below(loaded, root / "file")


def test_no_directory_is_listed(
    loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So one of 100,000 files costs no more than another."""

    def never(*given: object) -> None:
        raise AssertionError("the directory is listed")

    loader = loader_below(loaded, folder.parent)
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, never)
    assert loader.read(named("a")).modules


def test_a_file_that_changes_while_it_is_read(
    loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.fstat

    def once(handle: int) -> os.stat_result:
        found = before(handle)
        os.utime(folder / CONFIG, ns=(0, found.st_mtime_ns + 1))
        return found

    monkeypatch.setattr("engine.loading.adapters.adapter_files.os.fstat", once)
    with pytest.raises(AdapterRefusedError, match="has changed while it was read"):
        read(loaded, folder)


def test_a_link_that_is_turned_after_it_was_checked(
    loaded: LoadedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes((folder / CONFIG).read_bytes())
    plain = Path.resolve

    def turned(path: Path, strict: bool = False) -> Path:
        found = plain(path, strict)
        if path.name == CONFIG:
            (folder / CONFIG).unlink(missing_ok=True)
            (folder / CONFIG).symlink_to(outside)
        return found

    monkeypatch.setattr(Path, "resolve", turned)
    with pytest.raises(AdapterRefusedError, match="is a link that leaves"):
        read(loaded, folder)


def test_a_config_of_halves_of_characters_is_told(loaded: LoadedModel, folder: Path) -> None:
    configured(folder, **{"\ud800": 1})
    with pytest.raises(AdapterRefusedError) as raised:
        read(loaded, folder)
    str(raised.value).encode()
    configured(folder, **{"\ud800": 0, "base_model_name_or_path": "a\ud800\nb" + "c" * 999})
    assert read(loaded, folder).base_model == "ab" + "c" * 252
