"""Policies and attention from outside the tree: served with the checks that ours have."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.api.offline import from_model
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import ConfigError, ModelRefusedError
from engine.scheduler.policies import register_scheduler, scheduler_class
from tests.tiny_models import FAMILIES, make_model

DOCS = Path(__file__).parents[3] / "docs" / "schedulers.md"
ATTENTION = """
import torch
from engine.attention.interface import AttentionBackend
from engine.attention.torch_backend import TorchAttentionBackend

prepared = 0

class Counting(TorchAttentionBackend):
    name = "counting"

    def prepare(self, layout, window, like):
        global prepared
        prepared += 1
        return super().prepare(layout, window, like)

class Wrong(Counting):
    def forward(self, *args):
        return super().forward(*args) * 1.5

class Half(Counting):
    dtypes = (torch.float16,)

class Unfinished(AttentionBackend):
    pass

number = 1
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of somebody else's, with the documents' policy in it; its name."""
    (policy,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    text = policy.replace('register_scheduler("shortest_first", ShortestFirstScheduler)\n', "")
    (tmp_path / "somebody_s.py").write_text(text + ATTENTION)
    (tmp_path / "broken_one.py").write_text("raise RuntimeError('on purpose')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "somebody_s"
    sys.modules.pop("somebody_s", None)


def test_a_policy_and_an_attention_from_outside_compute_the_same(outside: str) -> None:
    model = make_model(FAMILIES["llama"]())
    loaded = from_model(model, attention=f"{outside}:Counting")
    config = ContinuousBatchingConfig(
        block_size=4, scheduler_type=f"{outside}:ShortestFirstScheduler"
    )
    prompts = [[5, 6, 7, 8, 9], [3, 4], [9, 8, 7]]
    outputs = loaded.generate_batch(
        prompts, continuous_batching_config=config, max_new_tokens=6, progress_bar=False
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert output.generated_tokens == expected[0, len(prompt) :].tolist()
    assert sys.modules[outside].prepared > 6


def test_what_computes_something_else_is_refused_as_ours_would_be(outside: str) -> None:
    with pytest.raises(ModelRefusedError, match="differs from the model's own by"):
        from_model(make_model(FAMILIES["llama"]()), attention=f"{outside}:Wrong")
    with pytest.raises(ConfigError, match=r"^attention: .*float32"):
        from_model(make_model(FAMILIES["llama"]()), attention=f"{outside}:Half")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not_there:Policy", "ModuleNotFoundError"),
        ("broken_one:Policy", "on purpose"),
        ("somebody_s:Policy", "AttributeError"),
        ("somebody_s:number", "no subclass of"),
        ("somebody_s:Path", "AttributeError"),
        ("somebody_s:", "AttributeError"),
        (":", "ValueError"),
        ("somebody_s:Unfinished", "no subclass of"),
    ],
)
def test_what_is_no_class_of_the_kind_is_refused(outside: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^scheduler_type: is .*{said}"):
        scheduler_class(name)
    with pytest.raises(ConfigError, match=f"^attention: is .*{said}"):
        from_model(make_model(FAMILIES["llama"]()), attention=name)


def test_names_of_ours_have_no_colon() -> None:
    with pytest.raises(ConfigError, match="colon"):
        register_scheduler("a:b", scheduler_class("fifo"))
    with pytest.raises(ConfigError, match=r"or package\.module:Class"):
        LoadConfig(attention="flash")
