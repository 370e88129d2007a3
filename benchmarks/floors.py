"""The lower bound of a machine's time: an ideal schedule, computed from the model's size and the
machine's measured rates.

    prefill      floating-point operations / the matrix rate
    decode step  the larger of: bytes of weights and KV read / the memory's bandwidth,
                                operations / the matrix rate

The ideal schedule prefills a request as soon as it may start, then decodes all running requests
together. A prefix that all share is computed and read once. Recurrent states are read and written
once a step. Layers have grouped attention or the gated delta rule. Of a mixture of experts, a step
reads those that its tokens choose, as many as if each chose by chance.

For a GPU, `step_s` computes the floor of a single decode step. There, products and attention run
one after the other. The products' time is the larger of reading weights and multiplying, and the
time for reading the KV is added.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.workloads import Lengths

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """A checkpoint's size.

    Attributes:
        linear_parameters: the parameters of the layers' matrices, without those of experts.
        head_parameters: the parameters of the matrix that computes the logits.
        other_parameters: the parameters of norms and biases.
        max_tokens: the longest context.
        attention_width: the number of heads times their dimension, summed over the layers.
        kv_width: the number of KV elements per token, over all layers.
        state_width: the number of elements of a request's recurrent states, over all layers. They
            are in float32.
        expert_parameters: the parameters of all experts, over all layers.
        chosen_share: the share of them that a token uses.
    """

    linear_parameters: int
    head_parameters: int
    other_parameters: int
    vocab_size: int
    max_tokens: int
    attention_width: int
    kv_width: int
    state_width: int = 0
    expert_parameters: int = 0
    chosen_share: float = 0.0

    def weight_bytes(self, dtype: str, tokens: int = 1) -> int:
        """Return the bytes of weights that a decode step of this many tokens reads."""
        parameters = self.linear_parameters + self.head_parameters + self.other_parameters
        read = 1 - (1 - self.chosen_share) ** tokens
        return (parameters + round(self.expert_parameters * read)) * ITEM_BYTES[dtype]

    @property
    def used_parameters(self) -> int:
        """The parameters of the layers' matrices that a token is multiplied by."""
        return self.linear_parameters + round(self.expert_parameters * self.chosen_share)

    def kv_bytes(self, dtype: str) -> int:
        """Return the bytes of KV per token."""
        return self.kv_width * ITEM_BYTES[dtype]

    @property
    def state_bytes(self) -> int:
        """The bytes of states that a decode step reads and writes for each request."""
        return 2 * 4 * self.state_width

    @property
    def _each_flops(self) -> int:
        """The operations for one token wherever it stands. An element of a state is multiplied and
        added for what the key reads, for the update and for what the query reads.
        """
        return 2 * self.used_parameters + 6 * self.state_width

    def token_flops(self, context: int) -> int:
        """Return the operations for one token after this many others, without its logits."""
        return self._each_flops + 4 * self.attention_width * (context + 1)

    def prompt_flops(self, start: int, end: int) -> int:
        """Return the operations for a prompt's tokens from start to before end, and the last one's
        logits.
        """
        pairs = (end * (end + 1) - start * (start + 1)) // 2
        return (
            self._each_flops * (end - start)
            + 4 * self.attention_width * pairs
            + 2 * self.head_parameters
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's measured rates.

    Attributes:
        bandwidth: bytes read from memory per second.
        matrix: floating-point operations of a matrix product per second, in the model's type.
    """

    bandwidth: float
    matrix: float


@dataclass(frozen=True, slots=True)
class Floor:
    """The times of an ideal schedule, in seconds."""

    prefill_s: float
    decode_s: float
    steps: int

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def ideal(
    lengths: list[Lengths], concurrency: int | None, shape: Shape, dtype: str, rates: Rates
) -> Floor:
    """Compute the ideal schedule of requests that all wait from the start, in this order.
    concurrency: the most that run at the same time; None for all.
    """
    waiting = list(reversed(lengths))
    running: list[tuple[Lengths, int]] = []  # and the tokens generated so far
    prefill_s = decode_s = 0.0
    steps = 0
    is_prefix_there = False
    while waiting or running:
        while waiting and (concurrency is None or len(running) < concurrency):
            one = waiting.pop()
            start = one.shared_prefix if is_prefix_there else 0
            is_prefix_there = True
            prefill_s += shape.prompt_flops(start, one.prompt) / rates.matrix
            running.append((one, 1))  # a prompt's last position gives the first token
        running = [(one, done) for one, done in running if done < one.output]
        if running:
            decode_s += _step_s(running, shape, dtype, rates)
            steps += 1
            running = [(one, done + 1) for one, done in running if done + 1 < one.output]
    return Floor(prefill_s, decode_s, steps)


def step_s(shape: Shape, dtype: str, batch: int, context: float, rates: Rates) -> float:
    """Return the seconds of one decode step on a GPU: weights or their products, then the KV.
    batch: the requests in the step. context: the mean number of tokens whose KV each of them reads.
    """
    parameters = shape.used_parameters + shape.head_parameters
    products_s = max(
        shape.weight_bytes(dtype, batch) / rates.bandwidth, 2 * parameters * batch / rates.matrix
    )
    return products_s + batch * context * shape.kv_bytes(dtype) / rates.bandwidth


def prompts_s(shape: Shape, lengths: list[Lengths], rates: Rates) -> float:
    """Return the seconds for computing prompts that share nothing."""
    return sum(shape.prompt_flops(0, one.prompt) for one in lengths) / rates.matrix


def _step_s(running: list[tuple[Lengths, int]], shape: Shape, dtype: str, rates: Rates) -> float:
    """Return the seconds of one decode step."""
    shared = running[0][0].shared_prefix
    kv_tokens = shared + sum(one.prompt - one.shared_prefix + done - 1 for one, done in running)
    read = shape.weight_bytes(dtype, len(running)) + kv_tokens * shape.kv_bytes(dtype)
    read += len(running) * shape.state_bytes
    flops = sum(
        shape.token_flops(one.prompt + done - 1) + 2 * shape.head_parameters
        for one, done in running
    )
    return max(read / rates.bandwidth, flops / rates.matrix)


def read_shape(model: Path) -> Shape:
    """Return the size of a checkpoint, from its config and the headers of its safetensors files.
    Raises ValueError if its size cannot be computed here.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    if any("expert" in key for key in config):
        raise ValueError(f"{model}: floors are computed for dense decoders only")
    linear = head = other = embedding = 0
    for name, dimensions in tensor_shapes(model).items():
        size = math.prod(dimensions)
        if "embed_tokens" in name:
            embedding += size
        elif name.startswith("lm_head"):
            head += size
        elif len(dimensions) == 2:
            linear += size
        else:
            other += size
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    if unknown := {*kinds} - {"full_attention", "sliding_attention", "linear_attention"}:
        raise ValueError(f"{model}: floors are not computed for layers of {', '.join(unknown)}")
    recurrent = kinds.count("linear_attention")
    heads, layers = config["num_attention_heads"], len(kinds) - recurrent
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return Shape(
        linear_parameters=linear,
        head_parameters=embedding if config.get("tie_word_embeddings") else head,
        other_parameters=other,
        vocab_size=config["vocab_size"],
        max_tokens=config["max_position_embeddings"],
        attention_width=layers * heads * head_dim,
        kv_width=2 * layers * (config.get("num_key_value_heads") or heads) * head_dim,
        state_width=recurrent * _delta_state(config) if recurrent else 0,
    )


def _delta_state(config: dict[str, Any]) -> int:
    """Return the elements of one layer's state by the gated delta rule. That of its convolution is
    under 2 % of them and left out.
    """
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    if missing := [name for name in names if name not in config]:
        raise ValueError(f"floors need {', '.join(missing)} of recurrent layers")
    heads, key, value = (config[name] for name in names)
    return int(heads * key * value)


def shape_of(config: dict[str, Any]) -> Shape:
    """Return the size of a Qwen3 model, dense or of experts, that is not on disk, from its config's
    numbers.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads, head_dim = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    projections = hidden * head_dim * (2 * heads + 2 * kv_heads)  # queries, output, keys, values
    gated, experts = 3 * hidden * config["intermediate_size"], config.get("num_experts", 0)
    if experts:
        gated = hidden * experts  # the router
    return Shape(
        linear_parameters=layers * (projections + gated),
        head_parameters=config["vocab_size"] * hidden,
        other_parameters=layers * 2 * (hidden + head_dim) + hidden,
        vocab_size=config["vocab_size"],
        max_tokens=config["max_position_embeddings"],
        attention_width=layers * heads * head_dim,
        kv_width=2 * layers * kv_heads * head_dim,
        expert_parameters=layers * experts * 3 * hidden * config.get("moe_intermediate_size", 0),
        chosen_share=config["num_experts_per_tok"] / experts if experts else 0.0,
    )


def tensor_shapes(model: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if not shapes:
        raise ValueError(f"{model} has no safetensors files")
    return shapes
