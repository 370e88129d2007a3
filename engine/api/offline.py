"""Text generation without a server: `load(path)` returns a model with the methods of transformers'
ContinuousMixin.

model = engine.load("models/demo")
outputs = model.generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=32)
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from engine.api.batch_generation import generate
from engine.api.batching_options import resolve_config
from engine.api.build_manager import build_manager
from engine.api.following import follow, is_follower
from engine.api.generation_options import GenerationDefaults
from engine.api.manager import ContinuousBatchingManager
from engine.api.results import GenerationOutput
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import (
    ConfigError,
    EngineUnavailableError,
    ModelRefusedError,
    WeightsRefusedError,
)
from engine.contract.startup import Paced
from engine.core.threads import call_on_own_thread
from engine.loading.exchange import Weights, exchange_weights
from engine.loading.loader import load_model, verify_model
from engine.loading.quantised.stored_linear import refuse_quantised
from engine.loading.verified import VerifiedModel
from engine.models.held_layer import held_layers
from engine.text import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from engine.telemetry.engine_telemetry import Telemetry

logger = logging.getLogger(__name__)


class LoadedModel:
    """A verified model with continuous batching; created by `load` or `from_model`."""

    def __init__(
        self,
        verified: VerifiedModel,
        config: ContinuousBatchingConfig | None = None,
        tokenizer_path: Path | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            verified: the model, which has passed the load gate.
            config: the default config of managers.
            tokenizer_path: the directory with the tokenizer's files, or None if there is none.
            telemetry: notified of what managers do; may be None.
        """
        self._verified = verified
        self._config = config or ContinuousBatchingConfig()
        self._tokenizer_path = tokenizer_path
        self._tokenizer: Tokenizer | None = None
        self._kept = _Kept()
        self._telemetry = telemetry
        self._exchange = threading.Lock()
        self._managers: weakref.WeakSet[ContinuousBatchingManager] = weakref.WeakSet()
        self._guard()

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model. It can be used to generate, train and save, because steps run on
        a view of it.
        """
        return self._verified.original

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own generation config."""
        config: GenerationConfig = self._verified.original.generation_config
        return config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if its directory has none."""
        if self._tokenizer is None and self._tokenizer_path is not None:
            try:
                self._tokenizer = Tokenizer.load(self._tokenizer_path, self._verified.vocab_size)
            except TokenizerError as error:
                logger.info("no tokenizer: %s", error)
                self._tokenizer_path = None
        return self._tokenizer

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: object | None = None,
    ) -> ContinuousBatchingManager:
        """Create a manager with its own KV cache. Call `start` on it, add requests, then call
        `stop`.

        If the model keeps a manager (see `ContinuousBatchingManager.stop`) that was made with equal
        configs, that manager is returned, with its cache. If the kept manager has other configs, it
        is dropped and its memory is freed before the new one is made.

        Args:
            generation_config: the default options of requests. Fields that it leaves open come from
                the model's own config, as for `model.generate`. If None, all of them do.
            continuous_batching_config: ours or transformers'. If None, the generation config's is
                used, or the one given to `load` if that has none.

        Raises:
            ConfigError: an option is out of bounds, or not available on this device.
            InsufficientMemoryError: the KV cache does not fit.
            ModelChangedError: modules of the model were replaced since it was verified, or it was
                moved or converted.
            UnsupportedFeatureError: the generation config asks for something that this engine does
                not support, and drop_unsupported_processors is off.
            InvalidRequestError: the generation config's num_return_sequences is out of bounds.
        """
        return self._manager(generation_config, continuous_batching_config, {})

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Drop the manager that the model keeps, together with its cache. Harmless if there is
        none.
        """
        self._kept.drop()

    def load_weights(self, weights: Weights, *, partial: bool = False) -> None:
        """Replace the model's weights, including packed ones, such as after each step of a trainer.

        Running managers pause between two steps meanwhile. Everything computed with the old weights
        is discarded: cached prefixes, and the KV of live requests, which keep their tokens and
        continue from them with the new weights.

        Args:
            weights: the new weights by their names in the model's `state_dict`, either as such a
                dict or as pairs like those of `named_parameters`. Pairs are read to the end before
                anything is written. Each weight is converted to the model's dtype, and quantized
                again if the model is int8. For weights shared under several names, one name is
                enough.
            partial: whether names may be missing; their weights are unchanged.

        Raises:
            WeightsRefusedError: a name is unknown or missing, a tensor has the wrong shape or is
                not floating-point, or the model is split across processes. Nothing was changed.
            ModelChangedError: the owner has changed the model in another way, see
                `init_continuous_batching`. The weights were nevertheless replaced.
        """
        if self._verified.ranks is not None:
            raise WeightsRefusedError(
                "the model is split across processes, where weights are not exchanged: load it anew"
            )
        if not isinstance(weights, Mapping):
            weights = list(weights)
        with self._exchange, contextlib.ExitStack() as windows:
            for manager in list(self._managers):
                with contextlib.suppress(EngineUnavailableError):  # it does not run
                    windows.enter_context(manager.pause())
            exchange_weights(self.model, weights, partial=partial)

    def _guard(self) -> None:
        """Make packed layers refuse new weights while a step may be reading them."""
        guard = _Guard(weakref.WeakMethod(self._refuse_while_steps_run))
        layers = held_layers(self.model)
        for layer in layers:
            layer.guard = guard
        if layers:  # else it would write the layers before the first packed one
            self.model.register_load_state_dict_pre_hook(guard)

    def _refuse_while_steps_run(self) -> None:
        if not all(manager.lets_model_change() for manager in self._managers):
            raise WeightsRefusedError(
                "weights: steps read them now, because a manager runs; use load_weights, which "
                "waits for the step, or write them in a manager's pause()"
            )

    @contextlib.contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: object | None = None,
        persistent_manager: bool = False,
        warmup: bool = True,
    ) -> Iterator[ContinuousBatchingManager]:
        """Start a manager, and stop it at the end of the block after finishing live requests.

        Args:
            generation_config, continuous_batching_config: see `init_continuous_batching`.
            block, timeout: how to wait at the end of the block; see
                `ContinuousBatchingManager.stop`.
            persistent_manager: whether the model keeps the manager for the next session.
            warmup: whether to run everything that is slow the first time before the first prompt.
                This happens once for each manager.
        """
        manager = self._manager(generation_config, continuous_batching_config, {})
        _start(manager, warmup)
        try:
            yield manager
        finally:
            manager.stop(block, timeout, keep_for_next_session=persistent_manager)

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: object | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = True,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Generate for a batch of prompts.

        Args:
            inputs: the prompts' token ids, as lists, or one-dimensional numpy arrays or torch
                tensors.
            generation_config, continuous_batching_config: see `init_continuous_batching`.
            record_timestamps: whether outputs include the time of each token.
            progress_bar: whether to show a progress bar.
            persistent_manager: whether the model keeps the manager and its cache for the next call
                with the same configs.
            warmup: whether to run everything that is slow the first time before the first prompt.
            kwargs: max_new_tokens, eos_token_id, adapter (a loaded adapter's name for all prompts,
                or one or None for each), and individual fields of ContinuousBatchingConfig.

        Returns:
            The outputs by request id, in the order of the prompts. The ids of a new manager are
                "req_0", "req_1", …; a kept manager continues its numbering. With
                num_return_sequences above 1, "req_0" is followed by "req_0__child#0",
                "req_0__child#1", …. A refused prompt has one output, with status FAILED and its
                error.

        Raises:
            InvalidRequestError: a keyword is unknown.
            ConfigError, InsufficientMemoryError, ModelChangedError, UnsupportedFeatureError: see
                `init_continuous_batching`.
        """
        max_new_tokens = kwargs.pop("max_new_tokens", None)
        eos_token_id = kwargs.pop("eos_token_id", None)
        adapter = kwargs.pop("adapter", None)
        manager = self._manager(generation_config, continuous_batching_config, kwargs)
        is_complete = False
        try:
            _start(manager, warmup)
            results = generate(
                manager,
                inputs,
                max_new_tokens=max_new_tokens,
                eos_token_id=eos_token_id,
                record_timestamps=record_timestamps,
                progress_bar=progress_bar,
                adapter=adapter,
            )
            is_complete = True
        finally:
            manager.stop(
                keep_for_next_session=persistent_manager and is_complete, hard_stop=not is_complete
            )
        return results

    def _manager(
        self,
        generation_config: GenerationConfig | None,
        continuous_batching_config: object | None,
        options: dict[str, Any],
    ) -> ContinuousBatchingManager:
        generation = generation_config or self.generation_config
        config = resolve_config(generation, continuous_batching_config, self._config, options)
        defaults = GenerationDefaults(
            generation,
            self._verified.eos_token_ids,
            model_generation_config=self.generation_config,
            drop_unsupported=config.drop_unsupported_processors,
            return_logprobs=config.return_logprobs,
            vocab_size=self._verified.vocab_size,
            seed=config.seed,
        )
        settings = (generation.to_json_string(), self.generation_config.to_json_string(), config)
        kept = self._kept.take(settings)
        if kept is not None:
            kept.num_return_sequences = defaults.num_return_sequences
            return kept
        self._verified.refresh()
        telemetry = self._telemetry
        manager = build_manager(
            self._verified,
            config,
            logger.info,
            defaults=defaults,
            tokenizer=self.tokenizer,
            keeper=self._kept,
            settings=settings,
            observer=None if telemetry is None else telemetry.observer(self._name),
        )
        self._managers.add(manager)
        return manager

    @property
    def _name(self) -> str:
        return self._verified.path.name or type(self.model).__name__


def load(
    path: str,
    config: ContinuousBatchingConfig | None = None,
    *,
    telemetry: Telemetry | None = None,
    **options: Any,
) -> LoadedModel:
    """Load and verify a model.

    With tensor_parallel="auto", the script runs on all ranks that torchrun started, but this call
    returns only on rank 0. On the other ranks it computes for rank 0, and raises SystemExit when
    rank 0 ends.

    Args:
        path: a directory with config.json and safetensors, or a hub id.
        config: the default config of managers.
        telemetry: notified of what managers do (docs/offline.md); may be None.
        options: fields of LoadConfig: dtype, device, threads, attention, quantization,
            pack_weights, decoder, tensor_parallel, adapters, max_adapter_rank, max_adapter_bytes,
            max_adapters. dtype and device may be torch objects, and adapters a dict of directories
            by name.

    Raises:
        ModelRefusedError: the model cannot be loaded, or would not run correctly.
        ConfigError: an option is unknown or out of bounds.
        RanksLostError: the model is split, and another rank has ended or failed.
    """
    load_config = _load_config(options)
    if is_follower(load_config):
        follow(path, load_config)
        raise SystemExit(0)
    verified = call_on_own_thread(
        lambda: load_model(path, load_config, Paced(logger.info)), "headrace-load"
    )
    if verified.leader is not None:
        atexit.register(verified.end)
    return LoadedModel(verified, config, verified.path, telemetry)


_OF_OTHERS = {
    "adapter_root": "is an option of servers, whose operators load adapters; use adapters",
    "attn_implementation": "is not needed: steps have attention of the engine's (attention=…), and "
    "loaded.model.set_attn_implementation is for the model's own calls",
    "device_map": "is not an option here; use device",
    "torch_dtype": "is not an option here; use dtype",
    "tp_plan": "is not an option here; use tensor_parallel",
    "distributed_config": "is not an option here; use tensor_parallel",
    "quantization_config": "is not an option here; use quantization",
}
"""Options of servers and of from_pretrained, with the equivalents that `load` offers."""


def _load_config(options: dict[str, Any]) -> LoadConfig:
    names = [field.name for field in dataclasses.fields(LoadConfig)]
    known = [name for name in names if name not in _OF_OTHERS]
    for name in options:
        if name not in known:
            hint = _OF_OTHERS.get(name, "is not an option of engine.load")
            raise ConfigError(name, f"{hint}; the options are {', '.join(known)}")
    values = dict(options)
    if isinstance(values.get("dtype"), torch.dtype):
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    if isinstance(values.get("device"), torch.device):
        values["device"] = str(values["device"])
    if isinstance(values.get("adapters"), Mapping):
        values["adapters"] = tuple(f"{name}={one}" for name, one in values["adapters"].items())
    return LoadConfig(**values)


def from_model(
    model: PreTrainedModel,
    config: ContinuousBatchingConfig | None = None,
    tokenizer_path: str | Path | None = None,
    attention: str = "auto",
    telemetry: Telemetry | None = None,
) -> LoadedModel:
    """Verify a model that is already in memory.

    The model is not changed: steps run on a view of it that shares its weights.

    Args:
        model: the model, in evaluation mode.
        config: the default config of managers.
        tokenizer_path: the directory with the tokenizer's files, for stop strings. If None, the
            directory that the model was loaded from, if any.
        attention: see LoadConfig.
        telemetry: notified of what managers do (docs/offline.md); may be None.

    Raises:
        ModelRefusedError: the model would not run correctly.
        ConfigError: the requested attention is not available here.
    """
    if model.training:
        raise ModelRefusedError("the model is in training mode; call model.eval() first")
    refuse_quantised(model)
    name = tokenizer_path or model.config.name_or_path
    directory = Path(name) if name else None
    verified = verify_model(
        model,
        directory or Path(),
        logger.info,
        attention,
    )
    return LoadedModel(verified, config, directory, telemetry)


def _start(manager: ContinuousBatchingManager, warmup: bool) -> None:
    if warmup and not manager.warmed_up:
        manager.warmup()
    manager.start()


class _Guard:
    """Calls a method of a loaded model for as long as the model exists.

    A copy of the model gets a guard that does nothing, because no steps run on the copy.
    """

    def __init__(self, method: Callable[[], Any] = lambda: None) -> None:
        self._method = method

    def __call__(self, *_: object) -> None:
        method = self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        return _Guard, ()


class _Kept:
    """The one stopped manager that a model keeps; see `engine.api.manager.ManagerKeeper`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._manager: ContinuousBatchingManager | None = None

    def keep(self, manager: ContinuousBatchingManager) -> None:
        """Keep a manager, replacing the one kept now, if any."""
        with self._lock:
            self._manager = manager

    def release(self, manager: ContinuousBatchingManager) -> None:
        """Stop keeping a manager because it was started."""
        with self._lock:
            if self._manager is manager:
                self._manager = None

    def take(self, settings: object) -> ContinuousBatchingManager | None:
        """Return the kept manager if it was made with these settings; otherwise drop it and return
        None.
        """
        with self._lock:
            manager, self._manager = self._manager, None
        if manager is None or manager.settings != settings:
            return None
        manager.join()  # its thread may still be ending
        return manager

    def drop(self) -> None:
        """Drop the kept manager, if any."""
        with self._lock:
            self._manager = None
