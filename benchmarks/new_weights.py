"""The time in which a loaded model takes new weights, beside that of loading it.

    python -m benchmarks new_weights --shape qwen3-0.6b --turns 5 --packings bfloat16,int8

For each packing: seconds of `engine.load`, of `load_weights` with those of a model in memory, of
`load_state_dict`, and of the look for changes at the start of a manager. All turns are printed.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial

import torch

import engine
from benchmarks.measures import seconds_of
from benchmarks.models import SHAPES, random_model
from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, option

_PACKINGS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


def measure(options: argparse.Namespace, record: Record) -> None:
    new = random_model(options.shape, device="cpu", dtype=torch.bfloat16)
    state = new.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        new.save_pretrained(folder)
        for packing in options.packings.split(","):
            load = partial(engine.load, folder, **_PACKINGS[packing])  # type: ignore[arg-type]
            record.put(seconds_of(load, 2), "packings", packing, "load")
            loaded = load()
            for what, run in (
                ("load_weights", partial(loaded.load_weights, state)),
                ("load_state_dict", partial(loaded.model.load_state_dict, state)),
                ("look", loaded._verified.refresh),
            ):
                record.put(seconds_of(run, options.turns), "packings", packing, what)


MEASUREMENT = Measurement(
    measure=measure,
    options=(
        option("shape", "qwen3-0.6b", choices=sorted(SHAPES)),
        option("turns", 5),
        option("packings", ",".join(_PACKINGS)),
    ),
)
