"""Recurrences of the rows of many requests, with the kernels of `engine.native`.

    short_convolution   x [T, C] ─────────────┬─ the last inputs of each channel ─▶ y [T, C]
    gated_delta_rule    q, k, v, decay, beta ─┴─ a matrix for each head ──────────▶ o [T, H, V]

A step's rows lie one request after the other. Each request has a slot in which its state is read
and written, and a request whose first row is at position 0 begins with zeros, whatever its slot
holds. A request's results and state depend on its own rows alone, and on how its steps divide them
only within `GRID` positions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from engine.models.formats.native import DTYPES, native_library
from engine.native.library import ConvolutionCall, DeltaRuleCall, StateRows
from engine.native.torch_library import operation

GRID = 64
"""Steps that are cut at multiples of this many positions have the bits of those that are not."""
WIDEST = 8
"""The largest number of weights of a channel, and of inputs that a convolution's state holds."""


def _like_x(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _like_value(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> torch.Tensor:
    return value.new_empty(value.shape)


@operation(
    "short_convolution(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor(a!) state, "
    "Tensor starts, Tensor counts, Tensor slots) -> Tensor",
    _like_x,
)
def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    state: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Convolve each channel with its own weights: [T, C] → [T, C].

    Args:
        x: [T, C], float32 or bfloat16. Rows beyond those of all requests are padding.
        weight: [C, 2 to 8], the newest input's weight last.
        bias: [C], or None if there is none.
        silu: whether SiLU follows.
        state: [slots, C, S], the last S inputs of each request, the newest last. S is at least the
            number of weights - 1. Its type is x's, or float32. Each slot is contiguous.
        starts: int64 [R], the position of each request's first row.
        counts: int64 [R], the number of rows of each request.
        slots: int64 [R], each request's slot. No two are the same.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    channels, width = weight.shape
    kept = state.shape[-1]
    _check(
        x.dim() == 2 and x.shape[1] == channels,
        lambda: f"x is {list(x.shape)}, for {channels} channels",
    )
    _check(2 <= width <= WIDEST, lambda: f"{width} weights: 2 to {WIDEST} are supported")
    _check(width - 1 <= kept <= WIDEST, lambda: f"a state of {kept} inputs, for {width} weights")
    _check(weight.dtype is x.dtype, lambda: f"x is {x.dtype}, and its weights are {weight.dtype}")
    _check(
        state.dtype in (x.dtype, torch.float32),
        lambda: f"x is {x.dtype}, and its state {state.dtype}",
    )
    check_state(state, (channels, kept))
    x = x if x.stride(1) == 1 else x.contiguous()
    weight, bias = weight.contiguous(), None if bias is None else bias.to(x.dtype).contiguous()
    y = x.new_empty(x.shape)
    call = ConvolutionCall(
        rows=state_rows(len(x), len(state), starts, counts, slots),
        x=x.data_ptr(),
        y=y.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        state=state.data_ptr(),
        x_stride=x.stride(0),
        slot_stride=state.stride(0),
        channels=channels,
        width=width,
        state_width=kept,
        dtype=DTYPES[x.dtype],
        state_dtype=DTYPES[state.dtype],
        silu=silu,
        threads=torch.get_num_threads(),
    )
    native_library().convolution(ctypes.byref(call))
    return y


@operation(
    "gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, "
    "bool normed, Tensor(a!) state, Tensor starts, Tensor counts, Tensor slots) -> Tensor",
    _like_value,
)
def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    normed: bool,
    state: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Compute a gated delta rule: [T, Hk, K], [T, Hk, K], [T, H, V] → [T, H, V].

    Args:
        query, key: [T, Hk, K], float32 or bfloat16. Each serves H / Hk consecutive heads.
        value: [T, H, V].
        decay: [T, H], or [T, H, K] for one of each channel: the logarithm of what is left of the
            state, at most 0.
        beta: [T, H], how much of a correction is written.
        normed: whether queries and keys are first divided by their lengths.
        state: float32 [slots, H, K, V]. Each slot is contiguous.
        starts, counts, slots: see `short_convolution`.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    tokens, key_heads, key_dim = key.shape
    heads, value_dim = value.shape[1:]
    _check(
        query.shape == key.shape, lambda: f"queries {list(query.shape)}, and keys {list(key.shape)}"
    )
    _check(len(value) == tokens, lambda: f"{tokens} keys, and {len(value)} values")
    _check(heads % key_heads == 0, lambda: f"{heads} heads, for {key_heads} of keys")
    _check(
        query.dtype is key.dtype is value.dtype, lambda: "queries, keys and values differ in type"
    )
    decays = (tokens, heads) if decay.dim() == 2 else (tokens, heads, key_dim)
    _check(decay.shape == decays, lambda: f"decays of {list(decay.shape)}, not {list(decays)}")
    _check(beta.shape == (tokens, heads), lambda: f"beta of {list(beta.shape)}")
    _check(state.dtype is torch.float32, lambda: f"a state of {state.dtype}, not float32")
    check_state(state, (heads, key_dim, value_dim))
    query, key, value = map(_rows_in_one_piece, (query, key, value))
    decay, beta = decay.float().contiguous(), beta.float().contiguous()
    output = value.new_empty(value.shape)
    call = DeltaRuleCall(
        rows=state_rows(tokens, len(state), starts, counts, slots),
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        decay=decay.data_ptr(),
        beta=beta.data_ptr(),
        output=output.data_ptr(),
        state=state.data_ptr(),
        query_stride=query.stride(0),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        slot_stride=state.stride(0),
        num_key_heads=key_heads,
        num_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        decay_dim=1 if decay.dim() == 2 else key_dim,
        normed=normed,
        dtype=DTYPES[value.dtype],
        threads=torch.get_num_threads(),
    )
    native_library().delta_rule(ctypes.byref(call))
    return output


def check_state(state: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a state is not [slots, *shape], or a slot is not contiguous."""
    _check(
        state.shape[1:] == shape,
        lambda: f"a state of {list(state.shape)}, not [slots, *{list(shape)}]",
    )
    _check(
        state.is_contiguous() or state[0].is_contiguous(),
        lambda: "the elements of a slot are not contiguous",
    )


def state_rows(
    tokens: int, num_slots: int, starts: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor
) -> StateRows:
    """Return a step's requests for the kernels. The tensors must outlive the result.

    Args:
        tokens: the number of the step's rows.
        num_slots: the number of slots that states have.
        starts, counts, slots: see `short_convolution`.

    Raises:
        ValueError: the numbers do not fit each other.
    """
    for one in (starts, counts, slots):
        _check(one.dtype is torch.int64 and one.is_contiguous(), lambda: "int64 [R] is expected")
        _check(one.shape == slots.shape, lambda: "starts, counts and slots differ in length")
    # The kernel reads and writes where these numbers say.
    first, rows, used = starts.tolist(), counts.tolist(), slots.tolist()
    _check(
        all(one >= 0 for one in (*first, *rows)), lambda: f"starts {first}, counts {rows}: below 0"
    )
    _check(sum(rows) <= tokens, lambda: f"{sum(rows)} rows of requests, of {tokens} rows")
    _check(len(set(used)) == len(used), lambda: f"requests share a slot: {used}")
    _check(
        all(0 <= one < num_slots for one in used),
        lambda: f"slots are 0 to {num_slots - 1}: {used}",
    )
    return StateRows(
        starts=starts.data_ptr(),
        counts=counts.data_ptr(),
        slots=slots.data_ptr(),
        num_requests=len(slots),
        num_rows=tokens,
    )


def _rows_in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    _, across_heads, along = tensor.stride()
    is_whole = along == 1 and across_heads == tensor.shape[2]
    return tensor if is_whole else tensor.contiguous()


def _check(holds: bool, otherwise: Callable[[], str]) -> None:
    if not holds:
        raise ValueError(otherwise())
