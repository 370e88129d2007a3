"""What requests may ask of a model with recurrent layers: forms, conversations, tools, several
choices, priorities. In float32 it gets what the unmodified model gives.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import engine
from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel
from engine.api.results import GenerationOutput, choice_name
from engine.contract.sampling_params import GrammarKind, GrammarParams
from tests.engine.core_steps import NEW_TOKENS, Steps
from tests.engine.hybrids import FAMILIES, PARAMETERS, TOOLS, Hybrid, save_hybrid
from tests.engine.mode_sweep import BLOCK, managed
from tests.engine.structured.conftest import form
from tests.engine.structured.tags import params, tag
from tests.tiny_models import greedy_reference, make_prompts

COUNT = 100
"""Enough for a call whose tokens are single bytes."""
PROMPTS = make_prompts((20, 45, 5, 33, 61))
CALL = params(
    tag(
        '<tool_call>\n{"name": "read_gauge", "arguments": ',
        "}\n</tool_call>",
        {"type": "json_schema", "json_schema": PARAMETERS},
    )
)
FORMS: list[GrammarParams] = [
    form(
        GrammarKind.JSON_SCHEMA,
        json.dumps({
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "size": {"enum": ["small", "large"]},
            },
            "required": ["name", "size"],
            "additionalProperties": False,
        }),
    ),
    form(GrammarKind.REGEX, r"[a-z]{3,9}( [0-9]{2}|é)"),
    form(GrammarKind.LARK, 'start: pair ("," pair){0,2}\npair: /[a-z]{1,3}/ "=" /[0-9]{1,2}/'),
    form(GrammarKind.CHOICE, ("yes", "no", "maybe, or not")),
    CALL,
]  # fmt: skip
SAMPLED: dict[str, Any] = {
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 0,
    "num_return_sequences": 3,
    "per_request_processors": True,
}


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def loaded(hybrid: Hybrid) -> LoadedModel:
    loaded = engine.load(str(hybrid.directory), dtype="float32", threads=1)
    is_ours = hybrid.model.config.model_type == "qwen3_5_text"
    assert (loaded._verified.decoder is not None) == is_ours
    return loaded


def _result(manager: ContinuousBatchingManager, name: str) -> GenerationOutput:
    output = manager.get_result(name, timeout=60)
    assert output is not None
    assert output.error is None
    return output


# ---- forms and tools -----------------------------------------------------------------------------


def test_forms_give_what_generate_gives_within_them(hybrid: Hybrid, loaded: LoadedModel) -> None:
    """Beside requests without a form, in chunks, and again from kept states."""
    prompts = dict(zip([*range(len(FORMS))], PROMPTS, strict=True))
    within = {i: hybrid.within(prompt, FORMS[i], COUNT) for i, prompt in prompts.items()}
    free = {i: greedy_reference(hybrid.model, prompt, COUNT) for i, prompt in prompts.items()}
    assert all(len(tokens) < COUNT for i, tokens in within.items() if i in (1, 2, 3, 4))
    with managed(loaded, num_blocks=96, max_batch_tokens=24, max_requests_per_batch=4) as manager:
        for turn in range(2):
            for i, prompt in prompts.items():
                manager.add_request(prompt, f"{turn} in form {i}", COUNT, grammar=FORMS[i])
                manager.add_request(prompt, f"{turn} free {i}", COUNT)
            for i in prompts:
                found = list(_result(manager, f"{turn} in form {i}").generated_tokens)
                assert hybrid.without_end(found) == within[i]
                assert list(_result(manager, f"{turn} free {i}").generated_tokens) == free[i]
        assert manager.stats().prefix_hits > sum(map(len, PROMPTS)) / 2


# ---- several choices -----------------------------------------------------------------------------


def test_choices_are_drawn_from_the_models_own_probabilities(
    hybrid: Hybrid, loaded: LoadedModel
) -> None:
    """Each choice goes on from its own copy of the prompt's state, beside others and again."""
    options = {**SAMPLED, "logprobs": 0, "eos_token_id": -1}
    batching = options.pop("per_request_processors")
    prompts = PROMPTS[:3]
    found: list[list[list[int]]] = []
    with managed(
        loaded, num_blocks=160, max_batch_tokens=32, per_request_processors=batching
    ) as manager:
        for turn in range(2):
            names = [f"{turn} {i}" for i in range(len(prompts))]
            for seed, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
                manager.add_request(prompt, name, NEW_TOKENS, seed=seed, **options)
            outputs = [
                [_result(manager, choice_name(name, choice)) for choice in range(3)]
                for name in names
            ]
            found.append([list(one.generated_tokens) for row in outputs for one in row])
            for prompt, row in zip(prompts, outputs, strict=True):
                for one in row:
                    _check_logprobs(hybrid, prompt, one)
        assert manager.stats().prefix_hits > 0
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 9


