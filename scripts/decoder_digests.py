"""Writes engine/models/digests.py: `python scripts/decoder_digests.py`.

Adds the digests of the installed version of transformers to those that are there. Run it for a
version whose decoders pass `tests/engine/models` with every family; the digest says only that it
was done.
"""

from __future__ import annotations

from pathlib import Path

import transformers

from engine.models.digests import DIGESTS, VERSIONS
from engine.models.table import FAMILIES, digest
from tests.model_recipes import RECIPES
from tests.tiny_models import make_model

TARGET = Path(__file__).resolve().parents[1] / "engine" / "models" / "digests.py"
HEAD = '''"""The digests of model classes' sources that our decoder was compared with.

Written by scripts/decoder_digests.py.
"""
'''


def main() -> None:
    """Write the file."""
    found = {name: set(DIGESTS.get(name, ())) for name in FAMILIES}
    for recipe in RECIPES.values():
        if recipe.is_known:
            model = make_model(recipe.config())
            if model.config.model_type in FAMILIES:
                found[model.config.model_type].add(digest(model))
    versions = sorted({*VERSIONS, transformers.__version__})
    lines = [HEAD, f"VERSIONS = {_tuple(versions)}"]
    lines += ['"""The versions of transformers that they were taken from."""', ""]
    lines += ["DIGESTS: dict[str, tuple[str, ...]] = {"]
    lines += [f'    "{name}": {_tuple(sorted(found[name]))},' for name in sorted(found)]
    TARGET.write_text("\n".join([*lines, "}", ""]))


def _tuple(texts: list[str]) -> str:
    return str(tuple(texts)).replace("'", '"')


if __name__ == "__main__":
    main()
