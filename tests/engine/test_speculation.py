"""Speculation through the whole engine: it changes no token, whatever is guessed."""

from __future__ import annotations

import json
import random
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from typing_extensions import override

import engine
from engine import assembly
from engine.api.offline import LoadedModel
from engine.attention.step_states import NOTHING_RECURS, Recurrence, StateShape
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.outputs import RequestOutput
from engine.contract.request import GenerationRequest, Request
from engine.contract.sampling_params import (
    MAX_LOGIT_BIAS,
    GrammarKind,
    GrammarParams,
    LogprobParams,
    SamplingParams,
    StopParams,
)
from engine.contract.types import CallerKey, RequestId, TokenId
from engine.core.engine_core import EngineCore
from engine.drafts import drafter
from engine.drafts.draft_source import DraftSource, Guess
from engine.drafts.row_costs import RowTimes
from engine.drafts.suffix_index import SharedIndexes
from engine.loading import running
from engine.scheduler.base import Scheduler
from engine.structured import GrammarCompiler
from engine.text import Tokenizer
from tests.engine.forced_drafts import draft_always
from tests.engine.mode_sweep import (
    LENGTHS,
    NEW_TOKENS,
    check_every_mode,
    load_family,
    sharing_prompts,
)
from tests.families import EVERY_FAMILY
from tests.model_recipes import VOCAB
from tests.recurrent_recipes import RECURRENT
from tests.tiny_models import greedy_reference, make_prompts

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
NEW = 24
FORMS = (
    GrammarParams(kind=GrammarKind.REGEX, text=r"[a-z]{3,9}( [0-9]{2}|é)"),
    GrammarParams(kind=GrammarKind.CHOICE, choices=("yes", "no", "maybe, or not")),
)
Outputs = dict[tuple[str, int], list[RequestOutput]]


class Scripted(DraftSource):
    """Guesses from what a run without speculation gave: right, wrong from some place, or random.

    Attributes:
        known: what a choice, or else a prompt, is followed by.
        num_kept: how many drafts were kept.
    """

    name = "history"
    num_kinds = 1
    known: dict[tuple[object, ...], list[int]]
    vocab_size: int
    num_kept: int

    def __init__(self, right: list[int], begin: int) -> None:
        self._right, self._begin = right, begin
        self._chance = random.Random(len(right))

    @classmethod
    @override
    def begin(cls, request: Request, indexes: SharedIndexes) -> Self:
        right = cls.known.get((request.request_id, request.choice))
        if right is None:
            right = cls.known.get(tuple(request.spec.prompt), [])
        return cls(right, request.num_prompt_tokens)

    @override
    def guess(self, tokens: array[int], most: int) -> Guess | None:
        chance = self._chance
        guessed = self._right[len(tokens) - self._begin :][: chance.randint(0, most)]
        kind = chance.choice(("right", "wrong", "random"))
        if kind == "wrong" and guessed:
            place = chance.randrange(len(guessed))
            guessed[place] = (guessed[place] + 1) % self.vocab_size
        elif kind == "random":
            guessed = [chance.randrange(self.vocab_size) for _ in range(chance.randint(0, most))]
        return Guess(array("i", guessed), 0) if guessed else None


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """All that is guessed is tried, also beside prompts, and guesses are Scripted's."""

    def decoding(self: Scheduler) -> list[Request]:
        return [one for one in self.runnable() if one.num_tokens_to_compute == 1]

    judge = drafter.Drafter.judge

    def counted(
        self: drafter.Drafter, request: Request, count: int, kept: int, **rest: Any
    ) -> None:
        Scripted.num_kept += kept
        judge(self, request, count, kept, **rest)

    draft_always(monkeypatch)
    monkeypatch.setattr(drafter.Drafter, "judge", counted)
    monkeypatch.setattr(Scheduler, "_draftable", decoding)
    monkeypatch.setitem(drafter.SOURCES, Scripted.name, Scripted)
    Scripted.known, Scripted.num_kept = {}, 0
    return Scripted


