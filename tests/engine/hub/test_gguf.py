"""GGUF files of a repository: which one is meant, what comes of it, and that it is served then."""

from __future__ import annotations

from pathlib import Path

import pytest

import engine
from engine.contract.errors import DownloadError, ModelInUseError, ModelRefusedError
from engine.hub import cache
from engine.hub.cache import HubId
from engine.hub.fetching import Patience, fetch
from engine.hub.gguf_names import meant
from engine.loading.checkpoint import check_before_weights, read_checkpoint, resolve_path
from tests.engine.hub.loopback_hub import COMMIT, Hub
from tests.gguf_files import all_of, split_gguf
from tests.gguf_models import write

QUICK = Patience(tries=3, first_s=0.01, most_s=2.0)
CHOICES = [
    "tiny-Q4_K_M.gguf",
    "tiny-Q4_K.gguf",
    "tiny-Q8_0-00001-of-00002.gguf",
    "tiny-Q8_0-00002-of-00002.gguf",
    "BF16/tiny-BF16-00001-of-00003.gguf",
    "mmproj-Q4_K.gguf",
    "tiny-Q4_K.txt",
    "../Q2_K.gguf",
]


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories around files are made below the test's own."""
    monkeypatch.setattr("engine.loading.gguf.folder.constants.HF_HOME", str(tmp_path / "home"))


@pytest.fixture
def files(hub: Hub, tmp_path: Path) -> dict[str, bytes]:
    """The files of org/tiny: two models, one of them in two parts, and nothing beside them."""
    found = hub.repositories["org/tiny"].files
    found.clear()
    file, _ = write(tmp_path / "model", "llama", all_of("Q8_0"))
    found["README.md"] = b"# Tiny"
    found["tiny-Q8_0.gguf"] = file.read_bytes()
    write(tmp_path / "model", "llama", all_of("Q4_K"))
    for part in split_gguf(file, tmp_path / "parts", "tiny-Q4_K", 2):
        found[part.name] = part.read_bytes()
    return found


def asked(hub: Hub) -> set[str]:
    return {path.rsplit("/", 1)[1] for _, path, _ in hub.log if "/resolve/" in path}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("tiny-Q4_K.gguf", ["tiny-Q4_K.gguf"]),
        ("Q4_K", ["tiny-Q4_K.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("Q8_0", ["tiny-Q8_0-00001-of-00002.gguf"]),
        ("tiny-Q8_0-00002-of-00002.gguf", ["tiny-Q8_0-00001-of-00002.gguf"]),
        ("BF16", ["BF16/tiny-BF16-00001-of-00003.gguf"]),
        ("Q4", []),
        ("Q2_K", []),
        ("tiny", [*sorted({*CHOICES[:3], CHOICES[4]})]),
        (".*", []),
    ],
)
def test_which_file_is_meant(wanted: str, found: list[str]) -> None:
    assert sorted(meant(CHOICES, wanted)) == found


@pytest.mark.parametrize("name", ["tiny-Q8_0.gguf", "Q8_0"])
def test_a_file_comes_alone_and_is_served(hub: Hub, files: dict[str, bytes], name: str) -> None:
    model = f"org/tiny:{name}"
    loaded = engine.load(model)
    assert asked(hub) == {"tiny-Q8_0.gguf"}
    assert loaded.model.config.model_type == "llama"
    hub.log.clear()
    path = cache.find(HubId.parse(model))
    assert path is not None
    assert path.name == "tiny-Q8_0.gguf"
    made = resolve_path(model, [].append, needs_weights=False)
    assert (made / path.name).samefile(path)
    assert not hub.log
    assert cache.find(HubId("org/tiny")) is None  # nor does it stand for the safetensors


