"""A hub on loopback, asked by the real client of huggingface_hub, and an empty cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.engine.hub.loopback_hub import Hub, Repository, running

WEIGHTS = bytes(range(256)) * 8192  # 2 MiB
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"the same again",
    "original/params.json": b"{}",
    "README.md": b"# Tiny",
}
USED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub that the client asks, with the repository org/tiny."""
    with running({"org/tiny": Repository(dict(FILES))}) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield made
