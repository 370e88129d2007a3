"""What comes of a model, how it is resumed, and what a bad hub or a bad disk does to it. The client
is huggingface_hub's own; the hub is on loopback.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from engine.contract.errors import DownloadError, ModelInUseError, ModelRefusedError
from engine.contract.startup import DOWNLOAD, Paced, Stages, Transfer
from engine.hub import cache
from engine.hub.cache import HubId
from engine.hub.fetching import Patience, fetch
from engine.loading.checkpoint import resolve_path
from tests.engine.hub.conftest import FILES, USED, WEIGHTS
from tests.engine.hub.loopback_hub import COMMIT, Hub, Repository, running

TINY = HubId("org/tiny")
QUICK = Patience(tries=3, first_s=0.01, most_s=2.0)


def get(lines: list[str] | None = None, model: HubId = TINY) -> Path:
    return fetch(model, [].append if lines is None else lines.append, patience=QUICK)


def names(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}


def asked(hub: Hub) -> list[str]:
    return [path.rsplit("/", 1)[1] for _, path, _ in hub.log if "/resolve/" in path]


def test_only_what_is_used_comes_and_is_told_before(hub: Hub) -> None:
    lines: list[str] = []
    path = get(lines)
    assert names(path) == USED
    assert all((path / name).read_bytes() == FILES[name] for name in USED)
    assert set(asked(hub)) == USED
    size = sum(len(FILES[name]) for name in USED)
    assert re.fullmatch(
        rf"downloading org/tiny \({COMMIT[:12]}\): 4 files, {size / 1e6:.3g} MB; licence: "
        rf"apache-2.0 \({hub.url}/org/tiny\)",
        lines[0],
    )
    assert re.fullmatch(r"into \S+/hub: [\d,.]+ GB free", lines[1])
    last = lines[-1]
    assert isinstance(last, Transfer)
    assert (last.done, last.total) == (size, size)


def test_what_came_is_found_without_the_hub_and_by_its_own_library(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = get()
    hub.log.clear()
    stages = Stages([].append)
    assert resolve_path("org/tiny", stages) == path
    assert not hub.log
    assert DOWNLOAD not in dict(stages.end())
    assert cache.find(HubId("org/tiny", COMMIT)) == path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert snapshot_download("org/tiny", allow_patterns=["*.json"]) == str(path)
    found = cache.scan()
    assert found is not None
    [repo] = found.repos
    assert {one.file_name for one in next(iter(repo.revisions)).files} == USED
    assert next(iter(repo.revisions)).refs == {"main"}
    (path / "model.safetensors").unlink()  # by hand
    assert cache.find(TINY) is None


def test_the_index_decides_which_weights_come(hub: Hub) -> None:
    files = hub.repositories["org/tiny"].files
    del files["model.safetensors"]
    files["model-1.safetensors"], files["model-2.safetensors"] = b"one", b"two"
    files["model.safetensors.index.json"] = (
        b'{"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": '
        b'"model-2.safetensors"}}'
    )
    shards = {"model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"}
    assert names(get()) == USED - {"model.safetensors"} | shards


@pytest.mark.parametrize("named", ["../x.safetensors", "gone.safetensors", "consolidated.txt"])
def test_an_index_that_names_other_files_is_refused(hub: Hub, named: str) -> None:
    files = hub.repositories["org/tiny"].files
    del files["model.safetensors"]
    files["../x.safetensors"] = b"1"
    files["model.safetensors.index.json"] = b'{"weight_map": {"a": "%s"}}' % named.encode()
    with pytest.raises(DownloadError, match="names files it has not") as told:
        get()
    assert told.value.cause == "damaged"


def test_cut_five_times_it_is_resumed_each_time(hub: Hub) -> None:
    hub.behaviour.cut_after = [400_000, 300_000, 200_000, 500_000, 1]
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [
        headers.get("Range") for _, path, headers in hub.log if path.endswith("model.safetensors")
    ]
    assert len(ranges) == 6
    assert ranges[0] is None
    # What is lost at a cut is less than a chunk.
    assert hub.sent < len(WEIGHTS) + 5 * (1 << 18)
    begins = [int(one[6:-1]) for one in ranges[1:] if one is not None]
    assert begins == sorted(begins)
    assert begins[0] > 0


def test_another_process_goes_on_where_one_was_killed(hub: Hub) -> None:
    class Killed(BaseException):
        pass

    def sink(line: str) -> None:
        if isinstance(line, Transfer) and line.done > 600_000:
            raise Killed

    hub.behaviour.rate = 1e6
    with pytest.raises(Killed):
        fetch(TINY, sink, patience=QUICK)
    [partial] = TINY.folder.glob("blobs/*.incomplete")
    there = partial.stat().st_size
    assert 0 < there < len(WEIGHTS)
    assert cache.find(TINY) is None
    assert cache.partial_bytes(TINY.folder) == there
    hub.behaviour.rate = float("inf")
    lines: list[str] = []
    path = get(lines)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert "of it is here" in lines[1]
    assert not list(TINY.folder.glob("blobs/*.incomplete"))


def test_a_hub_that_ignores_ranges_sends_all_again(hub: Hub) -> None:
    hub.behaviour.cut_after, hub.behaviour.ignores_range = [600_000], True
    lines: list[str] = []
    assert (get(lines) / "model.safetensors").read_bytes() == WEIGHTS
    last = lines[-1]
    assert isinstance(last, Transfer)
    assert last.done == last.total


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"short": 1000}, r"ended after 2,096,152 of 2,097,152 bytes"),
        ({"extra": b"x"}, r"has more than its 2,097,152 bytes"),
    ],
)
def test_too_little_and_too_much(hub: Hub, fault: dict[str, object], said: str) -> None:
    for name, value in fault.items():
        setattr(hub.behaviour, name, value)
    with pytest.raises(DownloadError, match=said) as told:
        get()
    assert told.value.cause == "damaged"
    assert not list(TINY.folder.glob("blobs/*.incomplete"))
    assert cache.find(TINY) is None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_other_bytes_than_announced(hub: Hub, name: str) -> None:
    hub.repositories["org/tiny"].announced[name] = (
        {"lfs": {"size": len(WEIGHTS), "sha256": "0" * 64, "pointerSize": 1}}
        if name == "model.safetensors"
        else {"blobId": "0" * 40}
    )
    with pytest.raises(DownloadError, match=rf"{name} of org/tiny is not the file .* digest"):
        get()
    assert not list(TINY.folder.glob("blobs/0*"))


def test_digests_that_are_paths_are_no_digests(hub: Hub) -> None:
    hub.repositories["org/tiny"].announced["config.json"] = {"blobId": "../" * 10 + "etc"}
    with pytest.raises(DownloadError, match=r"no config\.json"):
        get()


def test_another_etag_does_not_matter_since_the_digest_does(hub: Hub) -> None:
    hub.behaviour.etag = "f" * 64
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_redirect_to_another_host_does_not_get_the_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with running({"org/tiny": Repository(dict(FILES))}) as other:
        hub.behaviour.redirect = other.url.replace("127.0.0.1", "localhost")
        assert names(get()) == USED
        here = [
            headers.get("Authorization", headers.get("authorization")) for *_, headers in hub.log
        ]
        assert set(here) == {"Bearer hf_secret"}
        assert len(other.log) == 4
        assert not any("hf_secret" in str(headers) for *_, headers in other.log)


def test_a_hub_that_asks_to_wait_is_given_the_time(hub: Hub) -> None:
    hub.behaviour.refuse = [(429, {"Retry-After": "0"}), (503, {})]
    hub.behaviour.refuse_files = [(429, {"Retry-After": "0"}), (502, {})]
    assert names(get()) == USED


def test_a_revision_has_its_own_name(hub: Hub) -> None:
    path = get(model=HubId.parse("org/tiny@v1"))
    assert (TINY.folder / "refs" / "v1").read_text() == COMMIT
    assert cache.find(TINY) is None
    assert cache.find(HubId("org/tiny", "v1")) == path


def test_a_model_that_is_refused_brings_no_weights(hub: Hub) -> None:
    hub.repositories["org/tiny"].files["config.json"] = b'{"model_type": "t5"}'
    with pytest.raises(ModelRefusedError, match="no causal language model"):
        resolve_path("org/tiny", [].append)
    assert "model.safetensors" not in asked(hub)


def test_a_plan_needs_no_weights(hub: Hub) -> None:
    resolve = resolve_path("org/tiny", [].append, needs_weights=False)
    assert names(resolve) == USED - {"model.safetensors"}
    hub.log.clear()
    assert resolve_path("org/tiny", [].append, needs_weights=False) == resolve
    assert not hub.log


def test_what_is_here_is_served_while_the_hub_is_away(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = get()
    (TINY.folder / "headrace" / COMMIT).unlink()  # as other programs leave it
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lines: list[str] = []
    assert resolve_path("org/tiny", lines.append) == path
    assert "because org/tiny is not in" in lines[-1]
    with pytest.raises(DownloadError):
        get()


def test_removed_unless_it_is_used(hub: Hub) -> None:
    path = get()
    held = cache.hold(path)
    assert held is not None
    with pytest.raises(ModelInUseError, match="is used by a running server"):
        cache.remove(TINY)
    held.close()
    with cache.fetching(TINY, lambda: None), pytest.raises(ModelInUseError, match="downloaded"):
        cache.remove(TINY)
    assert cache.remove(TINY) == sum(len(FILES[name]) for name in USED)
    assert not TINY.folder.exists()
    with pytest.raises(DownloadError, match="is not in"):
        cache.remove(TINY)
    assert cache.hold(Path("/nowhere/models/x")) is None


def test_what_has_come_of_a_model_is_removed_too(hub: Hub) -> None:
    (TINY.folder / "blobs").mkdir(parents=True)
    (TINY.folder / "blobs" / f"{'0' * 64}.incomplete").write_bytes(b"12345")
    assert cache.remove(TINY) == 5
    assert not TINY.folder.exists()


def test_a_log_gets_a_line_every_five_seconds() -> None:
    now, seen = [0.0], list[str]()
    sink = Paced(seen.append, lambda: now[0])
    for number in range(26):
        now[0] = number / 2
        sink(Transfer(number, 25, now[0], 2.0))
    sink("a line")
    assert [line if line == "a line" else getattr(line, "done", None) for line in seen] == [
        0, 10, 20, 25, "a line",
    ]  # fmt: skip
    assert seen[1] == "downloading:  40% 10.0/25.0 [00:05<00:07, 2.00B/s]"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    path = tmp_path / "disk"
    path.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m tmpfs {path} 2>/dev/null") != 0:
        pytest.skip("nothing can be mounted here")
    yield path
    os.system(f"umount {path}")


def test_a_disk_that_fills_in_the_middle(
    hub: Hub, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(small_disk))
    with pytest.raises(DownloadError, match=r"takes 2\.1 MB more, and 1\.05 MB are") as told:
        get()
    assert told.value.cause == "no_room"
    assert not list(small_disk.glob("*/blobs/*"))

    class Roomy:
        free = 1 << 40

    monkeypatch.setattr("shutil.disk_usage", lambda path: Roomy)  # others fill it meanwhile
    with pytest.raises(DownloadError, match="is full: free some") as told:
        get()
    assert told.value.cause == "disk_full"
    assert cache.partial_bytes(TINY.folder) > 500_000
    os.system(f"mount -o remount,size=8m {small_disk}")
    hub.sent = 0
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent < 1_600_000  # of 2 MiB: it went on