def all_kinds(
    vocab_size: int, chance: random.Random, count: int, *, forms: bool, shared: bool
) -> list[GenerationRequest]:
    """Requests whose options are drawn. Some of them may have no drafts.

    Args:
        vocab_size, chance, count: of the model; what draws; how many.
        forms: whether some have a grammar. The model must have the demo model's tokenizer.
        shared: whether prompts begin alike.
    """
    (prefix,) = make_prompts((30,), seed=10**6)
    specs = []
    for index in range(count):
        (prompt,) = make_prompts((chance.choice((1, 7, 40, 90)),), seed=index)
        form = chance.choice((None, None, None, None, *FORMS)) if forms else None
        is_free = form is None  # what else limits the choice could leave no token
        greedy = chance.random() < 0.4
        sampling = SamplingParams(
            temperature=0.0 if greedy else chance.choice((0.7, 1.0, 1.5)),
            top_k=chance.choice((0, 5, 50)),
            top_p=chance.choice((1.0, 0.9)),
            min_p=chance.choice((0.0, 0.05)),
            typical_p=chance.choice((1.0, 1.0, 0.8)),
            seed=chance.randrange(1000),
            repetition_penalty=chance.choice((1.0, 1.0, 1.0, 1.3)),
            presence_penalty=chance.choice((0.0, 0.0, 0.0, 0.5)),
            frequency_penalty=chance.choice((0.0, 0.0, 0.0, 0.0, -0.3)),
            no_repeat_ngram_size=chance.choice((0, 0, 0, 3)) if is_free else 0,
            allowed_token_ids=chance.choice(((), (), range(vocab_size // 2))) if is_free else (),
            banned_token_ids=chance.choice(((), (TokenId(5), TokenId(9)))) if is_free else (),
            logit_bias=chance.choice(((), ((TokenId(3), 2.0),))),
        )
        new = chance.choice((1, 2, 9, NEW))
        endings = [
            tuple(map(TokenId, chance.sample(range(vocab_size), size)))
            for size in (chance.choice((0, 0, min(vocab_size // 9, 100))), chance.choice((0, 9)))
        ]
        stop = StopParams(
            max_tokens=new,
            min_tokens=chance.choice((0, new // 2)) if is_free else 0,
            stop_token_ids=endings[0] if is_free else (),
            eos_token_ids=endings[1] if is_free else (TokenId(1),),
            ignore_eos=is_free and chance.random() < 0.3,
        )
        specs.append(
            GenerationRequest(
                request_id=RequestId(str(index)),
                prompt=[*prefix, *prompt] if shared else prompt,
                sampling=sampling,
                stop=stop,
                logprobs=chance.choice(
                    (None, LogprobParams(top_n=2), LogprobParams(token_ids=(TokenId(4),)))
                ),
                prompt_logprobs=chance.choice((None, None, None, 1)),
                grammar=form,
                n=1 if greedy else chance.choice((1, 1, 3)),
                priority=chance.choice((0, 0, 5)),
                bypass_prefix_cache=chance.random() < 0.2,
                cache_salt=chance.choice((b"", b"salt")),
                time_limit_s=chance.choice((None, 1e6)),
                caller=CallerKey(chance.choice("ab")),
                prediction=make_prompts((30,), seed=index)[0],
            )
        )
    return specs


def run(core: EngineCore, specs: list[GenerationRequest], vocab_size: int) -> Outputs:
    """Two enter with each step, and at times a step leaves one out."""
    compiler = GrammarCompiler(Tokenizer.load(DEMO), vocab_size)
    chance = random.Random(len(specs))
    waiting = list(specs)
    outputs: Outputs = {}
    while waiting or core._live.by_id or core.has_work:
        for spec in [waiting.pop(0) for _ in range(min(2, len(waiting)))]:
            form, endings = spec.grammar, spec.stop.ending_token_ids
            core.add(spec, core.clock(), compiler.compile(form, endings) if form else None)
        core.unhold_all()
        if core._live.by_id and chance.random() < 0.3:
            core.hold(chance.choice(list(core._live.by_id)))
        for output in core.step().outputs:
            outputs.setdefault((output.request_id, output.choice), []).append(output)
    return outputs


def flat(outputs: Outputs) -> dict[Any, Any]:
    """What is told of each choice, however it was grouped."""
    found = {}
    for key, all_of in outputs.items():
        finish = all_of[-1].finish
        assert finish is not None
        found[key] = (
            [token for output in all_of for token in output.token_ids],
            [one for output in all_of for one in output.logprobs or ()],
            [one for output in all_of for one in output.prompt_logprobs or ()],
            finish.reason,
            finish.stop_token_id,
            finish.usage.prompt_tokens,
            finish.usage.completion_tokens,
        )
    return found


def built(loaded: LoadedModel, **options: Any) -> EngineCore:
    config = ContinuousBatchingConfig(**{"block_size": 8, "num_blocks": 200, **options})
    return assembly.build_core(loaded._verified, config, lambda line: None)[0]


def hangs_on_rounding(
    core: EngineCore,
    vocab_size: int,
    spec: GenerationRequest,
    choice: int,
    both: tuple[list[int], list[int]],
) -> bool:
    """Whether each of two outputs of a choice is what logits give that differ by a ten thousandth,
    up to the first token in which they are not the same.
    """
    chance = random.Random(0)
    given = dict(spec.sampling.logit_bias)
    common = next((i for i, pair in enumerate(zip(*both, strict=False)) if len({*pair}) > 1), None)
    if common is None:
        return False  # an output that is longer than another is no other token
    ids = {one[common] for one in both} | given.keys()
    ids |= set(range(min(vocab_size, MAX_LOGIT_BIAS - len(ids))))
    nudged = [
        replace(
            spec,
            request_id=RequestId(str(index)),
            sampling=replace(
                spec.sampling,
                logit_bias=[(one, given.get(one, 0.0) + chance.gauss(0, 1e-4)) for one in ids],
            ),
        )
        for index in range(40)
    ]
    ends = common + 1
    results = flat(run(core, nudged, vocab_size))
    found = [one[0][:ends] for key, one in results.items() if key[1] == choice]
    return all(one[:ends] in found for one in both)


def compare(
    loaded: LoadedModel,
    scripted: type[Scripted],
    count: int,
    *,
    bits: bool,
    forms: bool = False,
    num_blocks: int = 400,
    seed: int = 1,
) -> EngineCore:
    """With and without speculation.

    bits: whether log-probabilities are equal, too. Prompts are then not divided and share nothing,
    and nothing is computed again, because sums depend on where. Else a choice may differ from where
    its token hangs on rounding.
    """
    vocab_size = loaded._verified.vocab_size
    specs = all_kinds(vocab_size, random.Random(seed), count, forms=forms, shared=not bits)
    options: dict[str, Any] = {
        "max_batch_tokens": 1024 if bits else 64,
        "num_blocks": num_blocks,
        "allow_block_sharing": not bits,
    }
    without = built(loaded, speculation="off", **options)
    plain = flat(run(without, specs, vocab_size))
    scripted.known = {key: one[0] for key, one in plain.items()}
    scripted.vocab_size = vocab_size
    core = built(loaded, speculation="history", max_drafts=7, **options)
    outputs = run(core, specs, vocab_size)
    found = flat(outputs)
    if bits:
        assert found == plain
    else:
        plain, found = ({k: (v[0], *v[3:]) for k, v in one.items()} for one in (plain, found))
        assert found.keys() == plain.keys()
        differ = [key for key in plain if found[key] != plain[key]]
        assert len(differ) <= 1 + len(plain) // 200
        for key in differ:
            spec = next(one for one in specs if one.request_id == key[0])
            both = (plain[key][0], found[key][0])
            assert hangs_on_rounding(without, vocab_size, spec, key[1], both), (
                f"choice {key} of {spec.sampling}: {plain[key]} became {found[key]}"
            )
    assert not (bits and without.scheduler.num_preemptions + core.scheduler.num_preemptions)
    stats = core._results
    drafted = core.scheduler.drafter
    assert drafted is not None
    assert stats.num_accepted_draft_tokens == sum(drafted.num_kept.values())
    assert stats.num_draft_tokens == sum(drafted.num_drafted.values())
    assert stats.num_draft_tokens > stats.num_accepted_draft_tokens > count
    usages = [all_of[-1].finish.usage for all_of in outputs.values() if all_of[-1].finish]
    assert stats.num_draft_tokens == sum(one.draft_tokens for one in usages)
    assert stats.num_accepted_draft_tokens == sum(one.accepted_draft_tokens for one in usages)
    assert not drafted._states
    core.scheduler.kv_cache.check_integrity()
    return core


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "deepseek_v3"])
def test_no_token_changes_in_torch(
    loaded_torch: Callable[[str], LoadedModel], forced: type[Scripted], family: str
) -> None:
    compare(loaded_torch(family), forced, 40, bits=False)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")],
)
def test_no_bit_changes_in_our_decoder(
    forced: type[Scripted], dtype: str, quantization: str
) -> None:
    loaded = engine.load(str(DEMO), dtype=dtype, quantization=quantization, threads=1)
    compare(loaded, forced, 60, bits=True, forms=True)


def test_no_token_changes_where_blocks_are_few(forced: type[Scripted]) -> None:
    """Also where requests are preempted, share prefixes, and are computed a part at a time."""
    core = compare(
        engine.load(str(DEMO), dtype="float32", threads=1), forced, 60, bits=False, num_blocks=40
    )
    assert core.stats().preemptions > 0
    assert core.stats().prefix_hits > 0


@pytest.mark.parametrize("source", ["grammar", "auto"])
def test_forced_text_is_drafted_and_changes_no_bit(forced: type[Scripted], source: str) -> None:
    loaded = engine.load(str(DEMO), dtype="bfloat16")
    vocab_size = forced.vocab_size = loaded._verified.vocab_size
    value = {"enum": ["certainly", "hardly"]}
    names = ["first_value", "second_value"]
    schema = {"type": "object", "properties": dict.fromkeys(names, value), "required": names}
    specs = [
        GenerationRequest(
            request_id=RequestId(str(index)),
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0 if index % 2 else 1.0, seed=index),
            stop=StopParams(max_tokens=60, eos_token_ids=(TokenId(1),)),
            logprobs=LogprobParams(top_n=1),
            grammar=GrammarParams(
                kind=GrammarKind.JSON_SCHEMA,
                text=json.dumps(schema | {"additionalProperties": False}),
            ),
        )
        for index, prompt in enumerate(make_prompts((5, 20, 40, 9), seed=3))
    ]
    specs = [replace(one, n=2) if one.sampling.temperature else one for one in specs]
    plain = flat(run(built(loaded, speculation="off"), specs, vocab_size))
    core = built(loaded, speculation=source)
    assert flat(run(core, specs, vocab_size)) == plain
    if source == "grammar":
        assert core.stats().accepted_grammar_draft_tokens > len(plain)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")]
)
def test_two_thousand_requests_keep_every_bit(
    forced: type[Scripted], dtype: str, quantization: str, seed: int
) -> None:
    loaded = engine.load(str(DEMO), dtype=dtype, quantization=quantization, threads=1)
    compare(loaded, forced, 500, bits=True, forms=True, seed=seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 6))
def test_two_thousand_requests_among_few_blocks_keep_every_token(
    forced: type[Scripted], seed: int
) -> None:
    loaded = engine.load(str(DEMO), dtype="float32", threads=1)
    core = compare(loaded, forced, 500, bits=False, forms=True, num_blocks=40, seed=seed)
    assert core.stats().preemptions > 0


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("decoder", ["transformers", "own"])
def test_every_family_equals_generate_with_drafts(
    forced: type[Scripted], family: str, decoder: str
) -> None:
    if family in RECURRENT:
        pytest.skip("a recurrent layer's state cannot go back, so there are no drafts")
    model, loaded, attention = load_family(family, decoder)
    for prompt in (*make_prompts(LENGTHS), *sharing_prompts()):
        forced.known[tuple(prompt)] = greedy_reference(model, prompt, NEW_TOKENS)
    forced.vocab_size = VOCAB
    check_every_mode(model, loaded, attention, speculation="history")
    assert forced.num_kept > 5 * NEW_TOKENS


def test_rows_are_timed_in_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The OpenMP threads of one that lives on would make others' steps slower."""
    timed: list[threading.Thread] = []
    measure = running.measure_rows

    def watched(*given: Any, **more: Any) -> RowTimes:
        timed.append(threading.current_thread())
        return measure(*given, **more)

    monkeypatch.setattr(running, "measure_rows", watched)
    built(engine.load(str(DEMO), dtype="float32", threads=1), speculation="auto")
    assert len(timed) == 1
    assert not timed[0].is_alive()


@pytest.mark.parametrize(
    ("device", "dtype", "own", "auto", "asked"),
    [
        ("cpu", torch.float32, False, True, True),
        ("cpu", torch.bfloat16, True, True, True),
        ("cpu", torch.bfloat16, False, False, False),  # torch's products could change tokens
        ("cuda", torch.bfloat16, True, False, True),
    ],
)
def test_where_tokens_may_be_guessed(
    device: str, dtype: torch.dtype, own: bool, auto: bool, asked: bool
) -> None:
    model = SimpleNamespace(
        leader=None,
        device=torch.device(device),
        dtype=dtype,
        decoder=object() if own else None,
        probe=SimpleNamespace(recurrence=NOTHING_RECURS),
    )
    for is_asked, wanted in ((False, auto), (True, asked)):
        why = assembly.why_no_drafts(model, is_asked=is_asked, overlap=False)  # type: ignore[arg-type]
        assert (why is None) == wanted
    assert assembly.why_no_drafts(model, is_asked=True, overlap=True)  # type: ignore[arg-type]
    state = StateShape(0, "conv", 0, (2,), dtype)
    model.probe = SimpleNamespace(recurrence=Recurrence("past_key_values", (state,)))
    assert assembly.why_no_drafts(model, is_asked=True, overlap=False)  # type: ignore[arg-type]
