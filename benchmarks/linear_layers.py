"""Linear layers of a Qwen3-0.6B shape alone: torch's own, oneDNN's packing and our kernels, by type
and by number of rows, in turns.

    python -m benchmarks.linear_layers --rows 1,16,512 --types bfloat16,int8 --seconds 10
    python -m benchmarks.linear_layers --variant avx2   # our kernels for another instruction set

Every layer has separate weights, so that they come from memory as in a model. The best time of each
layer counts, which is what a quiet machine would reach. The median over passes shows how quiet the
machine was. What cannot run here is reported and left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.instructions import ENVIRONMENTS, limit
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
TYPES = {
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
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
        dtype: the type of the inputs.
        weight_bytes: the bytes per weight element.
        layers: the layers.
        best, passes: the best time of each layer, and the time of each pass over all layers, in
            seconds.
    """

    name: str
    dtype: torch.dtype
    weight_bytes: float
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


def contenders(types: list[str], layers: int) -> list[Contender]:
    """Return everything that can compute these types here, with layers of random weights."""
    shapes = SHAPES * layers
    found: list[Contender] = []
    for name in types:
        dtype = TYPES[name]
        plain = [torch.nn.Linear(k, n, bias=False, dtype=dtype) for n, k in shapes]
        ways: dict[str, Callable[[torch.nn.Linear], torch.nn.Module]] = {
            "ours": _packed(INTEGERS.get(name, Native))
        }
        if name not in INTEGERS:
            ways["torch"] = lambda linear: linear
        if name == "bfloat16":
            if torch.ops.mkldnn._is_mkldnn_bf16_supported():
                ways["oneDNN"] = _packed(OneDnn)
            else:
                print("oneDNN: has no bfloat16 on this processor", file=sys.stderr)
        size = dtype.itemsize * (INTEGERS[name].share if name in INTEGERS else 1)
        found += [
            Contender(f"{who} {name}", dtype, size, [make(one) for one in plain])
            for who, make in ways.items()
        ]
    return found


def measure(rows: int, seconds: float, those: list[Contender]) -> None:
    """Run the contenders alternately and print a line for each."""
    for one in those:
        one.best, one.passes = [], []
    depths = {k for _, k in SHAPES}
    inputs = {
        dtype: {k: torch.randn(rows, k).to(dtype) for k in depths} for dtype in set(TYPES.values())
    }
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(those[0].passes) < FEWEST_PASSES:
        for one in those:
            one.run(inputs[one.dtype])
    elements = sum(n * k for n, k in SHAPES) * (len(those[0].layers) // len(SHAPES))
    for one in those:
        took, median = sum(one.best), sorted(one.passes)[len(one.passes) // 2]
        print(
            f"{rows:5d} rows  {one.name:16s} {took * 1e3:9.2f} ms (median {median * 1e3:9.2f})  "
            f"{2 * rows * elements / took / 1e9:7.0f} GFLOP/s  "
            f"{one.weight_bytes * elements / took / 1e9:6.1f} GB/s of weights",
            flush=True,
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1,4,16,32,128,512")
    parser.add_argument("--types", default="bfloat16,int8,int4,float32", help=", ".join(TYPES))
    parser.add_argument("--variant", choices=list(ENVIRONMENTS), help="of our kernels")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of a model, each of 7 products")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of rows")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if unknown := set(options.types.split(",")) - set(TYPES):
        parser.error(f"--types: {', '.join(sorted(unknown))}: choose of {', '.join(TYPES)}")
    if options.variant:
        limit(options.variant)
    with torch.inference_mode():
        those = contenders(options.types.split(","), options.layers)
        for rows in map(int, options.rows.split(",")):
            measure(rows, options.seconds, those)


if __name__ == "__main__":
    main()
