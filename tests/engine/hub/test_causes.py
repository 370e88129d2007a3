"""Why a model cannot be fetched: each cause is made to happen, and docs/models.md has its words.

`python tests/engine/hub/test_causes.py` cannot write the table: what is said comes from a hub that
refuses. A test that fails shows the line that is missing.
"""

import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from huggingface_hub import constants

from engine.contract.errors import DownloadError
from engine.hub import cache, fetching
from engine.hub.cache import HubId
from engine.hub.fetching import Patience, fetch
from engine.hub.repository import _CAUSES, HubFile
from tests.engine.hub.loopback_hub import Hub

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
QUICK = Patience(tries=2, first_s=0.01, most_s=2.0)
GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model org/tiny is restricted."}
BAD_TOKEN = {"X-Error-Message": "Invalid credentials in Authorization header"}
Prepare = Callable[[Hub, pytest.MonkeyPatch], object]


def _refuse(status: int, headers: dict[str, str] | None = None) -> Prepare:
    return lambda hub, patch: hub.behaviour.refuse.extend([(status, headers or {})] * 9)


def _without(name: str) -> Prepare:
    return lambda hub, patch: hub.repositories["org/tiny"].files.pop(name)


def _with_gguf(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    files = hub.repositories["org/tiny"].files
    files["name-Q4_K_M.gguf"] = files["name-Q8_0.gguf"] = b"GGUF"


def _gated(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.behaviour.refuse_files = [(403, GATED)] * 99


def _bad_token(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", "hf_wrong")
    hub.behaviour.refuse = [(401, BAD_TOKEN)]


def _nobody(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        patch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")


def _no_room(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000_000))


def _full(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    def receive(self: object, file: HubFile, out: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(fetching._Fetching, "_receive", receive)


def _no_home(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    Path(constants.HF_HUB_CACHE).write_text("a file, where the cache belongs")


def _large(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    told = {"lfs": {"size": 60 * 10**9, "sha256": "0" * 64, "pointerSize": 1}}
    hub.repositories["org/tiny"].announced["model.safetensors"] = told


CASES: list[tuple[str, str, Prepare]] = [
    ("offline", "org/tiny", lambda hub, patch: patch.setattr(constants, "HF_HUB_OFFLINE", True)),
    ("gated", "org/tiny", _gated),
    ("no_such_model", "org/none", lambda hub, patch: None),
    ("no_such_revision", "org/tiny@v9", lambda hub, patch: None),
    (
        "renamed",
        "org/old",
        lambda hub, patch: hub.behaviour.renamed.update({"org/old": "org/tiny"}),
    ),
    (
        "disabled",
        "org/tiny",
        _refuse(403, {"X-Error-Message": "Access to this resource is disabled."}),
    ),
    ("bad_token", "org/tiny", _bad_token),
    ("forbidden", "org/tiny", _refuse(403)),
    ("too_many", "org/tiny", _refuse(429, {"Retry-After": "3600"})),
    ("hub_failed", "org/tiny", _refuse(500)),
    ("unreachable", "org/tiny", _nobody),
    ("no_room", "org/tiny", _no_room),
    ("disk_full", "org/tiny", _full),
    ("cannot_write", "org/tiny", _no_home),
    ("no_safetensors", "org/tiny", _without("model.safetensors")),
    ("no_model", "org/tiny", _without("config.json")),
    ("which_file", "org/tiny:Q9", _with_gguf),
    ("too_large", "org/tiny", _large),
    ("damaged", "org/tiny", lambda hub, patch: setattr(hub.behaviour, "extra", b"x")),
]


def _general(text: str, hub: Hub) -> str:
    """A message in the words of the document."""
    text = re.sub(r"http://127\.0\.0\.1:\d+", "https://huggingface.co", text)
    text = text.replace(constants.HF_HUB_CACHE, "~/.cache/huggingface/hub")
    return re.sub(r"org/(tiny|none)", "OWNER/NAME", text).replace("org/old", "OLD/NAME")


def _table() -> Iterator[tuple[str, str]]:
    for line in DOCUMENT.read_text().splitlines():
        if found := re.fullmatch(r"\| `(\w+)` \| [^|]+ \| (.+) \|", line):
            yield found[1], found[2]


@pytest.mark.parametrize(("cause", "model", "prepare"), CASES, ids=[case[0] for case in CASES])
def test_each_cause_says_what_to_do_and_the_document_has_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, cause: str, model: str, prepare: Prepare
) -> None:
    prepare(hub, monkeypatch)
    with pytest.raises(DownloadError) as told:
        fetch(HubId.parse(model), [].append, patience=QUICK)
    assert told.value.cause == cause
    assert _general(str(told.value), hub) == dict(_table())[cause]
    assert "hf_wrong" not in str(told.value)


@pytest.mark.parametrize(
    "text",
    ["../etc", "a/../b", "a/b/c", "a--b/c", "a/b@../x", "a/b@", "a/b@x//y", "a/b@/x", "a/b@x y",
     "a/b:", "a/b:../x.gguf", "a/b:x//y", "a/b@:x", "a/b:x@y", "a/b:c:d", "a/b\n", "",
     "a/" + "b" * 200, "a/b@" + "c" * 300],
)  # fmt: skip
def test_ids_that_are_none(hub: Hub, text: str) -> None:
    with pytest.raises(DownloadError) as told:
        HubId.parse(text)
    assert told.value.cause == "bad_id"
    assert not hub.log


def test_the_document_has_all_causes() -> None:
    named = {cause for cause, _ in _table()}
    assert {cause for _, _, cause, _ in _CAUSES} <= named
    assert named == {case[0] for case in CASES} | {"bad_id"}
    with pytest.raises(DownloadError) as told:
        HubId.parse("OWNER/../NAME")
    assert str(told.value) == dict(_table())["bad_id"]
    with pytest.raises(DownloadError):
        cache.remove(HubId("org/none"))
