"""Measures what this machine computes in a second, with the kernels that a server would use.

    matrices    packed as the engine packs them, and as torch has them: one row, and many rows
    attention   the backend that was chosen, on caches of the model's own shape: reading KV in
                decode steps, computing a prompt
    operations  a small tensor operation, which costs the same however little it computes

Each is the best of some runs, because other work on the machine only slows it down. It takes three
to five seconds and at most 400 MiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import AttentionParams, BatchLayout, LayerCache
from engine.attention.registry import AttentionUnavailableError, choose_backend, fall_back
from engine.config import LoadConfig
from engine.models.packed import multiply, new_scales, pack, packed_size
from engine.planning.outline import Outline

_ELEMENTS = 64 << 20
"""Of the matrices that are read: more than any cache holds."""
_COLUMNS, _DEPTH = 4096, 1024
"""Outputs and inputs of one matrix."""
_ROWS = 512
"""Rows of input with which arithmetic takes longer than reading."""
_REQUESTS, _CONTEXT = 16, 512
_KV_BYTES = 64 << 20
"""Of the caches that attention reads, about."""
_PROMPT = 512
_TRYING_S = 0.4
"""Each is run again for so long, after a first time."""
_SMALL = 300
"""How many small operations are timed together."""
_COLD = 4
"""Times as long as in a loop: within a step caches are cold."""
GIVEN_OPERATION_S = 5e-6
"""Seconds of a small operation, where rates are given."""


@dataclass(frozen=True, slots=True)
class Products:
    """The rates of matrix products.

    Attributes:
        bandwidth: bytes of weights that are read in a second, with one row of input.
        rate: floating-point operations in a second, with many rows.
    """

    bandwidth: float
    rate: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine computes in a second.

    Attributes:
        packed: of the matrices that are packed.
        plain: of those that are not, experts for one.
        kv_bandwidth: bytes of KV that attention reads in decode steps.
        attention_rate: floating-point operations of a prompt's attention.
        operation_s: seconds of a small tensor operation.
        is_measured: False: they were given.
    """

    packed: Products
    plain: Products
    kv_bandwidth: float
    attention_rate: float
    operation_s: float
    is_measured: bool


def given_rates(bandwidth: float, rate: float) -> Rates:
    """The rates of a machine of which only two are known.

    Args:
        bandwidth: bytes read from memory in a second.
        rate: floating-point operations of matrix products in a second, in the model's type.
    """
    products = Products(bandwidth, rate)
    return Rates(products, products, bandwidth, rate, GIVEN_OPERATION_S, is_measured=False)


def measure_rates(outline: Outline, load_config: LoadConfig, block_size: int) -> Rates:
    """Measure this machine's CPUs. Torch's threads must have been set."""
    plain = _plain_products(outline.dtype)
    packed = plain
    if outline.packing in ("native", "int8"):
        packed = _packed_products(int8=outline.packing == "int8")
    kv_bandwidth, attention_rate = _attention(outline, load_config, block_size)
    return Rates(
        packed=packed,
        plain=plain,
        kv_bandwidth=kv_bandwidth,
        attention_rate=attention_rate,
        operation_s=_operation_s(outline.dtype),
        is_measured=True,
    )


def _best_s(work: Callable[[], object]) -> float:
    """The least seconds of some runs; the first one does not count."""
    work()
    found: list[float] = []
    while sum(found) < _TRYING_S:
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def _products(
    multiply_all: Callable[[torch.Tensor], object],
    multiply_one: Callable[[torch.Tensor], object],
    dtype: torch.dtype,
    held: int,
) -> Products:
    """Measure products with one row over all matrices, and with many rows over one of them."""
    row = torch.ones((1, _DEPTH), dtype=dtype)
    rows = torch.ones((_ROWS, _DEPTH), dtype=dtype)
    return Products(
        bandwidth=held / _best_s(lambda: multiply_all(row)),
        rate=2 * _ROWS * _DEPTH * _COLUMNS / _best_s(lambda: multiply_one(rows)),
    )


