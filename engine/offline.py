"""Generation without a server: `load(path)`, and a model with the methods of transformers'
ContinuousMixin.

model = engine.load("models/demo")
outputs = model.generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=32)
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from engine.assembly import build_manager
from engine.config import ContinuousBatchingConfig, LoadConfig
from engine.errors import HeadraceError, InvalidRequestError, ModelRefusedError, QueueFullError
from engine.generation_options import GenerationDefaults
from engine.manager import ContinuousBatchingManager
from engine.request import RequestStatus
from engine.results import GenerationOutput
from engine.runner.loader import VerifiedModel, load_model, verify_model
from engine.text import Tokenizer, TokenizerError
from engine.threads import call_on_own_thread

logger = logging.getLogger(__name__)

_CONFIG_FIELDS = frozenset(field.name for field in dataclasses.fields(ContinuousBatchingConfig))


class LoadedModel:
    """A verified model with continuous batching; made by `load` or `from_model`."""

    def __init__(self, verified: VerifiedModel, config: ContinuousBatchingConfig | None) -> None:
        self._verified = verified
        self._config = config or ContinuousBatchingConfig()
        self._kept: ContinuousBatchingManager | None = None
        self._kept_key: tuple[str, ContinuousBatchingConfig] | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model; its attention is ours while it is loaded here."""
        return self._verified.model

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own generation config."""
        config: GenerationConfig = self._verified.model.generation_config
        return config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None if its directory has none."""
        if self._tokenizer is None:
            try:
                self._tokenizer = Tokenizer.load(self._verified.path, self._verified.vocab_size)
            except TokenizerError as error:
                logger.info("no tokenizer: %s", error)
        return self._tokenizer

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
    ) -> ContinuousBatchingManager:
        """Make a manager, with a KV cache of its own; `start` it, add requests, `stop` it.

        Args:
            generation_config: what requests have unless they say otherwise; None: the model's.
            continuous_batching_config: None: the one given to `load`.

        Raises:
            InsufficientMemoryError: the KV cache does not fit.
            UnsupportedFeatureError: the generation config asks for what this engine does not do,
                and drop_unsupported_processors is off.
        """
        config = continuous_batching_config or self._config
        chosen = generation_config or self.generation_config
        defaults = GenerationDefaults(
            chosen,
            self._verified.eos_token_ids,
            drop_unsupported=config.drop_unsupported_processors,
            return_logprobs=config.return_logprobs,
            vocab_size=self._verified.vocab_size,
            seed=config.seed,
        )
        manager, _, _ = build_manager(
            self._verified, config, logger.info, defaults=defaults, tokenizer=self.tokenizer
        )
        return manager

    @contextlib.contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        *,
        block: bool = True,
        timeout: float | None = None,
        warmup: bool = True,
    ) -> Iterator[ContinuousBatchingManager]:
        """A started manager, stopped at the end of the block: live requests are finished first.

        Args:
            generation_config, continuous_batching_config: see `init_continuous_batching`.
            block, timeout: how the end of the block waits; see `ContinuousBatchingManager.stop`.
            warmup: whether to run what is slow the first time before the first prompt.
        """
        manager = self.init_continuous_batching(generation_config, continuous_batching_config)
        if warmup:
            manager.warmup()
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=block, timeout=timeout)

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = True,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Generate for a batch of prompts.

        Args:
            inputs: the prompts' token ids.
            generation_config: None: the model's own.
            continuous_batching_config: None: the one given to `load`.
            record_timestamps: whether outputs tell when each token came.
            progress_bar: whether to show one.
            persistent_manager: whether to keep the manager, its thread and its cache for the next
                call with the same configs; `close` ends it.
            warmup: whether to run what is slow the first time before the first prompt.
            kwargs: max_new_tokens, eos_token_id, and fields of ContinuousBatchingConfig.

        Returns:
            For each prompt, in their order, its request id ("req_0", "req_1", …) and output. A
            prompt that is refused has an output with status FAILED and its error.

        Raises:
            InvalidRequestError: an unknown keyword.
            InsufficientMemoryError, UnsupportedFeatureError: see `init_continuous_batching`.
        """
        max_new_tokens = kwargs.pop("max_new_tokens", None)
        eos_token_id = kwargs.pop("eos_token_id", None)
        config = self._with_options(continuous_batching_config or self._config, kwargs)
        manager = self._manager_for(generation_config, config, warmup)
        results: dict[str, GenerationOutput] = {}
        try:
            with tqdm(total=len(inputs), disable=not progress_bar, unit="request") as bar:

                def take(timeout: float | None) -> bool:
                    output = manager.get_result(timeout=timeout)
                    if output is not None:
                        results[output.request_id] = output
                        bar.update()
                    return output is not None

                for index, prompt in enumerate(inputs):
                    name = f"req_{index}"
                    try:
                        while not _add(
                            manager,
                            prompt,
                            request_id=name,
                            max_new_tokens=max_new_tokens,
                            record_timestamps=record_timestamps,
                            eos_token_id=eos_token_id,
                        ):
                            take(timeout=0.05)  # the queue is full: results make room
                    except InvalidRequestError as error:
                        results[name] = _refused(name, prompt, error)
                        bar.update()
                    while take(timeout=0):
                        pass  # unread results are bounded: they are read while prompts are added
                while len(results) < len(inputs) and take(timeout=None):
                    pass
        finally:
            complete = len(results) == len(inputs)
            if not (persistent_manager and complete):
                manager.stop(abort=not complete)
                self._kept = self._kept_key = None
        return {f"req_{index}": results[f"req_{index}"] for index in range(len(inputs))}

    def close(self) -> None:
        """End the manager that a call with persistent_manager=True has kept. Harmless if there is
        none.
        """
        if self._kept is not None:
            self._kept.stop(abort=True)
            self._kept = self._kept_key = None

    def _manager_for(
        self,
        generation_config: GenerationConfig | None,
        config: ContinuousBatchingConfig,
        warmup: bool,
    ) -> ContinuousBatchingManager:
        """The kept manager if it fits, else a new one, started."""
        key = ((generation_config or self.generation_config).to_json_string(), config)
        if self._kept is not None and self._kept_key == key and self._kept.is_running():
            return self._kept
        self.close()
        manager = self.init_continuous_batching(generation_config, config)
        if warmup:
            manager.warmup()
        manager.start()
        self._kept, self._kept_key = manager, key
        return manager

    @staticmethod
    def _with_options(
        config: ContinuousBatchingConfig, options: dict[str, Any]
    ) -> ContinuousBatchingConfig:
        unknown = sorted(set(options) - _CONFIG_FIELDS)
        if unknown:
            raise InvalidRequestError(
                unknown[0],
                "is no keyword of generate_batch; use a generation config, or the fields of "
                f"ContinuousBatchingConfig: {', '.join(sorted(_CONFIG_FIELDS))}",
            )
        return dataclasses.replace(config, **options) if options else config


def load(path: str, config: ContinuousBatchingConfig | None = None, **options: Any) -> LoadedModel:
    """Load and verify a model.

    Args:
        path: a directory with config.json and safetensors, or a hub id.
        config: what managers use unless they are given another.
        options: fields of LoadConfig: dtype, device, threads.

    Raises:
        ModelRefusedError: the model cannot be loaded, or would be run wrongly.
        ConfigError: an option is out of its bounds.
    """
    load_config = LoadConfig(**options)
    verified = call_on_own_thread(
        lambda: load_model(path, load_config, logger.info), "headrace-load"
    )
    return LoadedModel(verified, config)


def from_model(
    model: PreTrainedModel, config: ContinuousBatchingConfig | None = None
) -> LoadedModel:
    """Verify a model that is in memory. Its attention implementation is exchanged for ours.

    Raises:
        ModelRefusedError: it would be run wrongly.
    """
    if model.training:
        raise ModelRefusedError("the model is in training mode; call model.eval() first")
    path = Path(model.config.name_or_path or ".")
    return LoadedModel(verify_model(model, path, logger.info), config)


def _add(manager: ContinuousBatchingManager, prompt: Sequence[int], **options: Any) -> bool:
    """Add a request; False: the queue is full, try again later."""
    try:
        manager.add_request(prompt, **options)
    except QueueFullError:
        return False
    return True


def _refused(name: str, prompt: Sequence[int], error: HeadraceError) -> GenerationOutput:
    return GenerationOutput(
        request_id=name, prompt_ids=list(prompt), error=str(error), status=RequestStatus.FAILED
    )
