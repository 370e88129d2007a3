"""Speculation through the whole server: what it tells, and what a prediction may be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import headrace
import pytest
from headrace.v1 import generation_pb2 as pb

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.drafts.drafter import SOURCES
from engine.process.local_client import LocalEngineClient
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.engine.forced_drafts import draft_always
from tests.service.real_server import ROOT, WAIT_S

DRAFT_COUNTS = (
    "draft_tokens",
    "accepted_draft_tokens",
    "prediction_draft_tokens",
    "accepted_prediction_draft_tokens",
)
DEMO = ROOT / "models" / "demo"
PROMPT = "Once upon a time there was a mill by the river"
NEW = 60


@pytest.fixture(scope="module")
def client() -> Iterator[headrace.Client]:
    """Of a server whose options say nothing of speculation. How many guesses are tried does not
    depend on how long steps take here.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        draft_always(patch)
        target = stack.enter_context(_served_in_a_thread())
        yield stack.enter_context(headrace.Client(target))


@contextmanager
def _served_in_a_thread() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)

    async def start() -> HeadraceServer:
        engine = LocalEngineClient(str(DEMO), ContinuousBatchingConfig(), LoadConfig(threads=1))
        config = ServiceConfig(listen=("127.0.0.1:0",))
        server = HeadraceServer(config, engine, progress=lambda line: None)
        await server.start()
        await server.ready()
        return server

    try:
        server: HeadraceServer = run(start())
        yield server.addresses[0]
        run(server.drain(0))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def generate(client: headrace.Client, **options: Any) -> headrace.Result:
    return client.generate(
        PROMPT, **{"temperature": 0, "ignore_eos": True, "max_tokens": NEW, **options}
    )


def test_a_prediction_changes_no_token_and_saves_steps(client: headrace.Client) -> None:
    plain = generate(client, temperature=1.0, seed=4)
    assert plain.usage.accepted_draft_tokens <= plain.usage.draft_tokens < NEW
    before = client.control.statistics().engine
    for prediction in (plain.token_ids, plain.text):
        found = generate(client, temperature=1.0, seed=4, prediction=prediction)
        assert found.token_ids == plain.token_ids
        assert found.text == plain.text
        usage = found.usage
        assert usage.accepted_draft_tokens <= usage.draft_tokens
        assert usage.accepted_prediction_draft_tokens > NEW / 2
        assert usage.accepted_prediction_draft_tokens <= usage.prediction_draft_tokens
        assert usage.prediction_draft_tokens <= usage.draft_tokens
    wrong = generate(client, temperature=1.0, seed=4, prediction=[5] * 100)
    assert wrong.token_ids == plain.token_ids
    after = client.control.statistics().engine
    assert after.draft_tokens - before.draft_tokens >= usage.draft_tokens
    assert after.accepted_draft_tokens > before.accepted_draft_tokens
    assert after.steps_with_drafts > before.steps_with_drafts
    assert after.drafts >= after.steps_with_drafts


def test_choices_add_up(client: headrace.Client) -> None:
    plain = generate(client, temperature=1.0, seed=4, n=3)
    found = generate(client, temperature=1.0, seed=4, n=3, prediction=plain.choices[1].token_ids)
    assert [one.token_ids for one in found.choices] == [one.token_ids for one in plain.choices]
    for name in DRAFT_COUNTS:
        total = sum(getattr(one.usage, name) for one in found.choices)
        assert getattr(found.usage, name) == total


def test_requests_and_sources_add_up_to_the_counters(client: headrace.Client) -> None:
    before = _counters(client)
    plain = generate(client)
    found = [plain, *(generate(client, prediction=plain.text, n=n) for n in (1, 2))]
    found += [generate(client, temperature=1.0, seed=seed) for seed in range(3)]
    grown = {name: value - before[name] for name, value in _counters(client).items()}
    for name in DRAFT_COUNTS:
        assert grown[name] == sum(getattr(one.usage, name) for one in found)
    for name in DRAFT_COUNTS[:2]:
        kinds = (grown[name.replace("draft", f"{source}_draft")] for source in SOURCES)
        assert grown[name] == sum(kinds)


def _counters(client: headrace.Client) -> dict[str, float]:
    told = client.control.statistics().engine
    found: dict[str, float] = {name: getattr(told, name) for name in DRAFT_COUNTS[:2]}
    for source in SOURCES:
        found[f"{source}_draft_tokens"] = told.others[f"headrace.tokens.drafted.{source}"]
        found[f"accepted_{source}_draft_tokens"] = told.others[
            f"headrace.tokens.drafts_accepted.{source}"
        ]
    return found


def test_penalties_have_no_drafts(client: headrace.Client) -> None:
    plain = generate(client, repetition_penalty=1.3)
    found = generate(client, repetition_penalty=1.3, prediction=plain.token_ids)
    assert found.token_ids == plain.token_ids
    assert found.usage.draft_tokens == 0


def test_what_a_prediction_may_not_be(client: headrace.Client) -> None:
    card = client.model()
    limit = card.limits.max_context_tokens
    for prediction, says in (
        ([0, card.vocab_size], rf"prediction.tokens.ids\[1\].*below {card.vocab_size}"),
        ([1] * (limit + 1), rf"prediction.tokens.ids.*{limit}"),
        ([1] * 1_000_000, "prediction.tokens.ids"),
        ("a " * (limit + 1), "prediction.text"),
        ("a" * 1_000_000, "prediction.text"),
    ):
        with pytest.raises(headrace.InvalidArgumentError, match=says):
            generate(client, prediction=prediction)
    assert "prediction" in card.capabilities.names
    assert card.capabilities.scheduling.speculation
    spec = pb.GenerationSpec(text=pb.TextInput(text=PROMPT))
    spec.prediction.SetInParent()
    with pytest.raises(headrace.InvalidArgumentError, match="prediction"):
        client.generate(spec)
