"""The names of GGUF files: which files are the parts of one model, and which model is meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FILE = re.compile(r"(\w[\w.+-]*/)*(?!mmproj)\w[\w.+-]*\.gguf", re.ASCII)
"""Names of models. Files that begin with mmproj are parts of models that see images."""
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.ASCII)


def parts_of(name: str) -> list[str]:
    """Return the names of all parts of a file's model, in order. A whole file is its only part."""
    match = _PART.search(name)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        return [name]
    stem = name[: match.start()]
    return [f"{stem}-{part:05}-of-{match[2]}.gguf" for part in range(1, int(match[2]) + 1)]


def models_in(names: Iterable[str]) -> list[str]:
    """Return the first file of each model among some files."""
    return sorted({parts_of(name)[0] for name in names if _FILE.fullmatch(name)})


def meant(names: Iterable[str], wanted: str) -> list[str]:
    """Return the first file of each model that is meant.

    Args:
        names: of the files that there are.
        wanted: a file's name, or what stands in it between marks, such as Q4_K_M.
    """
    models = models_in(names)
    if (whole := parts_of(wanted)[0]) in models:
        return [whole]
    between_marks = re.compile(rf"(?<![^-._/]){re.escape(wanted)}(?![^-./])", re.IGNORECASE)
    return [one for one in models if between_marks.search(one)]
