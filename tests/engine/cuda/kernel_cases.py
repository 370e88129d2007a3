"""The sizes for which every Triton kernel is compiled: those of real models' layers, by block size
and type. See `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from engine.attention.interface import AttentionParams, BatchLayout, LayerCache
from engine.models.description import Activation, ClampedGate, NormForm, Routing
from engine.models.operations import BoundNorm, Gate, Heads, KVPlaces
from tests.engine.cuda.kernels import Found
from tests.engine.cuda.watch import ADA, AMPERE, CUDA, HOPPER, Properties

BLOCK_SIZES = (16, 32, 64, 128, 256)
WIDE = 64
TYPES = (torch.bfloat16, torch.float16, torch.float32)
_REQUESTS = 8
_CONTEXT = 1100
_PROMPT = 200


@dataclass(frozen=True, slots=True)
class Layer:
    """An attention layer.

    Attributes:
        name: whose.
        heads, kv_heads, dim, value_dim: how many heads, and their sizes.
        window, softcap, sinks: 0, None and False: it has none.
    """

    name: str
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int = 0
    softcap: float | None = None
    sinks: bool = False


LAYERS = (
    Layer("Qwen3-8B", 32, 8, 128, 128),
    Layer("Llama-3.2-1B", 32, 8, 64, 64),
    Layer("gpt-oss", 64, 8, 64, 64, window=128, sinks=True),
    Layer("Phi-3-mini", 32, 32, 96, 96),
    Layer("Gemma-2-9B", 16, 8, 256, 256, window=4096, softcap=50.0),
    Layer("Gemma-3-4B", 8, 4, 256, 256, window=1024),
    Layer("DeepSeek-V3", 128, 128, 192, 128),
    Layer("Gemma-4, full", 16, 2, 512, 512),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What is compiled together.

    Attributes:
        name: for messages.
        run: launches its kernels; call it by `kernels.compile_all`.
        dtype: of its tensors.
        layer: if it is attention.
        properties: of the device for which they are compiled.
    """

    name: str
    run: Callable[[], object]
    dtype: torch.dtype
    layer: Layer | None = None
    properties: Properties = HOPPER