def test_all_parts_come(hub: Hub, files: dict[str, bytes]) -> None:
    model = HubId.parse("org/tiny:Q4_K")
    path = fetch(model, [].append, check=check_before_weights, patience=QUICK)
    parts = [name for name in files if "Q4_K" in name]
    assert asked(hub) == set(parts)
    assert path.name == parts[0]
    (path.parent / parts[1]).unlink()
    assert cache.find(model) is None


def test_a_revision(hub: Hub, files: dict[str, bytes]) -> None:
    model = HubId.parse("org/tiny@v1:Q8_0")
    assert str(model) == "org/tiny@v1:Q8_0"
    path = fetch(model, [].append, patience=QUICK)
    assert path == cache.find(model) == cache.find(HubId("org/tiny", COMMIT, "Q8_0"))
    assert cache.find(HubId("org/tiny", file="Q8_0")) is None


@pytest.mark.parametrize("is_whole", [True, False])
def test_files_of_the_original_come_if_all_are_there(
    hub: Hub, files: dict[str, bytes], is_whole: bool
) -> None:
    """Some repositories have a config.json with a type alone."""
    made = resolve_path("org/tiny:Q8_0", [].append)
    files["config.json"] = (made / "config.json").read_bytes()
    if is_whole:
        files["tokenizer.json"] = (made / "tokenizer.json").read_bytes()
    cache.remove(HubId("org/tiny"))
    hub.log.clear()
    read_checkpoint(resolve_path("org/tiny:Q8_0", [].append))
    beside = {"config.json", "tokenizer.json"} if is_whole else set()
    assert asked(hub) == {"tiny-Q8_0.gguf"} | beside


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("org/tiny", "org/tiny has GGUF files: give one of org/tiny:tiny-Q4_K-00001-of-00002.gguf, "
         "org/tiny:tiny-Q8_0.gguf"),
        ("org/tiny:Q5_K_M", "org/tiny has no GGUF files 'Q5_K_M': give one of org/tiny:tiny-Q4_K-"),
        ("org/tiny@v1:tiny", "org/tiny has 2 GGUF files 'tiny': give one of org/tiny@v1:tiny-Q4"),
    ],
)  # fmt: skip
def test_errors_name_the_files(hub: Hub, files: dict[str, bytes], model: str, said: str) -> None:
    for config in ({}, {"config.json": b"{}"}):
        files |= config
        with pytest.raises(DownloadError) as told:
            fetch(HubId.parse(model), [].append, patience=QUICK)
        assert told.value.cause == "which_file"
        assert str(told.value).startswith(said)
    assert not asked(hub)


def test_errors_name_some_of_many_files(hub: Hub, files: dict[str, bytes]) -> None:
    files |= {f"m-{number:03}.gguf": b"" for number in range(100)}
    with pytest.raises(DownloadError, match=r"m-019\.gguf and 82 others$"):
        fetch(HubId.parse("org/tiny:nothing"), [].append, patience=QUICK)


def test_a_repository_that_lacks_a_part(hub: Hub, files: dict[str, bytes]) -> None:
    del files["tiny-Q4_K-00002-of-00002.gguf"]
    with pytest.raises(DownloadError, match=r"has no tiny-Q4_K-00002-of-00002\.gguf"):
        fetch(HubId.parse("org/tiny:Q4_K"), [].append, patience=QUICK)


def test_a_file_that_is_refused(hub: Hub, files: dict[str, bytes]) -> None:
    files["tiny-Q2_K.gguf"] = b"GGUF" + bytes(40)
    with pytest.raises(ModelRefusedError, match=r"tiny-Q2_K\.gguf: version 0 is not read here"):
        resolve_path("org/tiny:Q2_K", [].append)


def test_a_file_that_is_served_is_not_removed(hub: Hub, files: dict[str, bytes]) -> None:
    held = cache.hold(resolve_path("org/tiny:Q8_0", [].append))
    assert held is not None
    with pytest.raises(ModelInUseError, match="is used by a running server"):
        cache.remove(HubId("org/tiny"))
    held.close()
    cache.remove(HubId("org/tiny"))
