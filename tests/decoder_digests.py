"""Writes engine/models/digests.py: `.venv-versions/newest/bin/python tests/decoder_digests.py`.

Adds the digests of the installed version of transformers to those that are there, and compares our
decoder of every family with transformers' models by test. Where a test fails, the file is put back:
no digest stays without the comparison. Read first what changed in the sources of the families.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.models.digests import DIGESTS, VERSIONS  # noqa: E402 - after the path is set
from engine.models.table import FAMILIES, digest  # noqa: E402
from tests.model_recipes import RECIPES  # noqa: E402
from tests.tiny_models import make_model  # noqa: E402

TARGET = ROOT / "engine" / "models" / "digests.py"
EVERY_FAMILY = "tests/engine/test_families.py::test_every_mode_equals_generate"
COMPARISON = (("tests/engine/models", "-m", "not slow"), (EVERY_FAMILY, "-k", "own"))
"""What pytest is given: the parts of each layer, with faults that must be found; then each family's
tokens, in every mode.
"""
HEAD = '''"""The digests of model classes' sources that our decoder was compared with.

Written by tests/decoder_digests.py.
"""
'''


def main() -> int:
    """Write the file, and put it back if a test fails; the exit code."""
    before = TARGET.read_text()
    TARGET.write_text(_digests())
    for tests in COMPARISON:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            TARGET.write_text(before)
            sys.stderr.write(f"{TARGET.name} is as it was: tests failed\n")
            return 1
    return 0


def _digests() -> str:
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
    return "\n".join([*lines, "}", ""])


def _tuple(texts: list[str]) -> str:
    return str(tuple(texts)).replace("'", '"')


if __name__ == "__main__":
    sys.exit(main())
