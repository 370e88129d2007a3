"""Adapters against peft's own model, which generates each prompt alone, in float32."""

from __future__ import annotations

import copy
import ctypes
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine import assembly
from engine.api.offline import LoadedModel
from engine.contract.adapters import Adapter, AdapterLoad, AdapterRows
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import AdapterNotLoadedError, ConfigError, InvalidRequestError
from engine.contract.loaded_adapters import LoadedAdapters
from engine.contract.request import RequestStatus
from engine.core.loop import EngineLoop
from engine.drafts import drafter
from engine.drafts.row_costs import RowTimes
from engine.kv_cache import prefix_index
from engine.loading.adapters import adapter_loading
from engine.loading.adapters.adapter_loading import AdapterLoader, load_adapters
from engine.models.low_rank import LowRankPart, weights_of
from tests.adapter_files import PeftAdapter, linear_targets
from tests.engine.mode_sweep import BLOCK, NEW_TOKENS, check_every_mode, load_family, managed, run
from tests.model_recipes import RECIPES
from tests.tiny_models import greedy_reference, make_model, make_prompts

OWN = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "mixtral",
    "phi3",
    "qwen2",
    "olmo2",
    "cohere",
)
MODULES = ("gpt_oss", "phi", "qwen2_moe", "gemma3")
MIXED: dict[str, Any] = {
    "r": 4,
    "rank_pattern": {"q_proj": 2, r"layers\.1\..*up_proj": 7},
    "alpha_pattern": {"v_proj": 3, "down_proj": 40},
    "use_rslora": True,
    "exclude_modules": r".*layers\.2\.self_attn\.k_proj",
}


def fresh(family: str) -> PreTrainedModel:
    """The family's model, whose linear layers peft can change."""
    return make_model(RECIPES[family].config(eos_token_id=None))


def load(loaded: LoadedModel, **adapters: Path) -> None:
    config = LoadConfig(adapters=tuple(f"{name}={one}" for name, one in adapters.items()))
    load_adapters(loaded._verified, config, lambda line: None)


@pytest.mark.parametrize(
    ("family", "decoder", "options"),
    [(family, "own", {"r": 8}) for family in OWN]
    + [(family, "transformers", {"r": 8}) for family in MODULES]
    + [("llama", "own", one) for one in ({"r": 1}, {"r": 64}, MIXED)],
)
def test_every_mode_equals_peft(
    family: str, decoder: str, options: dict[str, Any], tmp_path: Path
) -> None:
    _, loaded, attention = load_family(family, decoder)
    model = fresh(family)
    adapter = PeftAdapter(model, tmp_path, target_modules=linear_targets(model), **options)
    load(loaded, one=adapter.directory)
    reference = adapter.model.base_model.model
    prompt = make_prompts((90,))[0]
    assert adapter.generate(prompt, 12) != greedy_reference(model, prompt, 12), "it changes nothing"
    check_every_mode(reference, loaded, attention, adapter="one")


