"""Functions that a random model is made to call: the real engine holds it to what their type hints
say, and each call runs.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import headrace
import pytest
from headrace import AsyncClient, AsyncToolRun, FinishReason, ToolChoice, ToolRunEnd

from tests.service.callers import calling, make_directory

FORMAT = "hermes"
SEEDS = 8
MESSAGES: Any = [{"role": "user", "content": "How high is the river?"}]


class Unit(enum.Enum):
    METRES = "m"
    FEET = "größer als 1 ft"


@dataclass
class Span:
    first: Literal[1, 2, 3]
    exact: bool = False


RAN: list[Any] = []


def gauge(unit: Unit, span: Span | None, at: tuple[bool, Literal["Ulm", "Passau"]]) -> str:
    """How high the river is."""
    RAN.append((unit, span, at))
    return "3 m"


async def rain(exact: bool) -> bool:
    """Whether it rains."""
    RAN.append(exact)
    return exact


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_directory(tmp_path_factory.mktemp("model"), FORMAT)


@pytest.fixture
async def client(directory: Path) -> AsyncIterator[AsyncClient]:
    RAN.clear()
    async with calling(directory, FORMAT) as opened:
        yield opened


async def runs(client: AsyncClient, choice: Any) -> list[AsyncToolRun]:
    """Runs of two replies, with different seeds, together."""
    made = [
        client.run_tools(
            MESSAGES, [gauge, rain], tool_choice=choice, max_turns=2, max_tokens=300,
            temperature=1.0, seed=seed, max_reasoning_tokens=5,
        )
        for seed in range(SEEDS)
    ]  # fmt: skip
    await asyncio.gather(*(run.result() for run in made))
    for run in made:
        first, *_ = run.turns
        assert first.result.finish_reason is FinishReason.TOOL_CALLS
        assert [answer.error for answer in first.answers] == [None] * len(first.answers)
    assert len(RAN) == sum(len(turn.answers) for run in made for turn in run.turns) >= SEEDS
    return made


@pytest.mark.parametrize("choice", ["required", ToolChoice("required", parallel_calls=False)])
async def test_calls_that_are_required_run(client: AsyncClient, choice: Any) -> None:
    made = await runs(client, choice)
    if not isinstance(choice, str):
        assert [len(run.turns[0].answers) for run in made] == [1] * SEEDS
    for ran in RAN:
        if isinstance(ran, bool):
            continue
        unit, span, at = ran
        assert isinstance(unit, Unit)
        assert span is None or (span.first in (1, 2, 3) and type(span.exact) is bool)
        assert type(at[0]) is bool
        assert at[1] in ("Ulm", "Passau")


async def test_one_function_is_called_and_then_the_model_may_answer(client: AsyncClient) -> None:
    choice = {"type": "function", "function": {"name": "rain"}}
    made = await runs(client, choice)
    for run in made:
        assert {one.name for one in run.turns[0].result.tool_calls} == {"rain"}
        assert {answer.content for answer in run.turns[0].answers} <= {"true", "false"}
    assert not all(run.turns[1].result.tool_calls for run in made)


async def test_no_call_where_none_is_chosen(client: AsyncClient) -> None:
    run = client.run_tools(MESSAGES, [gauge], tool_choice="none", max_tokens=60, seed=1)
    result = await run.result()
    assert result.tool_calls == ()
    assert run.end in (ToolRunEnd.CUT, ToolRunEnd.ANSWERED)


async def test_reasoning_is_bounded(client: AsyncClient) -> None:
    for bound in (0, 7):
        result = await client.generate(
            MESSAGES, max_reasoning_tokens=bound, max_tokens=60, temperature=1.0, seed=2
        )
        assert result.usage.reasoning_tokens <= bound + 3  # with what its marks take


async def test_structural_tags(client: AsyncClient) -> None:
    tag = {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "at "},
            {"type": "json_schema", "json_schema": {"enum": ["Ulm", "Passau"]}},
        ]},
    }  # fmt: skip
    result = await client.generate(
        MESSAGES, structural_tag=tag, max_tokens=60, seed=3, max_reasoning_tokens=0
    )
    assert result.text in ('at "Ulm"', 'at "Passau"')
    with pytest.raises(headrace.InvalidArgumentError, match="structural_tag"):
        await client.generate(MESSAGES, structural_tag={"type": "structural_tag"}, max_tokens=9)
