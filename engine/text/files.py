"""Reads a model directory's files about its tokenizer.

    tokenizer.json                      vocabulary, normaliser, decoder; the library reads it
    tokenizer_config.json               special and added tokens, sometimes the chat template, and
                                        how replies are marked
    special_tokens_map.json             special tokens of older directories
    added_tokens.json                   added tokens of older directories
    chat_template.jinja                 the chat template; overrides that in tokenizer_config.json
    chat_template.json                  the same, of the image processor of some models; comes last
    additional_chat_templates/*.jinja   further ones, by name

The files of older directories are used if tokenizer_config.json has no added_tokens_decoder. The
order of precedence is that of transformers 5, so both produce the same tokens from the same
directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.text.text_errors import TokenizerError, TokenizerMissingError

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_REMEDY = (
    "Convert the tokenizer once, with transformers: "
    "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of a directory.

    Attributes:
        backend: the tokenizer, with its added tokens, without truncation and padding.
        special_tokens: the special tokens that chat templates may use, by name, such as
            {"bos_token": "<s>"}.
        chat_templates: the chat templates by name; "default" is the usual one. Empty if there are
            none.
        response_template: how the model marks reasoning and tool calls, as in the configuration;
            not checked. None if there is no such entry.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    response_template: object = None


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read a directory.

    Raises:
        TokenizerMissingError: there is no tokenizer.json.
        TokenizerError: a file cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerMissingError(
            f"{directory} has no tokenizer.json: token ids alone can be sent and read. {_REMEDY}"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} cannot be read as a tokenizer. {_REMEDY}") from error
    config = _read_json(directory / "tokenizer_config.json")
    try:
        added = {
            int(key): _token(value) for key, value in config.get("added_tokens_decoder", {}).items()
        }
        special, extra = _special_tokens(directory, config)
        if "added_tokens_decoder" not in config:
            added = _older_added_tokens(directory, backend, [*special.values(), *extra])
        _add_tokens(backend, added, special, extra)
        templates = _chat_templates(directory, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{directory}/tokenizer_config.json has a form that is not known"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return TokenizerFiles(
        backend,
        {name: _content(value) for name, value in special.items()},
        templates,
        config.get("response_template"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _token(value: object) -> AddedToken:
    """Read a token of the files: its text, or an object with its text and flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, Mapping):
        raise TypeError("a token is neither a string nor an object")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(
        value["content"], **{flag: bool(value[flag]) for flag in flags if flag in value}
    )


def _is_object(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping) and "content" in value


def _content(value: object) -> str:
    return str(value["content"]) if isinstance(value, Mapping) else str(value)


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the named special tokens, in the order in which transformers adds them, and the
    unnamed.
    """
    merged = dict(config)
    if "added_tokens_decoder" not in config:
        for name, value in _read_json(directory / "special_tokens_map.json").items():
            merged[name] = {**value, "special": True} if _is_object(value) else value
    found = {name: value for name, value in merged.items() if name.endswith("_token")}
    named = {name: found[name] for name in _NAMED if found.get(name) is not None}
    others = {name: value for name, value in found.items() if name not in _NAMED}
    # Under other names, an object in the configuration is a token only where it is marked as one.
    named |= {
        name: value
        for name, value in others.items()
        if _is_object(value) and (value.get("__type") == "AddedToken" or value != config.get(name))
    }
    named |= {name: value for name, value in others.items() if isinstance(value, str)}
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if isinstance(extra, Mapping):
        return named | dict(extra), []
    return named, list(extra)


def _older_added_tokens(
    directory: Path, backend: Backend, special: list[Any]
) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json, which older directories have, if tokenizer.json has
    none.
    """
    there = backend.get_added_tokens_decoder()
    names = {_content(value) for value in special}
    return {
        int(token_id): AddedToken(name, normalized=name not in names, special=name in names)
        for name, token_id in _read_json(directory / "added_tokens.json").items()
        if int(token_id) not in there
    }


def _add_tokens(
    backend: Backend, added: Mapping[int, AddedToken], special: Mapping[str, Any], extra: list[Any]
) -> None:
    """Add the tokens that the configuration has and tokenizer.json lacks to the backend, in order
    of their ids.
    """
    there = backend.get_added_tokens_decoder()
    known = {repr(token) for token in there.values()}
    wanted = [token for _, token in sorted(added.items()) if repr(token) not in known]
    names = {token.content for token in there.values()} | {token.content for token in wanted}
    for value in (*special.values(), *extra):
        if _content(value) not in names:
            names.add(_content(value))
            token = _token(value)
            token.special = True
            wanted.append(token)
    if wanted:
        backend.add_tokens(wanted)


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    if (path := directory / "chat_template.jinja").is_file():
        found["default"] = path.read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if found:
        return found
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {str(entry["name"]): str(entry["template"]) for entry in given}
    of_processor = _read_json(directory / "chat_template.json").get("chat_template")
    return {"default": of_processor} if isinstance(of_processor, str) else {}
