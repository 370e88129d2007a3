"""Linear layers of a Qwen3-0.6B shape alone: torch's own, oneDNN's packing and our kernels, by type
and by number of rows, in turns.

    python -m benchmarks linear_layers --rows 1,16,512 --types bfloat16,int4-128 --seconds 10
    python -m benchmarks linear_layers --variant avx2   # our kernels for another instruction set

Every layer has separate weights, so that they come from memory as in a model. The best time of each
layer counts, which is what a quiet machine would reach. The median over passes shows how quiet the
machine was. What cannot run here is reported and left out.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.instructions import ENVIRONMENTS, limit
from benchmarks.processes import SystemFailure
from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, option, rotated
from engine.models.formats.codes import Codes, Layout
from engine.models.formats.grouped import Grouped
from engine.models.formats.int4 import Int4
from engine.models.formats.int8 import Int8
from engine.models.formats.native import Native
from engine.models.formats.onednn import OneDnn
from engine.models.formats.registry import Format
from engine.models.held_layer import PackedLinear

LAYERS = 8
"""The number of layers: 250 MB in bfloat16, more than any cache."""
SHAPES = (
    *((2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048)),  # attention
    *((3072, 1024), (3072, 1024), (1024, 3072)),
)
"""The shapes in one layer, [N, K]."""
_HALF = torch.float16
LAYOUTS = {
    "int4-128": lambda k: Layout(4, 128, has_minima=False, scale_dtype=_HALF),
    "int4-128-minima": lambda k: Layout(4, 128, has_minima=True, scale_dtype=_HALF),
    "int4-128-order": lambda k: Layout(4, 128, False, torch.randperm(k), _HALF),
    "int8-128": lambda k: Layout(8, 128, has_minima=False, scale_dtype=_HALF),
}
"""Integers as files have them, by the number of inputs."""
TYPES = {
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
    **dict.fromkeys(LAYOUTS, torch.bfloat16),
    "float32": torch.float32,
}
"""The types of weights, and of the inputs used with them."""
INTEGERS: dict[str, Format] = {"int8": Int8, "int4": Int4}
FEWEST_PASSES = 2


@dataclass(slots=True)
class Contender:
    """One implementation of the layers; all compute the same.

    Attributes:
        name: the implementation and the type of the weights.
        weight_bytes: of all layers.
        best, passes: the best time of each layer, and the time of each pass over all layers, in
            seconds.
    """

    name: str
    dtype: torch.dtype
    weight_bytes: int
    layers: list[torch.nn.Module]
    best: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)

    def run(self, inputs: dict[int, torch.Tensor]) -> None:
        """Run all layers once. `inputs`: [rows, K] by K."""
        took = []
        for layer in self.layers:
            x = inputs[layer.in_features]  # type: ignore[index]  # an int in all of them
            start = time.perf_counter()
            layer(x)
            took.append(time.perf_counter() - start)
        self.best = [min(pair) for pair in zip(self.best or took, took, strict=True)]
        self.passes.append(sum(took))


def _packed(how: Format) -> Callable[[torch.nn.Linear], PackedLinear]:
    def make(linear: torch.nn.Linear) -> PackedLinear:
        held = how(linear.weight.shape, linear.weight.dtype)
        held.pack(linear.weight.detach())
        return PackedLinear(held, linear)

    return make


def _stored(layout_of: Callable[[int], Layout]) -> Callable[[torch.nn.Linear], PackedLinear]:
    def make(linear: torch.nn.Linear) -> PackedLinear:
        (n, k), layout = linear.weight.shape, layout_of(linear.in_features)
        scales = torch.rand(n, -(-k // layout.group)).half().float()
        codes = torch.randint(0, 1 << layout.bits, (n, k), dtype=torch.uint8)
        held = Grouped((n, k), linear.weight.dtype, layout)
        held.pack_codes(0, Codes(codes, scales, -8 * scales if layout.has_minima else None))
        return PackedLinear(held, linear)

    return make


def contenders(types: list[str], layers: int) -> list[Contender]:
    """Return everything that can compute these types here, with layers of random weights."""
    shapes = SHAPES * layers
    found: list[Contender] = []
    for name in types:
        dtype = TYPES[name]
        plain = [torch.nn.Linear(k, n, bias=False, dtype=dtype) for n, k in shapes]
        ways: dict[str, Callable[[torch.nn.Linear], torch.nn.Module]] = {
            "ours": _stored(LAYOUTS[name])
            if name in LAYOUTS
            else _packed(INTEGERS.get(name, Native))
        }
        if name in ("bfloat16", "float32"):
            ways["torch"] = lambda linear: linear
        if name == "bfloat16":
            if torch.ops.mkldnn._is_mkldnn_bf16_supported():
                ways["oneDNN"] = _packed(OneDnn)
            else:
                print("oneDNN: has no bfloat16 on this processor", file=sys.stderr)
        for who, make in ways.items():
            those = [make(one) for one in plain]
            found.append(Contender(f"{who} {name}", dtype, sum(map(_bytes, those)), those))
    return found


def _bytes(layer: torch.nn.Module) -> int:
    if isinstance(layer, PackedLinear) and isinstance(layer.held, Native):
        return sum(one.nbytes for one in layer.held.tensors().values())
    return math.prod(layer.weight.shape) * layer.weight.itemsize  # type: ignore[arg-type, operator]


def run(rows: int, seconds: float, those: list[Contender]) -> dict[str, Any]:
    """Run the contenders alternately, and return what each took."""
    for one in those:
        one.best, one.passes = [], []
    depths = {k for _, k in SHAPES}
    inputs = {
        dtype: {k: torch.randn(rows, k).to(dtype) for k in depths} for dtype in set(TYPES.values())
    }
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(those[0].passes) < FEWEST_PASSES:
        for one in rotated(those, len(those[0].passes)):
            one.run(inputs[one.dtype])
    elements = sum(n * k for n, k in SHAPES) * (len(those[0].layers) // len(SHAPES))
    found = {}
    for one in those:
        took, median = sum(one.best), sorted(one.passes)[len(one.passes) // 2]
        found[one.name] = {
            "best_s": took,
            "median_s": median,
            "flops": 2 * rows * elements / took,
            "weight_bytes_per_s": one.weight_bytes / took,
        }
    return found


def measure(options: argparse.Namespace, record: Record) -> None:
    torch.set_num_threads(options.threads)
    if unknown := set(options.types.split(",")) - set(TYPES):
        raise SystemFailure(f"--types: {', '.join(sorted(unknown))}: choose of {', '.join(TYPES)}")
    if options.variant:
        limit(options.variant)
    with torch.inference_mode():
        those = contenders(options.types.split(","), options.layers)
        for rows in options.rows.split(","):
            record.put(run(int(rows), options.seconds, those), "rows", rows)


MEASUREMENT = Measurement(
    measure=measure,
    options=(
        option("rows", "1,4,16,32,128,512"),
        option("types", "bfloat16,int8,int4,float32", ", ".join(TYPES)),
        option("variant", None, "of our kernels", choices=list(ENVIRONMENTS)),
        option("layers", LAYERS, "of a model, each of 7 products"),
        option("seconds", 10.0, "for each number of rows"),
        option("threads", 2),
    ),
)