def _check_logprobs(hybrid: Hybrid, prompt: list[int], output: GenerationOutput) -> None:
    tokens = list(output.generated_tokens)
    assert len(tokens) == NEW_TOKENS
    with torch.inference_mode():
        logits = hybrid.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=1e-3, atol=1e-3)


def test_choices_within_a_form_are_those_of_the_request_alone(
    hybrid: Hybrid, loaded: LoadedModel
) -> None:
    options = dict(SAMPLED)
    batching = {"per_request_processors": options.pop("per_request_processors"), "num_blocks": 160}
    found = []
    for is_crowded in (False, True):
        with managed(
            loaded, max_batch_tokens=24, allow_block_sharing=is_crowded, **batching
        ) as one:
            if is_crowded:
                for i, prompt in enumerate(PROMPTS):
                    one.add_request(prompt, f"beside {i}", COUNT)
            for seed, prompt in enumerate(PROMPTS[:2]):
                one.add_request(prompt, f"r{seed}", COUNT, seed=seed, grammar=FORMS[3], **options)
            found.append([
                list(_result(one, choice_name(f"r{seed}", choice)).generated_tokens)
                for seed in range(2)
                for choice in range(3)
            ])  # fmt: skip
    assert found[0] == found[1]
    for tokens in found[0]:
        assert hybrid.tokenizer.decode(tokens, skip_special_tokens=True) in FORMS[3].choices


# ---- conversations -------------------------------------------------------------------------------


def test_a_conversation_with_a_tool(hybrid: Hybrid, loaded: LoadedModel) -> None:
    """The prompt is transformers', replies and calls are `generate`'s, and each turn goes on from
    the end of the prompt before.
    """
    theirs, tokenizer = AutoTokenizer.from_pretrained(hybrid.directory), hybrid.tokenizer
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Answer briefly, and politely."}
    ]
    before = 0
    with managed(loaded, num_blocks=256, max_batch_tokens=64) as manager:
        for turn, (question, grammar) in enumerate([
            ("How high is the river at Ulm?", CALL), (None, None), ("And at Passau?", CALL),
        ]):  # fmt: skip
            if question is None:
                messages.append({"role": "tool", "content": "3 m"})
            else:
                messages.append({"role": "user", "content": question})
            text = tokenizer.apply_chat_template(messages, tools=TOOLS)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            assert prompt == theirs.apply_chat_template(
                messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
            )
            hits = manager.stats().prefix_hits
            manager.add_request(prompt, f"turn {turn}", COUNT, grammar=grammar)
            reply = list(_result(manager, f"turn {turn}").generated_tokens)
            assert manager.stats().prefix_hits - hits >= (before - 1) // BLOCK * BLOCK
            before = len(prompt)
            if grammar is None:
                assert reply == greedy_reference(hybrid.model, prompt, COUNT)
            else:
                assert hybrid.without_end(reply) == hybrid.within(prompt, grammar, COUNT)
            said = tokenizer.decode(reply, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": said})
    assert '"name": "read_gauge"' in messages[2]["content"]


# ---- priorities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [0.0, 0.01])
@pytest.mark.parametrize("short_of", ["places", "slots"])
def test_high_priorities_take_the_slots_of_low_ones(
    hybrid: Hybrid,
    loaded: LoadedModel,
    short_of: str,
    space: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which go on afterwards where they were, also within a form."""
    options: dict[str, Any] = {"max_requests_per_batch": 2 if short_of == "places" else 8}
    if short_of == "slots":
        monkeypatch.setattr("engine.loading.memory._state_slots", lambda *_: 2)
    options |= {"scheduler_type": "priority", "cpu_offload_space": space}
    made = Steps((hybrid.model, loaded), **options)
    made.add("low 0", PROMPTS[0], priority=-1)
    made.add("form", PROMPTS[1], COUNT, matcher=hybrid.matcher(CALL), grammar=CALL, priority=-1)
    made.steps(8)
    low = {name: list(made.ledger.text(name)) for name in ("low 0", "form")}
    assert all(low.values())
    for i in range(2):
        made.add(f"high {i}", PROMPTS[2 + i], priority=1)
    made.steps(1)
    assert made.core.stats().preemptions == 2
    while {"high 0", "high 1"} <= set(made.ledger.live):
        made.steps(1)
        assert {name: made.ledger.text(name) for name in low} == low, "those of high priority run"
    made.finish()
    for name, prompt in (("low 0", PROMPTS[0]), ("high 0", PROMPTS[2]), ("high 1", PROMPTS[3])):
        made.check(name, prompt)
    expected = hybrid.within(PROMPTS[1], CALL, COUNT)
    assert hybrid.without_end(made.ledger.text("form")) == expected
    assert len(low["form"]) < len(expected)
    stats = made.core.stats()
    assert (stats.offloads, stats.restores) == ((2, 2) if space else (0, 0))
    assert stats.states_used == made.kv_cache.num_used_blocks == 0
