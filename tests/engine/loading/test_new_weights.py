"""New weights in a model that runs: whatever way they come, what is generated afterwards is what a
model gives that was loaded with them; or they are refused, and nothing has changed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from engine.api.manager import ContinuousBatchingManager
from engine.api.offline import LoadedModel, from_model, load
from engine.api.results import choice_name
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import WeightsRefusedError
from engine.models.held_layer import held_layers
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

SMALL = ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=64)
PROMPTS = make_prompts((20, 1, 40, 33))
NEW = 5
PACKINGS = ("float32", "bfloat16", "int8")
FAMILY = {"llama": False, "qwen2": False, "gemma3": True, "mixtral": False}
"""With whether its output layer is tied to the embedding. qwen2's products have biases."""


def _model(family: str, packing: str = "float32", seed: int = 0) -> PreTrainedModel:
    config = FAMILIES[family]()
    config.tie_word_embeddings = FAMILY[family]
    model = make_model(config, seed)
    model.generation_config.eos_token_id = None  # references are as long as what is asked for
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.dim() == 1:  # biases and norms are trained, too
                one.add_(torch.randn_like(one) * (0.5 if name.endswith("bias") else 0.1))
    made: PreTrainedModel = model.to(torch.float32 if packing == "float32" else torch.bfloat16)
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @functools.cache
    def save(family: str, packing: str, seed: int) -> Path:
        path = tmp_path_factory.mktemp("model")
        _model(family, packing, seed).save_pretrained(path)
        return path

    return save


def _loaded(path: Path, packing: str) -> LoadedModel:
    loaded = load(
        str(path),
        threads=1,
        pack_weights=True,
        quantization="int8" if packing == "int8" else "none",
    )
    assert held_layers(loaded.model)
    return loaded


def _batch(model: LoadedModel, prompts: list[list[int]] = PROMPTS, keep: bool = True) -> Any:
    outputs = model.generate_batch(
        prompts,
        GenerationConfig(do_sample=False),
        continuous_batching_config=SMALL,
        max_new_tokens=NEW,
        eos_token_id=-1,
        progress_bar=False,
        persistent_manager=keep,  # and with it its cached prefixes
    )
    assert not any(output.error for output in outputs.values())
    return [output.generated_tokens for output in outputs.values()]


def _together(manager: ContinuousBatchingManager, prompts: list[list[int]]) -> Any:
    """Prompts that all wait before the first step, so that every engine makes the same batches:
    narrow types round a row by the size of its batch.
    """
    with manager.pause():
        names = manager.add_requests(prompts, NEW)
    outputs = {}
    while len(outputs) < len(names):
        output = manager.get_result(timeout=60)
        assert output is not None
        assert not output.error
        outputs[output.request_id] = output.generated_tokens
    return [outputs[name] for name in names]


@contextlib.contextmanager
def _started(loaded: LoadedModel) -> Iterator[ContinuousBatchingManager]:
    config = GenerationConfig(do_sample=False, eos_token_id=-1)
    manager = loaded.init_continuous_batching(config, SMALL)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True)


def _by_our_call(loaded: LoadedModel, new: PreTrainedModel) -> None:
    loaded.load_weights(new.state_dict())


def _by_pairs(loaded: LoadedModel, new: PreTrainedModel) -> None:
    """As a trainer in float32 has them; a tied weight has one name."""
    loaded.load_weights((name, one.float()) for name, one in new.named_parameters())


def _by_load_state_dict(loaded: LoadedModel, new: PreTrainedModel) -> None:
    loaded.model.load_state_dict(new.state_dict())


def _by_copy(loaded: LoadedModel, new: PreTrainedModel) -> None:
    with torch.no_grad():
        for name, one in new.named_parameters():
            path, _, last = name.rpartition(".")
            getattr(loaded.model.get_submodule(path), last).copy_(one)


