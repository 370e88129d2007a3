"""Log-probabilities of prompt tokens equal those of one plain forward, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.api.offline import LoadedModel
from engine.contract.outputs import TokenLogprobs
from tests.engine.runner.steps import build, make_core, make_request, run
from tests.tiny_models import greedy_reference, make_prompts


def _expected(model: Any, prompt: list[int]) -> torch.Tensor:
    """[len(prompt) − 1, V]: the log-probabilities behind each token but the last."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1]
    finally:
        model.set_attn_implementation(before)
    return torch.log_softmax(logits.float(), dim=-1)


def _check(
    found: tuple[TokenLogprobs, ...] | None, model: Any, prompt: list[int], top_n: int
) -> None:
    expected = _expected(model, prompt)
    assert found is not None
    assert len(found) == len(prompt) - 1
    for row, (entry, token) in enumerate(zip(found, prompt[1:], strict=True)):
        assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-4)
        assert len(entry.candidates) == top_n
        best = torch.topk(expected[row], top_n).values.tolist()
        assert [value for _, value in entry.candidates] == pytest.approx(best, abs=1e-4)
        above = int((expected[row] > expected[row, token] + 1e-4).sum())
        below = int((expected[row] >= expected[row, token] - 1e-4).sum())
        assert above < entry.rank <= max(above + 1, below)


@pytest.mark.parametrize("budget", [1, 7, 64, 1024])
def test_all_prompt_tokens_are_reported_once(
    loaded: Callable[[str], LoadedModel], budget: int
) -> None:
    """In chunks of every size, beside neighbours that did not ask."""
    llama = loaded("llama")
    prompts = make_prompts((40, 1, 2, 33))
    core = make_core(build(llama, max_batch_tokens=budget))
    asked = [make_request(str(i), p, 2, prompt_logprobs=i) for i, p in enumerate(prompts)]
    outputs = run(core, [*asked, make_request("not", prompts[0], 2)])
    for index, prompt in enumerate(prompts):
        first = outputs[str(index)][0]
        assert first.prompt_done == 0
        _check(first.prompt_logprobs, llama.model, prompt, index)
        assert all(output.prompt_logprobs is None for output in outputs[str(index)][1:])
    assert all(output.prompt_logprobs is None for output in outputs["not"])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("budget", [1, 7, 1024])
def test_tokens_are_what_they_are_without(
    loaded: Callable[[str], LoadedModel], budget: int, count: int
) -> None:
    """The rows of prompts stand behind those that are sampled, and there may be one for each
    token.
    """
    llama = loaded("llama")
    prompts = make_prompts((9, 21, 5))[:count]

    def tokens(prompt_logprobs: int | None) -> list[list[int]]:
        core = make_core(build(llama, max_batch_tokens=budget))
        requests = [
            make_request(str(i), prompt, 6, prompt_logprobs=prompt_logprobs)
            for i, prompt in enumerate(prompts)
        ]
        outputs = run(core, requests)
        return [[t for one in outputs[str(i)] for t in one.token_ids] for i in range(count)]

    expected = [greedy_reference(llama.model, prompt, 6) for prompt in prompts]
    assert tokens(0) == tokens(None) == expected


def test_rows_are_picked_where_not_all_are_wanted_in_their_order(
    loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = loaded("llama")
    model = llama._verified.model  # what steps run
    forward, kept = model.forward, []

    def watched(*arguments: Any, **named: Any) -> Any:
        kept.append(named["logits_to_keep"])
        return forward(*arguments, **named)

    monkeypatch.setattr(model, "forward", watched)
    (prompt,) = make_prompts((6,))
    for prompt_logprobs, first in ((None, [5]), (0, [5, 0, 1, 2, 3, 4])):
        kept.clear()
        run(
            make_core(build(llama)), [make_request("a", prompt, 3, prompt_logprobs=prompt_logprobs)]
        )
        assert kept[0].tolist() == first
        # A tensor of one zero equals 0: what a step that decodes hands over is told by its type.
        assert [(type(one), one) for one in kept[1:]] == [(int, 0), (int, 0)]


def test_scoring_alone(loaded: Callable[[str], LoadedModel]) -> None:
    """max_tokens 0: the prompt's log-probabilities, and no token."""
    llama = loaded("llama")
    (prompt,) = make_prompts((20,))
    outputs = run(make_core(build(llama)), [make_request("a", prompt, 0, prompt_logprobs=0)])
    assert [output.token_ids for output in outputs["a"]] == [(), ()]
    _check(outputs["a"][0].prompt_logprobs, llama.model, prompt, 0)
