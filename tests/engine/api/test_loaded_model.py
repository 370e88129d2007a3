"""A model that the engine runs stays its owner's: it generates, trains and saves as it did before,
and what its owner does to it is never computed wrongly.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel, from_model, load
from engine.api.results import GenerationOutput
from engine.attention.registry import ATTENTION_NAME
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import (
    ModelChangedError,
    ModelRefusedError,
    NoGradientsError,
    NoStepError,
)
from engine.contract.outputs import FinishReason
from tests.long_rope import ORIGINAL, make_lengthened
from tests.model_recipes import FAST
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

DEMO = Path(__file__).parents[3] / "models" / "demo"
SMALL = ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=64)
PROMPTS = make_prompts((20, 1, 40))
NEW = 5


def _model(family: str = "llama", attention: str = "sdpa", **options: Any) -> PreTrainedModel:
    config = FAMILIES[family]()
    for name, value in options.items():
        setattr(config, name, value)
    model = make_model(config)
    model.set_attn_implementation(attention)
    return model


def _batch(model: LoadedModel) -> list[list[int]]:
    outputs = model.generate_batch(
        PROMPTS,
        GenerationConfig(do_sample=False),
        continuous_batching_config=SMALL,
        max_new_tokens=NEW,
        eos_token_id=-1,
        progress_bar=False,
    )
    assert not any(output.error for output in outputs.values())
    return [output.generated_tokens for output in outputs.values()]


def _in_order(results: Iterable[GenerationOutput]) -> list[list[int]]:
    found = {output.request_id: output.generated_tokens for output in results}
    return [found[f"req_{index}"] for index in range(len(PROMPTS))]


def _padded() -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, PROMPTS))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS]
    ids = torch.tensor(rows)
    return ids, (ids != 0).long()


def _free(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    """What a padded batch gives, whose masks are the model's own."""
    ids, mask = _padded()
    made: Any = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    tokens: list[list[int]] = made[:, ids.shape[1] :].tolist()
    return tokens


def _gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Of a training step, in training mode; what it leaves is taken away."""
    ids, mask = _padded()
    model.train()
    torch.manual_seed(0)
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    model.eval()
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return found


def _implementations(model: PreTrainedModel) -> list[str | None]:
    return [
        module.config._attn_implementation
        for module in model.modules()
        if hasattr(module, "config")
    ]


def _files(model: PreTrainedModel, directory: Path) -> dict[str, bytes]:
    model.save_pretrained(directory)
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


class _State:
    """All of a model that its owner can see."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self.files = _files(model, directory)  # it writes down the architecture in the config
        self.modules = {name: (id(one), type(one)) for name, one in model.named_modules()}
        self.own = {name: sorted(vars(one)) for name, one in model.named_modules()}
        self.places = {
            name: (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        self.numbers = {name: one.clone() for name, one in model.state_dict().items()}
        self.config = model.config.to_dict()
        self.generation_config = model.generation_config.to_dict()
        self.implementations = _implementations(model)

    def check(self, model: PreTrainedModel, directory: Path) -> None:
        now = _State(model, directory)
        for name in ("modules", "own", "places", "config", "generation_config", "implementations"):
            assert getattr(now, name) == getattr(self, name), name
        assert now.numbers.keys() == self.numbers.keys()
        assert all(torch.equal(now.numbers[name], one) for name, one in self.numbers.items())
        assert now.files == self.files


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("llama", "gpt_oss", "gemma4") else pytest.mark.slow)
        for name in FAST
    ],
)
def test_a_model_that_was_handed_in_is_its_owners(family: str, tmp_path: Path) -> None:
    model = _model(family, "eager")
    right = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    free, gradients = _free(model), _gradients(model)
    state = _State(model, tmp_path / "before")

    def check(where: str) -> None:
        assert _free(model) == free, where
        found = _gradients(model)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, gradients[name]), (where, name)
        state.check(model, tmp_path / where)

    loaded = from_model(model)
    assert loaded.model is model
    check("loaded")
    with loaded.continuous_batching_context_manager(
        continuous_batching_config=SMALL, block=True
    ) as manager:
        names = [
            manager.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1) for prompt in PROMPTS
        ]
        check("running")
        outputs = [manager.get_result(name) for name in names]
        assert [output and output.generated_tokens for output in outputs] == right
    check("stopped")
    assert _batch(loaded) == right


