"""Loads the kernels and declares their interface. If they cannot be loaded, the error says why."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.native.build import LIBRARY, fingerprint

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "headrace_linear_size": (_POINTER,),
    "headrace_linear_pack": (_POINTER, _POINTER, _INT, ctypes.c_int),
    "headrace_linear_rows": (_POINTER, _POINTER, _INT, _POINTER, ctypes.c_int),
    "headrace_linear": (_POINTER, _POINTER, _INT, _POINTER, _INT, _INT, ctypes.c_int),
    "headrace_norm": (_POINTER, _POINTER, _POINTER, _INT, _INT, ctypes.c_int, ctypes.c_int),
    "headrace_gate": (
        *(ctypes.c_int, _POINTER, _INT, _POINTER, _INT),
        *(_POINTER, _INT, _INT, _INT, ctypes.c_int, ctypes.c_int),
    ),
    "headrace_heads": (_POINTER, ctypes.c_int, ctypes.c_int),
    "headrace_add": (
        *(_POINTER, _POINTER, ctypes.c_float, _POINTER),
        *(_INT, _INT, ctypes.c_int, ctypes.c_int),
    ),
    "headrace_low_rank": (
        *(_POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _INT),
        *(ctypes.c_int, ctypes.c_int),
    ),
    "headrace_greedy": (_POINTER, _INT, _INT, _INT, _POINTER, ctypes.c_int),
    "headrace_draw": (
        *(_POINTER, _INT, _POINTER, _INT, _INT, ctypes.c_int),
        *(_POINTER, _POINTER, _POINTER, ctypes.c_int),
    ),
    "headrace_convolution": (_POINTER,),
    "headrace_delta_rule": (_POINTER,),
    "headrace_recur": (_POINTER, _POINTER),
    "headrace_gated_norm": (_POINTER, _POINTER, _POINTER, _INT, ctypes.c_int),
    "headrace_recurrent_scratch": (_POINTER,),
}
_REBUILD = f"run `{sys.executable} -m engine.native.build`"


class AttentionCall(ctypes.Structure):
    """One layer's attention. Mirrors the struct in src/calls.h.

    Attributes:
        query, key, value: the step's tokens, [Hq, T, D], [Hkv, T, D] and [Hkv, T, Dv]. The elements
            of a head are contiguous. The strides count elements.
        keys, values: the layer's cache, [num_slots, Hkv, D] and [num_slots, Hkv, Dv].
        output: [T, Hq, Dv]. All of the above have the same dtype.
        sinks: float32 [Hq], or null.
        starts, counts: int64 [R]. tables: int32 [R, table_width].
        scratch: float32 [scratch_floats].
        window: the maximum number of positions that a token attends to, including its own. 0 for
            all.
        dtype: 0 float32, 1 bfloat16, 2 float16.
        threads: the number of threads to use.
        softcap: 0 for none.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key", "value", "keys", "values", "output")),
        *((name, _POINTER) for name in ("sinks", "starts", "counts", "tables", "scratch")),
        ("scratch_floats", _INT),
        *((f"query_{axis}_stride", _INT) for axis in ("head", "token")),
        *((f"key_{axis}_stride", _INT) for axis in ("head", "token")),
        *((f"value_{axis}_stride", _INT) for axis in ("head", "token")),
        *((name, _INT) for name in ("num_requests", "num_tokens", "table_width", "block_size")),
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, _INT) for name in ("window", "dtype", "threads")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


FLOAT32, BFLOAT16, CODES = 0, 1, 2
"""The types of elements."""
FROM_ONE, ROUNDED_FIRST, CENTERED = 1, 2, 4
"""The variants of norms. 0: x divided by its root mean square, times the weight. FROM_ONE: the
same, but the weight is stored as its difference from 1. ROUNDED_FIRST: x is rounded before it is
multiplied by the weight. CENTERED: a layer norm; the mean of x is subtracted first.
"""
SILU, GELU_TANH, RELU_SQUARED, SIGMOID = 0, 1, 2, 3
"""The activations."""
ATTENTION, SHORT_CONVOLUTION, DELTA_NET = 0, 1, 2
"""What mixes a layer's tokens."""


