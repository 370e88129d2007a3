"""Which path a step takes, and padding: the tokens stay what `model.generate` gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from engine.api.offline import LoadedModel
from engine.loading.running import LoadedRunner
from engine.runner.input_batch import InputBatch
from engine.runner.model_runner import StepKind
from engine.runner.runner_options import StepPath
from engine.scheduler.scheduled_batch import ScheduledBatch
from tests.engine.runner.steps import build, make_core, make_request, run, tokens_of
from tests.tiny_models import FAMILIES, WINDOW, greedy_reference, make_model, make_prompts

LENGTHS = (1, 2, 31, WINDOW + 40, 100)
NEW = 12


@pytest.fixture
def loaded(loaded_torch: Callable[[str], LoadedModel]) -> Callable[[str], LoadedModel]:
    return loaded_torch


@cache
def reference(family: str) -> list[list[int]]:
    model = make_model(FAMILIES[family]())
    return [greedy_reference(model, prompt, NEW) for prompt in make_prompts(LENGTHS)]


def watch(built: LoadedRunner) -> list[InputBatch]:
    """Every step's inputs, as they were laid out."""
    runner: Any = built.runner
    seen: list[InputBatch] = []
    build_inputs = runner._builder.build

    def record(batch: ScheduledBatch) -> InputBatch:
        seen.append(build_inputs(batch))
        return seen[-1]

    runner._builder.build = record
    return seen


def generate(built: LoadedRunner, **core_options: Any) -> list[list[int]]:
    core = make_core(built, **core_options)
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(make_prompts(LENGTHS))]
    outputs = run(core, requests)
    return [tokens_of(outputs[request.request_id]) for request in requests]


@pytest.mark.parametrize(
    ("limit", "decodes"), [(0, 0), (None, NEW - 1), (14, NEW - 1), (13, 4), (1, 0)]
)
def test_the_decode_path_is_for_short_enough_requests(
    loaded: Callable[[str], LoadedModel], limit: int | None, decodes: int
) -> None:
    """The longest request has 100 tokens: with its fifth new one it needs a 14th block of 8."""
    built = build(loaded("llama"), max_blocks_per_request=limit)
    assert generate(built) == reference("llama")
    counts = {StepPath.DECODE: decodes, StepPath.VARLEN: NEW - decodes}
    expected = {StepKind(path, is_replayed=False): n for path, n in counts.items() if n}
    assert built.runner.steps == Counter(expected)


def test_a_mixed_step_takes_the_varlen_path(loaded: Callable[[str], LoadedModel]) -> None:
    built = build(loaded("llama"), max_batch_tokens=40)
    seen = watch(built)
    assert generate(built) == reference("llama")
    for inputs in seen:
        only_decodes = bool((inputs.layouts[0].counts == 1).all())
        assert (inputs.path is StepPath.DECODE) == only_decodes
    assert {inputs.path for inputs in seen} == set(StepPath)


def test_the_default_limit_is_the_longest_request(loaded: Callable[[str], LoadedModel]) -> None:
    assert build(loaded("llama")).runner.options.max_decode_blocks == 512 // 8
    assert build(loaded("llama"), num_blocks=20).runner.options.max_decode_blocks == 20
    assert build(loaded("mistral"), num_blocks=20).runner.options.max_decode_blocks == 512 // 8


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(("q", "kv"), [(7, 0), (0, 13), (16, 64)])
def test_padding_changes_nothing(
    loaded: Callable[[str], LoadedModel], family: str, q: int, kv: int
) -> None:
    built = build(
        loaded(family),
        q_padding_interval_size=q,
        kv_padding_interval_size=kv,
        max_batch_tokens=40,
    )
    seen = watch(built)
    assert generate(built) == reference(family)
    for inputs in seen:
        assert len(inputs.token_ids) == len(inputs.positions)
        if q:
            assert len(inputs.token_ids) % q == 0
            assert len(inputs.token_ids) - inputs.num_tokens < q
        assert all(row < inputs.num_tokens for row in inputs.logit_rows)
        assert not inputs.token_ids[inputs.num_tokens :].any()


def test_padding_is_really_read_and_written(loaded: Callable[[str], LoadedModel]) -> None:
    """The metadata of a decode step of two requests, padded to 4 tokens and 32 of context."""
    built = build(loaded("gemma3"), q_padding_interval_size=4, kv_padding_interval_size=32)
    runner = built.runner
    backend = runner._forward.backend
    null = runner.kv.caches[0].keys[0]
    null.fill_(5.0)
    prepared: list[Any] = []
    prepare = backend.prepare

    def record(*args: Any) -> Any:
        prepared.append(prepare(*args))
        return prepared[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "prepare", record)
        core = make_core(built)
        run(core, [make_request(str(i), p, 2) for i, p in enumerate(make_prompts((5, 9)))])
    prefill, _, decode, _ = prepared
    assert [len(chunk.slots) for chunk in prefill.chunks] == [32, 32]
    assert prefill.slot_mapping.tolist()[14:] == [0, 0], "padding goes to the null block"
    assert len(decode.slot_mapping) == 4
    (bucket,) = decode.buckets
    assert len(bucket.blocks) == 2 * 32 // 8
    assert decode.slot_mapping.tolist()[2:] == [0, 0]
    assert not (null == 5.0).any(), "padding was written there"


def test_nothing_is_padded_unless_asked(loaded: Callable[[str], LoadedModel]) -> None:
    built = build(loaded("llama"))
    seen = watch(built)
    generate(built)
    assert all(len(inputs.token_ids) == inputs.num_tokens for inputs in seen)
    assert all(np.array_equal(i.positions, i.layouts[0].positions) for i in seen)
