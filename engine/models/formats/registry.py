"""The weight formats. A new one is a line here, or a choice of LoadConfig.quantization."""

from __future__ import annotations

import importlib

from engine.models.formats.native import Native
from engine.models.formats.onednn import OneDnn
from engine.models.formats.weight_format import WeightFormat

Format = type[WeightFormat]

FORMATS: tuple[Format, ...] = (Native, OneDnn)
"""Those that change no results. The first that serves is used."""


def named(quantization: str) -> Format:
    """Return the format that a choice of LoadConfig.quantization asks for: FORMAT in the module of
    that name, with underscores.
    """
    module = quantization.replace("-", "_")
    found: Format = importlib.import_module(f"engine.models.formats.{module}").FORMAT
    return found
