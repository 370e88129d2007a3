"""Several rows of one request in a step: drafts change no token, and are kept if right."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import engine
from engine.api.offline import LoadedModel
from engine.contract.outputs import RequestOutput, TokenLogprobs
from engine.contract.request import GenerationRequest, Request
from engine.contract.sampling_params import LogprobParams, SamplingParams, StopParams
from engine.contract.types import BlockId, TokenId
from engine.core.engine_core import EngineCore
from engine.kv_cache.block_table import BlockTable
from engine.loading.running import LoadedRunner
from engine.runner.cuda_graph import GraphBackend
from engine.runner.input_batch import InputBatchBuilder
from engine.runner.runner_options import PLAIN, RunnerOptions, StepPath
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build, make_core, make_request, tokens_of
from tests.tiny_models import WINDOW, make_prompts

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
NEW = 20
MOST = 5
Outputs = dict[str, list[RequestOutput]]


def requests(lengths: tuple[int, ...]) -> list[GenerationRequest]:
    """One of each kind of choice that can be drafted, in turn."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=7, top_k=20, top_p=0.95),
        SamplingParams(temperature=1.0, seed=8),
        SamplingParams(temperature=0.0, banned_token_ids=(TokenId(5),)),
    ]
    return [
        make_request(
            str(index),
            prompt,
            NEW,
            sampling=kinds[index % len(kinds)],
            stop=StopParams(max_tokens=NEW, min_tokens=NEW // 2),
            logprobs=LogprobParams(top_n=2),
        )
        for index, prompt in enumerate(make_prompts(lengths))
    ]


def run(core: EngineCore, specs: list[GenerationRequest], known: Outputs | None) -> Outputs:
    """Run all requests. known: what they give; half of the drafts have a wrong token somewhere."""
    chance = random.Random(3)
    for spec in specs:
        core.add(spec, 0.0)
    outputs: Outputs = {spec.request_id: [] for spec in specs}
    while core.has_work:
        for request in core.scheduler.running.values() if known is not None else ():
            right = tokens_of(known[request.request_id])[request.num_output_tokens :]
            drafts = right[: chance.randint(0, MOST)]
            if drafts and chance.random() < 0.5:
                drafts[chance.randrange(len(drafts))] ^= 1
            request.drafts = tuple(map(TokenId, drafts))
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def flat(outputs: Outputs) -> dict[str, tuple[list[int], list[TokenLogprobs]]]:
    """The tokens and log-probabilities of each request, however they were grouped."""
    return {
        name: (tokens_of(all_of), [one for output in all_of for one in output.logprobs or ()])
        for name, all_of in outputs.items()
    }


def check(
    built: Callable[[], LoadedRunner],
    lengths: tuple[int, ...],
    *,
    overlap: bool = False,
    close: float = 0.0,
) -> LoadedRunner:
    """close: how far log-probabilities may be apart, where torch sums by the number of rows."""
    specs = requests(lengths)
    plain = run(make_core(built(), overlap=overlap), specs, None)
    drafted_by = built()
    drafted = run(make_core(drafted_by, overlap=overlap), specs, plain)
    for name, (tokens, logprobs) in flat(plain).items():
        found, theirs = flat(drafted)[name]
        assert found == tokens
        values = [[one.logprob for one in each] for each in (theirs, logprobs)]
        np.testing.assert_allclose(*values, rtol=0, atol=close)
    assert all(len(tokens) == NEW for tokens, _ in flat(plain).values())
    kept = sum(len(output.token_ids) > 1 for outputs in drafted.values() for output in outputs)
    assert kept > len(specs), "several tokens of one step were kept"
    return drafted_by


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "deepseek_v3"])
def test_drafts_change_no_token(
    loaded_torch: Callable[[str], LoadedModel], family: str, overlap: bool
) -> None:
    loaded = loaded_torch(family)
    lengths = (1, 31, WINDOW + 40, 100)
    options = {"max_batch_tokens": 40, "use_async_batching": overlap}
    check(lambda: build(loaded, **options), lengths, overlap=overlap, close=1e-5)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")],
)
def test_drafts_change_no_bit_in_our_decoder(dtype: str, quantization: str) -> None:
    loaded = engine.load(str(DEMO), dtype=dtype, quantization=quantization)
    options = {"max_batch_tokens": 64, "use_async_batching": True}
    check(lambda: build(loaded, **options), (3, 17, 40, 90, 150), overlap=True)


def test_drafts_are_rows_of_captured_steps(loaded_torch: Callable[[str], LoadedModel]) -> None:
    loaded = loaded_torch("llama")

    def built(graphs: GraphBackend | None = None) -> LoadedRunner:
        return build(loaded, graphs=graphs or RecordingBackend(), max_requests_per_batch=16)

    steps = check(built, (2, 9, 30), close=1e-5).runner.steps
    replayed = [kind for kind in steps if kind.is_replayed and kind.path is StepPath.DECODE]
    assert replayed
    assert not [kind for kind in steps if not kind.is_replayed]


def test_a_part_with_drafts_is_laid_out_as_rows_of_one_token() -> None:
    def part(name: str, ids: list[int], start: int, blocks: int, drafts: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
        request = Request(make_request(name, ids, 9), 0.0, 40)
        table = BlockTable(0, [BlockId(blocks + index) for index in range(3)])
        count = len(ids) - start
        wanted = tuple(map(TokenId, drafts))
        return ScheduledRequest(request, start, count, (table,), 1 + len(wanted), wanted)

    parts = (
        part("a", [5, 6, 7], 2, 1, (8, 9)),
        part("b", [4] * 6, 5, 10),
        part("c", [3, 2], 0, 20),
    )
    built = InputBatchBuilder(1, 4, PLAIN).build(ScheduledBatch(parts, 6))
    assert built.path is StepPath.VARLEN
    assert built.token_ids.tolist() == [7, 8, 9, 4, 3, 2]
    assert built.positions.tolist() == [2, 3, 4, 5, 0, 1]
    assert built.logit_rows.tolist() == [0, 1, 2, 3, 5]
    assert [one.request_id for one in built.sampling] == ["a", "a", "a", "b", "c"]
    assert built.lengths == [3, 4, 5, 6, 2]
    (layout,) = built.layouts
    assert layout.starts.tolist() == [2, 3, 4, 5, 0]
    assert layout.counts.tolist() == [1, 1, 1, 1, 2]
    assert layout.num_decodes == 4
    np.testing.assert_array_equal(layout.tables[0], layout.tables[2])
    options = RunnerOptions(max_decode_blocks=8)
    decode = InputBatchBuilder(1, 4, options).build(ScheduledBatch(parts[:2], 4))
    assert decode.path is StepPath.DECODE
