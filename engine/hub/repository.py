"""What the hub has of a model, which of its files are used, and what the hub's refusals mean.

    id ─▶ one call of the hub's API ─▶ Listing: commit, licence, files with sizes and digests
    Listing, model.safetensors.index.json ─▶ the files that are used

A digest is the SHA-256 of a large file's content (git-lfs), or the SHA-1 that git assigns to a
small file. Nothing else that the hub says about a file is trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engine.contract.errors import DownloadError
from engine.hub.cache import HubId, cache_folder
from engine.hub.gguf_names import meant, models_in, parts_of

INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_SMALL = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|chat_template)\.json|chat_template\.jinja|additional_chat_templates/\w[\w-]*\.jinja",
    re.ASCII,
)
"""The names of the files from which a config and a tokenizer are read."""
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_MOST_FILES = 100_000
_MAX_SMALL = 256 << 20
_SHOWN = 20
"""The maximum number of files that an error names."""
_UNAUTHORIZED, _FORBIDDEN, _TOO_MANY = 401, 403, 429


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository: its name there, its size in bytes, and its digest."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Listing:
    """A commit of a repository. `licence` is the licence given in the model card, or empty if there
    is none.
    """

    commit: str
    files: Mapping[str, HubFile]
    licence: str


def ask(model: HubId) -> Listing:
    """Ask the hub for a model's listing.

    Raises:
        DownloadError: the hub has no such model or revision, or its answer is invalid.
        HfHubHTTPError, HTTPError, OfflineModeIsEnabled: see `explained`.
    """
    api = HfApi(library_name="headrace")
    info = api.model_info(model.repo, revision=model.revision, files_metadata=True, timeout=30)
    if info.id != model.repo:
        raise DownloadError(
            "renamed", f"{model.repo} is called {info.id} on the hub now: give that id"
        )
    siblings = info.siblings or ()
    if not re.fullmatch(r"[0-9a-f]{40}", info.sha or "") or len(siblings) > _MOST_FILES:
        raise _nonsense(model, "has no commit, or too many files")
    files = {}
    for one in siblings:
        size, digest = one.size, one.blob_id
        if one.lfs is not None:
            size, digest = one.lfs.size, one.lfs.sha256
        if isinstance(size, int) and size >= 0 and _DIGEST.fullmatch(digest or ""):
            files[one.rfilename] = HubFile(one.rfilename, size, str(digest))
    card = info.card_data
    licence = getattr(card, "license", None)
    if licence == "other":
        licence = getattr(card, "license_name", None) or licence
    told = licence if isinstance(licence, str) and licence.isprintable() else ""
    return Listing(str(info.sha), files, told[:100])


def small_files(model: HubId, listing: Listing) -> list[HubFile]:
    """Return the files that are read before the weights, or beside a GGUF file.

    Raises:
        DownloadError: this is not a model's repository.
    """
    found = [file for name, file in listing.files.items() if _SMALL.fullmatch(name)]
    if model.file:
        is_original = {"config.json", "tokenizer.json"} <= listing.files.keys()
        return found if is_original and "/" not in gguf_file(model, listing) else []
    if "config.json" not in listing.files:
        if models_in(listing.files):
            raise _which_file(model, listing)
        raise DownloadError(
            "no_model", f"{model} has no config.json: it is not a model that transformers reads"
        )
    if INDEX in listing.files and _WHOLE not in listing.files:
        found.append(listing.files[INDEX])
    for file in found:
        if file.size > _MAX_SMALL:
            raise _nonsense(model, f"has a {file.name} of {file.size:,} bytes")
    return found


def weight_files(model: HubId, listing: Listing, index: bytes) -> list[HubFile]:
    """Return the files of the model's weights: the parts of a GGUF file, or chosen as transformers
    does: a single file if there is one, otherwise those that the index names.

    Args:
        index: the index's content, if there is one.

    Raises:
        DownloadError: the repository has no safetensors, or the index names files that it does not
            have.
    """
    if model.file:
        names = parts_of(gguf_file(model, listing))
        if missing := [name for name in names if name not in listing.files]:
            raise _nonsense(model, f"has no {missing[0]}")
        return [listing.files[name] for name in names]
    if _WHOLE in listing.files:
        return [listing.files[_WHOLE]]
    if INDEX not in listing.files:
        if models_in(listing.files):
            raise _which_file(model, listing)
        raise DownloadError(
            "no_safetensors",
            f"{model} has no model.safetensors: only safetensors and GGUF files are read, because "
            "loading others can run code; look for the same model in one of these forms",
        )
    try:
        shards = set(json.loads(index)["weight_map"].values())
        return [listing.files[name] for name in sorted(shards) if _SHARD.fullmatch(name)] or [
            listing.files[""]
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _nonsense(model, f"has an {INDEX} that names files it has not") from error


def gguf_file(model: HubId, listing: Listing) -> str:
    """Return the first part of the GGUF file that is meant.

    Raises:
        DownloadError: there is none, or there are several.
    """
    found = meant(listing.files, model.file)
    if len(found) != 1:
        raise _which_file(model, listing)
    return found[0]


def _which_file(model: HubId, listing: Listing) -> DownloadError:
    there = models_in(listing.files)
    found = meant(there, model.file) if model.file else []
    what = f"has {len(found) or 'no'} GGUF files {model.file!r}" if model.file else "has GGUF files"
    shown = [str(replace(model, file=one)) for one in found or there]
    more = f" and {len(shown) - _SHOWN} others" if len(shown) > _SHOWN else ""
    given = f"give one of {', '.join(shown[:_SHOWN])}{more}" if shown else "look for another model"
    return DownloadError("which_file", f"{model.repo} {what}: {given}")


def _nonsense(model: HubId, what: str) -> DownloadError:
    return DownloadError("damaged", f"{model} {what}; choose another revision or model")


_CAUSES: tuple[tuple[type[Exception], int | None, str, str], ...] = (
    (
        OfflineModeIsEnabled,
        None,
        "offline",
        "{model} is not in {cache}, and HF_HUB_OFFLINE forbids to ask the hub: unset that, or copy "
        "a model's directory here and give its path",
    ),
    (
        GatedRepoError,
        None,
        "gated",
        "{model} is gated: accept its licence at {page}, and set HF_TOKEN to a token of that "
        "account ({token})",
    ),
    (
        RevisionNotFoundError,
        None,
        "no_such_revision",
        "{model}: there is no such revision; {page}/tree/main has the branches, tags and commits",
    ),
    (
        RepositoryNotFoundError,
        None,
        "no_such_model",
        "the hub has no model {model}, or it is private: see whether {page} is right; for a "
        "private one set HF_TOKEN to a token of an account that may read it ({token})",
    ),
    (DisabledRepoError, None, "disabled", "the hub has disabled {model}: {page} may say why"),
    (
        HfHubHTTPError,
        _UNAUTHORIZED,
        "bad_token",
        "the hub refuses the token: set HF_TOKEN to a valid one, of {hub}/settings/tokens, or, for "
        "a public model, unset it and log out with `hf auth logout`",
    ),
    (
        HfHubHTTPError,
        _FORBIDDEN,
        "forbidden",
        "the hub forbids {model} to this account: see {page}; a token with limited rights must "
        "have the one to read this model ({token})",
    ),
    (
        HfHubHTTPError,
        _TOO_MANY,
        "too_many",
        "the hub takes no more calls from here for now: try again in {wait}; with a token in "
        "HF_TOKEN it takes more ({token})",
    ),
    (
        HfHubHTTPError,
        None,
        "hub_failed",
        "the hub answers with status {status}: try again later",
    ),
    (
        HTTPError,
        None,
        "unreachable",
        "{hub} cannot be reached ({detail}): check the network, HTTPS_PROXY if there is a proxy, "
        "and HF_ENDPOINT if that is set",
    ),
)
"""The meaning of the hub's refusals: an error, its status if that matters, our cause, and what to
do.
"""

NOT_ASKED = frozenset({"offline", "unreachable", "hub_failed", "too_many", "bad_token"})
"""The causes that do not tell whether the hub has the model."""


def why(model: HubId, error: Exception) -> DownloadError:
    """Return the DownloadError for an error of the hub's client; see `_CAUSES`."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if response is not None and status == _UNAUTHORIZED and not get_token():
        error = RepositoryNotFoundError(str(error), response=response)  # so it tells strangers
    for kind, wanted, cause, text in _CAUSES:
        if isinstance(error, kind) and wanted in (None, status):
            seconds = retry_after_s(error)
            return DownloadError(
                cause,
                text.format(
                    model=model,
                    cache=cache_folder(),
                    page=model.page,
                    hub=constants.ENDPOINT,
                    status=status,
                    detail=(str(error).strip() or type(error).__name__).splitlines()[0][:200],
                    token="one was sent" if get_token() else "none was sent",
                    wait="some minutes" if seconds is None else f"{seconds:.0f} s",
                ),
            )
    raise error


@contextmanager
def explained(model: HubId) -> Iterator[None]:
    """Turn errors of the hub's client into DownloadErrors."""
    try:
        yield
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise why(model, error) from error


def retry_after_s(error: Exception) -> float | None:
    """Return how many seconds a response asks to wait, or None if it does not say."""
    response = getattr(error, "response", None)
    text = "" if response is None else response.headers.get("Retry-After", "")
    return float(text) if re.fullmatch(r"\d{1,6}", text) else None
