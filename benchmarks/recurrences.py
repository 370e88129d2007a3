"""Recurrences of a Qwen3-Next layer's shape alone: our kernels beside transformers' functions.

    python -m benchmarks.recurrences --threads 1
    python -m benchmarks.recurrences --variant avx2   # our kernels for another instruction set

transformers' functions compute one request after the other, as a stand-in calls them. Times are the
processor's, of all threads; the best call counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.models.qwen3_next import modeling_qwen3_next as transformers_own

from benchmarks.instructions import ENVIRONMENTS, limit
from benchmarks.markdown import table
from benchmarks.measures import seconds_of
from benchmarks.records import Record
from benchmarks.rig.measurement import DTYPE, THREADS, Measurement, option
from engine.models.recurrence import gated_delta_rule, short_convolution

_KEY_HEADS, _HEADS, _DIM, _WIDTH = 16, 32, 128, 4
_CHANNELS = (2 * _KEY_HEADS + _HEADS) * _DIM
_DECODED = 100
"""The position of a decode."""
CASES = {
    "a prompt of 512": (512, 0, 1),
    "1 decode": (1, _DECODED, 1),
    "16 decodes": (1, _DECODED, 16),
}
"""The number of rows of each request, the position of the first one, and the number of requests."""


def contenders(case: str, dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], ...]]:
    """Return ours and transformers' for each recurrence."""
    count, start, requests = CASES[case]
    total, is_prompt = count * requests, start == 0
    where = (torch.full((requests,), start), torch.full((requests,), count), torch.arange(requests))
    x, weight = torch.randn(total, _CHANNELS).to(dtype), torch.randn(_CHANNELS, _WIDTH).to(dtype)
    inputs = torch.zeros(requests, _CHANNELS, _WIDTH, dtype=dtype)
    query, key = (torch.randn(total, _KEY_HEADS, _DIM).to(dtype) for _ in range(2))
    value = torch.randn(total, _HEADS, _DIM).to(dtype)
    decay, beta = -torch.rand(total, _HEADS), torch.rand(total, _HEADS)
    state = torch.zeros(requests, _HEADS, _DIM, _DIM)

    def theirs_convolved() -> None:
        for r in range(requests):
            rows = x[None, r * count : (r + 1) * count].mT
            if is_prompt:
                transformers_own.causal_conv1d_fn(rows, weight, None, activation="silu")
            else:
                kept = inputs[r : r + 1]
                transformers_own.causal_conv1d_update(rows, kept, weight, None, "silu")

    def theirs_corrected() -> None:
        own = transformers_own.torch_recurrent_gated_delta_rule
        for r in range(requests):
            part = [
                one[None, r * count : (r + 1) * count] for one in (query, key, value, decay, beta)
            ]
            (transformers_own.torch_chunk_gated_delta_rule if is_prompt else own)(
                *part,
                initial_state=None if is_prompt else state[r : r + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )

    return {
        "short convolution": (
            lambda: short_convolution(x, weight, None, True, inputs, *where),
            theirs_convolved,
        ),
        "gated delta rule": (
            lambda: gated_delta_rule(query, key, value, decay, beta, True, state, *where),
            theirs_corrected,
        ),
    }


def measure(options: argparse.Namespace, record: Record) -> None:
    """Measure every recurrence in every case, in turns."""
    if options.variant:
        limit(options.variant)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for case in CASES:
        for name, calls in contenders(case, getattr(torch, options.dtype)).items():
            ours, theirs = (
                1e3 * min(seconds_of(call, options.turns, time.process_time)) for call in calls
            )
            record.put({"ours_ms": ours, "transformers_ms": theirs}, name, case)


def to_markdown(record: Mapping[str, Any]) -> str:
    """Return a row for each recurrence and case."""
    rows = [
        [name, case, f"{one['ours_ms']:.3f}", f"{one['transformers_ms']:.3f}",
         f"{one['transformers_ms'] / one['ours_ms']:.1f}"]
        for name in ("short convolution", "gated delta rule")
        for case, one in record[name].items()
    ]  # fmt: skip
    return "\n".join(table("recurrence | rows | ours, ms | transformers, ms | ratio", rows))


MEASUREMENT = Measurement(
    name="recurrences",
    about=str(__doc__),
    measure=measure,
    table=to_markdown,
    options=(
        *(DTYPE, THREADS),
        option("turns", 20, "calls of each"),
        option("variant", None, "an instruction set", choices=ENVIRONMENTS),
    ),
    quick={"turns": 1},
    is_kept=False,
)

if __name__ == "__main__":
    MEASUREMENT.run()