@pytest.mark.parametrize("pack_weights", [None, False])
def test_a_model_that_was_loaded_is_the_checkpoints(
    pack_weights: bool | None, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    loaded = load(str(DEMO), dtype="float32", pack_weights=pack_weights)
    outputs = _batch(loaded)
    assert _implementations(loaded.model) == _implementations(plain)
    assert _free(loaded.model) == _free(plain)
    assert _files(loaded.model, tmp_path / "loaded") == _files(plain, tmp_path / "plain")
    if pack_weights is None:
        with pytest.raises(NoGradientsError, match="pack_weights=False"):
            _gradients(loaded.model)
        loaded.model.eval()
    else:
        expected = _gradients(plain)
        for name, gradient in _gradients(loaded.model).items():
            assert torch.equal(gradient, expected[name]), name
    assert _batch(loaded) == outputs == _batch(from_model(plain))


def test_our_attention_does_not_reach_training() -> None:
    """Its kernels give no gradients: they are the steps' alone."""
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()
    loaded = load(str(DEMO), dtype="bfloat16", pack_weights=False)
    expected, actual = _gradients(plain), _gradients(loaded.model)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], one) for name, one in expected.items())
    assert _batch(loaded) == _batch(loaded)


@pytest.mark.parametrize("attention", ["sdpa", "eager", {"": "sdpa", "text_config": "eager"}])
@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_whatever_attention_the_owner_sets(family: str, attention: str | dict[str, str]) -> None:
    if isinstance(attention, dict) and family == "llama":
        pytest.skip("it has no configs within its config")
    model = _model(family)
    right = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    loaded = from_model(model)
    manager = loaded.init_continuous_batching(continuous_batching_config=SMALL)
    manager.start()
    model.set_attn_implementation(attention)
    set_to = _implementations(model)
    for prompt in PROMPTS:
        manager.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1)
    manager.stop()
    assert _in_order(manager) == right
    assert _batch(loaded) == right
    assert _implementations(model) == set_to


def test_an_attention_that_is_set_on_one_layer() -> None:
    model: Any = _model()
    right = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    loaded = from_model(model)
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "eager"
    assert _batch(loaded) == right
    assert layer.config._attn_implementation == "eager"


def test_a_window_and_the_weights_of_attention() -> None:
    """Beyond a window the model's own masks are what keeps tokens out; and eager gives weights."""
    model: Any = _model("mistral", "eager")
    ids = torch.tensor([make_prompts((90,))[0]])
    expected = model(ids, output_attentions=True)
    from_model(model)
    actual = model(ids, output_attentions=True)
    assert torch.equal(actual.logits, expected.logits)
    assert len(actual.attentions) == model.config.num_hidden_layers
    for one, other in zip(actual.attentions, expected.attentions, strict=True):
        assert torch.equal(one, other)


def test_training_beside_steps() -> None:
    """Neither training mode, nor its dropout, nor gradient checkpointing reaches the steps."""
    model: Any = _model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    right = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    loaded = from_model(model)
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name from 5.20 on
    (enable or model.gradient_checkpointing_enable)()
    assert _batch(loaded) == right
    assert model.training
    ids, mask = _padded()
    torch.manual_seed(0)
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    other: Any = _model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    torch.manual_seed(0)
    other(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one.grad, twin.grad)


def _raise_q(model: Any) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1.5)


def _other_parameter(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight * -1.0)


def _other_scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3.0


def _other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 30.0


def _write_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(30.0)


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, made: made * 3.0)


