"""Converts a scheduled batch to the flat ragged arrays of one step.

request   a     b        c          requests that compute one token come first
tokens    a7    b3 b4'   d0 d1 d2   token_ids, T = 6; b4' is a draft
position  7     3  4     0  1  2    positions
sampled   0     1  2           5    logit_rows: those of the sampled rows

To the attention, the rows are requests: a, b, b and c here. A draft reads the cache in a row of its
own, as the next step's token would, so that its sums are the same. A step whose rows all have one
token may take the decode path. Other steps take the path for varying lengths. Padding comes after
the last row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.interface import BatchLayout
from engine.contract.adapters import AdapterRows
from engine.contract.request import PENDING_TOKEN, Request
from engine.contract.rope import RopeLengths, with_lengths
from engine.contract.types import RequestKey, TokenId
from engine.kv_cache.block_table import BlockTable
from engine.runner.runner_options import RunnerOptions, StepPath
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The prompt tokens of one request for which a step computes log-probabilities.

    Attributes:
        key: the request.
        top_n: the number of candidates to report with each token.
        targets: the tokens that follow the computed ones, up to the end of the prompt.
    """

    key: RequestKey
    top_n: int
    targets: tuple[TokenId, ...]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs on the host.

    Attributes:
        path: the path that computes it.
        num_tokens: the number of tokens, without padding.
        token_ids, positions: int64 [T], including padding, which is token 0 at position 0.
            Positions may carry a length (see `engine.contract.rope`).
        logit_rows: int64 [S + P], the tokens whose logits are needed: those of the S sampled rows,
            then P prompt tokens.
        wants_all_rows: whether these are all tokens in order, so that no rows need to be selected.
        sampling: the requests of the S rows.
        lengths: how many of the request's tokens come before the one sampled from each of the rows.
        prompts: the requests of the P prompt tokens, in order.
        layouts: one per layer group.
        adapters: the rows whose requests have adapters; None: no request has one.
        carried: tokens that are not on the host yet and are 0 in token_ids: (index of the token,
            the request for which the previous step samples it).
    """

    path: StepPath
    num_tokens: int
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    logit_rows: npt.NDArray[np.int64]
    wants_all_rows: bool
    sampling: tuple[Request, ...]
    lengths: Sequence[int]
    prompts: tuple[PromptRows, ...]
    layouts: tuple[BatchLayout, ...]
    adapters: AdapterRows | None = None
    carried: tuple[tuple[int, RequestKey], ...] = ()


class InputBatchBuilder:
    """Prepares the inputs of batches.

    Consecutive decode steps often have the same requests. So arrays that do not change are reused,
    and block tables are stacked again only if one has changed. Therefore, the arrays of a batch
    must not be written to.
    """

    def __init__(
        self,
        num_groups: int,
        block_size: int,
        options: RunnerOptions,
        rope: RopeLengths | None = None,
    ) -> None:
        """Create a builder.

        Args:
            num_groups: the number of layer groups.
            block_size: the number of tokens in a block.
            options: for paths and padding.
            rope: how rotary frequencies depend on a request's length, or None if they do not.
        """
        self._block_size = block_size
        self._options = options
        self._rope = rope
        self._tables = tuple(StackedTables(group) for group in range(num_groups))
        self._ones = np.ones(0, dtype=np.int64)
        self._rows = np.arange(0, dtype=np.int64)

    def build(self, batch: ScheduledBatch) -> InputBatch:
        """Prepare a batch's inputs. Its requests must be in order: those that compute one token
        come first.
        """
        parts, options = batch.requests, self._options
        rows = parts
        if batch.num_tokens > len(parts) and any(part.drafts for part in parts):
            rows = tuple([row for part in parts for row in _rows(part)])
        places = [row.start for row in rows]
        starts = np.array(places, dtype=np.int64)
        is_decode = rows[-1].num_tokens == 1
        if is_decode:
            counts, last_rows = self._decode_counts(len(rows))
            num_decodes, positions = len(rows), starts
        else:
            counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
            ends = np.cumsum(counts)
            last_rows = ends - 1
            num_decodes = int(np.count_nonzero(counts == 1))
            positions = np.arange(batch.num_tokens) + np.repeat(starts - (ends - counts), counts)
        num_tokens = batch.num_tokens
        num_padding = -num_tokens % options.q_interval if options.q_interval else 0
        token_ids, pending = _token_ids(batch, num_tokens + num_padding)
        sampling = tuple([row.request for row in rows if row.num_sampled])
        logit_rows, lengths = last_rows, starts + counts
        if len(sampling) != len(rows):
            sampled = [row.num_sampled > 0 for row in rows]
            logit_rows, lengths = last_rows[sampled], lengths[sampled]
        prompts: tuple[PromptRows, ...] = ()
        if any(row.request.spec.prompt_logprobs is not None for row in rows):
            prompts, prompt_rows = _prompts(rows, last_rows.tolist())
            logit_rows = np.concatenate((logit_rows, *prompt_rows))
        fits_decode = is_decode and max(places) // self._block_size < options.max_decode_blocks
        layouts = tuple(
            [
                BatchLayout(
                    starts=starts,
                    counts=counts,
                    num_decodes=num_decodes,
                    positions=positions,
                    tables=tables.stack(rows),
                    block_size=self._block_size,
                    num_padding=num_padding,
                    kv_interval=options.kv_interval,
                )
                for tables in self._tables
            ]
        )
        position_ids = positions
        if self._rope is not None:
            rope_lengths = np.array([row.request.rope_length for row in rows], dtype=np.int64)
            rope_lengths = np.repeat(rope_lengths, counts)
            position_ids = with_lengths(positions, rope_lengths, self._rope.original)
        adapters = [row.request.adapter for row in rows]
        return InputBatch(
            path=StepPath.DECODE if fits_decode else StepPath.VARLEN,
            num_tokens=num_tokens,
            token_ids=token_ids,
            positions=np.append(position_ids, np.zeros(num_padding, np.int64))
            if num_padding
            else position_ids,
            logit_rows=logit_rows,
            # Comparing the numbers of rows and tokens would not be enough: prompt rows come after
            # the sampled ones.
            wants_all_rows=len(sampling) == len(token_ids),
            sampling=sampling,
            lengths=lengths.tolist(),
            prompts=prompts,
            layouts=layouts,
            adapters=AdapterRows.of(adapters, counts) if any(adapters) else None,
            carried=tuple([(row, rows[row].request.key) for row in pending]),
        )

    def _decode_counts(self, num_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the counts and indices of rows of one token each: int64 [R]."""
        if num_rows > len(self._ones):
            self._ones = np.ones(num_rows, dtype=np.int64)
            self._rows = np.arange(num_rows, dtype=np.int64)
        return self._ones[:num_rows], self._rows[:num_rows]


