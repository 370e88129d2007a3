"""The models in huggingface_hub's cache on this machine.

    models--OWNER--NAME/
        blobs/DIGEST                  the content of a file; DIGEST.incomplete: a partial download
        snapshots/COMMIT/config.json  links to blobs
        refs/main                     the commit
        headrace/COMMIT               the names of the files that are used, if all are present
        headrace/*.lock               held while the model is being downloaded or used

`hf download` and transformers read and write the same directories, except for the last two lines.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound, HFValidationError
from huggingface_hub.utils import HFCacheInfo, validate_repo_id

from engine.contract.errors import DownloadError, ModelInUseError
from engine.hub.gguf_names import meant, parts_of

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[\w][\w.+/-]{0,199}", re.ASCII)
_PREFIX = "models" + constants.REPO_ID_SEPARATOR
_MARKS, _FETCHING, _USED = "headrace", "fetching.lock", "used.lock"


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on the hub.

    Attributes:
        repo: its id, such as OWNER/NAME.
        revision: a branch, a tag or a commit.
        file: which GGUF file is meant (`gguf_names.meant`). Empty: the safetensors.
    """

    repo: str
    revision: str = constants.DEFAULT_REVISION
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> HubId:
        """Parse `OWNER/NAME`, with `@REVISION`, `:FILE.gguf` or both behind it.

        Raises:
            DownloadError: the text is not such an id.
        """
        named, colon, file = text.partition(":")
        repo, at, revision = named.partition("@")
        try:
            validate_repo_id(repo)
        except HFValidationError as error:
            raise DownloadError(
                "bad_id",
                f"{text!r} is neither a directory here nor an id of the hub, OWNER/NAME or "
                "OWNER/NAME:FILE.gguf",
            ) from error
        if at and not _is_name(revision):
            raise DownloadError(
                "bad_id", f"{revision!r} is not a revision: give a branch, a tag or a commit"
            )
        if colon and not _is_name(file):
            raise DownloadError(
                "bad_id", f"{file!r} is no GGUF file: give its name, or a type such as Q4_K_M"
            )
        return cls(repo, revision if at else constants.DEFAULT_REVISION, file)

    def __str__(self) -> str:
        is_default = self.revision == constants.DEFAULT_REVISION
        revision = "" if is_default else f"@{self.revision}"
        return f"{self.repo}{revision}:{self.file}".removesuffix(":")

    @property
    def page(self) -> str:
        """The model's page on the hub."""
        return f"{constants.ENDPOINT}/{self.repo}"

    @property
    def folder(self) -> Path:
        """The model's directory in the cache, whether it exists or not."""
        return cache_folder() / (_PREFIX + self.repo.replace("/", constants.REPO_ID_SEPARATOR))

    @property
    def has_commit(self) -> bool:
        """Whether the revision is a commit."""
        return _COMMIT.fullmatch(self.revision) is not None


def _is_name(text: str) -> bool:
    is_path = not any(part in ("", ".", "..") for part in text.split("/"))
    return is_path and _NAME.fullmatch(text) is not None


def cache_folder() -> Path:
    """Return the cache's directory, as set by huggingface_hub's variables."""
    return Path(constants.HF_HUB_CACHE)


def _snapshot(model: HubId) -> Path | None:
    commit = model.revision
    if not model.has_commit:
        try:
            commit = (model.folder / "refs" / model.revision).read_text().strip()
        except (OSError, ValueError):
            return None
    path = model.folder / "snapshots" / commit
    return path if _COMMIT.fullmatch(commit) and path.is_dir() else None


def find(model: HubId, *, needs_weights: bool = True) -> Path | None:
    """Return the directory of a model, or its GGUF file, if all its used files are present. The hub
    is not contacted.

    Args:
        model: the model to find.
        needs_weights: whether the weights are needed; if False, its config is enough. A GGUF file
            has both.
    """
    path = _snapshot(model)
    if path is None:
        return None
    if model.file:
        here = [str(one.relative_to(path)) for one in path.rglob("*.gguf") if one.is_file()]
        files = meant(here, model.file)
        is_whole = len(files) == 1 and set(parts_of(files[0])) <= set(here)
        return path / files[0] if is_whole else None
    try:
        names = (model.folder / _MARKS / path.name).read_text().split("\n")
    except (OSError, ValueError):
        names = []
    if needs_weights:
        return path if names and all((path / name).exists() for name in names) else None
    return path if (path / "config.json").exists() else None


