"""Measures what this machine computes in a second, with the code that a server would run.

    matrices    as the engine packs them, or as torch has them: read and multiplied by one row, by
                some and by many, because kernels differ by the number of rows
    experts     one layer's module, as transformers computes it, with made-up weights
    attention   the backend that was chosen, on caches of the model's own shape: reading KV in
                decode steps, computing a prompt
    sampling    rows of the model's vocabulary, at a temperature
    operations  a small tensor operation, which costs the same however little it computes

Each is the best of some runs, because other work on the machine only slows it down. It takes about
five seconds and 400 MiB; with experts as much again as the weights of one layer, if these have at
most 512 MiB; larger ones are not run, but computed from the rates of matrices.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionParams, BatchLayout, LayerCache
from engine.attention.registry import AttentionUnavailableError, choose_backend, fall_back
from engine.config import LoadConfig
from engine.models.packed import multiply, new_scales, pack, packed_size
from engine.planning.outline import CALLED_WITH, Experts, Matrices, Outline
from engine.request import GenerationRequest, Request
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams, StopParams
from engine.token_ids import TokenIds
from engine.types import RequestId, RequestKey, TokenId

_ELEMENTS = 64 << 20
"""Of the matrices that are read: more than any cache holds."""
_COLUMNS, _DEPTH = 4096, 1024
"""Outputs and inputs of one matrix."""
_ROWS = (1, 4, 16, 64, 256)
"""Rows of input; with the last, arithmetic takes longer than reading."""
_FEW = 64
"""Up to so many rows all matrices are multiplied: they are read from memory."""
_REQUESTS, _CONTEXT = 16, 512
_KV_BYTES = 64 << 20
"""Of the caches that attention reads, about."""
_PROMPT = 512
_TRYING_S = 0.25
"""Each is run again for so long, after a first time."""
_EXPERTS_BYTES = 512 << 20
"""The most weights of a module of experts that is run."""
_FAILURES = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
_SMALL = 300
"""How many small operations are timed together."""
_COLD = 4
"""Times as long as in a loop: within a step caches are cold."""
GIVEN_OPERATION_S = 5e-6
"""Seconds of a small operation, where rates are given."""


Points = tuple[tuple[int, float], ...]
"""Seconds for each byte of weights, by the number of rows, ascending."""


def between(points: Points, rows: float) -> float:
    """Seconds for each byte with so many rows: linear between points, in proportion behind them."""
    most, longest = points[-1]
    if rows >= most:
        return longest * rows / most
    return float(np.interp(rows, [x for x, _ in points], [seconds for _, seconds in points]))


@dataclass(frozen=True, slots=True)
class Products:
    """The rates of matrix products.

    Attributes:
        bandwidth: bytes of weights that are read in a second, with one row of input.
        rate: floating-point operations in a second, with many rows.
        points: what was measured; none: the rates were given.
    """

    bandwidth: float
    rate: float
    points: Points = ()

    def seconds(self, matrices: Matrices, rows: float) -> float:
        """Seconds of products with so many rows."""
        if self.points:
            return matrices.held * between(self.points, rows)
        # Reading and computing overlap, but not entirely.
        return math.hypot(matrices.held / self.bandwidth, 2 * matrices.elements * rows / self.rate)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine computes in a second.

    Attributes:
        packed: of the matrices as they are held: packed, if they are.
        plain: of those that are never packed, which are experts.
        experts: of whole modules of experts, by tokens; none: there are none, or they were not run.
        kv_bandwidth: bytes of KV that attention reads in decode steps.
        attention_rate: floating-point operations of a prompt's attention.
        sampled_row_s: seconds of sampling a row at a temperature.
        operation_s: seconds of a small tensor operation.
        is_measured: False: they were given.
    """

    packed: Products
    plain: Products
    experts: Points
    kv_bandwidth: float
    attention_rate: float
    sampled_row_s: float
    operation_s: float
    is_measured: bool


def given_rates(bandwidth: float, rate: float, row_bytes: int) -> Rates:
    """The rates of a machine of which only two are known.

    Args:
        bandwidth: bytes read from memory in a second.
        rate: floating-point operations of matrix products in a second, in the model's type.
        row_bytes: a row of logits, which sampling reads twice.
    """
    products = Products(bandwidth, rate)
    return Rates(
        packed=products,
        plain=products,
        experts=(),
        kv_bandwidth=bandwidth,
        attention_rate=rate,
        sampled_row_s=2 * row_bytes / bandwidth,
        operation_s=GIVEN_OPERATION_S,
        is_measured=False,
    )


