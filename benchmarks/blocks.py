"""Blocks of documents that programs write from records.

<!-- KIND: benchmarks/results/NAME.json -->
… written by a program …
<!-- end of KIND -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path


def rewrite_blocks(text: str, kind: str, tell: Callable[[str], str]) -> str:
    """Return a document's text with its blocks of a kind rewritten. tell: returns the text of a
    block, given the name of its record.
    """
    return re.sub(
        rf"(<!-- {kind}: (\S+) -->\n).*?(<!-- end of {kind} -->)",
        lambda match: f"{match[1]}\n{tell(match[2])}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def update_document(document: Path, rewrite: Callable[[str], str], *, check: bool) -> bool:
    """Rewrite a document. Returns whether it was already up to date. check: do not write."""
    old = document.read_text()
    new = rewrite(old)
    if new != old and not check:
        document.write_text(new)
    return new == old
