"""Draws a random sample of the project's English, for a reader to judge
(`python scripts/draw_sentences.py --seed 7`).

Docstrings come from all of our Python folders except the tests; sentences come from docs/ and
README.md. Generated code, code blocks, tables and headings are left out. The same seed on the same
tree draws the same sample, so a second reader can check the first reader's marks.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("service", "engine", "clients/python/src", "benchmarks", "scripts", "models/demo")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
NOT_PROSE = re.compile(r"^\s*(#|\||<|!\[)")
# A sentence ends at a full stop that is followed by white space and a new beginning.
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[\"(])")
LIST_ITEM = re.compile(r"^\s*([-*]|\d+\.)\s")


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (location, text) of every docstring, in the order of paths and lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if GENERATED.search(path.name):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, documented) and (text := ast.get_docstring(node)):
                    name = "module" if isinstance(node, ast.Module) else node.name
                    line = node.body[0].lineno
                    yield f"{path.relative_to(ROOT)}:{line} {name}", text


def sentences() -> Iterator[tuple[str, str]]:
    """Yield (location, text) of every sentence of the documentation, in order."""
    for path in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]:
        for line, paragraph in paragraphs(path.read_text(encoding="utf-8")):
            for sentence in SENTENCE_END.split(paragraph):
                if len(sentence.split()) >= 4:
                    yield f"{path.relative_to(ROOT)}:{line}", sentence


def paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of each paragraph and list item, joined to one line; code blocks are
    left out.
    """
    first, words, in_code = 0, list[str](), False
    for number, line in enumerate([*markdown.splitlines(), ""], start=1):
        fence = line.lstrip().startswith("```")
        begins = not line.strip() or fence or NOT_PROSE.match(line) or LIST_ITEM.match(line)
        if begins and words:
            yield first, " ".join(words)
            words = []
        in_code ^= fence
        indented_code = not words and line.startswith(" " * 4)
        if fence or in_code or indented_code or not line.strip() or NOT_PROSE.match(line):
            continue
        if not words:
            first = number
        words.append(LIST_ITEM.sub("", line).strip())


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw docstrings and sentences at random.")
    parser.add_argument("--seed", type=int, required=True, help="the same seed, the same sample")
    parser.add_argument("--docstrings", type=int, default=100, metavar="N")
    parser.add_argument("--sentences", type=int, default=50, metavar="N")
    arguments = parser.parse_args()

    chance = random.Random(arguments.seed)
    drawn = chance.sample(list(docstrings()), arguments.docstrings)
    drawn += chance.sample(list(sentences()), arguments.sentences)
    for number, (place, text) in enumerate(drawn, start=1):
        sys.stdout.write(f"{number}. {place}\n{textwrap.indent(text, '    ')}\n\n")


if __name__ == "__main__":
    main()
