"""Launches the Triton kernels of one layer as a single torch operation.

With `headrace::triton_attention`, a compiler or a stand-in for CUDA graphs sees a single call and
the tensors that it writes.

Tile sizes come from a table. Autotuning would stall requests at serving time, and could round a
request's results differently in another run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from engine.attention.triton_kernels.decode import decode_kernel, merge_kernel
from engine.attention.triton_kernels.prefill import prefill_kernel
from engine.attention.triton_kernels.write import write_kernel
from engine.native.torch_library import operation, writes_nothing

_LOG2E = 1.4426950408889634
_HELD = ((1 << 10, 3, 168), (1 << 11, 3, None), (1 << 13, 2, 255))
"""Register limits of decode programs, by tile size.

Each entry is (maximum elements of a program's queries, number of such programs for which a
multiprocessor's 64k registers suffice, maximum registers per thread). The last is None where the
compiler stays low enough without a limit. With compute capability 9.0, the compiler spills some
registers if it has no limit, rather than use a few more than would let another program run. It also
spills if the limit is 168 and it needs all 168.
"""
_PART, _PARTS = 128, 4
"""BLOCK_D and the number of parts, for keys that are read in parts. See `Tiles.columns`."""
_FUSES = True
"""Whether a multiplication and an addition are fused. Every launch sets this, because Triton's
default depends on its version and on the environment.
"""
OVERLAPS = True
"""If False, no kernel starts before the previous one has ended, even if the device supports it."""
_SHARED_SLACK = 8 << 10
"""Bytes of shared memory that the compiler may need in addition to the tiles."""
_SCHEMA = (
    "triton_attention(Tensor query, Tensor? key, Tensor? value, Tensor(a!) keys, "
    "Tensor(b!) values, Tensor(c!) output, Tensor slot_mapping, Tensor cu_seqlens, Tensor starts, "
    "Tensor counts, "
    "Tensor table_offsets, Tensor extent, Tensor entries, Tensor? sinks, int block_size, "
    "int window, int most_cuts, int decode_rows, int prefill_rows, float scaling, float? softcap) "
    "-> ()"
)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSize:
    """The device properties that determine a launch. Each device has one object, which equals
    itself alone, so that what depends on it can be looked up quickly.

    Attributes:
        processors: the number of multiprocessors.
        shared_memory: the maximum bytes of shared memory for one program.
        overlaps: whether a kernel may start before the previous one has ended; see
            `triton_kernels.overlap`.
    """

    processors: int
    shared_memory: int
    overlaps: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The constants of a launch. They equal themselves alone, as a DeviceSize does.

    Attributes:
        rows: BLOCK_M, a program's query rows: tokens times the query heads of a key/value head.
        keys: BLOCK_N, the number of keys that are read at a time.
        warps: the number of warps per program.
        depth: the number of tiles of keys and values that are loaded while one is computed.
        programs: the number of programs for which a multiprocessor has registers (1 if unknown).
        registers: the maximum registers per thread, or None if the compiler decides.
        columns: BLOCK_V if several programs split a tile's values and read keys in parts. 0 if one
            program computes all values and reads whole keys.
    """

    rows: int
    keys: int
    warps: int
    depth: int
    programs: int = 1
    registers: int | None = None
    columns: int = 0

    @property
    def stages(self) -> int:
        """The number of pipeline stages for the compiler.

        A tile's address is itself loaded from the block table, so the compiler has to spread its
        stages over two dependent loads.
        """
        return 2 * self.depth + 1


HOPPER = DeviceSize(processors=132, shared_memory=227 << 10)


@cache
def choose_tiles(
    *, groups: int, dim: int, value_dim: int, itemsize: int, is_decode: bool, size: DeviceSize
) -> Tiles:
    """Choose the tiles for a layer.

    Args:
        groups: query heads per key/value head.
        dim, value_dim: head sizes, padded to powers of two.
        itemsize: bytes per element.
        is_decode: whether the tiles are for requests with one token.
        size: the properties of the device.
    """
    widest = max(dim, value_dim)
    fewest = max(16, _padded(groups))
    if not is_decode and itemsize == 2 and dim == _PARTS * _PART and fewest <= 128:
        columns = min(256, value_dim)
        shared = itemsize * (128 * dim + 64 * max(columns, 2 * _PART)) + _SHARED_SLACK
        if shared <= size.shared_memory:
            return Tiles(128, 64, 8, 0, columns=columns)
    if itemsize == 4:
        # Without tensor cores, products are unrolled one by one, so tiles are small.
        rows, keys, depth = (16 if is_decode or widest > 128 else 32), 32, 1
        keys = 32 if widest <= 128 else 16
    elif is_decode:
        rows, keys, depth = 16, (64 if widest <= 128 else 32), 2
    elif widest <= 256:
        rows, keys, depth = 128, 64, (2 if widest <= 128 else 1)
    else:
        rows, keys, depth = 64, 16, 1
    rows = max(rows, fewest)

    def fits() -> bool:
        found = _shared_bytes(
            Tiles(rows, keys, 0, depth),
            dim=dim,
            value_dim=value_dim,
            itemsize=itemsize,
            is_decode=is_decode,
        )
        return found <= size.shared_memory

    while not fits():
        if depth > 1:
            depth -= 1
        elif rows > max(fewest, 64):
            rows //= 2
        elif keys > 16:
            keys //= 2
        elif depth > 0:
            depth = 0
        else:
            break  # the compiler reports what it lacks
    if not is_decode or itemsize == 4:
        return Tiles(rows, keys, 8, depth)
    if rows > 32 or widest > 256:
        return Tiles(rows, keys, 8, depth, registers=255)
    held = next(one for one in _HELD if rows * widest <= one[0])
    return Tiles(rows, keys, 4, depth, programs=held[1], registers=held[2])


def _shared_bytes(tiles: Tiles, *, dim: int, value_dim: int, itemsize: int, is_decode: bool) -> int:
    """Estimate the shared memory of a program, in bytes."""
    # Tensor cores may read a tile while the next ones are loaded, so there is one tile more.
    loaded = (tiles.depth if is_decode else tiles.depth + 1) * tiles.keys * (dim + value_dim)
    return itemsize * (tiles.rows * (dim + tiles.keys) + loaded) + _SHARED_SLACK


def _padded(size: int) -> int:
    """Round up to a power of two, as required for a tile's sides."""
    return 1 << (size - 1).bit_length()


@cache
def decode_places(
    tiles: Tiles, *, dim: int, value_dim: int, itemsize: int, size: DeviceSize
) -> int:
    """Return how many decode programs run on a device at the same time."""
    tile = _shared_bytes(tiles, dim=dim, value_dim=value_dim, itemsize=itemsize, is_decode=True)
    fit = size.shared_memory // (tile - _SHARED_SLACK)
    return size.processors * max(1, min(tiles.programs, fit))


@cache
def device_size(device: torch.device) -> DeviceSize:
    """Return the size of a device, or that of an H100 for the interpreter, which runs on a CPU."""
    if device.type != "cuda":
        return HOPPER
    found = torch.cuda.get_device_properties(device)
    shared = found.shared_memory_per_block_optin  # type: ignore[attr-defined]  # no stub has it
    return DeviceSize(found.multi_processor_count, shared, OVERLAPS and found.major >= 9)


@operation(_SCHEMA, writes_nothing)
def triton_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    slot_mapping: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    table_offsets: torch.Tensor,
    extent: torch.Tensor,
    entries: torch.Tensor,
    sinks: torch.Tensor | None,
    block_size: int,
    window: int,
    most_cuts: int,
    decode_rows: int,
    prefill_rows: int,
    scaling: float,
    softcap: float | None,
) -> None:
    """Write the step's keys and values, and compute attention.

    Args:
        query: [Hq, T, D], in the cache's dtype, as are key and value.
        key: [Hkv, T, D]. If key and value are None, nothing is written to the cache.
        value: [Hkv, T, Dv].
        keys, values: the layer's cache, [num_slots, Hkv, D] and [num_slots, Hkv, Dv].
        output: [T, Hq, Dv], contiguous.
        slot_mapping, cu_seqlens, starts, counts, table_offsets, extent, entries: see `step_arrays`.
        sinks: [Hq].
        block_size: tokens per block.
        window: the sliding window, or 0 if there is none.
        most_cuts: the maximum number of cuts of a context, for which `entries` was made.
        decode_rows: how many of the first requests may have one token; above 0 if there is padding.
        prefill_rows: how many requests may have more than one token.
        scaling, softcap: see AttentionParams.
    """
    query = _rows_in_one_piece(query)
    heads, _, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    sizes = _sizes(kv_heads, dim, value_dim)
    layer = _layer(
        heads, kv_heads, dim, value_dim, block_size, window, softcap is not None, sinks is not None
    )
    # Scores are converted to units of log 2 after the softcap.
    scales = (scaling * _LOG2E, 1.0) if softcap is None else (scaling / softcap, softcap * _LOG2E)
    attention = _Attention(
        tensors=(query, keys, values, output),
        sinks=sinks,
        step=(cu_seqlens, starts, counts, table_offsets, extent, entries),
        scales=scales,
        layer=layer,
    )
    with _on_its_device(query):
        if key is not None and value is not None:
            key, value = _rows_in_one_piece(key), _rows_in_one_piece(value)
            write_kernel[(key.shape[1],)](
                *(key, value, keys, values, slot_mapping),
                *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
                BLOCK_H=_padded(kv_heads),
                **_told(query.device),
                **sizes,
            )
        if decode_rows:
            attention.decode(decode_rows, most_cuts)
        if prefill_rows:
            attention.prefill(prefill_rows)