class StackedTables:
    """The block tables of a step's rows in one group, as an array."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._tables: list[BlockTable] = []
        self._state: list[tuple[int, int, int]] = []
        self._stacked = np.zeros((0, 0), dtype=np.int32)

    def stack(self, rows: Sequence[ScheduledRequest]) -> npt.NDArray[np.int32]:
        """Return int32 [R, blocks of the longest], padded with the null block.

        If nothing has changed, this is the array of the last call. If the requests are the same,
        only rows that have changed are read again, which halves the time with 256 requests.
        """
        tables = [row.tables[self._group] for row in rows]
        # Entries change by appending, by release from the front, and by cutting, when drafts were
        # wrong. Tables of slots lose entries otherwise; of them only the first is read, which
        # never changes.
        state = [(table.length, table.released, table.num_cuts) for table in tables]
        is_same = tables == self._tables
        if is_same and state == self._state:
            return self._stacked
        stacked = np.zeros((len(tables), max(table.length for table in tables)), dtype=np.int32)
        changed: Iterable[int] = range(len(tables))
        if is_same:
            width = min(stacked.shape[1], self._stacked.shape[1])
            stacked[:, :width] = self._stacked[:, :width]
            changed = [row for row in changed if state[row] != self._state[row]]
        for row in changed:
            table = tables[row]
            stacked[row, : table.length] = table.blocks[: table.length]
        self._tables, self._state, self._stacked = tables, state, stacked
        return stacked


def _rows(part: ScheduledRequest) -> Sequence[ScheduledRequest]:
    """Divide a request's part with drafts into rows of one token."""
    if not part.drafts:
        return (part,)
    return [
        part._replace(start=start, num_sampled=1, drafts=())
        for start in range(part.start, part.start + part.num_rows)
    ]


def _token_ids(batch: ScheduledBatch, length: int) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return the step's tokens, int64 [length], padded with 0, and the indices of pending tokens,
    which are also 0.
    """
    parts = batch.requests
    known: list[int] = []
    if batch.num_tokens == len(parts):  # the usual decode step, at half the cost
        known = [part.request.token_ids[part.start] for part in parts]
    else:
        for part in parts:
            known += part.request.token_ids[part.start : part.start + part.num_tokens]
            known += part.drafts
    pending: list[int] = []
    if PENDING_TOKEN in known:
        pending = [row for row, token in enumerate(known) if token == PENDING_TOKEN]
        for row in pending:
            known[row] = 0
    known += [0] * (length - len(known))
    return np.array(known, dtype=np.int64), pending


def _prompts(
    rows: Sequence[ScheduledRequest], last_rows: Sequence[int]
) -> tuple[tuple[PromptRows, ...], list[npt.NDArray[np.int64]]]:
    """Return the prompt tokens for which a step computes log-probabilities, and their indices.

    last_rows: the index of each row's last token among the step's tokens.
    """
    prompts, places = [], []
    for row, last in zip(rows, last_rows, strict=True):
        spec = row.request.spec
        if spec.prompt_logprobs is None:
            continue
        targets = spec.prompt[row.start + 1 : row.start + 1 + row.num_tokens]
        if targets:
            prompts.append(PromptRows(row.request.key, spec.prompt_logprobs, targets))
            first = last - row.num_tokens + 1
            places.append(np.arange(first, first + len(targets)))
    return tuple(prompts), places
