"""Linear layers of a Qwen3-0.6B shape: torch's own, oneDNN's packing and ours, in turns.

    python -m benchmarks.linear_layers --rows 1,16,32 --seconds 30 --threads 2

Every layer has weights of its own, so that they come from memory as in a model. Of each layer the
best time counts, and the sum over layers is printed in milliseconds: what a quiet machine would do.
The median of the sums shows how quiet it was.
"""

from __future__ import annotations

import argparse
import time

import torch

from engine.models.packed import PackedLinear, new_scales, pack, packed_size
from engine.models.packed_onednn import OneDnnLinear

_LAYERS = 28
_SHAPES = ((2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024))
"""Of one layer, [N, K]; and the last one below."""
_LAST, _HEAD = (1024, 3072), (151936, 1024)
_MOST_ROWS_OF_HEAD = 64
"""Steps with more rows are prefill: few of them go through the output layer."""


def _packed(linear: torch.nn.Linear) -> PackedLinear:
    packed = torch.empty(packed_size(*linear.weight.shape), dtype=torch.uint8)
    pack(linear.weight, packed)
    return PackedLinear(packed, linear)


def _int8(linear: torch.nn.Linear) -> PackedLinear:
    packed = torch.empty(packed_size(*linear.weight.shape, int8=True), dtype=torch.uint8)
    scales = new_scales(linear.out_features)
    pack(linear.weight, packed, scales)
    return PackedLinear(packed, linear, scales)


def _measure(layers: dict[str, list[torch.nn.Module]], rows: int, seconds: float) -> None:
    inputs = {k: torch.randn(rows, k).bfloat16() for k in (1024, 2048, 3072)}
    best = {name: [float("inf")] * len(members) for name, members in layers.items()}
    sums: dict[str, list[float]] = {name: [] for name in layers}
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(sums["torch"]) < 2:
        for name, members in layers.items():
            took = []
            for member in members:
                x = inputs[member.in_features]  # type: ignore[index]  # an int in all of them
                start = time.perf_counter()
                member(x)
                took.append((time.perf_counter() - start) * 1e3)
            best[name] = [min(pair) for pair in zip(best[name], took, strict=True)]
            sums[name].append(sum(took))
    for name in layers:
        median = sorted(sums[name])[len(sums[name]) // 2]
        print(f"{rows:5d} rows  {name:7s}  best {sum(best[name]):8.1f} ms  median {median:8.1f} ms")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,16,32")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each number of rows")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = [*_SHAPES, _LAST] * _LAYERS + [_HEAD]
    with torch.inference_mode():
        plain = [torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for n, k in shapes]
        layers: dict[str, list[torch.nn.Module]] = {
            "torch": list(plain),
            "oneDNN": [OneDnnLinear(linear) for linear in plain],
            "ours": [_packed(linear) for linear in plain],
            "int8": [_int8(linear) for linear in plain],
        }
        for rows in map(int, options.rows.split(",")):
            used = layers
            if rows > _MOST_ROWS_OF_HEAD:
                used = {name: members[:-1] for name, members in layers.items()}
            _measure(used, rows, options.seconds)


if __name__ == "__main__":
    main()
