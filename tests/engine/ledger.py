"""What came out of a core, held against what was asked for and the tokens computed by hand."""

from __future__ import annotations

from engine.contract.outputs import Finish, FinishReason, RequestOutput, StepOutputs
from engine.contract.request import GenerationRequest
from engine.contract.stats import EngineStats
from engine.contract.types import RequestId
from engine.core.engine_core import EngineCore
from engine.scheduler.prefill_first import PATIENCE, PrefillFirstScheduler
from tests.engine.fake_runner import expected_tokens, prompt_logprob

Choice = tuple[RequestId, int]
NATURAL = (FinishReason.LENGTH, FinishReason.CONTEXT)


class Ledger:
    """Outputs, choice by choice."""

    def __init__(self) -> None:
        self.specs: dict[RequestId, GenerationRequest] = {}
        self.tokens: dict[Choice, list[int]] = {}
        self.ends: dict[Choice, Finish] = {}
        self.over: set[RequestId] = set()
        self.prompts_done: set[RequestId] = set()
        self.num_given: dict[RequestId, int] = {}  # how often a request had tokens

    def add(self, spec: GenerationRequest) -> None:
        self.specs[spec.request_id] = spec
        for choice in range(spec.n):
            self.tokens[spec.request_id, choice] = []

    @property
    def live(self) -> list[RequestId]:
        return [name for name in self.specs if name not in self.over]

    def live_choices(self, name: RequestId) -> list[int]:
        return [i for i in range(self.specs[name].n) if (name, i) not in self.ends]

    def text(self, name: str, choice: int = 0) -> list[int]:
        return self.tokens[RequestId(name), choice]

    def end(self, name: str, choice: int = 0) -> Finish:
        return self.ends[RequestId(name), choice]

    def take(self, step: StepOutputs) -> None:
        for output in step.outputs:
            self._take_one(output)

    def _take_one(self, output: RequestOutput) -> None:
        name, choice = output.request_id, (output.request_id, output.choice)
        spec = self.specs[name]
        assert name not in self.over, "an output after the end"
        assert choice not in self.ends, "an output after the choice's end"
        if output.prompt_done is not None:
            assert name not in self.prompts_done
            self.prompts_done.add(name)
            assert 0 <= output.prompt_done < len(spec.prompt)
        if spec.prompt_logprobs is None or output.prompt_done is None:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs == tuple(
                prompt_logprob(spec.prompt[i], i) for i in range(1, len(spec.prompt))
            )
        if output.token_ids:
            assert name in self.prompts_done
            self.num_given[name] = self.num_given.get(name, 0) + 1
            asked = spec.logprobs is not None
            assert (output.logprobs is not None) == asked
            if output.logprobs is not None:
                position = len(spec.prompt) + len(self.tokens[choice])
                found = [(each.logprob, each.rank) for each in output.logprobs]
                assert found == [
                    (-float(token), position + i) for i, token in enumerate(output.token_ids)
                ]
        self.tokens[choice] += output.token_ids
        ends_request = False
        if output.finish is not None:
            self.ends[choice] = output.finish
            failed = output.finish.reason is FinishReason.ERROR
            ends_request = failed or not self.live_choices(name)
        assert output.ends_request == ends_request, "a request's end is said once"
        if ends_request:
            self.over.add(name)

    def check(self, context: int) -> None:
        """Every token delivered so far is right, and so are the ends."""
        for (name, choice), tokens in self.tokens.items():
            spec = self.specs[name]
            right = expected_tokens(
                spec.prompt,
                spec.stop.max_tokens,
                ending=spec.stop.stop_token_ids,
                context=context,
                choice=choice,
            )
            assert tokens == right[: len(tokens)], "tokens differ from the oracle"
            end = self.ends.get((name, choice))
            if end is not None:
                self._check_end(spec, tokens, right, end)

    def check_drafts(self, stats: EngineStats) -> None:
        """Of what a step gives a choice, all tokens but one were drafts; usage says the same."""
        tokens = dict.fromkeys(self.specs, 0)
        usage = {name: [0, 0] for name in self.specs}
        for (name, choice), known in self.tokens.items():
            tokens[name] += len(known)
            end = self.ends.get((name, choice))
            if end is not None:
                usage[name][0] += end.usage.draft_tokens
                usage[name][1] += end.usage.accepted_draft_tokens
        kept = {name: tokens[name] - self.num_given.get(name, 0) for name in self.specs}
        assert stats.accepted_draft_tokens == sum(kept.values()) <= stats.draft_tokens
        for name in self.over:
            drafted, accepted = usage[name]
            assert accepted == kept[name] <= drafted
        if not self.live:
            assert stats.draft_tokens == sum(drafted for drafted, _ in usage.values())

    def _check_end(
        self, spec: GenerationRequest, tokens: list[int], right: list[int], end: Finish
    ) -> None:
        usage = end.usage
        assert usage.prompt_tokens == len(spec.prompt)
        assert 0 <= usage.cached_tokens < len(spec.prompt)
        assert end.timings.arrival <= end.timings.finished
        if end.reason in NATURAL:
            assert tokens == right
            full = len(tokens) == spec.stop.max_tokens
            assert (end.reason is FinishReason.LENGTH) == full
        if end.stop_token_id is not None:
            assert tokens == right
            assert tokens[-1] == end.stop_token_id
        if end.reason is FinishReason.ERROR:
            assert end.failure is not None
            assert usage.completion_tokens >= len(tokens)
        else:
            assert end.failure is None
            if end.reason is FinishReason.STOP and end.stop_token_id is None:
                assert usage.completion_tokens <= len(tokens)
            else:
                assert usage.completion_tokens == len(tokens)


def drain(core: EngineCore, ledger: Ledger) -> int:
    """Step until everything has ended, held requests too; how many steps it took. Raises if
    someone starves.
    """
    core.unhold_all()
    work = sum(
        spec.n * (len(spec.prompt) + spec.stop.max_tokens + 2) for spec in ledger.specs.values()
    )
    # Each step moves somebody on who is never preempted: the first by the policy's own order. With
    # PrefillFirst, it may be left out in between.
    left_out = PATIENCE if isinstance(core.scheduler, PrefillFirstScheduler) else 0
    limit = 50 + work * (left_out + 3)
    steps = 0
    while core.has_work:
        ledger.take(core.step())
        steps += 1
        assert steps < limit, f"no end: {ledger.live}"
    assert not ledger.live
    return steps
