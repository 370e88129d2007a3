"""Makes a verified model from a model's path; `engine.loading.running` puts a runner around it.

    path ─▶ config ─▶ check_config ─▶ weights ─▶ probe_layers, record ─▶ pack ─▶ view, decoder
         ─▶ compare, self_check
           └────────────────────────────────── load_model ──────────────────────────────────┘

Only safetensors are read, and no code in the model's directory is run. All ranks of a split model
(`engine.parallel.ranks`) load it in lockstep.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.attention.base import AttentionBackend
from engine.attention.registry import (
    AttentionUnavailableError,
    choose_backend,
    fall_back,
    register,
)
from engine.config import (
    LoadConfig,
)
from engine.environment import RankPlace
from engine.errors import InsufficientMemoryError, ModelChangedError, ModelRefusedError
from engine.loading.checkpoint import Checkpoint, read_checkpoint, resolve_path
from engine.loading.gate import (
    ModelProbe,
    check_config,
    num_embeddings,
    probe_layers,
    self_check,
)
from engine.loading.joining import join_linears, shared_inputs
from engine.loading.memory import GIB, HostLimits, StepLimits
from engine.loading.model_defaults import context_length, default_sampling, eos_token_ids
from engine.loading.packing import Packing, choose_packing, pack_model
from engine.loading.pages import trim
from engine.loading.rotary import follow_lengths, keep_frequencies, read_rope
from engine.loading.view import ModelView
from engine.models import choosing
from engine.models.choosing import (
    NOT_ASKED,
    CausalDecoder,
    Plan,
    exact_sums,
    make_decoder,
    plan_decoder,
)
from engine.models.experts import choose_experts
from engine.parallel.sharding import check_plan, sharding, whole_logits
from engine.rope import RopeLengths
from engine.runner.forward import CausalModel
from engine.runner.runner_options import RunnerOptions
from engine.sampling_params import SamplingParams
from engine.startup import KERNELS, VERIFY, WEIGHTS, enter
from engine.types import TokenId

if TYPE_CHECKING:
    from engine.parallel.leader import Leader
    from engine.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedModel:
    """A model in memory that passed the load gate.

    Attributes:
        model: a view of `original` with our attention implementation; steps run it if there is no
            decoder, or if they are compiled.
        decoder: our own decoder, with the same weights; None: steps run the model.
        original: the transformers model, as its owner has it. A split model has no view, because
            the engine owns it.
        path: its local directory.
        device, dtype, backend, probe: what it runs on and with, and what the gate found.
        context_length: the longest request that the model allows, in tokens.
        vocab_size: how many token ids both embedding and logits have.
        parameters: how many it has, packed ones included.
        eos_token_ids: the model's end-of-sequence ids.
        default_sampling: what `model.generate` would use.
        ranks: the processes across which the model is split; None: this one has all of it.
        leader: on rank 0, the connection to the other ranks; None: this is another rank, or there
            are no others.
        step_bytes: the measured memory of steps, by the largest step or the options for graphs, and
            by the block size.
        view: connects `model` and `original`; None: they are the same.
        rope: how the model's rotary frequencies depend on a request's length; None: they do not, or
            requests may not be longer than the original length.
    """

    model: PreTrainedModel
    original: PreTrainedModel
    path: Path
    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend
    probe: ModelProbe
    context_length: int
    vocab_size: int
    parameters: int
    eos_token_ids: tuple[TokenId, ...]
    default_sampling: SamplingParams
    ranks: Ranks | None = None
    leader: Leader | None = None
    step_bytes: dict[tuple[StepLimits | RunnerOptions, int], int] = field(default_factory=dict)
    view: ModelView | None = None
    rope: RopeLengths | None = None
    decoder: CausalDecoder | None = None

    @property
    def steps(self) -> CausalModel:
        """What steps run."""
        return self.decoder or self.model

    def refresh(self) -> None:
        """Take over changes that the owner has made to the model; called when steps may follow the
        owner's own work on it.

        Raises:
            ModelChangedError: the owner has replaced modules, or moved or converted the model.
        """
        if self.view is None:
            return
        self.view.refresh()
        device, dtype = self.original.device, self.original.dtype
        if (device, dtype) != (self.device, self.dtype):
            raise ModelChangedError(
                f"the model was verified as {self.dtype} on {self.device}, and is {dtype} on "
                f"{device} now"
            )

    def end(self) -> None:
        """Let the other ranks end, if there are any. Harmless if they have ended."""
        if self.leader is not None:
            self.leader.end()


def load_model(
    model: str, load_config: LoadConfig, progress: Callable[[str], None]
) -> VerifiedModel:
    """Load and verify a model. `progress` gets one line for each stage.

    Raises:
        ModelRefusedError: the model cannot be loaded, or would be run wrongly.
        ConfigError: load_config asks for something that is not available here.
        RanksLostError: the model is split, and another rank has ended.
    """
    ranks = None
    if load_config.tensor_parallel != "none":
        from engine.parallel.ranks import join  # msgspec is only needed for a split model

        ranks = join(load_config, RankPlace.read())
    if ranks is None:
        return _load(model, load_config, progress, None)
    with ranks.together():
        return _load(model, load_config, progress, ranks)


def _load(
    model: str,
    load_config: LoadConfig,
    progress: Callable[[str], None],
    ranks: Ranks | None,
) -> VerifiedModel:
    device = _device(load_config) if ranks is None else ranks.device
    set_threads(load_config, device, 1 if ranks is None else ranks.place.local_world_size)
    path = resolve_path(model)
    part = f", part {ranks.place.rank} of {ranks.place.world_size}" if ranks is not None else ""
    progress(f"loading {path} on {device}{part}")
    enter(progress, WEIGHTS)
    started = time.monotonic()
    loaded = _load_weights(path, load_config, device, ranks)
    seconds = time.monotonic() - started
    size = loaded.num_parameters() / 1e6
    progress(f"loaded {size:.1f} M parameters ({loaded.dtype}) in {seconds:.1f} s")
    if ranks is not None:
        return verify_model(loaded, path, progress, load_config.attention, ranks=ranks)
    return prepare_model(loaded, path, load_config, progress)


def prepare_model(
    model: PreTrainedModel,
    path: Path,
    load_config: LoadConfig,
    progress: Callable[[str], None],
) -> VerifiedModel:
    """Pack and verify a model whose weights are already on their device, as `load_model`
    does. Changes the model's modules.

    Raises:
        ModelRefusedError: the model would be run wrongly.
        ConfigError: load_config asks for something that is not available here.
    """
    packing = choose_packing(
        model.device, model.dtype, load_config.pack_weights, load_config.quantization
    )
    return verify_model(
        model,
        path,
        progress,
        load_config.attention,
        packing,
        own_decoder=load_config.decoder == "own",
    )


@exact_sums()
def verify_model(
    model: PreTrainedModel,
    path: Path,
    progress: Callable[[str], None],
    attention: str = "auto",
    packing: Packing | None = None,
    *,
    own_decoder: bool = False,
    ranks: Ranks | None = None,
) -> VerifiedModel:
    """Put a model that is in memory through the load gate. Its steps run on our decoder, or on a
    view of it (see `engine.loading.view`), which has our attention.

    Args:
        model: the model. Its modules are replaced if its weights are packed; on CUDA some of its
            parameters become views of longer ones. Otherwise it is not changed.
        path: its local directory.
        progress: gets a line for each stage.
        attention: see LoadConfig.
        packing: how its weights are packed, if they are. What is packed is compared with the model
            as it was before; with int8, which changes results, with the packed model.
        own_decoder: whether our decoder computes its steps if it can. Where it cannot, on CUDA,
            linear layers with the same input are joined.
        ranks: the processes across which it is split; all of them call this. The gate then compares
            with the results of the whole model.

    Raises:
        ModelRefusedError: the model would be run wrongly.
        ConfigError: that attention is not available here.
    """
    enter(progress, KERNELS)
    register()
    check_config(model.config, type(model))
    backend = choose_backend(model.device, model.dtype, attention)
    parameters = model.num_parameters()  # packed weights are no longer parameters
    if packing == "int8":
        progress(str(pack_model(model, packing)))
    original, view, rope = model, None, None
    if ranks is None:  # the hooks of a split model are bound to its own modules
        view, model, rope = _view(original)
    is_packed = packing in ("native", "int8")
    backend, probe, plan = _probe(model, backend, attention, is_packed if own_decoder else None)
    trim()
    was_packed = packing not in (None, "int8")
    if packing not in (None, "int8"):
        view, model = None, original  # the view would hold the originals of packed weights
        progress(str(pack_model(original, packing)))
        view, model, rope = _view(original)
    enter(progress, VERIFY)
    if view is not None:
        choose_experts(model, backend, progress)
    decoder = make_decoder(model, plan, backend, [shape.window for shape in probe.shapes], progress)
    del plan  # what was recorded of the model
    if own_decoder and decoder is None and view is not None:
        was_packed |= _join(model, probe, progress)
    if ranks is not None:
        probe = replace(probe, logits=whole_logits(model, probe))
    self_check(model, probe, backend, model.device, decoder, was_packed=was_packed)
    progress(f"verified: paged attention ({backend.name}) equals the model's own in every layer")
    trim()
    vocab_size = min(num_embeddings(model), probe.logits[0].shape[-1])
    return VerifiedModel(
        model=model,
        original=original,
        path=path,
        device=model.device,
        dtype=model.dtype,
        backend=backend,
        probe=probe,
        context_length=context_length(model.config.get_text_config(), rope),
        vocab_size=vocab_size,
        parameters=parameters,
        eos_token_ids=eos_token_ids(model.generation_config, model.config, vocab_size),
        default_sampling=default_sampling(model.generation_config),
        ranks=ranks,
        leader=_leader(ranks),
        view=view,
        rope=rope,
        decoder=decoder,
    )


def _view(original: PreTrainedModel) -> tuple[ModelView, PreTrainedModel, RopeLengths | None]:
    """A view, its model, and how the model's rotary frequencies depend on a request's length; None:
    they do not, or the view cannot follow.
    """
    view = ModelView.of(original)
    keep_frequencies(view.model)
    rope = read_rope(view.model)
    follows = rope is not None and follow_lengths(view.model, rope)
    return view, view.model, rope if follows else None


def _probe(
    model: PreTrainedModel, backend: AttentionBackend, attention: str, is_packed: bool | None
) -> tuple[AttentionBackend, ModelProbe, Plan]:
    """Probe a model, and plan our decoder on what it computes for the probe's last prompt; with
    another backend, if the one that was chosen does not support a layer.

    is_packed: see `plan_decoder`; None: our decoder is not asked for.
    """
    layers, plan = model.config.get_text_config().num_hidden_layers, NOT_ASKED

    def record(prompt: Sequence[TokenId]) -> torch.Tensor | None:
        nonlocal plan
        if is_packed is not None:
            plan = plan_decoder(model, backend, prompt, is_packed=is_packed)
        return None if isinstance(plan, str) else plan[1].logits[-1]

    try:
        probe = probe_layers(model, backend, layers, record)
    except AttentionUnavailableError as error:
        backend = fall_back(attention, error)
        probe = probe_layers(model, backend, layers, record)
    return backend, probe, plan


def _join(model: PreTrainedModel, probe: ModelProbe, progress: Callable[[str], None]) -> bool:
    """Join linear layers of a view where its steps run as transformers wrote them, on a device for
    which nothing is packed. Returns whether there are any.
    """
    if model.device.type not in choosing.TORCH_DEVICES:
        return False
    products = join_linears(shared_inputs(model, probe.prompts[-1]))
    progress(f"joined: {products} products of linear layers that have the same input")
    return products > 0


def _leader(ranks: Ranks | None) -> Leader | None:
    """The connection to the other ranks, on the one that leads them."""
    if ranks is None or not ranks.leads:
        return None
    from engine.parallel.leader import Leader  # see `load_model`

    return Leader(ranks)


def _check_room(checkpoint: Checkpoint, load_config: LoadConfig, available: int) -> None:
    """Refuse weights for which there is no memory, before the system kills the process that reads
    them.

    Raises:
        InsufficientMemoryError: they take more than what is free.
    """
    needed = float(checkpoint.file_bytes)
    if load_config.dtype != "auto" and checkpoint.dtype is not None:
        needed *= getattr(torch, load_config.dtype).itemsize / checkpoint.dtype.itemsize
    if load_config.quantization == "int8":
        needed /= 2
    if needed <= available:
        return
    lighter = "" if load_config.quantization == "int8" else ", or quantization int8 on a CPU"
    raise InsufficientMemoryError(
        f"{checkpoint.path}: the weights take {needed / GIB:.2f} GiB, and {available / GIB:.2f} "
        f"GiB are free here: give more memory, or a smaller model{lighter}; headrace-server plan "
        "says what a model takes"
    ).naming("quantization")


def _load_weights(
    path: Path, load_config: LoadConfig, device: torch.device, ranks: Ranks | None
) -> PreTrainedModel:
    checkpoint = read_checkpoint(path)
    if device.type == "cpu" and ranks is None:
        _check_room(checkpoint, load_config, HostLimits.read().memory_available)
    if ranks is not None:
        check_plan(checkpoint.config, checkpoint.model_class, ranks.place.world_size)
    if not sys.stderr.isatty():
        disable_progress_bar()  # a progress bar is for a terminal, not for a log
    dtype = "auto" if load_config.dtype == "auto" else getattr(torch, load_config.dtype)
    try:
        model: PreTrainedModel
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=checkpoint.config,
            dtype=dtype,
            attn_implementation=None,  # the owner gets the usual attention, whatever the file says
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **({} if ranks is None else sharding(ranks.place.world_size)),
        )
    except SafetensorError as error:
        raise ModelRefusedError(
            f"{path}: the weights cannot be read: a safetensors file is damaged, or was not copied "
            f"to its end ({error}); download it again"
        ) from error
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelRefusedError(f"{path}: the weights cannot be read: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelRefusedError(
            f"{path}: {len(missing)} weights are not in the checkpoint ({', '.join(missing[:3])}); "
            "they would be random numbers"
        )
    return model.eval().to(device)


def _device(load_config: LoadConfig) -> torch.device:
    """The device to use; resolves "auto".

    Raises:
        ModelRefusedError: CUDA is requested but not available.
    """
    if load_config.device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(load_config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelRefusedError("device is cuda, but torch finds no CUDA device here; use cpu")
    return device


def set_threads(load_config: LoadConfig, device: torch.device, sharers: int) -> None:
    """Set torch's threads; sharers: how many of our processes share this host."""
    limits = HostLimits.read()
    threads = load_config.threads or (max(1, limits.cpus // sharers) if device.type == "cpu" else 1)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    source = "threads" if load_config.threads else limits.cpu_source
    logger.info("CPU threads for the model: %d, because of %s", threads, source)