def find_unmarked(model: HubId, *, needs_weights: bool = True) -> Path | None:
    """Return the directory of a model that another program has downloaded, perhaps incompletely.

    Used for serving when the hub cannot be reached.
    """
    if model.file:
        return find(model)
    path = _snapshot(model)
    if path is None or not (path / "config.json").exists():
        return None
    return path if not needs_weights or any(path.glob("*.safetensors")) else None


def mark(model: HubId, commit: str, names: list[str]) -> None:
    """Record which commit a revision refers to, and that all used files of it are present.

    Args:
        model: the model. GGUF files need no record: they have their names once they are whole.
        commit: the commit.
        names: its used files. Empty if its weights are not here.
    """
    if names and not model.file:
        write(model.folder / _MARKS / commit, "\n".join(names))
    if not model.has_commit:
        write(model.folder / "refs" / model.revision, commit)


def write(path: Path, text: str) -> None:
    """Write a small file atomically, so that nobody reads it half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


def link(blob: Path, name: Path) -> None:
    """Give a blob a name in a snapshot, as a relative link."""
    name.parent.mkdir(parents=True, exist_ok=True)
    fresh = name.with_name(f".{name.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(os.path.relpath(blob, name.parent))
    fresh.replace(name)


@contextmanager
def fetching(model: HubId, waits: Callable[[], None]) -> Iterator[None]:
    """Exclude other downloads of a model. `waits` is called before waiting for another download."""
    with _opened(model.folder / _MARKS / _FETCHING) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def hold(path: Path) -> BinaryIO | None:
    """Keep `remove` from deleting a model's directory, or GGUF files that a directory has links to,
    until the returned file is closed.

    Returns None if the model is not in the cache, or its directory is not writable.
    """
    linked = next(path.glob("*.gguf"), None)
    place = path if linked is None else linked.resolve()
    folder = place.parent.parent
    if place.parent.name not in ("snapshots", "blobs") or not folder.name.startswith(_PREFIX):
        return None
    try:
        lock = _opened(folder / _MARKS / _USED)
    except OSError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _opened(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def scan() -> HFCacheInfo | None:
    """Return what huggingface_hub finds in the cache, or None if there is no cache."""
    try:
        return scan_cache_dir(cache_folder())
    except CacheNotFound:
        return None


def partial_bytes(folder: Path) -> int:
    """Return how many bytes of incomplete files have been received."""
    return sum(one.stat().st_size for one in folder.glob("blobs/*.incomplete"))


def remove(model: HubId) -> int:
    """Remove a model with all its revisions. Return the number of bytes freed.

    Raises:
        DownloadError: the model is not here.
        ModelInUseError: a server uses the model, or it is being downloaded.
        OSError: a file cannot be removed.
    """
    folder = model.folder
    if not folder.is_dir():
        raise DownloadError("not_here", f"{model.repo} is not in {cache_folder()}")
    with _opened(folder / _MARKS / _FETCHING) as one, _opened(folder / _MARKS / _USED) as other:
        for lock, what in ((one, "is being downloaded"), (other, "is used by a running server")):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ModelInUseError(
                    f"{model.repo} {what}: end that first (whoever maps its weights would keep "
                    "their room on the disk, and could not start again)"
                ) from error
        freed = partial_bytes(folder)
        found = scan()
        for repo in found.repos if found is not None else ():
            if repo.repo_type == "model" and repo.repo_id == model.repo and found is not None:
                commits = [revision.commit_hash for revision in repo.revisions]
                removal = found.delete_revisions(*commits)  # it knows blobs that models share
                freed += removal.expected_freed_size
                removal.execute()
        shutil.rmtree(folder, ignore_errors=not folder.exists())
    return freed