def measure_rates(outline: Outline, load_config: LoadConfig, block_size: int) -> Rates:
    """Measure this machine's CPUs. Torch's threads must have been set."""
    is_packed = outline.packing in ("native", "int8")
    experts = _experts(outline.experts[0], outline.dtype) if outline.experts else ()
    if is_packed:
        packed = _packed_products(int8=outline.packing == "int8")
    if not is_packed or (outline.experts and not experts):
        plain = _plain_products(outline.dtype)
    kv_bandwidth, attention_rate = _attention(outline, load_config, block_size)
    return Rates(
        packed=packed if is_packed else plain,
        plain=packed if is_packed and (experts or not outline.experts) else plain,
        experts=experts,
        kv_bandwidth=kv_bandwidth,
        attention_rate=attention_rate,
        sampled_row_s=_sampled_row_s(outline),
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
    multiply: Callable[[torch.Tensor, int], object], count: int, dtype: torch.dtype, held: int
) -> Products:
    """Measure products.

    Args:
        multiply: multiplies rows by the matrix of that index. count: how many there are.
        held: bytes of all.
    """
    points = []
    for number in _ROWS:
        rows = torch.ones((number, _DEPTH), dtype=dtype)
        used = count if number <= _FEW else 1

        def run(rows: torch.Tensor = rows, used: int = used) -> None:
            for index in range(used):
                multiply(rows, index)

        points.append((number, _best_s(run) * count / used / held))
    most, longest = points[-1]
    flops = 2 * most * _DEPTH * _COLUMNS * count
    return Products(1 / points[0][1], flops / (longest * held), tuple(points))


def _plain_products(dtype: torch.dtype) -> Products:
    count = _ELEMENTS // (_COLUMNS * _DEPTH)
    weights = torch.full((count, _COLUMNS, _DEPTH), 0.01, dtype=dtype)

    return _products(
        lambda rows, index: torch.nn.functional.linear(rows, weights[index]),
        count,
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

    return _products(
        lambda rows, index: multiply(rows, packed[index], scales, None, _COLUMNS, _DEPTH),
        count,
        torch.bfloat16,
        packed.nbytes,
    )


def _experts(one: Experts, dtype: torch.dtype) -> Points:
    """Measure a module of experts; none if it is too large, or cannot be run by itself."""
    held = one.weights.held
    if held > _EXPERTS_BYTES:
        return ()
    # As many of the same as no cache holds.
    modules = [
        copy.deepcopy(one.module).to_empty(device="cpu")
        for _ in range(max(1, min(8, _ELEMENTS * dtype.itemsize // held)))
    ]
    points = []
    try:
        with torch.inference_mode():
            for module in modules:
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.fill_(0.01)
            for tokens in _ROWS:
                args, kwargs = one.called_with(partial(_like, tokens=tokens, total=one.total))

                def run(args: Any = args, kwargs: Any = kwargs) -> None:
                    for module in modules:
                        module(*args, **kwargs)

                points.append((tokens, _best_s(run) / len(modules) / held))
    except _FAILURES:
        return ()
    return tuple(points)


def _like(watched: torch.Tensor, tokens: int, total: int) -> torch.Tensor:
    """What a module of experts is called with, for another number of tokens. Choices of experts are
    spread over all.
    """
    shape = list(watched.shape)
    shape[shape.index(CALLED_WITH)] = tokens
    if watched.is_floating_point():
        return torch.full(shape, 0.1, dtype=watched.dtype)
    chance = torch.Generator().manual_seed(0)
    chosen = torch.rand((tokens, total), generator=chance).argsort(dim=-1)
    return chosen[:, : shape[-1]].reshape(shape).to(watched.dtype)


def _sampled_row_s(outline: Outline) -> float:
    sampler = Sampler(outline.vocab_size, torch.device("cpu"))
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn((_REQUESTS, outline.vocab_size), generator=chance).to(outline.dtype)
    spec = GenerationRequest(
        request_id=RequestId("sampled"),
        prompt=TokenIds.of((TokenId(0),)),
        sampling=SamplingParams(temperature=1.0),
        stop=StopParams(max_tokens=1),
    )
    requests = [
        Request(spec=spec, arrival=0.0, max_total_tokens=2, key=RequestKey(key))
        for key in range(_REQUESTS)
    ]
    with torch.inference_mode():
        return _best_s(lambda: sampler.sample(logits, requests)) / _REQUESTS


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
