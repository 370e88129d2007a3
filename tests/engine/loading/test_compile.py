"""Compiled paths: they are used, they change no token, and a compiler that fails says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from engine.api.offline import LoadedModel, from_model
from engine.attention.opaque import CALLS
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ConfigError
from engine.loading.compile import compile_options
from engine.runner.runner_options import StepPath
from tests.engine.runner.steps import build, make_core, make_request, run, tokens_of
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

LENGTHS = (1, 31, 64)
NEW = 6


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class CountingBackend:
    """A compiler that leaves what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.compiled = 0
        self.calls = 0
        self.operations: set[str] = set()

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.compiled += 1
        self.operations |= {str(node.target) for node in module.graph.nodes}

        def call(*args: Any) -> Any:
            self.calls += 1
            return module.forward(*args)

        return call


@cache
def small(family: str) -> LoadedModel:
    """A model of few layers: compilers take their time for each."""
    config = FAMILIES[family]()
    config.num_hidden_layers = 2 if family == "gemma2" else 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return from_model(make_model(config))


def generate(built: Any, loaded: LoadedModel) -> None:
    """Greedy tokens, compared with `model.generate`."""
    prompts = make_prompts(LENGTHS)
    outputs = run(make_core(built), [make_request(str(i), p, NEW) for i, p in enumerate(prompts)])
    model = loaded.model
    for index, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(index)]) == greedy_reference(model, prompt, NEW)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma2"])
def test_a_compiled_model_is_one_graph_with_attention_in_it(family: str) -> None:
    backends = CountingBackend(), CountingBackend()
    varlen, decode = (CompileConfig(fullgraph=True, dynamic=True, backend=b) for b in backends)
    model = small(family)
    built = build(model, varlen_compile_config=varlen, decode_compile_config=decode)
    generate(built, model)
    for backend, steps in zip(backends, (1, NEW - 1), strict=True):
        assert backend.calls == steps + 1, "the tiny function at load, and each step"
        assert any("paged_attention" in name for name in backend.operations)
        assert backend.compiled <= 3
    assert not CALLS, "no context outlives its call"


def test_one_path_alone() -> None:
    backend = CountingBackend()
    built = build(small("llama"), decode_compile_config=CompileConfig(backend=backend))
    generate(built, small("llama"))
    assert backend.calls == 1 + NEW - 1


@pytest.mark.slow
def test_aot_eager() -> None:
    config = CompileConfig(fullgraph=True, backend="aot_eager", dynamic=True)
    built = build(small("llama"), decode_compile_config=config)
    generate(built, small("llama"))


def test_many_shapes() -> None:
    """Fixed shapes are compiled one by one, more of them than torch would allow by itself.

    Its limit is 8; here it is less, since each takes its time.
    """
    backend = CountingBackend()
    config = CompileConfig(fullgraph=True, backend=backend, dynamic=False)
    built = build(small("llama"), varlen_compile_config=config)
    for length in range(3, 6):
        (prompt,) = make_prompts((length,))
        with torch._dynamo.config.patch(recompile_limit=1):
            outputs = run(make_core(built), [make_request("a", prompt, 1)])["a"]
        assert tokens_of(outputs) == greedy_reference(small("llama").model, prompt, 1)
    assert backend.compiled == 1 + 3


def test_the_generation_config_is_the_fallback() -> None:
    llama = small("llama")
    backend = CountingBackend()
    with pytest.MonkeyPatch.context() as patch:
        fallback = CompileConfig(backend=backend)
        patch.setattr(llama.model.generation_config, "compile_config", fallback, raising=False)
        built = build(llama)
    assert backend.calls == 2, "the tiny function, for each path"
    generate(built, llama)
    assert backend.calls == 2 + NEW


# ---- options ---------------------------------------------------------------------------------


def options(fallback: object | None = None, **options: Any) -> dict[StepPath, Any]:
    return compile_options(ContinuousBatchingConfig(**options), fallback)


def test_nothing_is_compiled_unless_asked() -> None:
    assert options() == {}


@pytest.mark.parametrize(
    ("level", "mode", "dynamic"),
    [
        (1, "default", True),
        (2, "max-autotune-no-cudagraphs", True),
        (3, "max-autotune-no-cudagraphs", False),
    ],
)
def test_levels(level: int, mode: str, dynamic: bool) -> None:
    found = options(default_compile_level=level)
    assert set(found) == set(StepPath)
    for entry in found.values():
        assert (entry.backend, entry.mode, entry.dynamic) == ("inductor", mode, dynamic)
    if level == 3:
        assert options(use_default_compile_configs=True) == found


def test_what_goes_before_what() -> None:
    own, fallback = CompileConfig(backend="own"), CompileConfig(backend="fallback")
    found = options(fallback, decode_compile_config=own, default_compile_level=1)
    assert {path: entry.backend for path, entry in found.items()} == {
        StepPath.DECODE: "own",
        StepPath.VARLEN: "fallback",
    }


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("reduce-overhead", "default"),
        ("max-autotune", "max-autotune-no-cudagraphs"),
        ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
        (None, None),
    ],
)
def test_modes_never_capture_graphs(asked: str | None, taken: str | None) -> None:
    value = SimpleNamespace(mode=asked)
    found = options(varlen_compile_config=value)[StepPath.VARLEN]
    assert (found.backend, found.mode, found.fullgraph) == ("inductor", taken, False)


def test_options_take_the_place_of_a_mode() -> None:
    value = CompileConfig(options={"max_autotune": True})
    found = options(varlen_compile_config=value)[StepPath.VARLEN]
    assert found.mode is None
    assert found.options == {"max_autotune": True}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (SimpleNamespace(fullgraph="yes"), "fullgraph is 'yes'"),
        (SimpleNamespace(dynamic=3), "dynamic is 3"),
        (SimpleNamespace(mode=1), "mode is 1"),
        (SimpleNamespace(options=[]), r"options is \[\]"),
        (SimpleNamespace(backend=5), "backend is 5"),
        (SimpleNamespace(options={"triton.cudagraphs": True}), "use_cuda_graph"),
    ],
)
def test_wrong_fields_are_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"decode_compile_config: .*{message}"):
        options(decode_compile_config=value)


@pytest.mark.parametrize("mode", ["no-such-mode"])
def test_what_torch_refuses(mode: str) -> None:
    value = CompileConfig(mode=mode)
    with pytest.raises(ConfigError, match=r"varlen_compile_config: torch\.compile refuses it"):
        build(small("llama"), varlen_compile_config=value)


def test_a_compiler_that_is_missing_is_found_at_load() -> None:
    def missing(module: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        raise OSError("no C++ compiler found")

    value = CompileConfig(backend=missing)
    with pytest.raises(ConfigError, match=r"decode_compile_config: .*does not work here") as caught:
        build(small("llama"), decode_compile_config=value)
    assert "no C++ compiler found" in str(caught.value)
    with pytest.raises(ConfigError, match=r"does not work here|refuses it"):
        build(small("llama"), decode_compile_config=CompileConfig(backend="no_such_backend"))


def test_a_model_that_cannot_be_compiled_is_found_at_warmup() -> None:
    calls = 0

    def second_fails(module: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("this graph is too much")
        return module.forward

    value = CompileConfig(backend=second_fails)
    built = build(small("llama"), varlen_compile_config=value)
    with pytest.raises(ConfigError, match=r"compile_config: .*this graph is too much"):
        built.runner.warmup()
