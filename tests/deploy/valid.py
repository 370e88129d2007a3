"""Checks objects against the vendored schemas of their kinds (tests/deploy/schemas/README.md)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).parent / "schemas"
CLUSTERS = ("oldest", "newest")
"""The versions of Kubernetes of which there are schemas."""


@cache
def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def check_object(thing: dict[str, Any]) -> None:
    """That both versions of Kubernetes, or the project that defines it, know all of an object.

    Raises:
        jsonschema.ValidationError: they do not.
        KeyError: there is no schema of its kind.
    """
    kind = f"{thing['apiVersion']}/{thing['kind']}"
    ours = kind in _read("others")["kinds"]
    for name in ("others",) if ours else tuple(f"kubernetes-{one}" for one in CLUSTERS):
        schemas = _read(name)
        reference = f"#/definitions/{schemas['kinds'][kind]}"
        schema = {"$ref": reference, "definitions": schemas["definitions"]}
        jsonschema.Draft7Validator(schema).validate(thing)


def check_compose(document: dict[str, Any]) -> None:
    """That a compose file has the form that compose reads.

    Raises:
        jsonschema.ValidationError: it has not.
    """
    jsonschema.Draft202012Validator(_read("compose")).validate(document)
