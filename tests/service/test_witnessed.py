"""A caller who behaves loses nothing beside callers who do not: a witness on a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import model_service_pb2 as model
from headrace.v1.model_service_pb2_grpc import ModelServiceStub

from tests.campaign.hostile.attacker import attack
from tests.campaign.witness.process import Witness
from tests.service.helpers import DEADLINE_S
from tests.service.real_server import real_server

INPUTS = ("template-nulls", "malformed", "rapid-reset")
SECONDS = 1.0
"""Of each input: only how much is sent depends on it."""


@pytest.mark.timeout(240)
async def test_a_witness_loses_nothing_beside_hostile_inputs(tmp_path: Path) -> None:
    # In float32 the witness's tokens do not depend on who else is in its batch. Checks may be lost
    # at the address where the inputs are sent.
    health = f"unix:{tmp_path}/health"
    options = ("--dtype", "float32", "--listen", "127.0.0.1:0", "--health-listen", health)
    with real_server(*options) as server:
        await asyncio.to_thread(server.wait_until_ready)
        [target] = server.addresses
        async with grpc.aio.insecure_channel(target) as channel:
            stub: Any = ModelServiceStub(channel)
            card = (await stub.GetModel(model.GetModelRequest())).model
        pids = {"front_end": server.process.pid}
        witness = Witness(target, pids, health_target=health, tokens=64)
        await asyncio.to_thread(witness.start)
        try:
            for name in INPUTS:
                answers, _ = await attack(name, SECONDS, target=target, card=card, seed=name)
                assert sum(answers.values()) > 0, name
            before = (await asyncio.to_thread(witness.report)).requests
            async with asyncio.timeout(DEADLINE_S):
                while (report := await asyncio.to_thread(witness.report)).requests <= before + 1:
                    pass  # it is still served
        finally:
            await asyncio.to_thread(witness.close)
        assert server.process.poll() is None
    assert (report.wrong_tokens, report.lost_tokens, report.wrong_texts) == (0, 0, 0)
    assert report.not_serving == 0
    assert not report.refusals
    assert min(report.health.count, report.tokenize.count) > 0
