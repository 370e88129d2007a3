"""From a scheduled batch to the flat ragged arrays of one step.

request   a        b        c             requests that compute one token come first
tokens    a7       b3       c0 c1 c2      token_ids, T = 5
position  7        3        0  1  2       positions
sampled   0        1              4       logit_rows: the last token of each request that samples

A step in which every request computes one token may take the decode path; others take the path for
varying lengths. Padding goes behind the last request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.base import BatchLayout
from engine.batch import ScheduledBatch, ScheduledRequest
from engine.request import PENDING_TOKEN, Request
from engine.runner.options import RunnerOptions, StepPath
from engine.types import RequestKey, TokenId


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The prompt tokens of one request whose log-probabilities a step finds.

    Attributes:
        key: the request.
        top_n: how many candidates to report with each.
        targets: the tokens that stand behind the computed ones, as far as the prompt goes.
    """

    key: RequestKey
    top_n: int
    targets: tuple[TokenId, ...]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs on the host.

    Attributes:
        path: by which way it is computed.
        num_tokens: its tokens, padding not counted.
        token_ids, positions: int64 [T], padding included: token 0 at position 0.
        logit_rows: int64 [S + P], which tokens' logits are wanted: of the S requests that sample,
            then of P prompt tokens.
        sampling: the S requests.
        prompts: what the P prompt tokens belong to, in order.
        layouts: one per layer group.
        carried: the tokens that are not on the host yet, as 0 in token_ids: (token, the request
            for which the step before this one samples it).
    """

    path: StepPath
    num_tokens: int
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    logit_rows: npt.NDArray[np.int64]
    sampling: tuple[Request, ...]
    prompts: tuple[PromptRows, ...]
    layouts: tuple[BatchLayout, ...]
    carried: tuple[tuple[int, RequestKey], ...] = ()


def build_input_batch(
    batch: ScheduledBatch, num_groups: int, block_size: int, options: RunnerOptions
) -> InputBatch:
    """Lay a batch out. Its requests are ordered: those that compute one token first."""
    parts = batch.requests
    starts = np.fromiter((part.start for part in parts), dtype=np.int64, count=len(parts))
    counts = np.fromiter((part.num_tokens for part in parts), dtype=np.int64, count=len(parts))
    ends = np.cumsum(counts)
    num_decodes = int(np.count_nonzero(counts == 1))
    num_tokens = batch.num_tokens
    num_padding = -num_tokens % options.q_interval if options.q_interval else 0
    token_ids = np.zeros(num_tokens + num_padding, dtype=np.int64)
    token_ids[:num_decodes] = [part.request.token_ids[part.start] for part in parts[:num_decodes]]
    pending = np.flatnonzero(token_ids[:num_decodes] == PENDING_TOKEN).tolist()
    token_ids[pending] = 0
    for part, end in zip(parts[num_decodes:], ends[num_decodes:].tolist(), strict=True):
        stop = part.start + part.num_tokens
        token_ids[end - part.num_tokens : end] = part.request.token_ids[part.start : stop]
    positions = np.arange(num_tokens) + np.repeat(starts - (ends - counts), counts)
    samples = np.fromiter((part.samples for part in parts), dtype=np.bool_, count=len(parts))
    logit_rows = (ends - 1)[samples]
    prompts = []
    for index, part in enumerate(parts):
        rows = _prompt_rows(part)
        if rows is not None:
            first = ends[index] - counts[index]
            logit_rows = np.append(logit_rows, np.arange(first, first + len(rows.targets)))
            prompts.append(rows)
    layouts = tuple(
        BatchLayout(
            starts=starts,
            counts=counts,
            num_decodes=num_decodes,
            positions=positions,
            tables=_stack_tables(parts, group),
            block_size=block_size,
            num_padding=num_padding,
            kv_interval=options.kv_interval,
        )
        for group in range(num_groups)
    )
    return InputBatch(
        path=_path(starts, num_decodes == len(parts), block_size, options),
        num_tokens=num_tokens,
        token_ids=token_ids,
        positions=np.append(positions, np.zeros(num_padding, np.int64))
        if num_padding
        else positions,
        logit_rows=logit_rows,
        sampling=tuple(part.request for part in parts if part.samples),
        prompts=tuple(prompts),
        layouts=layouts,
        carried=tuple((row, parts[row].request.key) for row in pending),
    )


def _path(
    starts: npt.NDArray[np.int64], is_decode: bool, block_size: int, options: RunnerOptions
) -> StepPath:
    if is_decode and int(starts.max()) // block_size < options.max_decode_blocks:
        return StepPath.DECODE
    return StepPath.VARLEN


def _prompt_rows(part: ScheduledRequest) -> PromptRows | None:
    """What a part finds of its prompt's log-probabilities; None if nothing is wanted."""
    spec = part.request.spec
    if spec.prompt_logprobs is None:
        return None
    targets = spec.prompt[part.start + 1 : part.start + 1 + part.num_tokens]
    return PromptRows(part.request.key, spec.prompt_logprobs, targets) if targets else None


def _stack_tables(parts: Sequence[ScheduledRequest], group: int) -> npt.NDArray[np.int32]:
    """The requests' block tables of one group as rows, padded with the null block."""
    tables = [part.tables[group] for part in parts]
    width = max(table.length for table in tables)
    stacked = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in enumerate(tables):
        stacked[row, : table.length] = table.blocks[: table.length]
    return stacked
