"""Batches laid out by one builder, step after step, are what a new builder makes of each."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.interface import BatchLayout
from engine.contract.request import Request
from engine.contract.types import BlockId
from engine.kv_cache.block_table import BlockTable
from engine.runner.input_batch import InputBatch, InputBatchBuilder
from engine.runner.runner_options import PLAIN, RunnerOptions
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest
from tests.engine.runner.steps import make_request

BLOCK = 4
Row = tuple[Request, tuple[BlockTable, ...]]


def assert_same(left: InputBatch, right: InputBatch) -> None:
    for one in fields(InputBatch):
        mine, other = getattr(left, one.name), getattr(right, one.name)
        if one.name == "layouts":
            for layout, expected in zip(mine, other, strict=True):
                for part in fields(BatchLayout):
                    np.testing.assert_array_equal(
                        getattr(layout, part.name), getattr(expected, part.name)
                    )
        else:
            np.testing.assert_array_equal(mine, other)


def schedule(rows: list[Row], *, chunk: tuple[int, int] | None = None) -> ScheduledBatch:
    """One decode step of each request; and of a prompt of 9 tokens, whose log-probabilities are
    wanted, a chunk.
    """
    parts = [
        ScheduledRequest(request, len(request.token_ids) - 1, 1, tables, num_sampled=1)
        for request, tables in rows
    ]
    if chunk is not None:
        (start, stop), (_, tables) = chunk, begin("p", 9, 900)
        spec = make_request("p", list(range(9)), 5, prompt_logprobs=0)
        samples = stop == 9
        parts.append(
            ScheduledRequest(
                Request(spec, 0.0, 14), start, stop - start, tables, num_sampled=int(samples)
            )
        )
    return ScheduledBatch(tuple(parts), sum(part.num_tokens for part in parts))


def begin(name: str, length: int, blocks: int) -> Row:
    request = Request(make_request(name, [7] * length, 50), 0.0, 100)
    count = -(-length // BLOCK)
    ids = [BlockId(blocks + index) for index in range(count)]
    return request, (BlockTable(0, ids), BlockTable(0, [BlockId(one + 500) for one in ids]))


EVENTS = ("step", "step", "join", "leave", "replace", "window", "chunk", "end of a prompt")


@given(st.lists(st.sampled_from(EVENTS), max_size=30), st.sampled_from((0, 4)))
def test_what_is_kept_between_steps_is_right(events: list[str], padding: int) -> None:
    options = RunnerOptions(q_interval=padding)
    builder = InputBatchBuilder(2, BLOCK, options)
    rows = [begin("first", 6, 1)]
    for number, event in enumerate(events):
        if event == "join":
            rows.append(begin(f"r{number}", 1 + number % 7, 10 * number + 10))
        elif event == "leave" and len(rows) > 1:
            rows.pop(0)
        elif event == "replace":
            rows[0] = begin(f"r{number}", len(rows[0][0].token_ids), 10 * number + 10)
        elif event == "window":
            table = rows[-1][1][1]
            table.release_before(table.length - 1)
        for request, tables in rows:
            request.token_ids.append(number)  # type: ignore[arg-type]
            for table in tables:
                if table.length * BLOCK < len(request.token_ids):
                    table.extend([BlockId(1000 + number)])
        chunk = {"chunk": (2, 6), "end of a prompt": (6, 9)}.get(event)
        batch = schedule(rows, chunk=chunk)
        built = builder.build(batch)
        assert_same(built, InputBatchBuilder(2, BLOCK, options).build(batch))
        assert len(built.token_ids) == batch.num_tokens + (-batch.num_tokens % (padding or 1))
        prompt_rows = {"chunk": 4, "end of a prompt": 2}.get(event, 0)
        assert len(built.logit_rows) == len(built.sampling) + prompt_rows
        everywhere = built.logit_rows.tolist() == list(range(len(built.token_ids)))
        assert built.wants_all_rows == (everywhere and not prompt_rows)


def test_tables_are_stacked_again_only_when_one_has_changed() -> None:
    builder = InputBatchBuilder(2, BLOCK, PLAIN)
    rows = [begin("a", 5, 1), begin("b", 9, 20)]
    first = builder.build(schedule(rows)).layouts
    rows[0][0].token_ids.append(rows[0][0].token_ids[0])
    again = builder.build(schedule(rows)).layouts
    assert all(one.tables is other.tables for one, other in zip(first, again, strict=True))
    assert again[0].tables.tolist() == [[1, 2, 0], [20, 21, 22]]
    rows[0][1][1].release_before(1)
    last = builder.build(schedule(rows)).layouts
    assert last[0].tables is first[0].tables
    assert last[1].tables.tolist() == [[0, 502, 0], [520, 521, 522]]
    assert first[1].tables.tolist() == [[501, 502, 0], [520, 521, 522]], "a step may still read it"


def test_a_block_that_another_request_has_since_taken_is_not_read_again() -> None:
    builder = InputBatchBuilder(2, BLOCK, PLAIN)
    rows = [begin("a", 5, 1), begin("b", 9, 20)]
    builder.build(schedule(rows))
    for table in rows[0][1]:
        (given_back,) = table.cut(1)
        table.extend([BlockId(900)])
        rows[1][1][0].extend([given_back])
    last = builder.build(schedule(rows)).layouts
    assert [one.tables[0, 1] for one in last] == [900, 900]
