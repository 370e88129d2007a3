"""Compiles the model's forward pass with torch.compile, with separate options for each path.

Attention is a single opaque operation (see `engine.attention.opaque`). Only the runner captures
CUDA graphs, because the compiler cannot know which tensors of a step keep their addresses. If a
mode would let the compiler capture them, that part of the mode is omitted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ConfigError
from engine.runner.forward import CausalModel, one_line
from engine.runner.runner_options import StepPath

logger = logging.getLogger(__name__)

_WITHOUT_GRAPHS = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}
_RECOMPILE_LIMIT = 128
"""The maximum number of shapes that one path may be compiled for. torch's own limit is 8."""
_LEVELS: dict[int, tuple[str, bool]] = {
    1: ("default", True),
    2: ("max-autotune-no-cudagraphs", True),
    3: ("max-autotune-no-cudagraphs", False),
}
"""Maps default_compile_level to (mode, dynamic)."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """The arguments for torch.compile.

    Attributes:
        source: the name of the option that these come from, for messages.
        backend, mode, dynamic, fullgraph, options: see torch.compile. A mode is one of inductor's
            presets; other backends have none.
    """

    source: str
    backend: str | Callable[..., Any]
    mode: str | None
    dynamic: bool | None
    fullgraph: bool
    options: dict[str, Any] | None

    def apply(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function, which is then compiled at its first call.

        Raises:
            ConfigError: torch.compile refuses the options.
        """
        try:
            compiled: Callable[..., Any] = torch.compile(
                function,
                backend=self.backend,
                mode=self.mode,
                dynamic=self.dynamic,
                fullgraph=self.fullgraph,
                options=self.options,
            )
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(self.source, f"torch.compile refuses it: {error}") from error
        return compiled


def compile_options(
    config: ContinuousBatchingConfig, fallback: object | None
) -> dict[StepPath, CompileOptions]:
    """Return the options for each path that is compiled.

    Args:
        config: the server's options.
        fallback: the generation config's compile_config.

    Raises:
        ConfigError: a field of a compile config is not valid.
    """
    own = {
        StepPath.VARLEN: ("varlen_compile_config", config.varlen_compile_config),
        StepPath.DECODE: ("decode_compile_config", config.decode_compile_config),
    }
    level = 3 if config.use_default_compile_configs else config.default_compile_level
    found: dict[StepPath, CompileOptions] = {}
    for path, (source, value) in own.items():
        if value is not None:
            found[path] = _read(source, value)
        elif fallback is not None:
            found[path] = _read("compile_config (of the generation config)", fallback)
        elif level:
            mode, dynamic = _LEVELS[level]
            found[path] = CompileOptions(
                "default_compile_level", "inductor", mode, dynamic, fullgraph=False, options=None
            )
    return found


def compile_model(
    model: CausalModel, options: dict[StepPath, CompileOptions], device: torch.device
) -> dict[StepPath, CausalModel]:
    """Compile the model for each path that has options.

    Each compiler is first tried on a tiny function, so that a missing compiler is detected early.

    Raises:
        ConfigError: a compiler does not work here.
    """

    def varlen(**inputs: object) -> object:
        return model(**inputs)

    def decode(**inputs: object) -> object:
        return model(**inputs)

    models: dict[StepPath, CausalModel] = {}
    for path, function in ((StepPath.VARLEN, varlen), (StepPath.DECODE, decode)):
        if path in options:
            _try_compiler(options[path], device)
            models[path] = _with_limit(options[path].apply(function))
    return models


def _with_limit(compiled: Callable[..., Any]) -> CausalModel:
    def call(**inputs: object) -> object:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            return compiled(**inputs)

    return call


def _try_compiler(options: CompileOptions, device: torch.device) -> None:
    def tiny(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2 + 1

    try:
        options.apply(tiny)(torch.ones(2, device=device))
    except ConfigError:
        raise
    except Exception as error:  # compilers may raise anything
        raise ConfigError(
            options.source,
            f"backend {options.backend!r} of torch.compile does not work here "
            f"({type(error).__name__}: {one_line(error)}); install what it needs (for inductor a "
            "C++ compiler, on CUDA Triton too), or leave compilation out",
        ) from error


def _read(source: str, value: object) -> CompileOptions:
    """Read a transformers CompileConfig, or any object with the same fields.

    Missing fields get torch's defaults.
    """
    fields = {
        name: getattr(value, name, None) for name in ("backend", "mode", "dynamic", "options")
    }
    fullgraph = getattr(value, "fullgraph", False)
    expected: dict[str, tuple[object, tuple[type, ...]]] = {
        "fullgraph": (fullgraph, (bool,)),
        "dynamic": (fields["dynamic"], (bool, type(None))),
        "mode": (fields["mode"], (str, type(None))),
        "options": (fields["options"], (dict, type(None))),
    }
    for name, (found, types) in expected.items():
        if not isinstance(found, types):
            raise ConfigError(source, f"{name} is {found!r}; see transformers' CompileConfig")
    backend = fields["backend"] or "inductor"
    if not isinstance(backend, str) and not callable(backend):
        raise ConfigError(source, f"backend is {backend!r}; it must be a name or a function")
    options = fields["options"]
    if options and options.get("triton.cudagraphs"):
        raise ConfigError(
            source, "options has triton.cudagraphs; the runner captures graphs: see use_cuda_graph"
        )
    mode = fields["mode"]
    if backend != "inductor" or options is not None:
        mode = None  # a mode is a set of inductor's options; torch accepts one or the other
    elif mode in _WITHOUT_GRAPHS:
        logger.info(
            "%s: mode %s is taken as %s; CUDA graphs are the runner's (use_cuda_graph)",
            source,
            mode,
            _WITHOUT_GRAPHS[mode],
        )
        mode = _WITHOUT_GRAPHS[mode]
    return CompileOptions(source, backend, mode, fields["dynamic"], fullgraph, options)
