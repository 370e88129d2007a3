"""Runs the model's forward pass over one flat row of tokens, with our attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from engine.attention.interface import AttentionBackend, AttentionContext, AttentionMetadata
from engine.attention.opaque import calling, new_call_id
from engine.attention.registry import CONTEXT_KEYWORD
from engine.attention.step_states import StepStates
from engine.contract.adapters import AdapterRows
from engine.native.device_copy import to_device
from engine.runner.input_batch import InputBatch
from engine.runner.kv_tensors import KVTensors
from engine.runner.runner_options import StepPath


class CausalModel(Protocol):
    """What the runner needs from a transformers model with our attention implementation."""

    def __call__(self, **inputs: object) -> object:
        """Compute the forward pass. The result has `logits` [1, S, V]."""
        ...


class ModelForward:
    """Computes a model's forward pass over a KV cache.

    Attributes:
        kv: the cache.
        backend: computes attention.
    """

    def __init__(
        self,
        model: CausalModel,
        kv: KVTensors,
        backend: AttentionBackend,
        compiled: Mapping[StepPath, CausalModel] | None = None,
    ) -> None:
        """Create a forward pass.

        Args:
            model: the model.
            kv: the cache.
            backend: computes attention.
            compiled: the compiled model, for the paths that are compiled.
        """
        self.kv = kv
        self.backend = backend
        self._models = {path: (compiled or {}).get(path, model) for path in StepPath}
        self._device = kv.device
        # For each group its window, and a tensor like those of its cache; None if it holds states.
        self._groups = [(group.window, kv.like(group)) for group in kv.groups]
        self._call_ids = {path: new_call_id() for path in compiled or ()}

    @property
    def is_compiled(self) -> bool:
        """Whether any path is compiled."""
        return bool(self._call_ids)

    def as_it_comes(
        self, inputs: InputBatch, fill_in: Callable[[InputBatch, torch.Tensor], None]
    ) -> torch.Tensor:
        """Compute a step without capture, with tensors that are made only for it.

        Args:
            inputs: the step.
            fill_in: fills in tokens that are not on the host yet, in the step's token ids on the
                device.

        Returns:
            [S + P, V], in the model's dtype.
        """
        device = self._device
        metadata = [
            self.backend.prepare(layout, window, keys)
            for (window, keys), layout in zip(self._groups, inputs.layouts, strict=True)
            if keys is not None
        ]
        states = None
        if self.kv.states:  # their group is the last one
            layout = inputs.layouts[-1]
            states = StepStates.of(self.kv.states, layout.tables, layout.starts, layout.counts)
        token_ids = to_device(inputs.token_ids, device)
        fill_in(inputs, token_ids)
        logit_rows = None
        if self.is_compiled or not inputs.wants_all_rows:
            logit_rows = to_device(inputs.logit_rows, device)
        return self(
            inputs.path,
            token_ids,
            to_device(inputs.positions, device),
            logit_rows,
            metadata,
            states,
            inputs.adapters,
        )

    def __call__(
        self,
        path: StepPath,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor | None,
        metadata: Sequence[AttentionMetadata],
        states: StepStates | None = None,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """Compute a step.

        Args:
            path: selects the model to call.
            token_ids, positions: int64 [T].
            logit_rows: int64 [L], the tokens whose logits are wanted, or None for all.
            metadata: by group.
            states: of recurrent layers, if there are any.
            adapters: the rows with adapters, if there are any.

        Returns:
            [L, V], in the model's dtype.
        """
        context = AttentionContext(self.backend, self.kv.caches, metadata, states, adapters)
        call_id = self._call_ids.get(path)
        with self.backend.step_lock:
            if call_id is None:
                return self._call(path, token_ids, positions, logit_rows, context)
            with calling(call_id, context):
                return self._call(path, token_ids, positions, logit_rows, call_id)

    def _call(
        self,
        path: StepPath,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor | None,
        context: AttentionContext | int,
    ) -> torch.Tensor:
        cache = {}
        if isinstance(context, AttentionContext) and context.states is not None:
            cache[self.kv.recurrence.keyword] = context.states
        output = self._models[path](
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            logits_to_keep=0 if logit_rows is None else logit_rows,
            use_cache=False,
            **{CONTEXT_KEYWORD: context},
            **cache,
        )
        logits: torch.Tensor = output.logits  # type: ignore[attr-defined]  # a ModelOutput
        return logits[0]


def one_line(error: Exception) -> str:
    """Format a compiler's error as one line, without torch's advice on debugging."""
    text = str(error).partition("\n\nSet TORCHDYNAMO")[0]
    return " ".join(text.split())[:500]
