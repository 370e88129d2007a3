"""A model that passed the load gate, and how its owner's changes are handled afterwards.

owner changes the model ─▶ refresh: look ─┬─ elements ─────────────────────────▶ accepted
                                          ├─ attributes, hooks ─▶ gate again ──▶ accepted
                                          └─ modules, unsupported changes ─────▶ refused
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from engine.attention.interface import AttentionBackend
from engine.attention.registry import AttentionUnavailableError
from engine.contract.errors import ModelChangedError, ModelRefusedError, WeightsRefusedError
from engine.contract.loaded_adapters import LoadedAdapters
from engine.contract.rope import RopeLengths
from engine.contract.sampling_params import SamplingParams
from engine.contract.types import TokenId
from engine.drafts.row_costs import RowTimes
from engine.loading.adapters.adapted_modules import AdaptedModules
from engine.loading.gate import probe_layers, self_check
from engine.loading.memory import StepLimits
from engine.loading.model_watch import ModelChanges, ModelWatch, Noticed
from engine.loading.recurrent import follow_states
from engine.loading.recurrent_kernels import use_kernels
from engine.loading.rotary import (
    follow_lengths,
    has_own_frequencies,
    is_made_beforehand,
    keep_frequencies,
    read_rope,
)
from engine.loading.view import ModelView
from engine.models.choosing import CausalDecoder, exact_sums
from engine.models.describing import NotDescribedError, describe
from engine.models.held_layer import held_layers
from engine.models.recording import Observation
from engine.runner.forward import CausalModel
from engine.runner.runner_options import RunnerOptions

if TYPE_CHECKING:
    from engine.parallel.leader import Leader
    from engine.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedModel:
    """A model in memory that passed the load gate.

    Attributes:
        model: a view of `original` with our attention implementation. Steps run it if there is no
            decoder, or if they are compiled.
        decoder: our own decoder, with the same weights. If None, steps run the model.
        watch: detects the owner's changes. None if there is no owner; see `view`.
        original: the transformers model, as its owner has it. A split model has no view, because
            the engine owns it.
        path: its local directory.
        device, dtype, backend, probe: what it runs on and with, and what the gate found.
        context_length: the longest request that the model allows, in tokens.
        vocab_size: the number of token ids that both embedding and logits have.
        parameters: the number of parameters, including packed ones.
        stored: what the weights are that were quantised in the files, such as "gptq-4bit-g128", or
            "none".
        eos_token_ids: the model's end-of-sequence ids.
        default_sampling: the sampling that `model.generate` would use.
        ranks: the processes that the model is split across. None if this process has all of it.
        leader: on rank 0, the connection to the other ranks. None on other ranks, or if there are
            no others.
        step_bytes: the measured memory of steps. Keys are the largest step or the options for
            graphs, and the block size.
        row_times: the measured times of decode steps, by block size.
        view: connects `model` and `original`. None if they are the same.
        rope: how the model's rotary frequencies depend on a request's length. None if they do not,
            or if requests may not exceed the original length.
        adapted: computes adapters in steps. None if the model has no view.
        adapters: those that requests may name.
    """

    model: PreTrainedModel
    original: PreTrainedModel
    path: Path
    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend
    probe: Observation
    context_length: int
    vocab_size: int
    parameters: int
    eos_token_ids: tuple[TokenId, ...]
    default_sampling: SamplingParams
    ranks: Ranks | None = None
    leader: Leader | None = None
    stored: str = "none"
    step_bytes: dict[tuple[StepLimits | RunnerOptions, int], int] = field(default_factory=dict)
    row_times: dict[int, RowTimes] = field(default_factory=dict)
    view: ModelView | None = None
    rope: RopeLengths | None = None
    decoder: CausalDecoder | None = None
    watch: ModelWatch | None = None
    adapted: AdaptedModules | None = None
    adapters: LoadedAdapters = field(default_factory=LoadedAdapters)

    @property
    def steps(self) -> CausalModel:
        """The model or decoder that steps run. Modules that adapters change must be known before an
        engine is built.
        """
        if self.adapted is not None and self.adapted.has_stand_ins:
            return self.adapted
        return self.decoder or self.model

    def refresh(self) -> Noticed:
        """Apply changes that the owner has made to the model.

        This is called when steps may follow the owner's own work on the model. If it raises, steps
        continue with the previous state.

        Returns:
            How many times changes were noticed, up to now.

        Raises:
            ModelChangedError: the owner has replaced modules, or moved or converted the model, or
                changed it in a way that steps cannot follow.
        """
        if self.view is None or self.watch is None:
            return Noticed()
        self.view.check()
        device, dtype = self.original.device, self.original.dtype
        if (device, dtype) != (self.device, self.dtype):
            raise ModelChangedError(
                f"the model was verified as {self.dtype} on {self.device}, and is {dtype} on "
                f"{device} now"
            )
        for one in self.view.modules:
            if not has_own_frequencies(one, self.view.twins[id(one)]):
                raise ModelChangedError(
                    f"the frequencies of {type(one).__name__} are none of those that it sets itself"
                )
        noticed = self.watch.look(self._check)
        self.view.refresh()
        for layer in held_layers(self.original):
            layer.was_asked = False
            layer.sync()
        if self.decoder is not None:
            self.decoder.refresh()
        return noticed

    def _check(self, changes: ModelChanges) -> None:
        """Refuse changes that steps cannot follow; see `refresh`."""
        for path, name in {name.rpartition(".")[0]: name for name in changes.names}.items():
            if is_made_beforehand(self.original.get_submodule(path)):
                raise ModelChangedError(
                    f"{name} was changed, and frequencies were made with what it was"
                )
        replaced = [name for name in changes.replaced if self._is_read_in_place(name)]
        if replaced:
            raise ModelChangedError(
                f"{replaced[0]} is another tensor than when the model was verified, and our "
                "decoder reads that one: write the elements into it instead (copy_, or "
                "load_weights)"
            )
        layers = held_layers(self.original)
        visible = {name for name, one in self.original.named_parameters() if one.numel()}
        if layers and visible <= set(changes.written) and not any(one.was_asked for one in layers):
            raise WeightsRefusedError(
                f"all of parameters() were written, {min(visible)} among them, but not the weights "
                "of packed layers, which are not there: write those too, by load_weights or "
                "load_state_dict; if they are to stay, say so by load_weights(…, partial=True)"
            )
        if changes.attributes:
            try:
                self._verify_again()
            except (ModelRefusedError, AttentionUnavailableError) as error:
                raise ModelChangedError(
                    f"{changes.attributes[0]} was changed, and with it {error}"
                ) from error

    def _is_read_in_place(self, name: str) -> bool:
        """Return whether our decoder holds the address of a parameter."""
        path, _, last = name.rpartition(".")
        return self.decoder is not None and last in self.model.get_submodule(path)._parameters

    @exact_sums()
    def _verify_again(self) -> None:
        """Run the load gate again on the model as it is now. Raises the gate's
        exceptions.
        """
        _, model, _ = make_view(self.original)
        if self.decoder is not None:
            try:
                described = describe(model)
            except NotDescribedError as error:
                raise ModelRefusedError(str(error)) from error
            if described != self.decoder.description:
                raise ModelRefusedError("the model is another one than our decoder computes")
        probe = probe_layers(model, self.backend)
        if (probe.shapes, probe.recurrence) != (self.probe.shapes, self.probe.recurrence):
            raise ModelRefusedError("its layers attend to other tokens, or have other shapes")
        follow_states(model, probe.recurrence)
        if self.decoder is None:
            use_kernels(model, probe.recurrence)
        self_check(model, probe, self.backend, self.device, self.decoder)

    def end(self) -> None:
        """Let the other ranks end, if there are any. Does nothing if they have already ended."""
        if self.leader is not None:
            self.leader.end()


def make_view(original: PreTrainedModel) -> tuple[ModelView, PreTrainedModel, RopeLengths | None]:
    """Return a view, its model, and how the model's rotary frequencies depend on the length.

    The last is None if they do not, or if the view does not support it.
    """
    view = ModelView.of(original)
    keep_frequencies(view.model)
    rope = read_rope(view.model)
    follows = rope is not None and follow_lengths(view.model, rope)
    return view, view.model, rope if follows else None
