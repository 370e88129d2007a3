"""The linear layers of a model that adapters may change, and what computes them.

    layers of our decoder ─▶ its own call, with the adapters' tables
    other modules         ─▶ a stand-in in the view: the layer's forward, then `low_rank.add_to`

A stand-in adds to all rows of a step, in their order. So it may only stand in for a module that is
given exactly these: two prompts are computed apart and together, and a module that is given other
rows then, as experts are, is refused. The stand-ins of a step find its rows in the step's context.
Only the view has them: those of the adapters that are read before an engine is built, or of all
layers if others may come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.attention.interface import AttentionBackend, AttentionContext
from engine.attention.registry import CONTEXT_KEYWORD
from engine.attention.small_cache import SmallCache, Span, zeros
from engine.contract.adapters import AdapterRows
from engine.models import description as described
from engine.models.held_layer import PackedLinear
from engine.models.low_rank import PartPlace, add_to, decoder_places
from engine.models.recording import Observation
from engine.runner.forward import CausalModel

_FORWARD = "forward"
_LENGTHS = (3, 4)
"""The lengths of the prompts that are computed apart and together."""
_BLOCK = 4
_TOLERANCE = 2e-2
"""The tolerance between a module's inputs apart and together, relative to the largest."""


class AdaptedModules:
    """A model's linear layers.

    Attributes:
        shapes: (inputs, outputs) of each, by path, but for the output layer.
        places: those that our decoder computes.
        others: why the other modules of a path cannot be adapted, for those that are no such layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        steps: CausalModel,
        decoder: described.Decoder | None,
        backend: AttentionBackend,
        probe: Observation | None,
    ) -> None:
        """Look at a model. Nothing is changed yet.

        Args:
            model: the view that steps run.
            steps: the view, or our decoder.
            decoder: what our decoder computes, if it is used.
            backend, probe: see VerifiedModel. Without a probe, `stand_in` must be given layers that
                can be adapted.
        """
        self._model, self._steps, self._backend, self._probe = model, steps, backend, probe
        self._step = threading.local()
        self._stand_ins: dict[str, Callable[..., torch.Tensor]] = {}
        self._served: Mapping[str, str | None] | None = None
        output = model.get_output_embeddings()
        self.shapes = {
            path: _shape(one)
            for path, one in model.named_modules()
            if one is not output and isinstance(one, nn.Linear | PackedLinear | Conv1D)
        }
        self.others = {
            path: "is the output layer" if one is output else f"is {type(one).__name__}"
            for path, one in model.named_modules()
            if path not in self.shapes
        }
        outputs = {path: shape[1] for path, shape in self.shapes.items()}
        self.places: dict[str, PartPlace] = (
            {} if decoder is None else decoder_places(decoder, outputs)
        )
        self.num_layers = 0 if decoder is None else len(decoder.layers)

    @property
    def has_stand_ins(self) -> bool:
        """Whether adapters change modules outside of our decoder, so that this computes steps."""
        return bool(self._stand_ins)

    def why_not(self, path: str) -> str | None:
        """Return why a linear layer cannot be adapted, or None if it can. The first call computes
        some steps.
        """
        if path in self.places:
            return None
        if self._served is None:
            self._served = self._try()
        return self._served[path]

    def stand_in(self, paths: Iterable[str]) -> None:
        """Let what adapters add be computed for these modules. No step may be running."""
        for path in paths:
            if path in self._stand_ins or path in self.places:
                continue
            module = self._model.get_submodule(path)
            self._stand_ins[path] = compute = module.forward
            setattr(module, _FORWARD, partial(self._forward, path, compute))

    def stand_in_all(self) -> None:
        """Let what adapters add be computed for all layers that can be adapted, so that adapters
        may come later. No step may be running.
        """
        self.stand_in([path for path in self.shapes if self.why_not(path) is None])

    def _forward(
        self, path: str, compute: Callable[..., torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        y = compute(x)
        rows: AdapterRows | None = getattr(self._step, "rows", None)
        if rows is not None:
            y = y.contiguous()
            add_to(rows, path, x, y)
        return y

    def __call__(self, **inputs: Any) -> object:
        """Compute a step; see CausalModel."""
        context = inputs.get(CONTEXT_KEYWORD)
        rows = context.adapters if isinstance(context, AttentionContext) else None
        if rows is None or not self._stand_ins:
            return self._steps(**inputs)
        self._step.rows = rows
        try:
            return self._steps(**inputs)
        finally:
            self._step.rows = None

    def _try(self) -> dict[str, str | None]:
        """Return why each linear layer outside of our decoder cannot be adapted, or None."""
        if self._probe is None:
            raise ValueError("there is no probe")
        probe = self._probe
        paths = [path for path in self.shapes if path not in self.places]
        generator = torch.Generator().manual_seed(0)
        vocabulary = probe.logits[0].shape[-1]
        ids = torch.randint(0, vocabulary, (sum(_LENGTHS),), generator=generator)
        apart = [self._inputs(probe, paths, ids, (which,)) for which in range(len(_LENGTHS))]
        together = self._inputs(probe, paths, ids, tuple(range(len(_LENGTHS))))
        return {
            path: _why_other_rows([one[path] for one in apart], together[path]) for path in paths
        }

    def _inputs(
        self,
        probe: Observation,
        paths: Iterable[str],
        ids: torch.Tensor,
        prompts: tuple[int, ...],
    ) -> dict[str, list[torch.Tensor]]:
        """Return what modules are given in a step of these prompts."""
        found: dict[str, list[torch.Tensor]] = {path: [] for path in paths}
        small = SmallCache(
            self._backend, probe.shapes, _LENGTHS, _BLOCK,
            zeros(probe.dtype, self._model.device), probe.recurrence,
        )  # fmt: skip
        step = small.step([Span(one, 0, _LENGTHS[one]) for one in prompts])
        with _watched(self._model, found):
            step.logits(self._steps, ids)
        return found


@contextmanager
def _watched(model: nn.Module, found: Mapping[str, list[torch.Tensor]]) -> Iterator[None]:
    def note(inputs: list[torch.Tensor], _: nn.Module, given: tuple[Any, ...]) -> None:
        inputs.append(given[0].detach().clone() if given else torch.empty(0))

    with ExitStack() as hooks:
        for path, inputs in found.items():
            module = model.get_submodule(path)
            hooks.callback(module.register_forward_pre_hook(partial(note, inputs)).remove)
        yield


def _shape(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        return int(inputs), int(outputs)
    if isinstance(module, nn.Linear | PackedLinear):
        return module.in_features, module.out_features
    raise TypeError(type(module).__name__)


def _why_other_rows(apart: list[list[torch.Tensor]], together: list[torch.Tensor]) -> str | None:
    """Return why a module is not given all rows of a step in their order, or None if it is."""
    calls = {len(together), *(len(one) for one in apart)}
    if calls == {0}:
        return (
            "takes no part in a step, or our decoder computes it (--decoder transformers does not)"
        )
    if calls != {1}:
        return "is called several times in a step, or for some of its rows"
    whole = together[0].reshape(-1, together[0].shape[-1]).float()
    parts = torch.cat([one[0].reshape(-1, one[0].shape[-1]).float() for one in apart])
    if whole.shape != parts.shape or len(whole) != sum(_LENGTHS):
        return "is called for some of a step's rows"
    if (whole - parts).abs().max() > _TOLERANCE * parts.abs().max():
        return "is given a step's rows in another order"
    return None
