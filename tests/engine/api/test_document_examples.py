"""The examples with which transformers documents its continuous batching, as near to their text as
it can run, on the demo model. docs/offline.md lists what had to differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation import GenerationConfig

import engine
from engine import ContinuousBatchingConfig, LoadedModel, RequestStatus
from engine.contract.errors import InvalidRequestError
from tests.engine.rig import WAIT
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

DEMO = str(Path(__file__).parents[3] / "models" / "demo")
QUESTIONS = ["The river", "Once upon a time", "A small house"]
SMALL = ContinuousBatchingConfig(block_size=16, num_blocks=32)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return engine.from_model(
        AutoModelForCausalLM.from_pretrained(DEMO, attn_implementation="sdpa", dtype=torch.float32)
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO, padding_side="left")


@pytest.fixture(scope="module")
def generation_config(tokenizer: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=12,
        use_cuda_graph=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_batch_tokens=64,
    )


@pytest.fixture(scope="module")
def simple_batch_inputs(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(question)["input_ids"] for question in QUESTIONS]


@pytest.fixture(scope="module")
def right(model: LoadedModel, simple_batch_inputs: list[list[int]]) -> list[list[int]]:
    return [greedy_reference(model.model, prompt, 12) for prompt in simple_batch_inputs]


def test_generate_batch(
    model: LoadedModel,
    tokenizer: Any,
    generation_config: GenerationConfig,
    simple_batch_inputs: list[list[int]],
    right: list[list[int]],
) -> None:
    batch_outputs = model.generate_batch(
        inputs=simple_batch_inputs,
        generation_config=generation_config,
        progress_bar=False,
    )
    texts = {}
    for request_id, output in batch_outputs.items():
        texts[request_id] = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
    assert texts == {
        f"req_{index}": tokenizer.decode(tokens, skip_special_tokens=True)
        for index, tokens in enumerate(right)
    }


def test_manager(
    model: LoadedModel,
    generation_config: GenerationConfig,
    simple_batch_inputs: list[list[int]],
    right: list[list[int]],
) -> None:
    manager = model.init_continuous_batching(generation_config=generation_config)
    assert manager._loop._core.scheduler.max_batch_tokens == 64
    manager.start()
    for i, input_ids in enumerate(simple_batch_inputs):
        request_id = manager.add_request(input_ids=input_ids, request_id=f"request_{i}")
        assert request_id == f"request_{i}"

    result = manager.get_result(request_id="request_2", timeout=WAIT)
    assert result is not None
    assert result.generated_tokens == right[2]

    manager.stop()
    results = {request.request_id: request.generated_tokens for request in manager}
    assert results == {"request_0": right[0], "request_1": right[1]}


def test_streaming(
    model: LoadedModel,
    generation_config: GenerationConfig,
    simple_batch_inputs: list[list[int]],
    right: list[list[int]],
) -> None:
    manager = model.init_continuous_batching(generation_config=generation_config)
    manager.start()
    with pytest.raises(InvalidRequestError, match="stream"):  # the document's word for it
        manager.add_request(simple_batch_inputs[0], stream=True)
    manager.add_request(
        input_ids=simple_batch_inputs[0],
        request_id="streaming_request",
        streaming=True,
    )
    chunks = []
    for chunk in manager.request_id_iter(request_id="streaming_request"):
        chunks.append(chunk.generated_tokens)
        if chunk.status == RequestStatus.FINISHED:
            break
    manager.stop()
    assert chunks == [right[0][: length + 1] for length in range(len(right[0]))]


def test_paged_attention_may_be_named(
    generation_config: GenerationConfig,
    simple_batch_inputs: list[list[int]],
    right: list[list[int]],
) -> None:
    model = engine.from_model(
        AutoModelForCausalLM.from_pretrained(
            DEMO, attn_implementation="paged|eager", dtype=torch.float32
        )
    )
    outputs = model.generate_batch(simple_batch_inputs, generation_config, progress_bar=False)
    assert [output.generated_tokens for output in outputs.values()] == right


def test_a_sliding_window_set_by_hand(tmp_path: Path) -> None:
    make_model(FAMILIES["gemma2"]()).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 24
    config.sliding_window = 10
    model = engine.from_model(
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    )
    prompts = make_prompts((6, 50))
    outputs = model.generate_batch(
        prompts, continuous_batching_config=SMALL, max_new_tokens=12, progress_bar=False
    )
    assert [output.generated_tokens for output in outputs.values()] == [
        greedy_reference(model.model, prompt, 12) for prompt in prompts
    ]
    wide = make_model(FAMILIES["gemma2"]())
    assert outputs["req_1"].generated_tokens != greedy_reference(wide, prompts[1], 12)
