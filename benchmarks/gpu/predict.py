"""Estimates how long a step should take on a CUDA device. The estimate is shown with the floor,
which nothing can beat, and with measured times if there are any.

    decode step    weights or their products ─┬─ at the share of the rate that kernels reach
                   the KV that is read ───────┘
                   + launches · what each costs within a graph, from the least to the most

    prompt         its operations, at that share + what small operations read and write + launches

The constants come from one H200 (docs/performance.md has the measurements). They are chosen so that
8B's steps of 1, 32 and 128 requests are within the estimate; small models' products of many
requests are slower than that. The launches of a step are counted by the trace of tests/engine/cuda.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.floors import ITEM_BYTES, Rates, prompts_s, shape_of, step_s
from benchmarks.models import SHAPES
from benchmarks.processes import ROOT
from benchmarks.workloads import Lengths

COUNTS = ROOT / "tests" / "engine" / "cuda" / "launches.json"
DECODER = "own"
"""What computes the shapes of benchmarks.models on CUDA."""
TRACED_LAYERS = 3
"""The number of layers of the traced model."""
H200 = Rates(bandwidth=4.3e12, matrix=790e12)
"""A copy and a bfloat16 product, as measured on such a card; a record has its own device's rates.
"""
LAUNCH_S = (1.5e-6, 2.9e-6)
"""The time of a small kernel in a graph: the smallest and the largest of 8B's."""
RATE_SHARES = {1: 0.93, 2: 0.83, 64: 0.78}
"""The share of the copy's and the product's rates that products reach, from a number of requests
upwards. For one token, products use our kernels and overlap with the preceding work.
"""
KV_SHARES = {1: 0.7, 64: 0.82, 256: 0.94}
"""The share of the copy's rate at which KV is read, also from a number of requests upwards. It
includes the time for merging splits.
"""
PROMPT_SHARE = 0.85
"""The share of the product's rate in a step of prompts."""
EXPERT_SHARES = (0.7, 0.5)
"""The shares of the rates that experts' products are assumed to reach, in a decode step and in a
step of prompts. They were not measured.
"""
DRAW_S = (40e-6, 0.85e-6)
"""The time of a draw from 152k logits with top_k: the constant part, and the part per row."""
PROMPT_STEP = 8192
"""The number of tokens in a step of prompts."""
_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Predicted:
    """A range of seconds, from the smallest to the largest, and the number of launches included."""

    least_s: float
    most_s: float
    launches: int


def read_counts(kind: str, family: str) -> tuple[int, int]:
    """Return the counted launches of a step, in each layer and outside of the layers. kind: decode
    or prefill.
    """
    table: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8"))
    found = table["families"][family][DECODER][kind]
    return found["layer"], found["step"] - TRACED_LAYERS * found["layer"]


def _launches(kind: str, model: str) -> int:
    layer, rest = read_counts(kind, SHAPES[model].get("model_type", "qwen3"))
    return layer * int(SHAPES[model]["num_hidden_layers"]) + rest


def decode(
    model: str, batch: int, context: float, rates: Rates = H200, *, draws: bool = False
) -> Predicted:
    """Predict a decode step of this many requests, each after this many tokens. draws: whether
    tokens are sampled.
    """
    shape, launches = shape_of(SHAPES[model]), _launches("decode", model)
    kv_s = batch * context * shape.kv_bytes(_DTYPE) / rates.bandwidth
    dense = dataclasses.replace(shape, expert_parameters=0)
    dense_s = step_s(dense, _DTYPE, batch, context, rates) - kv_s
    experts_s = step_s(shape, _DTYPE, batch, context, rates) - kv_s - dense_s
    base_s = dense_s / _share(RATE_SHARES, batch) + kv_s / _share(KV_SHARES, batch)
    base_s += experts_s / EXPERT_SHARES[0]
    if draws:
        base_s += DRAW_S[0] + batch * DRAW_S[1]
    return Predicted(*(base_s + launches * each for each in LAUNCH_S), launches)


def prompt(model: str, tokens: int, rates: Rates = H200) -> Predicted:
    """Predict the time of a prompt of this many tokens, in a step with others."""
    launches = _launches("prefill", model)
    shape, lengths = shape_of(SHAPES[model]), [Lengths(tokens, 1)]
    dense_s = prompts_s(dataclasses.replace(shape, expert_parameters=0), lengths, rates)
    experts_s = prompts_s(shape, lengths, rates) - dense_s
    base_s = dense_s / PROMPT_SHARE + experts_s / EXPERT_SHARES[1]
    base_s += tokens * small_bytes(SHAPES[model]) / rates.bandwidth
    share = tokens / PROMPT_STEP
    return Predicted(*(base_s + share * launches * each for each in LAUNCH_S), launches)


def _share(shares: Mapping[int, float], batch: int) -> float:
    return shares[max(most for most in shares if most <= batch)]


def small_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes read and written per token between products and attention, in all layers:
    two sums with their norms, rotated queries and keys, values, and the gate; of experts, that of
    each, and the sum of their results.
    """
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    elements = 8 * config["hidden_size"] + 2 * heads * config["head_dim"]
    if chosen := config.get("num_experts_per_tok", 0):
        elements += chosen * 3 * config["moe_intermediate_size"]
        elements += (chosen + 1) * config["hidden_size"]
    else:
        elements += 3 * config["intermediate_size"]
    return int(config["num_hidden_layers"] * elements * ITEM_BYTES[_DTYPE])


def rates_of(record: Mapping[str, Any]) -> Rates:
    """Return the rates of a record's device, or those of an H200 if it has none."""
    for row in record["parts"].get("floors", {"rows": []})["rows"]:
        if row["key"] == "rates":
            return Rates(row["median"]["bandwidth"], row["median"]["matrix"])
    return H200


def steps_of(record: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return the seconds of a record's decode steps, by model and requests."""
    found: dict[str, dict[int, float]] = {}
    for name in ("smoke", "smoke-0.6b", "decode-8b", "decode-4b", "decode-moe"):
        part = record["parts"].get(name, {"rows": []})
        for row in part["rows"]:
            is_greedy = row.get("sampling") is None
            if row["key"].startswith("decode at") and is_greedy and "step_s" in row["median"]:
                steps = found.setdefault(part["model"], {})
                steps[row["requests"]] = row["median"]["step_s"]
    return found