def _by_parts(loaded: LoadedModel, new: PreTrainedModel) -> None:
    """Through views of a weight, its `data`, and lists of tensors."""
    with torch.no_grad():
        for name, one in new.named_parameters():
            path, _, last = name.rpartition(".")
            own = getattr(loaded.model.get_submodule(path), last)
            if one.dim() == 2:
                own[: len(one) // 2] = one[: len(one) // 2]
                own.data[len(one) // 2 :].copy_(one[len(one) // 2 :])
            else:
                torch._foreach_copy_([own], [one])


WAYS = (_by_our_call, _by_pairs, _by_load_state_dict, _by_copy, _by_parts)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("family", FAMILY)
def test_new_weights_are_those_that_are_computed(family: str, packing: str, saved: Any) -> None:
    news = [_model(family, packing, seed) for seed in (0, 1)]
    others = [_loaded(saved(family, packing, seed), packing) for seed in (0, 1)]
    right = [_batch(one) for one in others]
    states = [one.model.state_dict() for one in others]
    loaded = others[0]
    assert right[0] != right[1]
    for turn, way in enumerate(WAYS, 1):
        way(loaded, news[turn % 2])
        assert _batch(loaded) == right[turn % 2], way.__name__
        held = loaded.model.state_dict()
        assert all(torch.equal(held[name], one) for name, one in states[turn % 2].items())


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS)
def test_twenty_rounds_of_new_weights(packing: str, tmp_path: Path) -> None:
    """As reinforcement learning does it: each round new weights, and 16 prompts that share much."""
    shared = make_prompts((30,))[0]
    prompts = [shared + one for one in make_prompts(tuple(range(1, 17)), seed=2)]
    _model("qwen2", packing).save_pretrained(tmp_path / "first")
    loaded, seen = _loaded(tmp_path / "first", packing), set()
    with _started(loaded) as manager:
        for seed in range(1, 21):
            new = _model("qwen2", packing, seed)
            with manager.pause():
                WAYS[seed % len(WAYS)](loaded, new)
            new.save_pretrained(tmp_path / str(seed))
            tokens = _together(manager, prompts)
            with _started(_loaded(tmp_path / str(seed), packing)) as other:
                assert tokens == _together(other, prompts)
            if packing == "float32":
                assert tokens == [greedy_reference(new, prompt, NEW) for prompt in prompts]
            seen.add(str(tokens))
    assert len(seen) == 20


@pytest.mark.parametrize("packing", PACKINGS)
def test_its_own_weights_change_nothing(packing: str, saved: Any) -> None:
    """Not a bit, also of those that were rounded to int8."""
    loaded = _loaded(saved("gemma3", packing, 0), packing)
    before = loaded.model.state_dict()
    packed = [one.held.tensors()["packed"].clone() for one in held_layers(loaded.model)]
    loaded.model.load_state_dict(before)
    loaded.load_weights(before)
    after = [one.held.tensors()["packed"] for one in held_layers(loaded.model)]
    assert all(torch.equal(*pair) for pair in zip(packed, after, strict=True))


def test_a_model_in_memory_takes_weights_by_the_same_call() -> None:
    model, new = _model("llama"), _model("llama", seed=1)
    loaded = from_model(model)
    _batch(loaded)
    loaded.load_weights(new.named_parameters())
    assert _batch(loaded) == [greedy_reference(new, prompt, NEW) for prompt in PROMPTS]


# ---- while requests run ----------------------------------------------------------------------


@pytest.fixture
def running(saved: Any) -> Iterator[tuple[LoadedModel, ContinuousBatchingManager]]:
    loaded = _loaded(saved("llama", "float32", 0), "float32")
    each_a_step = replace(SMALL, speculation="off")
    manager = loaded.init_continuous_batching(GenerationConfig(do_sample=False), each_a_step)
    manager.start()
    yield loaded, manager
    manager.stop(hard_stop=True)


@pytest.mark.parametrize("how", ["call", "pause"])
def test_live_requests_go_on_with_the_new_weights(
    how: str, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep their tokens, and none of the KV of the old weights."""
    loaded, manager = running
    old, new = _model("llama"), _model("llama", seed=1)
    loop = manager._loop
    launch, steps, is_asked = loop._core.runner.launch, 0, threading.Event()

    def launch_slowly(batch: Any) -> Any:
        """The sixth step ends when the exchange was asked for."""
        nonlocal steps
        steps += 1
        assert steps != 6 or is_asked.wait(60)
        return launch(batch)

    def exchange() -> None:
        if how == "call":
            loaded.load_weights(new.state_dict())
        else:
            with manager.pause():
                loaded.model.load_state_dict(new.state_dict())

    monkeypatch.setattr(loop._core.runner, "launch", launch_slowly)
    prompt, most = PROMPTS[2], 12
    name = manager.add_request(prompt, max_new_tokens=most, eos_token_id=-1, n=2)
    thread = threading.Thread(target=exchange)
    thread.start()
    with loop._changed:
        assert loop._changed.wait_for(lambda: loop._window.is_wanted, 60)
    is_asked.set()
    thread.join()
    first = greedy_reference(old, prompt, most)
    for one in (name, choice_name(name, 1)):
        output = manager.get_result(one, timeout=60)
        assert output is not None
        tokens = output.generated_tokens
        right = [
            first[:at] + greedy_reference(new, prompt + first[:at], most - at) for at in range(7)
        ]
        assert tokens in right
        assert tokens != first
    name = manager.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1)
    output = manager.get_result(name, timeout=60)
    assert output is not None
    assert output.generated_tokens == greedy_reference(new, prompt, NEW)


def test_steps_that_run_are_not_written_under(running: Any) -> None:
    loaded, _ = running
    new = _model("llama", seed=1)
    before = loaded.model.state_dict()
    with pytest.raises(WeightsRefusedError, match="load_weights"):
        loaded.model.load_state_dict(new.state_dict())
    with pytest.raises(WeightsRefusedError, match=r"pause\(\)"):
        loaded.model.lm_head.weight.copy_(new.lm_head.weight)
    after = loaded.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_copy_of_the_model_is_written_whenever_its_owner_likes(running: Any) -> None:
    loaded, _ = running
    before, new = loaded.model.state_dict(), _model("llama", seed=1)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(loaded.model)))
    copied.load_state_dict(new.state_dict())
    prompt = PROMPTS[2]
    assert greedy_reference(copied, prompt, NEW) == greedy_reference(new, prompt, NEW)
    after = loaded.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_two_exchanges_at_once_do_not_mix(running: Any) -> None:
    loaded, manager = running
    states = [_model("llama", seed=seed).state_dict() for seed in (1, 2)]
    threads = [threading.Thread(target=loaded.load_weights, args=(state,)) for state in states * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = loaded.model.state_dict()
    assert any(all(torch.equal(held[name], one[name]) for name in one) for one in states)
    assert manager.is_running()


# ---- what is refused -------------------------------------------------------------------------


def _without(name: str, state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != name}


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: _without(Q, state), rf"1 weights are missing \({Q}\)"),
        (lambda state: state | {"module.x": torch.ones(3)}, "module.x: this model has no such"),
        (lambda state: state | {Q: torch.ones(3, 4)}, rf"{Q} has shape \[3, 4\]; it must be \["),
        (lambda state: state | {Q: state[Q].to(torch.int8)}, f"{Q} is torch.int8"),
        (lambda state: state | {Q: state[Q].to(torch.float8_e4m3fn)}, "dequantize it first"),
        (lambda state: state | {Q: state[Q].to("meta")}, f"{Q} is on the meta device"),
        (lambda state: state | {Q: state[Q].tolist()}, f"{Q} is a list"),
        (lambda state: state | {Q: state[Q].to_sparse()}, f"{Q} is .*sparse"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_and_nothing_is_changed(
    change: Callable[[Any], Any], message: str, saved: Any
) -> None:
    loaded = _loaded(saved("llama", "float32", 0), "float32")
    before, cached = (
        _batch(loaded),
        loaded.init_continuous_batching(GenerationConfig(do_sample=False), SMALL),
    )
    given = change(_model("llama", seed=1).state_dict())
    with pytest.raises(WeightsRefusedError, match=message):
        loaded.load_weights(given)
    with pytest.raises(WeightsRefusedError, match=message):
        loaded.load_weights(iter(given.items()))
    assert cached.stats().blocks_cached
    cached.stop(keep_for_next_session=True)
    assert _batch(loaded) == before


def test_two_names_of_one_weight_must_agree(saved: Any) -> None:
    loaded, new = _loaded(saved("gemma3", "float32", 0), "float32"), _model("gemma3", seed=1)
    state = {name: one.clone() for name, one in new.state_dict().items()}
    assert state.keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    loaded.load_weights(state)
    with pytest.raises(WeightsRefusedError, match="are one weight here, and differ"):
        loaded.load_weights(state | {"lm_head.weight": -state["lm_head.weight"]})
    loaded.load_weights(_without("lm_head.weight", state))
    assert _batch(loaded) == [greedy_reference(new, prompt, NEW) for prompt in PROMPTS]


def test_a_part_of_the_weights_is_taken_over_if_it_is_meant(saved: Any) -> None:
    loaded = _loaded(saved("llama", "float32", 0), "float32")
    mixed, new = _model("llama"), _model("llama", seed=1)
    part = {name: one for name, one in new.state_dict().items() if "norm" in name or name == Q}
    mixed.load_state_dict(part, strict=False)
    loaded.load_weights(part, partial=True)
    assert _batch(loaded) == [greedy_reference(mixed, prompt, NEW) for prompt in PROMPTS]


def test_parameters_alone_are_not_the_weights(saved: Any) -> None:
    """What a loop over parameters() writes lacks the packed weights."""
    loaded = _loaded(saved("llama", "float32", 0), "float32")
    _batch(loaded)
    new = _model("llama", seed=1)
    state = new.state_dict()
    with torch.no_grad():
        for name, one in loaded.model.named_parameters():
            if name in state:
                one.copy_(state[name])
    for _ in range(2):
        with pytest.raises(WeightsRefusedError, match="not the weights of packed layers"):
            _batch(loaded)
    loaded.load_weights(state)
    assert _batch(loaded) == [greedy_reference(new, prompt, NEW) for prompt in PROMPTS]
    rest = {name: one for name, one in _model("llama").state_dict().items() if name in state}
    plain = {name for name, _ in loaded.model.named_parameters()}
    loaded.load_weights({name: rest[name] for name in plain & rest.keys()}, partial=True)
    new.load_state_dict({name: rest[name] for name in plain & rest.keys()}, strict=False)
    assert _batch(loaded) == [greedy_reference(new, prompt, NEW) for prompt in PROMPTS]


def test_load_state_dict_says_what_it_lacks(saved: Any) -> None:
    loaded = _loaded(saved("llama", "float32", 0), "float32")
    state = loaded.model.state_dict()
    with pytest.raises(RuntimeError, match=f"Missing key.*{Q}"):
        loaded.model.load_state_dict(_without(Q, state))
    with pytest.raises(RuntimeError, match=rf"{Q}: has shape \[3, 4\]"):
        loaded.model.load_state_dict(state | {Q: torch.ones(3, 4)})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*module\.x"):
        loaded.model.load_state_dict(state | {"module.x": torch.ones(3)})
    found = loaded.model.load_state_dict(_without(Q, state), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == ([Q], [])