class NormWeight(ctypes.Structure):
    """A norm over `width` elements. Mirrors the struct in src/calls.h.

    Attributes:
        weight, bias: [width]. A null weight means that there is no norm.
        form: 0, FROM_ONE, ROUNDED_FIRST or CENTERED.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias")),
        ("width", _INT),
        ("eps", ctypes.c_float),
        ("form", ctypes.c_int),
    )


class HeadsCall(ctypes.Structure):
    """The queries and keys of one layer, which are normed and rotated in place. Mirrors the struct
    in src/calls.h.

    Attributes:
        query, key: [T, Hq * D] and [T, Hkv * D]. The strides are the distances between rows, in
            elements, and query_head_stride is that between heads of queries. It is D unless
            something else follows each query. The first rotary_dim elements of each head are
            rotated.
        cos, sin: float32 [T, rotary_dim / 2].
        query_norm, key_norm: over each head, or over all heads together.
        paired: whether neighbouring elements are rotated together, rather than elements of the two
            halves. It excludes norms over each head.
        rounds: whether products with cosines and sines are rounded before they are added.
        norms_last: whether norms over each head come after the rotation.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key")),
        *((name, _INT) for name in ("query_stride", "key_stride", "query_head_stride")),
        *((name, _POINTER) for name in ("cos", "sin")),
        *((name, _INT) for name in ("tokens", "num_heads", "num_kv_heads")),
        *((name, _INT) for name in ("head_dim", "rotary_dim")),
        *((name, NormWeight) for name in ("query_norm", "key_norm")),
        *((name, _INT) for name in ("paired", "rounds", "norms_last")),
    )


class LinearWeight(ctypes.Structure):
    """A packed linear layer: [outputs, inputs]. Mirrors the struct in src/calls.h.

    Attributes:
        bias: float32, or null if there is none.
        scales: by which integers are multiplied, one for each output and group of inputs
            (src/linear_layout.h). Null if weights are not integers.
        minima: in the order of the scales: what is added to the products. Null if 0 is the code
            2**(bits - 1).
        factors: float16, by which scales of 8 bits are multiplied, and minima.
        order: int32 [inputs], for each element of a row the input that it multiplies. Null if they
            are in order.
        dtype: FLOAT32 or BFLOAT16, the type of inputs and outputs. CODES if an integer weight is
            packed from its codes, or these are read: uint8 [outputs, inputs].
        bits: 8 or 4 if weights are integers. 0 if they are of that type.
        group: how many inputs of an integer weight share a scale: all, or a multiple of 8.
        scale_bits, minimum_bits: 16 or 32, for scales and minima of float16 or float32; 8 for int8
            with factors.
        shared: the binary logarithm of how many groups share factors.
        finished: bfloat16 [65536], the value that replaces each result, indexed by the result's
            bits. Null to keep the results.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("packed", "bias", "scales", "minima")),
        *((name, _POINTER) for name in ("factors", "order")),
        *((name, _INT) for name in ("outputs", "inputs", "dtype", "bits", "group")),
        *((name, _INT) for name in ("scale_bits", "minimum_bits", "shared")),
        ("finished", _POINTER),
    )


class RecurrentSpec(ctypes.Structure):
    """A recurrence that takes the place of attention. Mirrors the struct in src/calls.h.

    Attributes:
        weight: of the convolution, [channels, width], the newest input's last. bias: [channels], or
            null.
        log_rate, rate_bias: [H], of a delta net: its decays are
            -exp(log_rate) · softplus(a + rate_bias).
        norm: of a delta net: over each of its heads, V wide and ROUNDED_FIRST.
        num_key_heads, num_heads, key_dim, value_dim: of a delta net, Hk, H, K and V. Its
            convolution has 2 · Hk · K + H · V channels.
        groups: of a delta net: in how many groups of heads the columns of its projection come.
            First each group's queries, keys, values and z, and then each group's b and a.
        beta_factor: of a delta net: multiplies sigmoid(b).
    """

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias", "log_rate", "rate_bias")),
        ("norm", NormWeight),
        *((name, _INT) for name in ("channels", "width")),
        *((name, _INT) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim")),
        ("groups", _INT),
        ("beta_factor", ctypes.c_float),
    )


PROJECTIONS = 6
"""The largest number of first linear layers in a layer."""


class LayerSpec(ctypes.Structure):
    """A whole decoder layer: everything that does not depend on the step. Mirrors the struct in
    src/calls.h.

    Attributes:
        before_attention, after_attention, before_mlp, after_mlp: the norms, any of which may be
            missing.
        projection: queries, keys and values: one layer together, or one layer each. For a short
            convolution b, c and x together; for a delta net what RecurrentSpec.groups says, of
            which neighbours may be one layer.
        output: the output layer of attention, or of the recurrence.
        inner: the first layers of the MLP: gate and up as one or two layers, or one layer without a
            gate.
        down: the last layer of the MLP. If it has no weight, the layer ends before the MLP.
        sinks: for attention; see AttentionCall.
        heads: a HeadsCall without queries, keys, tokens, cosines and sines.
        recurrent: what takes the place of attention, if `mixer` says so.
        mixer: ATTENTION, SHORT_CONVOLUTION or DELTA_NET.
        attention_gated: whether a gate follows each head's query in the projection, and attention's
            results are multiplied by its sigmoid.
        rotary: the index in the step's cosines and sines.
        gated: whether the MLP has a gate.
        parallel: whether the MLP reads the same input as attention.
        activation: SILU, GELU_TANH or RELU_SQUARED.
        dtype: FLOAT32 or BFLOAT16.
        residual: multiplies what attention and the MLP add.
        scaling, softcap: for attention; see AttentionCall.
    """

    _fields_ = (
        *(
            (name, NormWeight)
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")
        ),
        ("projection", LinearWeight * PROJECTIONS),
        ("output", LinearWeight),
        ("inner", LinearWeight * 2),
        ("down", LinearWeight),
        ("sinks", _POINTER),
        ("heads", HeadsCall),
        ("recurrent", RecurrentSpec),
        *((name, _INT) for name in ("mixer", "attention_gated")),
        *((name, _INT) for name in ("rotary", "gated", "parallel", "activation", "dtype")),
        *((name, ctypes.c_float) for name in ("residual", "scaling", "softcap")),
    )


class LowRank(ctypes.Structure):
    """What an adapter adds to one linear layer: scale · B · A · x. Mirrors the struct in
    src/calls.h.

    Attributes:
        a: [rank, inputs]. b: [rank, outputs], transposed. Their elements lie as `pack_a` and
            `pack_b` of `engine.models.low_rank` order them.
        rank: 0 if the layer has no such part.
        column: the layer's first column among those of its product, which may be joined.
        dtype: FLOAT32 or BFLOAT16, the type of a and b.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("a", "b")),
        *((name, _INT) for name in ("rank", "inputs", "outputs", "column", "dtype")),
        ("scale", ctypes.c_float),
    )


