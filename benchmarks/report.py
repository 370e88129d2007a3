"""Tables in the documents, written from records.

    <!-- benchmark: benchmarks/results/demo.json -->
    … written by `python -m benchmarks report` …
    <!-- end of benchmark -->

A block names the record that it shows; nothing between the marks is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.records import read_record
from benchmarks.rig.measurement import module_of


def rewrite(text: str, read: Callable[[str], dict[str, Any] | None]) -> str:
    """Return a document with its blocks rewritten. read: returns the record of the name in a block,
    or None if there is none yet.
    """

    def tell(name: str) -> str:
        record = read(name)
        return "Not measured yet.\n" if record is None else render(record, name)

    return re.sub(
        r"(<!-- benchmark: (\S+) -->\n).*?(<!-- end of benchmark -->)",
        lambda match: f"{match[1]}\n{tell(match[2])}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def update(document: Path, root: Path, *, check: bool = False) -> bool:
    """Write a document's blocks unless they are only checked. Returns whether they were already up
    to date. root: the folder to which the names of records are relative. Raises ValueError if a
    record has another format.
    """
    old = document.read_text()
    new = rewrite(old, lambda name: read_record(root / name))
    if new != old and not check:
        document.write_text(new)
    return new == old


def render(record: dict[str, Any], name: str) -> str:
    """Return a record as text for a document. name: the name of its file."""
    rendered: str = module_of(record.get("kind", "run")).render(record, name)  # old ones have none
    return rendered