def _other_eps(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.5


PARTS = [_other_scaling, _other_frequencies, _write_frequencies, _hook, _other_eps]


@pytest.mark.parametrize("change", [_raise_q, _other_parameter, *PARTS])
def test_what_the_owner_changes_is_what_is_computed(change: Callable[[Any], None]) -> None:
    model = _model()
    loaded = from_model(model)
    before = _batch(loaded)
    change(model)
    right = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    assert right != before
    assert _batch(loaded) == right


def _train(model: Any) -> None:
    ids = torch.tensor(PROMPTS[:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _load_weights(model: Any) -> None:
    model.load_state_dict({name: 1.5 * one for name, one in model.state_dict().items()})


@pytest.mark.parametrize("change", [_raise_q, _other_parameter, _train, _load_weights, *PARTS])
@pytest.mark.parametrize("when", ["kept", "pause", "failed pause"])
def test_cached_prefixes_of_old_weights_are_forgotten(
    change: Callable[[Any], None], when: str
) -> None:
    model = _model()
    loaded = from_model(model)
    prompt = PROMPTS[2]

    def generate(manager: ContinuousBatchingManager) -> tuple[list[int], int]:
        name = manager.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1)
        output = manager.get_result(name, timeout=60)
        assert output is not None
        return output.generated_tokens, output.cached_tokens

    def manager(keep: bool) -> Any:
        return loaded.continuous_batching_context_manager(
            GenerationConfig(do_sample=False),
            continuous_batching_config=SMALL,
            persistent_manager=keep,
        )

    with manager(keep=True) as first:
        before, _ = generate(first)
        assert generate(first) == (before, 32)
        if when != "kept":
            error = ZeroDivisionError() if when == "failed pause" else None
            with contextlib.suppress(ZeroDivisionError), first.pause():
                change(model)
                if error is not None:
                    raise error
            after = generate(first)
    if when == "kept":
        with manager(keep=True) as second:
            assert second is first
            assert generate(second) == (before, 32)  # nothing was changed
        change(model)
        with manager(keep=False) as third:
            assert third is first
            after = generate(third)
    right = greedy_reference(model, prompt, NEW)
    assert right != before
    assert after == (right, 0)


def _other_norm(model: Any) -> None:
    weight = model.model.norm.weight
    model.model.norm.weight = torch.nn.Parameter(weight * torch.linspace(-1, 1, len(weight)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_scaling, "model.layers.0.self_attn.scaling was changed"),
        (_hook, "model.layers.0.mlp has hooks"),
        (_other_eps, "model.layers.0.input_layernorm.variance_epsilon was changed"),
        (_other_norm, "model.norm.weight is another tensor"),
    ],
)
def test_our_decoder_computes_no_other_model_than_it_was_compared_with(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    _model().save_pretrained(tmp_path)
    loaded = load(str(tmp_path), threads=1, pack_weights=True)
    before = _batch(loaded)
    manager = loaded.init_continuous_batching(continuous_batching_config=SMALL)
    manager.start()
    with pytest.raises(ModelChangedError, match=message), manager.pause():
        change(loaded.model)
    name = manager.add_request(PROMPTS[0], max_new_tokens=NEW, eos_token_id=-1)
    output = manager.get_result(name, timeout=60)
    assert output is not None
    assert output.generated_tokens == before[0]  # as documented, it goes on with what was verified
    manager.stop()
    for _ in range(2):
        with pytest.raises(ModelChangedError, match=message):
            _batch(loaded)


@pytest.mark.parametrize("change", [_other_frequencies, _write_frequencies])
def test_our_decoder_takes_over_other_frequencies(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    _model().save_pretrained(tmp_path)
    loaded = load(str(tmp_path), threads=1, pack_weights=True)
    before = _batch(loaded)
    change(loaded.model)
    right = [greedy_reference(loaded.model, prompt, NEW) for prompt in PROMPTS]
    assert right != before
    assert _batch(loaded) == right


@pytest.mark.parametrize("name", ["llama, dynamic", "llama, longrope"])
def test_frequencies_of_lengths_are_the_models_own(name: str) -> None:
    """What its own calls set there changes nothing; what the owner sets is refused."""
    model: Any = make_lengthened(name)
    loaded = from_model(model)
    before = _batch(loaded)
    model(input_ids=torch.arange(3, 4 + ORIGINAL).unsqueeze(0) % 100)
    assert _batch(loaded) == before
    _other_frequencies(model)
    with pytest.raises(ModelChangedError, match="none of those that it sets itself"):
        _batch(loaded)


def test_a_note_on_a_module_is_no_other_model() -> None:
    model: Any = _model()
    loaded = from_model(model)
    before = _batch(loaded)
    model.model.layers[0].noted = [1, {"a": torch.ones(2)}]
    model.generation_config = GenerationConfig(do_sample=False)
    assert _batch(loaded) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_the_owner_compiles(when: str) -> None:
    """His calls run compiled; it is bound to his modules, so steps have the one that is not."""
    model: Any = _model()
    right = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    compiled = torch.compile(model.forward, backend="eager")
    if when == "before":
        model.forward = compiled
    loaded = from_model(model)
    model.forward = compiled
    assert _batch(loaded) == right
    assert model.forward is compiled


def test_a_partial_forward_is_of_the_view() -> None:
    """As libraries that move layers between devices set it."""
    model: Any = _model()
    right = [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
    layer, seen = model.model.layers[0].self_attn, []

    def forward(module: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(module)
        return module.forward_before(*arguments, **named)

    layer.forward_before = layer.forward
    layer.forward = functools.partial(forward, layer)
    assert _batch(from_model(model)) == right
    assert layer not in seen


def _wrap_forward(model: Any) -> None:
    own = model.forward
    model.forward = lambda *arguments, **named: own(*arguments, **named)


class _Doubled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _exchange(model: Any) -> None:
    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = _Doubled(old.in_features, old.out_features)


def _drop_a_layer(model: Any) -> None:
    model.model.layers = model.model.layers[:-1]
    model.config.num_hidden_layers -= 1


def _convert(model: Any) -> None:
    model.bfloat16()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_exchange, "up_proj"),
        (_drop_a_layer, "layers"),
        (_convert, "bfloat16"),
        (_wrap_forward, "LlamaForCausalLM.forward"),
    ],
)
def test_exchanged_modules_are_refused(change: Callable[[Any], None], message: str) -> None:
    model = _model()
    loaded = from_model(model)
    manager = loaded.init_continuous_batching(continuous_batching_config=SMALL)
    manager.start()
    with pytest.raises(ModelChangedError, match=message), manager.pause():
        change(model)
    if change is _convert:  # what is accepted all the same fails, and takes nothing with it
        failed = manager.get_result(manager.add_request(PROMPTS[0]))
        assert failed is not None
        assert failed.finish_reason is FinishReason.ERROR
    manager.stop()
    with pytest.raises(ModelChangedError, match="from_model"):
        _batch(loaded)
    with pytest.raises(ModelChangedError):
        manager.start()
    assert not manager.is_running()
    if change is _wrap_forward:
        with pytest.raises(ModelRefusedError, match="attention calls"):
            from_model(model)  # it leads to the owner's modules, past the view's
        return
    again = from_model(model)
    if change is not _convert:
        assert _batch(again) == [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]


def test_an_error_in_a_pause_is_the_callers_own() -> None:
    model = _model()
    manager = from_model(model).init_continuous_batching(continuous_batching_config=SMALL)
    manager.start()

    def fail() -> None:
        with manager.pause():
            _exchange(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    manager.stop()


def test_models_and_managers_do_not_mix() -> None:
    models = [_model(), _model("gemma2", "eager")]
    right = [[greedy_reference(model, prompt, NEW) for prompt in PROMPTS] for model in models]
    managers = [
        from_model(model).init_continuous_batching(continuous_batching_config=SMALL)
        for model in models
    ]
    managers.append(from_model(models[0]).init_continuous_batching(None, SMALL))
    for manager in managers:
        manager.start()
    for prompt in PROMPTS:
        for manager in managers:
            manager.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1)
    assert [[greedy_reference(m, p, NEW) for p in PROMPTS] for m in models] == right
    for manager in managers:
        manager.stop()
    made = [_in_order(manager) for manager in managers]
    assert made == [right[0], right[1], right[0]]


def test_a_copy_of_a_loaded_model() -> None:
    loaded = from_model(_model())
    right = _batch(loaded)
    other: Any = copy.deepcopy(loaded.model)
    assert _free(other) == _free(loaded.model)
    again = from_model(other)
    _raise_q(loaded.model)
    assert _batch(again) == right
    assert _batch(loaded) != right


def test_the_engines_attention_without_a_step() -> None:
    loaded = from_model(_model())
    loaded.model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(NoStepError, match="set_attn_implementation"):
        loaded.model(torch.tensor([[5, 6]]))
    loaded.model.set_attn_implementation("sdpa")
    assert _batch(loaded) == [greedy_reference(loaded.model, prompt, NEW) for prompt in PROMPTS]


def test_an_attention_of_the_owners_own() -> None:
    """It is his model's, not the engine's: it is called in his calls and in none of ours."""
    calls: list[int] = []

    def noted(module: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(module.layer_idx)
        return AttentionInterface()["sdpa"](module, *arguments, **named)

    AttentionInterface.register("noted", noted)
    model = _model(attention="noted")
    calls.clear()
    right = _batch(from_model(model))
    assert not calls
    _free(model)
    assert calls
    assert right == [greedy_reference(model, prompt, NEW) for prompt in PROMPTS]