TO_PROJECTION, TO_OUTPUT, TO_INNER, TO_DOWN, PARTS = 0, 3, 4, 6, 7
"""Where the parts of a decoder layer begin in an adapter's table, and how many there are."""


class AdaptedRows(ctypes.Structure):
    """A step's rows with adapters, grouped by adapter. Mirrors the struct in src/calls.h.

    Attributes:
        rows: int64, the indices of the rows, group after group.
        ends: int64 [groups], where each group ends among `rows`.
        adapters: the address of each group's table of LowRank.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("rows", "ends", "adapters")),
        ("groups", _INT),
    )


class LayersCall(ctypes.Structure):
    """A step through consecutive layers. Mirrors the struct in src/calls.h.

    Attributes:
        layers: the address of each layer's LayerSpec.
        attention: the address of each layer's AttentionCall for this step. keys, values: the
            address of its cache. Null for layers that do not attend.
        states: the address of each layer's LayerStates, null for layers without. rows: the address
            of the step's StateRows, or null.
        x, y: [tokens, K].
        cos, sin: the addresses of float32 [tokens, rotary_dim / 2], one for each LayerSpec.rotary.
        scratch: memory for the largest layer, whose size in bytes layer_scratch returns.
        attention_scratch: float32 [attention_floats].
        count: the number of layers.
        next: the first layer that was not computed.
        threads: the number of threads to use.
        adapted: an AdaptedRows, whose tables have PARTS entries for each of the layers. Null if no
            row has an adapter.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "attention", "keys", "values")),
        *((name, _POINTER) for name in ("states", "rows", "x", "y")),
        *((name, _POINTER) for name in ("cos", "sin", "scratch", "attention_scratch")),
        *((name, _INT) for name in ("attention_floats", "tokens", "count", "next", "threads")),
        ("adapted", _POINTER),
    )


