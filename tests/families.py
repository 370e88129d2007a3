"""Every family as a test's parameter: a few in `make test`, the others in `make test-slow`."""

from __future__ import annotations

import pytest

from tests.model_recipes import FAST, RECIPES

EVERY_FAMILY = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name) for name in RECIPES
]