@pytest.fixture(scope="module")
def crowd(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[PreTrainedModel, LoadedModel, dict[str, PeftAdapter]]:
    """Sixteen adapters of one model."""
    _, loaded, _ = load_family("qwen3", "own")
    model, folder = fresh("qwen3"), tmp_path_factory.mktemp("adapters")
    adapters = {
        f"a{i}": PeftAdapter(
            model, folder / f"a{i}", seed=i, r=(1, 8, 64, 3)[i % 4],
            dtype=(torch.float32, torch.bfloat16, torch.float16)[i % 3],
            target_modules=linear_targets(model)[i % 3 :],
        )
        for i in range(16)
    }  # fmt: skip
    load(loaded, **{name: one.directory for name, one in adapters.items()})
    return model, loaded, adapters


def test_rows_of_sixteen_adapters_and_none_in_one_step(
    crowd: tuple[PreTrainedModel, LoadedModel, dict[str, PeftAdapter]],
) -> None:
    model, loaded, adapters = crowd
    names: list[str | None] = [*adapters, None, "a3", "a3", None]
    prompts = make_prompts(tuple(5 + 3 * i for i in range(len(names))))
    expected = [
        greedy_reference(model, prompt, NEW_TOKENS)
        if name is None
        else adapters[name].generate(prompt, NEW_TOKENS)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    found = loaded.generate_batch(
        prompts, adapter=names, max_new_tokens=NEW_TOKENS, progress_bar=False
    )
    assert [list(one.generated_tokens) for one in found.values()] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


def test_choices_of_a_request_have_its_adapter(
    crowd: tuple[PreTrainedModel, LoadedModel, dict[str, PeftAdapter]],
) -> None:
    _, loaded, adapters = crowd
    prompt = make_prompts((21,))[0]
    expected = adapters["a2"].generate(prompt, NEW_TOKENS)
    with loaded.continuous_batching_context_manager() as manager:
        manager.add_request(prompt, max_new_tokens=NEW_TOKENS, adapter="a2", n=3)
        found = [manager.get_result(timeout=60) for _ in range(3)]
    assert [list(one.generated_tokens) for one in found if one] == [expected] * 3


def test_drafts_change_no_token(
    crowd: tuple[PreTrainedModel, LoadedModel, dict[str, PeftAdapter]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, loaded, adapters = crowd
    free = RowTimes((1, 64), (1.0, 1.0), 0.0, 0.0)
    monkeypatch.setattr(assembly, "row_times", lambda *given: free)
    monkeypatch.setattr(drafter, "_CLEARLY", -1.0)
    prompts = make_prompts((9, 7))
    expected = [adapters["a1"].generate(one, NEW_TOKENS) for one in prompts]
    # What follows is in the prompt already, behind the prompt's own end.
    prompts = [one + tokens + one for one, tokens in zip(prompts, expected, strict=True)]
    expected = [adapters["a1"].generate(one, NEW_TOKENS) for one in prompts]
    drafted, stats = run(loaded, prompts, adapter="a1", speculation="history")
    assert drafted == expected
    assert stats.draft_tokens > 0


def test_an_adapter_that_is_not_loaded(
    crowd: tuple[PreTrainedModel, LoadedModel, dict[str, PeftAdapter]],
) -> None:
    _, loaded, _ = crowd
    found = loaded.generate_batch(
        make_prompts((4, 4)), adapter=["nobody", None], max_new_tokens=2, progress_bar=False
    )
    first, second = found.values()
    assert first.status is RequestStatus.FAILED
    assert "no adapter with the name 'nobody'" in str(first.error)
    assert second.status is RequestStatus.FINISHED
    with pytest.raises(InvalidRequestError, match="has 1 names for 2 prompts; give one for each"):
        loaded.generate_batch(make_prompts((4, 4)), adapter=["nobody"], progress_bar=False)


def test_compilation_is_refused_by_name(
    crowd: tuple[PreTrainedModel, LoadedModel, dict[str, PeftAdapter]],
) -> None:
    _, loaded, _ = crowd
    config = ContinuousBatchingConfig(block_size=BLOCK, num_blocks=16, default_compile_level=1)
    with pytest.raises(ConfigError, match="models with adapters are not compiled"):
        loaded.init_continuous_batching(continuous_batching_config=config).start()


def changed(adapter: PeftAdapter, directory: Path, **options: Any) -> Path:
    """The same tensors with another config."""
    other = copy.deepcopy(adapter.model)
    for name, value in options.items():
        setattr(other.peft_config["default"], name, value)
    other.save_pretrained(str(directory))
    return directory


def check_prefixes(tmp_path: Path) -> None:
    """Equal content alone shares what was cached, under any name."""
    _, loaded, _ = load_family("llama", "own")
    model = fresh("llama")
    targets = linear_targets(model)
    one = PeftAdapter(model, tmp_path / "one", target_modules=targets)
    other = PeftAdapter(model, tmp_path / "other", seed=1, target_modules=targets)
    louder = changed(one, tmp_path / "louder", lora_alpha=64)
    load(loaded, one=one.directory, twin=one.directory, other=other.directory, louder=louder)
    digests = {two.name: two.digest for two in loaded._verified.adapters.all()}
    assert digests["one"] == digests["twin"]
    assert len(set(digests.values())) == 3, "the digest says nothing of alpha, or of tensors"
    prompt = make_prompts((5 * BLOCK + 3,))[0]
    cached: dict[str | None, int] = {}
    with managed(loaded, num_blocks=64) as manager:
        for name in (None, "one", "other", "louder", "twin", None):
            before = manager.stats().prefix_hits
            manager.add_request(prompt, max_new_tokens=NEW_TOKENS, adapter=name)
            result = manager.get_result(timeout=60)
            assert result is not None
            cached[name] = manager.stats().prefix_hits - before
            if name in ("one", "twin"):
                assert list(result.generated_tokens) == one.generate(prompt, NEW_TOKENS)
    assert {name for name, hits in cached.items() if hits} == {"twin", None}


def run_steps(loop: EngineLoop, count: int) -> None:
    """Run steps of a loop that is paused."""
    for _ in range(count):
        with loop._changed:
            done = loop._between_steps(lambda: loop._deliver(loop._core.step()))
        done.result(60)


def check_change(change: str, tmp_path: Path) -> None:
    """A name means something else, or nothing; no step waits for that, and nothing mixes. Requests
    run, wait and are held meanwhile, all is computed again, and the prompt was cached.
    """
    _, loaded, _ = load_family("llama", "own")
    adapters = loaded._verified.adapters
    model = fresh("llama")
    old, new = (
        PeftAdapter(model, tmp_path / str(i), seed=i, target_modules=linear_targets(model))
        for i in (0, 1)
    )
    load(loaded, name=old.directory)
    [before] = adapters.told()
    prompt, options = make_prompts((5 * BLOCK + 3,))[0], {"max_new_tokens": NEW_TOKENS}
    was, later = (one.generate(prompt, NEW_TOKENS) for one in (old, new))
    expected: dict[str, list[int]] = {}
    with managed(loaded, num_blocks=64, max_requests_per_batch=2) as manager:
        loop = manager._loop
        loop.pause().result(60)
        for _ in range(3):  # one runs, one is held, and one waits
            expected[manager.add_request(prompt, adapter="name", **options)] = was
        run_steps(loop, 2)
        loop.hold_request(list(expected)[1])
        run_steps(loop, 1)
        if change == "replaced":
            load(loaded, name=new.directory)
            expected[manager.add_request(prompt, adapter="name", **options)] = later
        else:
            adapters.remove("name")
            with pytest.raises(AdapterNotLoadedError):
                manager.add_request(prompt, adapter="name", **options)
        [leaving] = [one for one in adapters.told() if one.digest == before.digest]
        assert (leaving.state, leaving.requests) == ("unloading", 3)
        run_steps(loop, 1)
        loop.forget_computed()
        loop.unhold_request(list(expected)[1])
        loop.resume()
        found: dict[str, list[int]] = {}
        while len(found) < len(expected):
            result = manager.get_result(timeout=60)
            assert result is not None
            found[result.request_id] = list(result.generated_tokens)
        assert found == expected
    assert [one.state for one in adapters.told()] == ["loaded"] * (change == "replaced")
    assert adapters.figures()["adapter_bytes"] == (before.nbytes if change == "replaced" else 0)


def test_a_prefix_is_shared_by_equal_content_alone(tmp_path: Path) -> None:
    check_prefixes(tmp_path)


@pytest.mark.parametrize("change", ["replaced", "unloaded"])
def test_a_request_keeps_the_content_that_it_began_with(change: str, tmp_path: Path) -> None:
    check_change(change, tmp_path)


def named_now(named: dict[str, Adapter]) -> Any:
    """Steps that take what a name means now."""
    plain = AdapterRows.of

    def of(adapters: Any, counts: Any) -> Any:
        return plain([one and named.get(one.name) for one in adapters], counts)

    return of


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("digest without config", "prefixes"),
        ("prefix of another content", "replaced"),
        ("replaced in the middle", "replaced"),
        ("unloaded in the middle", "unloaded"),
        ("slot reused while in use", "replaced"),
    ],
)
def test_planted_faults_of_changes_are_met(
    fault: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "digest without config":
        monkeypatch.setattr(adapter_loading, "struct", SimpleNamespace(pack=lambda *_: b""))
    elif fault == "prefix of another content":
        monkeypatch.setattr(prefix_index, "_root", lambda request: b"of any")
    elif fault in ("replaced in the middle", "unloaded in the middle"):
        named: dict[str, Adapter] = {}
        put, remove = LoadedAdapters.put, LoadedAdapters.remove

        def noted(adapters: LoadedAdapters, one: Adapter, *given: Any, **more: Any) -> Any:
            named[one.name] = one
            return put(adapters, one, *given, **more)

        def forgotten(adapters: LoadedAdapters, name: str) -> Any:
            named.pop(name)
            return remove(adapters, name)

        monkeypatch.setattr(LoadedAdapters, "put", noted)
        monkeypatch.setattr(LoadedAdapters, "remove", forgotten)
        monkeypatch.setattr(AdapterRows, "of", named_now(named))
    else:
        put, slots = LoadedAdapters.put, []

        def reused(adapters: LoadedAdapters, one: Adapter, *given: Any, **more: Any) -> Any:
            table = weights_of(one).table
            slots.append(table)
            ctypes.memmove(slots[0], table, ctypes.sizeof(table))
            return put(adapters, one, *given, **more)

        monkeypatch.setattr(LoadedAdapters, "put", reused)
    check = partial(check_change, change) if change != "prefixes" else check_prefixes
    with pytest.raises(AssertionError):
        check(tmp_path)


@pytest.mark.parametrize(("family", "decoder"), [("llama", "own"), ("phi", "transformers")])
def test_adapters_may_come_to_an_engine_that_runs(
    family: str, decoder: str, tmp_path: Path
) -> None:
    """Also where other modules than ours compute them: these are prepared at the start."""
    _, loaded, _ = load_family(family, decoder)
    loader = AdapterLoader(loaded._verified, LoadConfig(adapter_root=str(tmp_path)))
    model = fresh(family)
    adapter = PeftAdapter(model, tmp_path / "a", target_modules=linear_targets(model)[1:])
    prompt = make_prompts((20,))[0]
    expected = [greedy_reference(model, prompt, 12), adapter.generate(prompt, 12)]
    with managed(loaded, num_blocks=64) as manager:
        for step, name in enumerate((None, "one", None)):
            if step == 1:
                load = AdapterLoad(name="one", source="a")
                loader.put(loader.read(load), load)
            manager.add_request(prompt, max_new_tokens=12, adapter=name)
            result = manager.get_result(timeout=60)
            assert result is not None
            assert list(result.generated_tokens) == expected[step % 2]
        assert manager.stats().adapters == 1


@pytest.mark.parametrize("fault", ["scale ignored", "the wrong third", "slot of another"])
def test_planted_faults_are_met(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loaded, _ = load_family("llama", "own")
    model = fresh("llama")
    adapters = [
        PeftAdapter(model, tmp_path / str(i), seed=i, target_modules=linear_targets(model))
        for i in (0, 1)
    ]
    plain = LowRankPart.for_kernels

    def faulty(part: LowRankPart, column: int = 0) -> Any:
        made = plain(part, column)
        if fault == "scale ignored":
            made.scale = 1.0
        if fault == "the wrong third" and column:
            made.column -= made.outputs
        return made

    monkeypatch.setattr(LowRankPart, "for_kernels", faulty)
    load(loaded, a=adapters[0].directory, b=adapters[1].directory)
    if fault == "slot of another":
        one, other = loaded._verified.adapters.all()
        ours, theirs = (two.weights.table for two in (one, other))  # type: ignore[attr-defined]
        ours[0] = theirs[0]
    prompt = make_prompts((30,))[0]
    [tokens], _ = run(loaded, [prompt], adapter="a")
    assert tokens != adapters[0].generate(prompt, NEW_TOKENS)
