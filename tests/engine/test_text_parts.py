"""Models with towers, whole, against their text parts: every such line of docs/models.md is proved.

A tiny model of the whole class, with its towers, is written by its own `save_pretrained`. It
generates from text alone, eagerly; the engine, which loads only the text part, must serve the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.api.offline import LoadedModel
from engine.contract.config import LoadConfig
from engine.contract.errors import ModelRefusedError
from engine.loading.checkpoint import read_checkpoint
from engine.loading.loader import load_model
from engine.models.table import FAMILIES as DESCRIBED
from tests.engine.mode_sweep import check_every_mode
from tests.engine.runner.steps import build, make_core, make_request, run
from tests.multimodal_recipes import FAST, REFUSED, SERVED, Whole, make_whole
from tests.tiny_models import make_prompts

_SWEPT = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name) for name in SERVED
]


def _saved(folder: Path, name: str) -> PreTrainedModel:
    whole = make_whole(SERVED[name].config(eos_token_id=None))
    whole.save_pretrained(folder)
    return whole


@pytest.mark.parametrize("name", _SWEPT)
@pytest.mark.parametrize("decoder", ["transformers", "own"])
def test_every_mode_equals_generate_of_the_whole_model(
    name: str, decoder: str, tmp_path: Path
) -> None:
    recipe = SERVED[name]
    if not recipe.is_known:
        pytest.skip(f"this version of transformers has no {name} that is served")
    if decoder == "own" and recipe.text_type not in DESCRIBED:
        pytest.skip("our decoder does not know its text part")
    whole, lines = _saved(tmp_path, name), list[str]()
    config = LoadConfig(threads=1, decoder=decoder)
    if decoder == "transformers" and recipe.own_only:
        with pytest.raises(ModelRefusedError, match=recipe.own_only):
            load_model(str(tmp_path), config, lines.append)
        return
    verified = load_model(str(tmp_path), config, lines.append)
    assert (verified.decoder is not None) == (decoder == "own")
    assert any(line.startswith("left out, as only text is served: ") for line in lines)
    check_every_mode(whole, LoadedModel(verified), recipe.attention)


@pytest.mark.parametrize("decoder", ["transformers", "own"])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_logits_of_230_tokens_are_those_of_the_whole_model(
    name: str, decoder: str, tmp_path: Path
) -> None:
    """In chunks: the log-probabilities of a prompt's tokens, and of the most likely ones there."""
    whole = _saved(tmp_path, name)
    (prompt,) = make_prompts((230,))
    config = LoadConfig(threads=1, decoder=decoder)
    loaded = LoadedModel(load_model(str(tmp_path), config, lambda line: None))
    core = make_core(build(loaded, max_batch_tokens=48))
    outputs = run(core, [make_request("a", prompt, 1, prompt_logprobs=3)])["a"]
    found = outputs[0].prompt_logprobs
    assert found is not None
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert len(found) == len(expected) == 229
    own = torch.tensor([entry.logprob for entry in found])
    best = torch.tensor([[value for _, value in entry.candidates] for entry in found])
    assert (own - expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]).abs().max() < 1e-3
    assert (best - expected.topk(3).values).abs().max() < 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_a_text_part_that_would_be_run_wrongly_is_refused(name: str, tmp_path: Path) -> None:
    recipe = REFUSED[name]
    if not recipe.is_known:
        pytest.skip(f"this version of transformers has no {name}")
    recipe.config().save_pretrained(tmp_path)
    with pytest.raises(ModelRefusedError, match=recipe.reason):
        _load_at_last(recipe, tmp_path)


def _load_at_last(recipe: Whole, folder: Path) -> None:
    """Write the weights only if the config alone is not refused: some towers are hard to make."""
    read_checkpoint(folder, needs_weights=False)
    make_whole(recipe.config()).save_pretrained(folder)
    load_model(str(folder), LoadConfig(threads=1), lambda line: None)