def attention(layer: Layer, block_size: int, dtype: torch.dtype, kind: str) -> Case:
    """A layer's kernels: of a decode, or of a prefill."""

    def run() -> None:
        from engine.attention.triton_backend import TritonAttentionBackend

        def zeros(count: int, heads: int, dim: int) -> torch.Tensor:
            return torch.zeros((count, heads, dim), dtype=dtype, device=CUDA)

        start, new = (_CONTEXT, 1) if kind == "decode" else (0, _PROMPT)
        width = -(-(start + new) // block_size)
        slots = (_REQUESTS * width + 1) * block_size
        cache = LayerCache(
            zeros(slots, layer.kv_heads, layer.dim),
            zeros(slots, layer.kv_heads, layer.value_dim),
            group=0,
        )
        layout = BatchLayout(
            starts=np.full(_REQUESTS, start),
            counts=np.full(_REQUESTS, new),
            num_decodes=_REQUESTS if kind == "decode" else 0,
            positions=np.tile(np.arange(start, start + new), _REQUESTS),
            tables=np.ones((_REQUESTS, width), dtype=np.int32),
            block_size=block_size,
        )
        tokens = _REQUESTS * new
        sinks = torch.zeros(layer.heads, dtype=dtype, device=CUDA) if layer.sinks else None
        backend = TritonAttentionBackend()
        backend.forward(
            zeros(tokens, layer.heads, layer.dim).transpose(0, 1),
            zeros(tokens, layer.kv_heads, layer.dim).transpose(0, 1),
            zeros(tokens, layer.kv_heads, layer.value_dim).transpose(0, 1),
            cache,
            backend.prepare(layout, layer.window or None, cache.keys),
            AttentionParams(layer.dim**-0.5, layer.softcap, sinks),
        )

    name = f"{layer.name}, {kind}, blocks of {block_size}, {_word(dtype)}"
    return Case(name, run, dtype, layer)


@dataclass(frozen=True, slots=True)
class Rest:
    """What stands between a layer's products and its attention: whose, the widths of its residual
    stream and of its MLP, its heads, and the forms of its norms.
    """

    name: str
    width: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    form: NormForm
    normed_heads: bool = False
    normed_after: bool = False
    activation: Activation = "silu"


RESTS = (
    Rest("Qwen3-8B", 4096, 12288, 32, 8, 128, "rounded_first", normed_heads=True),
    Rest("Llama-3.1-70B", 8192, 28672, 64, 8, 128, "rounded_first"),
    Rest(
        "Gemma-2-9B", 3584, 14336, 16, 8, 256, "from_one", normed_after=True, activation="gelu_tanh"
    ),
)


def between(rest: Rest, dtype: torch.dtype, properties: Properties = HOPPER) -> Case:
    """The kernels of a layer beside its attention."""

    def run() -> None:
        from engine.models.triton_operations import TritonOperations

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=CUDA)

        def norm(width: int) -> BoundNorm:
            return BoundNorm(zeros(width), None, 1e-6, rest.form)

        tokens, operations = _REQUESTS, TritonOperations()
        after = norm(rest.width) if rest.normed_after else None
        operations.add_norm(
            zeros(tokens, rest.width), [zeros(tokens, rest.width)], after, 1.0, norm(rest.width)
        )
        of_heads = norm(rest.dim) if rest.normed_heads else None
        heads = Heads(rest.heads, rest.kv_heads, rest.dim, of_heads, of_heads, rotary_dim=rest.dim)
        cos, sin = torch.zeros((2, tokens, rest.dim // 2), device=CUDA).unbind()
        places = KVPlaces(
            zeros(256, rest.kv_heads, rest.dim),
            zeros(256, rest.kv_heads, rest.dim),
            torch.zeros(tokens, dtype=torch.int64, device=CUDA),
        )
        width = (rest.heads + 2 * rest.kv_heads) * rest.dim
        operations.rotate(zeros(tokens, width), heads, (cos, sin), places)
        operations.gate(zeros(tokens, 2 * rest.inner), rest.activation, gated=True)
        operations.multiply(zeros(1, rest.width), zeros(2 * rest.inner, rest.width), None)
        operations.multiply(zeros(1, rest.inner), zeros(rest.width, rest.inner), zeros(rest.width))

    where = f"{properties.major}.{properties.minor}"
    name = f"{rest.name}, beside attention, capability {where}, {_word(dtype)}"
    return Case(name, run, dtype, properties=properties)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A module of experts: whose, the widths of what it gets and of each expert, how many there are
    and how many compute a token, and whether its weights are transposed and have biases.
    """

    name: str
    width: int
    inner: int
    experts: int
    chosen: int
    transposed: bool = False


MIXTURES = (
    Mixture("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Mixture("gpt-oss-20b", 2880, 2880, 32, 4, transposed=True),
    Mixture("Mixtral-8x7B", 4096, 14336, 8, 2),
)


def experts(
    mixture: Mixture,
    dtype: torch.dtype,
    properties: Properties = HOPPER,
    counts: Sequence[int] = (),
) -> Case:
    """The kernels of a mixture, for some numbers of tokens: if none is given, for few and, as tiles
    are then larger, for many.
    """

    def run() -> None:
        from engine.models.triton_experts import mix_experts
        from engine.models.triton_operations import TritonOperations

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=CUDA)

        def matrices(inputs: int, outputs: int) -> torch.Tensor:
            return zeros(mixture.experts, *((inputs, outputs)[:: 1 if mixture.transposed else -1]))

        inner, biased = 2 * mixture.inner, mixture.transposed
        module = SimpleNamespace(
            num_experts=mixture.experts,
            has_gate=True,
            has_bias=biased,
            is_transposed=mixture.transposed,
            gate_up_proj=matrices(mixture.width, inner),
            gate_up_proj_bias=zeros(mixture.experts, inner) if biased else None,
            down_proj=matrices(mixture.inner, mixture.width),
            down_proj_bias=zeros(mixture.experts, mixture.width) if biased else None,
        )
        activation: Gate = ClampedGate(1.702, 7.0) if biased else "silu"
        routing = Routing("gate", "experts", mixture.chosen, True, True, activation)
        operations = TritonOperations()
        for tokens in counts or (_REQUESTS, 96 * mixture.experts // mixture.chosen):
            scores = zeros(tokens, mixture.experts)
            gate = partial(operations.gate, activation=activation, gated=True)
            mix_experts(zeros(tokens, mixture.width), scores, module, routing, gate)

    where = f"{properties.major}.{properties.minor}"
    name = f"{mixture.name}, experts, capability {where}, {_word(dtype)}"
    return Case(name, run, dtype, properties=properties)


def selection(*, counts: bool) -> Case:
    """The kernels that find the cut of top_p, or of top_k, which counts entries."""

    def run() -> None:
        from engine.sampling.triton_selection import least_bound

        shape = (_REQUESTS, 151_936)
        values = torch.zeros(shape, device=CUDA)
        masses = None if counts else torch.zeros(shape, dtype=torch.int64, device=CUDA)
        least_bound(values, masses, torch.ones((_REQUESTS, 1), dtype=torch.int64, device=CUDA))

    return Case(f"the cut of {'top_k' if counts else 'top_p'}", run, torch.float32)


def draws(dtype: torch.dtype) -> Case:
    """The kernels that choose tokens: the most likely ones, and drawn ones, with filters or not."""

    def run() -> None:
        from engine.sampling.triton_drawing import TritonDraws, TritonMostLikely

        logits = torch.zeros((_REQUESTS, 151_936), dtype=dtype, device=CUDA)
        numbers = torch.zeros((_REQUESTS, 5), dtype=torch.float64, device=CUDA)
        tokens = torch.zeros(_REQUESTS, dtype=torch.int64, device=CUDA)
        TritonMostLikely(logits)(logits, tokens)
        for filters in (False, True):
            TritonDraws(logits)(filters, logits, numbers, tokens)

    return Case(f"draws, {_word(dtype)}", run, dtype)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def every_case() -> Iterator[Case]:
    """All of them."""
    for dtype in TYPES:
        for layer in LAYERS:
            for block_size in BLOCK_SIZES:
                for kind in ("decode", "prefill"):
                    yield attention(layer, block_size, dtype, kind)
        for rest in RESTS:
            yield between(rest, dtype)
        for mixture in MIXTURES:
            for properties in (HOPPER, AMPERE, ADA):
                yield experts(mixture, dtype, properties)
    yield selection(counts=True)
    yield selection(counts=False)
    for dtype in TYPES:
        yield draws(dtype)


AHEAD: dict[str, frozenset[str]] = {
    **dict.fromkeys(("write_kernel", "prefill_kernel"), frozenset()),
    **dict.fromkeys(("add_norm_kernel", "rotate_kernel", "gate_kernel"), frozenset()),
    "clamped_gate_kernel": frozenset(),
    **dict.fromkeys(("route_kernel", "sort_kernel", "weighted_sum_kernel"), frozenset()),
    "experts_product_kernel": frozenset(),
    "decode_kernel": frozenset({"cu_seqlens", "starts", "table_offsets", "extent", "entries"}),
    "merge_kernel": frozenset({"cu_seqlens", "starts", "counts"}),
    "product_kernel": frozenset({"weight"}),
}
"""The kernels that may start before the one in front has ended, and what they may read by then:
what no kernel writes.
"""


LAST = frozenset({"find_most_likely", "count_bins"})
"""The kernels whose last program reads what all have stored."""


def faults(case: Case, found: Found) -> list[str]:
    """What is wrong with a compiled kernel; nothing if it is as it should be.

    Shared memory is bounded for every kernel. Kernels for 16-bit types keep everything in
    registers; the attention's read keys and values 16 bytes at a time, and block tables 8; experts'
    read weights 16 bytes at a time; a prefill and experts multiply by tensor cores, 64 keys or
    elements at once (only those of Hopper are told).
    """
    wrong = []
    if found.starts_early != (found.ahead is not None):
        wrong.append("it is launched early without waiting, or waits without being launched early")
    if (allowed := AHEAD.get(found.kernel)) is not None and case.properties.major >= 9:
        if found.ahead is None:
            wrong.append("it does not wait for the kernel in front of it")
        elif early := found.ahead - allowed:
            wrong.append(f"it uses {', '.join(sorted(early))} before it has waited")
    elif found.ahead is not None:
        wrong.append("it waits, where nothing starts early")
    if found.kernel in LAST and not found.finds_last:
        wrong.append("its last program may not see what the others have stored")
    shared = case.properties.shared_memory_per_block_optin
    if found.shared > shared:
        wrong.append(f"{found.shared} bytes of shared memory, and there are {shared}")
    if case.dtype is torch.float32:
        return wrong
    is_prefill = found.kernel == "prefill_kernel"
    layer = case.layer
    if found.spilled:
        wrong.append(f"{found.spilled} bytes of a thread's registers are spilled")
    if layer is not None and found.kernel in ("decode_kernel", "prefill_kernel"):
        in_parts = is_prefill and layer.dim > 256  # they arrive in registers
        kind, reads = ("loads", found.loads) if in_parts else ("copies", found.copies)
        if not {16} <= set(reads) <= {8, 16}:
            wrong.append(f"its {kind} have {reads} bytes")
    if found.kernel == "experts_product_kernel":
        if found.copies != (16,):
            wrong.append(f"its copies have {found.copies} bytes")
        if case.properties is HOPPER and min(found.products, default=0) < WIDE:
            wrong.append(f"its products are {found.products} wide")
    if layer is not None and is_prefill and min(found.products, default=0) < WIDE:
        wrong.append(f"its products are {found.products} wide")
    return wrong
