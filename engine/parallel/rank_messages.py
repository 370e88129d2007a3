"""The messages from rank 0 to the other ranks of a tensor-parallel model. They are encoded with
msgpack and checked against their types on arrival. Nothing received is executed.

Begin(1) ─▶ all report their free memory ─▶ Allocate(1) ─▶ all allocate their shard of the cache
Copies(1), RankStep(1), RankStep(1), …            a step's block copies, and its prepared inputs
End

A Begin without an Allocate has no effect: rank 0 found that the cache does not fit.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from engine.attention.interface import BatchLayout
from engine.kv_cache.copies import StepCopies
from engine.runner.input_batch import InputBatch
from engine.runner.kv_tensors import CacheSize
from engine.runner.runner_options import StepPath


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A runner is being made. Runners that are not in the list of live ones are dropped, together
    with their caches.
    """

    runner: int
    live: tuple[int, ...]


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """The size of the runner's cache; see CacheSize."""

    runner: int
    block_size: int
    num_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]

    @classmethod
    def of(cls, runner: int, plan: CacheSize) -> Allocate:
        """Make the message from the size of a cache."""
        return cls(runner, plan.block_size, plan.num_blocks, plan.host_blocks)


class Copies(msgspec.Struct, frozen=True, tag=True):
    """Block copies, to be made before the next step computes anything."""

    runner: int
    copies: StepCopies


class RankStep(msgspec.Struct, frozen=True, tag=True):
    """One step's inputs. Arrays are sent as the bytes of int64 elements, or int32 for the tables.
    The fields are those of InputBatch and BatchLayout, with `tables` by layer group.
    """

    runner: int
    path: StepPath
    num_tokens: int
    token_ids: bytes
    positions: bytes
    logit_rows: bytes
    wants_all_rows: bool
    starts: bytes
    counts: bytes
    num_decodes: int
    tables: tuple[bytes, ...]
    block_size: int
    num_padding: int
    kv_interval: int

    @classmethod
    def of(cls, runner: int, inputs: InputBatch) -> RankStep:
        """Extract what the forward pass needs from a step's inputs. No token may be carried
        over.
        """
        first = inputs.layouts[0]
        return cls(
            runner=runner,
            path=inputs.path,
            num_tokens=inputs.num_tokens,
            token_ids=_bytes(inputs.token_ids),
            positions=_bytes(inputs.positions),
            logit_rows=_bytes(inputs.logit_rows),
            wants_all_rows=inputs.wants_all_rows,
            starts=_bytes(first.starts),
            counts=_bytes(first.counts),
            num_decodes=first.num_decodes,
            tables=tuple(layout.tables.tobytes() for layout in inputs.layouts),
            block_size=first.block_size,
            num_padding=first.num_padding,
            kv_interval=first.kv_interval,
        )

    def inputs(self) -> InputBatch:
        """Recreate the inputs, without those that only sampling needs."""
        positions = _array(self.positions)
        starts = _array(self.starts)
        counts = _array(self.counts)
        return InputBatch(
            path=self.path,
            num_tokens=self.num_tokens,
            token_ids=_array(self.token_ids),
            positions=positions,
            logit_rows=_array(self.logit_rows),
            wants_all_rows=self.wants_all_rows,
            sampling=(),
            lengths=(),
            prompts=(),
            layouts=tuple(
                BatchLayout(
                    starts=starts,
                    counts=counts,
                    num_decodes=self.num_decodes,
                    positions=positions[: self.num_tokens],
                    tables=np.frombuffer(table, dtype=np.int32).reshape(len(starts), -1).copy(),
                    block_size=self.block_size,
                    num_padding=self.num_padding,
                    kv_interval=self.kv_interval,
                )
                for table in self.tables
            ),
        )


class End(msgspec.Struct, frozen=True, tag=True):
    """There is nothing more to compute, so the other ranks end."""


Message = Begin | Allocate | Copies | RankStep | End


def _bytes(array: npt.NDArray[np.int64]) -> bytes:
    return array.astype(np.int64, copy=False).tobytes()


def _array(raw: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(raw, dtype=np.int64).copy()  # torch accepts only writable memory