class StateRows(ctypes.Structure):
    """A step's requests, and where each one's state is. Mirrors the struct in src/calls.h.

    Attributes:
        starts: int64 [R], the position of each request's first row. At 0 its state is zeros,
            whatever its slot holds.
        counts: int64 [R], the number of rows of each request. A request without rows keeps its
            state.
        slots: int64 [R], the slot of each request's state. No two requests have the same.
        num_requests: R.
        num_rows: T. Rows beyond those of all requests are padding.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("starts", "counts", "slots")),
        *((name, _INT) for name in ("num_requests", "num_rows")),
    )


class LayerStates(ctypes.Structure):
    """The states of one layer, of all slots. Mirrors the struct in src/calls.h.

    Attributes:
        inputs: [slots, channels, inputs_width], the last inputs of its convolution, the newest
            last. inputs_dtype: the layer's type, or FLOAT32.
        matrices: float32 [slots, H, K, V], of a delta net; or null.
        inputs_stride, matrices_stride: the distances between slots, in elements.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("inputs", "matrices")),
        *((name, _INT) for name in ("inputs_stride", "matrices_stride")),
        *((name, _INT) for name in ("inputs_width", "inputs_dtype")),
    )


class RecurrentCall(ctypes.Structure):
    """A layer's recurrence in a step. Mirrors the struct in src/calls.h.

    Attributes:
        rows: the address of the step's StateRows.
        states: the address of the layer's LayerStates.
        projected: [T, width], what the first layers made. It may be changed.
        output: [T, width of the output layer's input], contiguous.
        scratch: recurrent_scratch says how many bytes a token needs.
    """

    _fields_ = (
        *((name, _POINTER) for name in ("rows", "states", "projected", "output", "scratch")),
        ("threads", _INT),
    )


class ConvolutionCall(ctypes.Structure):
    """A causal convolution of each channel with its own weights. Mirrors the struct in src/calls.h.

    Attributes:
        x: [T, C]. The stride is the distance between rows, in elements.
        y: [T, C], contiguous.
        weight: [C, width], the newest input's last. bias: [C], or null.
        state: [slots, C, state_width], the last inputs, the newest last. The stride is the distance
            between slots, in elements.
        width: 2 to 8. state_width: width - 1 to 8.
        dtype: FLOAT32 or BFLOAT16, the type of x, y, weight and bias.
        state_dtype: the same, or FLOAT32.
        silu: whether SiLU follows.
    """

    _fields_ = (
        ("rows", StateRows),
        *((name, _POINTER) for name in ("x", "y", "weight", "bias", "state")),
        *((name, _INT) for name in ("x_stride", "slot_stride")),
        *((name, _INT) for name in ("channels", "width", "state_width")),
        *((name, _INT) for name in ("dtype", "state_dtype", "silu", "threads")),
    )


