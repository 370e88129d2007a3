"""Makes an ordinary model's directory around a GGUF file, once, in the cache folder.

    model.gguf ─▶ config.json, tokenizer.json, ... beside it, or else written from its metadata
               ─▶ a directory with them and links to the file and its parts

So everything else reads such a model as it reads others. A directory that has these files, and one
GGUF file, is served as it is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from tokenizers import Tokenizer

from engine.contract.errors import ModelRefusedError
from engine.loading.gguf.container import Container, find_files, open_container
from engine.loading.gguf.described import config_of, generation_config_of
from engine.loading.gguf.tokenizer_files import tokenizer_of

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_OF_CONFIG = (_CONFIG, "generation_config.json")
_OF_TOKENIZER = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_LARGEST = 256 << 20
"""The maximum size in bytes of a file that is copied."""


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a directory whose weights are in one."""
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.is_file() and path.suffix == ".gguf"


def gguf_directory(path: Path) -> Path:
    """Return a directory with a GGUF file's model and its config and tokenizer.

    Args:
        path: the file, or a directory with one.

    Raises:
        ModelRefusedError: what is missing beside the file cannot be told from its metadata, or the
            directory cannot be written.
    """
    beside = path if path.is_dir() else path.parent
    has = [(beside / name).is_file() for name in (_CONFIG, _TOKENIZER)]
    files = find_files(path)
    if path.is_dir() and all(has):
        return path
    copied = [
        beside / name
        for names, is_here in zip((_OF_CONFIG, _OF_TOKENIZER), has, strict=True)
        for name in names
        if is_here and (beside / name).is_file()
    ]
    target = Path(constants.HF_HOME) / "headrace" / "gguf" / _key(files, copied)
    if target.is_dir():
        return target
    container = open_container(path)
    written: dict[str, dict[str, Any]] = {}
    if not has[0]:
        written[_CONFIG] = config_of(container)
        written["generation_config.json"] = generation_config_of(container)
    if not has[1]:
        embedding = container.tensors.get("token_embd.weight")
        written |= tokenizer_of(container, embedding.shape[0] if embedding is not None else 0)
        _check_tokenizer(container, written[_TOKENIZER])
    try:
        _write(target, container, copied, written)
    except OSError as error:
        raise ModelRefusedError(
            f"{target} cannot be written ({error}): make room there, or name another folder by "
            "HF_HOME"
        ) from error
    return target


def _key(files: tuple[Path, ...], copied: list[Path]) -> str:
    """Name the directory of a file as it is now, and as the code here reads it."""
    digest = hashlib.sha256()
    for one in (*files, *copied):
        about = one.stat()
        digest.update(f"{one.resolve()}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
    for code in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(code.read_bytes())
    return f"{files[0].stem[:64]}-{digest.hexdigest()[:16]}"


def _check_tokenizer(container: Container, tokenizer: dict[str, Any]) -> None:
    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # of the library, which raises no other class
        raise ModelRefusedError(
            f"{container.files[0]}: its tokenizer is damaged ({error}): put the tokenizer.json of "
            "the model that it was made from beside it"
        ) from error


def _write(
    target: Path, container: Container, copied: list[Path], written: dict[str, dict[str, Any]]
) -> None:
    """Write a directory. Processes that do so at the same time write the same one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as made:
        folder = Path(made)
        for one in copied:
            if one.stat().st_size > _LARGEST:
                raise ModelRefusedError(
                    f"{one} has {one.stat().st_size:,} bytes, and at most {_LARGEST:,} are copied: "
                    "put the model's own file there"
                )
            shutil.copyfile(one, folder / one.name)
        for name, content in written.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        for one in container.files:
            (folder / one.name).symlink_to(one.resolve())
        folder.chmod(0o755)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
