"""The model of an order, for systems that run on torch.

An order's "build" is the name of a shape of `benchmarks.models`. The model is then made on its
device, with the same random weights for every system on that device, and nothing is read from disk.
Without "build", "model" is a directory.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.models import random_model


def built_model(order: dict[str, Any]) -> PreTrainedModel | None:
    """Return the model to be made; None if the order names a directory."""
    if order.get("build") is None:
        return None
    dtype = getattr(torch, order["dtype"])
    return random_model(order["build"], device=order.get("device", "cpu"), dtype=dtype)