@cache
def _sizes(kv_heads: int, dim: int, value_dim: int) -> Mapping[str, int]:
    """Return the constants that all kernels of a layer share."""
    return {
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(16, _padded(dim)),
        "BLOCK_V": max(16, _padded(value_dim)),
    }


@cache
def _layer(
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    block_size: int,
    window: int,
    softcap: bool,
    sinks: bool,
) -> Mapping[str, int]:
    """Return the constants that decode and prefill share. softcap, sinks: whether there are any."""
    return {
        **_sizes(kv_heads, dim, value_dim),
        "BLOCK_SIZE": block_size,
        "GROUPS": heads // kv_heads,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "SINKS": sinks,
    }


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer's attention, after keys and values are written.

    Attributes:
        tensors: query, keys, values, output.
        sinks: the sinks, or None.
        step: cu_seqlens, starts, counts, table_offsets, extent, entries.
        scales: the factors of scores before and after a softcap.
        layer: the constants shared by decode and prefill.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    sinks: torch.Tensor | None
    step: tuple[torch.Tensor, ...]
    scales: tuple[float, float]
    layer: Mapping[str, int]

    def decode(self, rows: int, limit: int) -> None:
        """Compute the requests with one token, at most `rows`, in at most `limit` cuts each."""
        query, _, _, output = self.tensors
        layer, (cu_seqlens, starts, counts, *rest) = self.layer, self.step
        kv_heads, groups, value_dim = layer["KV_HEADS"], layer["GROUPS"], layer["VALUE_DIM"]
        parts = (rows, kv_heads, limit, groups)
        partials = query.new_empty((*parts, value_dim), dtype=torch.float32)
        highests, totals = query.new_empty((2, *parts), dtype=torch.float32).unbind(0)
        tiles = self._tiles(is_decode=True)
        places = decode_places(
            tiles,
            dim=layer["BLOCK_D"],
            value_dim=layer["BLOCK_V"],
            itemsize=query.itemsize,
            size=device_size(query.device),
        )
        decode_kernel[(max(1, min(places // kv_heads, rows * limit)), kv_heads)](
            *(*self.tensors, partials, highests, totals, self.sinks),
            *(cu_seqlens, starts, *rest),
            *(query.shape[1], *self.scales, query.stride(0), query.stride(1)),
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            MAX_CUTS=limit,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
            **_told(query.device),
            **layer,
        )
        merge_kernel[(rows, kv_heads * groups)](
            *(output, partials, highests, totals, self.sinks, cu_seqlens, starts, counts),
            WINDOW=layer["WINDOW"],
            SINKS=layer["SINKS"],
            HEADS=kv_heads * groups,
            GROUPS=groups,
            VALUE_DIM=value_dim,
            BLOCK_V=layer["BLOCK_V"],
            MAX_CUTS=limit,
            **_told(query.device),
        )

    def prefill(self, rows: int) -> None:
        """Compute the requests with more than one token, at most `rows`."""
        query = self.tensors[0]
        tiles = self._tiles(is_decode=False)
        block_q = tiles.rows // self.layer["GROUPS"]
        tokens, kv_heads = query.shape[1], self.layer["KV_HEADS"]
        blocks = {name: self.layer[name] for name in ("BLOCK_D", "BLOCK_V")}
        value_parts = 1
        if tiles.columns:
            value_parts = -(-blocks["BLOCK_V"] // tiles.columns)
            blocks = {"BLOCK_D": _PART, "BLOCK_V": tiles.columns}
        prefill_kernel[(tokens // block_q + rows, kv_heads, value_parts)](
            *(*self.tensors, self.sinks),
            *(*self.step, *self.scales, query.stride(0), query.stride(1)),
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            BLOCK_Q=block_q,
            IN_PARTS=tiles.columns > 0,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **_told(query.device),
            **{**self.layer, **blocks},
        )

    def _tiles(self, *, is_decode: bool) -> Tiles:
        query = self.tensors[0]
        return choose_tiles(
            groups=self.layer["GROUPS"],
            dim=self.layer["BLOCK_D"],
            value_dim=self.layer["BLOCK_V"],
            itemsize=query.itemsize,
            is_decode=is_decode,
            size=device_size(query.device),
        )


def try_out(device: torch.device) -> None:
    """Compile and launch the smallest kernel, to detect missing tools before a model runs.

    Raises whatever Triton and its compilers raise.
    """
    step = torch.zeros((1, 1, 16), device=device)
    cache = torch.zeros((1, 16), device=device)
    slot_mapping = torch.zeros(1, dtype=torch.int64, device=device)
    strides = (16, 16, 16, 16)
    sizes = {"KV_HEADS": 1, "DIM": 16, "VALUE_DIM": 16, "BLOCK_D": 16, "BLOCK_V": 16}
    with _on_its_device(step):
        write_kernel[(1,)](
            *(step, step, cache, cache, slot_mapping, *strides),
            BLOCK_H=1,
            **_told(device),
            **sizes,
        )
    cache.sum().item()  # wait for the end, so that a failure shows now


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], warps: int, **constants: object
) -> None:
    """Launch a kernel on the device of its first argument. Products and sums are not fused, unless
    the constants say so.
    """
    tensor: torch.Tensor = arguments[0]
    with _on_its_device(tensor):
        kernel[grid](
            *arguments,
            num_warps=warps,
            **{**_told(tensor.device), "enable_fp_fusion": False, **constants},
        )


def _told(device: torch.device) -> dict[str, bool]:
    """Return the options common to all launches."""
    overlaps = device_size(device).overlaps
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps, "enable_fp_fusion": _FUSES}


def _on_its_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, because Triton launches on the current device."""
    guard: AbstractContextManager[object] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard


def _rows_in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if the elements of one head and token are not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