def _plain_products(dtype: torch.dtype) -> Products:
    count = _ELEMENTS // (_COLUMNS * _DEPTH)
    weights = torch.full((count, _COLUMNS, _DEPTH), 0.01, dtype=dtype)

    def run_all(row: torch.Tensor) -> None:
        for weight in weights:
            torch.nn.functional.linear(row, weight)

    return _products(
        run_all,
        lambda rows: torch.nn.functional.linear(rows, weights[0]),
        dtype,
        weights.nbytes,
    )


def _packed_products(*, int8: bool) -> Products:
    count = _ELEMENTS // (_COLUMNS * _DEPTH)
    weight = torch.full((_COLUMNS, _DEPTH), 0.01, dtype=torch.bfloat16)
    size = packed_size(_COLUMNS, _DEPTH, int8=int8)
    packed = torch.empty((count, size), dtype=torch.uint8)
    scales = new_scales(_COLUMNS) if int8 else None
    for one in packed:
        pack(weight, one, scales)

    def run(rows: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return multiply(rows, one, scales, None, _COLUMNS, _DEPTH)

    def run_all(row: torch.Tensor) -> None:
        for one in packed:
            run(row, one)

    return _products(run_all, lambda rows: run(rows, packed[0]), torch.bfloat16, packed.nbytes)


def _attention(outline: Outline, load_config: LoadConfig, block_size: int) -> tuple[float, float]:
    """Bytes of KV read in a second in decode steps, and operations of a prompt in a second."""
    backend = choose_backend(outline.device, outline.kv_dtype, load_config.attention)
    shape, heads, dtype = outline.shapes[0], outline.heads[0], outline.kv_dtype
    params = AttentionParams(scaling=shape.key_dim**-0.5)
    reason = backend.why_not(shape, params)
    if reason is not None:
        backend = fall_back(load_config.attention, AttentionUnavailableError(reason))
    blocks = -(-_CONTEXT // block_size)
    slots = (_REQUESTS * blocks + 1) * block_size
    token_bytes = shape.elements_per_token * dtype.itemsize
    count = max(1, min(32, _KV_BYTES // (slots * token_bytes)))
    caches = [
        LayerCache(
            torch.zeros((slots, shape.num_kv_heads, shape.key_dim), dtype=dtype),
            torch.zeros((slots, shape.num_kv_heads, shape.value_dim), dtype=dtype),
            0,
        )
        for _ in range(count)
    ]

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.ones((heads, tokens, shape.key_dim), dtype=dtype),
            torch.ones((shape.num_kv_heads, tokens, shape.key_dim), dtype=dtype),
            torch.ones((shape.num_kv_heads, tokens, shape.value_dim), dtype=dtype),
        )

    tables = np.arange(1, _REQUESTS * blocks + 1, dtype=np.int32).reshape(_REQUESTS, blocks)
    starts = np.full(_REQUESTS, _CONTEXT - 1, dtype=np.int64)
    decode = backend.prepare(
        BatchLayout(
            starts=starts,
            counts=np.ones(_REQUESTS, dtype=np.int64),
            num_decodes=_REQUESTS,
            positions=starts,
            tables=tables,
            block_size=block_size,
        ),
        None,
        caches[0].keys,
    )
    prompt = min(_PROMPT, blocks * block_size)
    prefill = backend.prepare(
        BatchLayout(
            starts=np.zeros(1, dtype=np.int64),
            counts=np.array([prompt]),
            num_decodes=0,
            positions=np.arange(prompt),
            tables=tables[:1],
            block_size=block_size,
        ),
        None,
        caches[0].keys,
    )
    one, many = inputs(_REQUESTS), inputs(prompt)

    def read() -> None:
        for cache in caches:
            backend.forward(*one, cache, decode, params)

    with torch.inference_mode():
        read_s = _best_s(read)
        prompt_s = _best_s(lambda: backend.forward(*many, caches[0], prefill, params))
    pairs = prompt * (prompt + 1) // 2
    return (
        count * _REQUESTS * _CONTEXT * token_bytes / read_s,
        2 * heads * (shape.key_dim + shape.value_dim) * pairs / prompt_s,
    )


def _operation_s(dtype: torch.dtype) -> float:
    x = torch.ones((4, 256), dtype=dtype)

    def run() -> None:
        for _ in range(_SMALL):
            torch.mul(x, x)

    with torch.inference_mode():
        return _COLD * _best_s(run) / _SMALL
