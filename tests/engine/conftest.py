"""Tiny models, verified once a session, and one thread for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch

from engine.api.offline import LoadedModel, from_model
from tests.engine.rig import WAIT, Rig
from tests.tiny_models import FAMILIES, make_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def _loaded(family: str, attention: str = "auto") -> LoadedModel:
    return from_model(make_model(FAMILIES[family]()), attention=attention)


@pytest.fixture(scope="session")
def loaded() -> Callable[[str], LoadedModel]:
    """A family's tiny model behind the load gate; the same object for the whole session."""
    return _loaded


@pytest.fixture(scope="session")
def loaded_torch() -> Callable[[str], LoadedModel]:
    """The same with attention in torch, which can be captured; the native kernels cannot."""
    return partial(_loaded, attention="torch")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(per_request_processors=True)
    rig.manager.start()
    yield rig
    rig.let()
    rig.manager.stop(hard_stop=True, timeout=WAIT)
    assert not rig.manager.is_running()
    rig.kv_cache.check_integrity()
    assert rig.kv_cache.num_used_blocks == 0