class DeltaRuleCall(ctypes.Structure):
    """A gated delta rule. Mirrors the struct in src/calls.h.

    Attributes:
        query, key: [T, Hk, K]; value: [T, H, V]. The rest of a row is contiguous; the strides are
            the distances between rows, in elements. Each Hk serves H / Hk consecutive heads.
        decay: float32 [T, H, decay_dim], the logarithms of what is left of a state, at most 0.
        beta: float32 [T, H], how much of a correction is written.
        output: [T, H, V], contiguous.
        state: float32 [slots, H, K, V]. The stride is the distance between slots, in elements.
        num_key_heads, num_heads, key_dim, value_dim: Hk, H, K and V.
        decay_dim: 1 or K.
        normed: whether queries and keys are first divided by their lengths.
        dtype: FLOAT32 or BFLOAT16, the type of query, key, value and output.
    """

    _fields_ = (
        ("rows", StateRows),
        *((name, _POINTER) for name in ("query", "key", "value", "decay", "beta")),
        *((name, _POINTER) for name in ("output", "state")),
        *((f"{name}_stride", _INT) for name in ("query", "key", "value", "slot")),
        *((name, _INT) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim")),
        *((name, _INT) for name in ("decay_dim", "normed", "dtype", "threads")),
    )


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded kernels.

    Attributes:
        isa: the instruction set in use.
        lacks: a better instruction set that this processor has, but that the library was not built
            for. None if there is none.
        attention: takes an AttentionCall by reference. Returns 0, or, if the scratch memory is too
            small, the number of floats that it needs, without having done anything.
        linear_size, linear_pack, linear_rows, linear: packed linear layers; see the last lines of
            src/library.cpp, and `engine.models.formats.native`, which calls them.
        norm, gate, heads, add: the operations between a model's matrix products as separate
            functions, for the comparison with the model; see src/elementwise.cpp, and
            `engine.models.native_layer`, which calls them.
        low_rank: what adapters add to a product; see src/low_rank.cpp, and
            `engine.models.low_rank`, which calls it.
        layer_scratch: takes a LayerSpec by reference and a number of tokens. Returns how many bytes
            of scratch memory they need, which is proportional to the number of tokens.
        layers: takes a LayersCall by reference. Returns 0, or the number of floats of scratch
            memory that the attention of the next layer needs. In that case, call it again with that
            much.
        greedy: the most likely tokens; see src/greedy.cpp, and `engine.sampling.greedy`.
        draw: tokens drawn at a temperature; see src/draw.cpp, and `engine.sampling.drawing`.
        convolution: takes a ConvolutionCall by reference; see `engine.models.recurrence`.
        delta_rule: takes a DeltaRuleCall by reference; see `engine.models.recurrence`.
        recur, gated_norm, recurrent_scratch: a layer's recurrence as separate functions, for the
            comparison with the model; see src/recurrent.cpp, and `engine.models.native_layer`.
    """

    isa: str
    lacks: str | None
    attention: Any  # a ctypes function has no better type
    linear_size: Any
    linear_pack: Any
    linear_rows: Any
    linear: Any
    norm: Any
    gate: Any
    heads: Any
    add: Any
    low_rank: Any
    layer_scratch: Any
    layers: Any
    greedy: Any
    draw: Any
    convolution: Any
    delta_rule: Any
    recur: Any
    gated_norm: Any
    recurrent_scratch: Any

    def slower(self) -> str:
        """Return a line for the log if the processor has a better instruction set, otherwise an
        empty string.
        """
        if self.lacks is None:
            return ""
        return (
            f"the native kernels use {self.isa}, and this processor has {self.lacks}, which the "
            f"compiler that built them does not know: with g++ 11 or newer, {_REBUILD}"
        )


class NativeUnavailableError(Exception):
    """The kernels cannot be used here. The message says why, and what to do."""


def load_library(path: Path = LIBRARY) -> NativeLibrary:
    """Load the kernels. torch must have been imported, because its OpenMP threads are used.

    Raises:
        NativeUnavailableError: the kernels were not built, were built from other sources, or cannot
            run on this processor.
    """
    if not path.exists():
        raise NativeUnavailableError(
            f"the native kernels were not built; where g++ 11 or newer is, {_REBUILD}"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(
            f"the native kernels cannot be loaded ({error}); {_REBUILD}"
        ) from error
    library.headrace_fingerprint.restype = ctypes.c_char_p
    library.headrace_isa.restype = ctypes.c_char_p
    if library.headrace_fingerprint().decode() != fingerprint():
        raise NativeUnavailableError(
            f"the native kernels were built from other sources; {_REBUILD}"
        )
    isa = library.headrace_isa()
    if isa is None:
        raise NativeUnavailableError("the native kernels need AVX2, which this processor lacks")
    library.headrace_lacks.restype = ctypes.c_char_p
    lacks = library.headrace_lacks()
    attention = library.headrace_attention
    attention.argtypes = (ctypes.POINTER(AttentionCall),)
    attention.restype = ctypes.c_int64
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    library.headrace_linear_size.restype = ctypes.c_int64
    library.headrace_layer_scratch.argtypes = (ctypes.POINTER(LayerSpec), ctypes.c_int64)
    library.headrace_layers.argtypes = (ctypes.POINTER(LayersCall),)
    for name in ("layer_scratch", "layers", "recurrent_scratch"):
        getattr(library, f"headrace_{name}").restype = ctypes.c_int64
    return NativeLibrary(
        isa=isa.decode(),
        lacks=None if lacks is None else lacks.decode(),
        attention=attention,
        linear_size=library.headrace_linear_size,
        linear_pack=library.headrace_linear_pack,
        linear_rows=library.headrace_linear_rows,
        linear=library.headrace_linear,
        norm=library.headrace_norm,
        gate=library.headrace_gate,
        heads=library.headrace_heads,
        add=library.headrace_add,
        low_rank=library.headrace_low_rank,
        layer_scratch=library.headrace_layer_scratch,
        layers=library.headrace_layers,
        greedy=library.headrace_greedy,
        draw=library.headrace_draw,
        convolution=library.headrace_convolution,
        delta_rule=library.headrace_delta_rule,
        recur=library.headrace_recur,
        gated_norm=library.headrace_gated_norm,
        recurrent_scratch=library.headrace_recurrent_scratch,
    )
