"""The time in which a loaded model takes new weights, beside that of loading it.

    python -m benchmarks.new_weights --shape qwen3-0.6b --turns 5 --packings bfloat16,int8

For each packing: seconds of `engine.load`, of `load_weights` with those of a model in memory, of
`load_state_dict`, and of the look for changes at the start of a manager. All turns are printed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch

import engine
from benchmarks.models import SHAPES, random_model

_PACKINGS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


def _told(what: str, turns: int, run: Callable[[], object]) -> None:
    took = []
    for _ in range(turns):
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
    print(f"  {what:16s} {' '.join(f'{one:.3f}' for one in sorted(took))} s", flush=True)


def main() -> None:
    """Run the measurement and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--packings", default=",".join(_PACKINGS))
    options = parser.parse_args()
    new = random_model(options.shape, device="cpu", dtype=torch.bfloat16)
    state = new.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        new.save_pretrained(folder)
        for packing in options.packings.split(","):
            how = _PACKINGS[packing]
            print(packing, flush=True)
            _told("load", 2, lambda how=how: engine.load(folder, **how))  # type: ignore[misc]
            loaded = engine.load(folder, **how)  # type: ignore[arg-type]  # options of several types
            _told("load_weights", options.turns, lambda one=loaded: one.load_weights(state))  # type: ignore[misc]
            _told("load_state_dict", options.turns,
                  lambda one=loaded: one.model.load_state_dict(state))  # type: ignore[misc]  # fmt: skip
            _told("look", options.turns, loaded._verified.refresh)


if __name__ == "__main__":
    main()
