"""Loads and verifies a model from its path. `engine.loading.running` builds the runner around it.

    path ─▶ config ─▶ check_config ─▶ weights ─▶ probe_layers, record ─▶ pack ─▶ view, decoder
         ─▶ compare, self_check
           └────────────────────────────────── load_model ──────────────────────────────────┘

Only safetensors are read, and no code in the model's directory is run. All ranks of a split model
(`engine.parallel.ranks`) load it in lockstep.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.attention.interface import AttentionBackend
from engine.attention.registry import (
    AttentionUnavailableError,
    choose_backend,
    fall_back,
    register,
)
from engine.contract.adapters import AdapterLoad
from engine.contract.config import LoadConfig
from engine.contract.environment import RankPlace
from engine.contract.errors import InsufficientMemoryError, ModelRefusedError
from engine.contract.startup import KERNELS, VERIFY, WEIGHTS, enter
from engine.loading.adapters.adapted_modules import AdaptedModules
from engine.loading.adapters.adapter_loading import load_adapters
from engine.loading.checkpoint import Checkpoint, read_checkpoint, resolve_path
from engine.loading.driver import why_unusable
from engine.loading.gate import (
    NotFiniteError,
    check_config,
    num_embeddings,
    probe_layers,
    self_check,
)
from engine.loading.joined_linears import join_linears
from engine.loading.memory import GIB, HostLimits
from engine.loading.model_defaults import context_length, default_sampling, eos_token_ids
from engine.loading.model_watch import ModelWatch
from engine.loading.packing import (
    NOT_FINITE,
    choose_dtype,
    choose_packing,
    held_bytes,
    pack_model,
    why_kernels_are_slower,
)
from engine.loading.pages import trim
from engine.loading.quantised.stored_linear import count_parameters, stored_modules
from engine.loading.recurrent import follow_states, layer_kinds, recurs
from engine.loading.recurrent_kernels import use_kernels
from engine.loading.rotary import replaces_itself
from engine.loading.sharding import check_plan, sharding, whole_logits
from engine.loading.stored_packing import (
    check_stored,
    describe_stored,
    pack_stored,
    pages_given_back,
)
from engine.loading.verified import VerifiedModel, make_view
from engine.loading.weights import model_without_weights, read_weights
from engine.models import choosing
from engine.models.choosing import (
    NOT_ASKED,
    CausalDecoder,
    Plan,
    describe_steps,
    exact_sums,
    make_decoder,
)
from engine.models.experts import choose_experts
from engine.models.formats.registry import Format
from engine.models.held_layer import HeldLayer
from engine.models.recording import Observation

if TYPE_CHECKING:
    from engine.contract.rope import RopeLengths
    from engine.loading.view import ModelView
    from engine.parallel.leader import Leader
    from engine.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


def load_model(
    model: str,
    load_config: LoadConfig,
    progress: Callable[[str], None],
    adapters: Sequence[AdapterLoad] | None = None,
) -> VerifiedModel:
    """Load and verify a model. `progress` receives one line for each stage. `adapters`: see
    `load_adapters`.

    Raises:
        ModelRefusedError: the model cannot be loaded, or would run incorrectly.
        ConfigError: load_config requests something that is not available here.
        RanksLostError: the model is split, and another rank has ended.
    """
    ranks = None
    if load_config.tensor_parallel != "none":
        from engine.parallel.ranks import join  # msgspec is only needed for a split model

        ranks = join(load_config, RankPlace.read())
    if ranks is None:
        verified = _load(model, load_config, progress, None)
        load_adapters(verified, load_config, progress, adapters)
        return verified
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
    path = resolve_path(model, progress)
    part = f", part {ranks.place.rank} of {ranks.place.world_size}" if ranks is not None else ""
    progress(f"loading {path} on {device}{part}")
    enter(progress, WEIGHTS)
    started = time.monotonic()
    loaded = _load_weights(path, load_config, device, progress, ranks)
    seconds = time.monotonic() - started
    size = count_parameters(loaded) / 1e6
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
    """Pack and verify a model whose weights are already on their device, like `load_model`.

    This changes the model's modules.

    Raises:
        ModelRefusedError: the model would run incorrectly.
        ConfigError: load_config requests something that is not available here.
    """
    packing = choose_packing(
        model.device, model.dtype, load_config.pack_weights, load_config.quantization
    )
    if stored_modules(model):
        progress(describe_stored(model, packing))
    if model.device.type == "cpu" and (slower := why_kernels_are_slower()):
        progress(slower)
    return verify_model(
        model,
        path,
        progress,
        load_config.attention,
        packing,
        own_decoder=load_config.decoder == "own",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What runs a model's steps, and what it is judged by.

    Attributes:
        model: the view's model, or the original if it is split.
        view: the original with our attention; None if the model is split.
        rope: how its rotary frequencies depend on lengths, if they do.
        backend: its attention.
        probe: what was observed of the model before its weights were packed.
        decoder: our decoder; None if the model's own modules run steps.
    """

    model: PreTrainedModel
    view: ModelView | None
    rope: RopeLengths | None
    backend: AttentionBackend
    probe: Observation
    decoder: CausalDecoder | None


@exact_sums()
def verify_model(
    model: PreTrainedModel,
    path: Path,
    progress: Callable[[str], None],
    attention: str = "auto",
    packing: Format | None = None,
    *,
    own_decoder: bool = False,
    ranks: Ranks | None = None,
) -> VerifiedModel:
    """Put a model that is in memory through the load gate.

    Its steps run on our decoder, or on a view of the model (see `engine.loading.view`) that has
    our attention.

    Args:
        model: the model. Its modules are replaced if its weights are packed, and on CUDA some of
            its parameters become views of larger ones. Otherwise it is not changed.
        path: its local directory.
        progress: receives one line for each stage.
        attention: see LoadConfig.
        packing: how its weights are packed, if they are. The reference for the packed layers is the
            model before packing, or the packed model if the format changes results.
        own_decoder: whether our decoder computes its steps if it can. If it cannot, linear layers
            with the same input are joined on CUDA.
        ranks: the processes that the model is split across; all of them call this. The gate then
            compares with the results of the whole model.

    Raises:
        ModelRefusedError: the model would run incorrectly.
        ConfigError: the requested attention is not available here.
    """
    enter(progress, KERNELS)
    register()
    check_config(model.config, type(model))
    stored = {one.stored.form.label for one in stored_modules(model).values()}
    parameters = count_parameters(model)  # packed weights are no longer parameters
    backend = choose_backend(model.device, model.dtype, attention)
    ready = _prepare(model, backend, attention, packing, own_decoder, ranks is not None, progress)
    probe = ready.probe
    if ranks is not None:
        probe = replace(probe, logits=whole_logits(ready.model, probe))
    self_check(
        *(ready.model, probe, ready.backend, model.device, ready.decoder), is_whole=ranks is None
    )
    name = ready.backend.name
    progress(f"verified: paged attention ({name}) equals the model's own in every layer")
    trim()
    vocab_size = min(num_embeddings(ready.model), probe.logits[0].shape[-1])
    return VerifiedModel(
        model=ready.model,
        original=model,
        path=path,
        device=model.device,
        dtype=model.dtype,
        backend=ready.backend,
        probe=probe,
        context_length=context_length(model.config.get_text_config(), ready.rope),
        vocab_size=vocab_size,
        parameters=parameters,
        stored=next(iter(stored), "none"),
        eos_token_ids=eos_token_ids(model.generation_config, model.config, vocab_size),
        default_sampling=default_sampling(model.generation_config),
        ranks=ranks,
        leader=_leader(ranks),
        view=ready.view,
        rope=ready.rope,
        decoder=ready.decoder,
        watch=None if ready.view is None else ModelWatch(model, replaces_itself),
        adapted=None
        if ready.view is None
        else AdaptedModules(
            ready.model,
            ready.decoder or ready.model,
            None if ready.decoder is None else ready.decoder.description,
            ready.backend,
            probe,
        ),
    )


def _prepare(
    original: PreTrainedModel,
    backend: AttentionBackend,
    attention: str,
    packing: Format | None,
    own_decoder: bool,
    is_split: bool,
    progress: Callable[[str], None],
) -> _Prepared:
    """Observe a model, pack its weights, and make what runs its steps."""
    if is_split and recurs(layer_kinds(original)):
        raise ModelRefusedError(
            f"{type(original).__name__} has recurrent layers, which are not divided among "
            "processes; leave tensor_parallel out"
        )
    how, stored = packing, bool(stored_modules(original))
    is_ours = packing is not None and packing.is_ours

    def pack(how: Format) -> None:
        report = pack_model(original, how)
        if report.linears or not stored:  # all of them may be quantised
            progress(str(report))

    if packing is not None and packing.changes_results:  # the packed model is the one observed
        pack(packing)
        packing = None
    model, view, rope = original, None, None
    if not is_split:  # the hooks of a split model are bound to its own modules
        view, model, rope = make_view(original)
    backend, probe, plan = _probe(model, backend, attention, is_ours if own_decoder else None)
    trim()
    if packing is not None or stored:
        view, model = None, original  # the view would hold the originals of packed weights
        if packing is not None:
            pack(packing)
        if stored:
            progress(pack_stored(original, how))
        view, model, rope = make_view(original)
    enter(progress, VERIFY)
    if view is not None:
        choose_experts(model, backend, progress)
        if probe.recurrence.shapes:
            follow_states(model, probe.recurrence)
            progress(probe.recurrence.described())
    decoder = make_decoder(model, plan, backend, probe, progress)
    if decoder is None and view is not None and probe.recurrence.shapes:
        progress(use_kernels(model, probe.recurrence))
    if own_decoder and decoder is None and view is not None:
        _join(model, probe, progress)
    return _Prepared(
        model=model,
        view=view,
        rope=rope,
        backend=backend,
        probe=replace(probe, record=None, joinable=()),
        decoder=decoder,
    )


def _probe(
    model: PreTrainedModel, backend: AttentionBackend, attention: str, is_packed: bool | None
) -> tuple[AttentionBackend, Observation, Plan]:
    """Probe a model, and record it if our decoder can compute it.

    If the chosen backend does not support a layer, another one is used. For `is_packed`, see
    `describe_steps`; None means that our decoder is not requested.
    """

    def probe(backend: AttentionBackend) -> tuple[AttentionBackend, Observation, Plan]:
        plan = NOT_ASKED
        if is_packed is not None:
            plan = describe_steps(model, model.device, backend, is_packed=is_packed)
        with pages_given_back(model):
            found = probe_layers(model, backend, None if isinstance(plan, str) else plan)
        return backend, found, plan

    try:
        try:
            return probe(backend)
        except AttentionUnavailableError as error:
            return probe(fall_back(attention, error))
    except NotFiniteError as error:
        raise ModelRefusedError(_why_not_finite(model, error)) from error


def _why_not_finite(model: PreTrainedModel, error: NotFiniteError) -> str:
    """Say which weights make a model's results NaN or infinite. Weights are read only for this."""
    held = ((f"{path}.weight", one.held.unpacked()) for path, one in model.named_modules()
            if isinstance(one, HeldLayer))  # fmt: skip
    stored = ((f"{path}.weight", one.values(part)) for path, one in stored_modules(model).items()
              for part in one.slices())  # fmt: skip
    for name, tensor in itertools.chain(
        model.named_parameters(), model.named_buffers(), held, stored
    ):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return NOT_FINITE.format(name=name)
    return (
        f"{error} in the model's own code, though its weights are not: its numbers are too large "
        f"for {model.dtype}; choose another dtype"
    )


def _join(model: PreTrainedModel, probe: Observation, progress: Callable[[str], None]) -> None:
    """Join linear layers of a view whose steps run as transformers wrote them.

    This is only done on devices for which nothing is packed.
    """
    if model.device.type in choosing.TORCH_DEVICES:
        products = join_linears(model, probe.joinable)
        progress(f"joined: {products} products of linear layers that have the same input")


def _leader(ranks: Ranks | None) -> Leader | None:
    """Return the connection to the other ranks if this is the leading rank."""
    if ranks is None or not ranks.leads:
        return None
    from engine.parallel.leader import Leader  # see `load_model`

    return Leader(ranks)


def _check_room(
    checkpoint: Checkpoint, dtype: torch.dtype, load_config: LoadConfig, available: int
) -> None:
    """Refuse weights that do not fit in memory, as they are held in the end.

    Otherwise the system would kill the process while it reads them.

    Raises:
        InsufficientMemoryError: the weights need more memory than is free.
    """
    packing = choose_packing(
        torch.device("cpu"), dtype, load_config.pack_weights, load_config.quantization
    )
    needed = sum(held_bytes(model_without_weights(checkpoint, dtype), packing).values())
    if needed <= available:
        return
    lighter = ""
    if load_config.quantization == "none":
        lighter = ", or quantization int8 or int4 on a CPU"
    if checkpoint.stored is not None:
        lighter = (
            "" if packing is not None and packing.changes_results else ", or quantization int8"
        )
    elif dtype is torch.float32:  # integers are for bfloat16
        half = f"{needed / 2 / GIB:.2f} GiB"
        lighter = f", or dtype bfloat16, with which they take {half}, and less with quantization"
    raise InsufficientMemoryError(
        f"{checkpoint.path}: the weights take {needed / GIB:.2f} GiB as {dtype}, and "
        f"{available / GIB:.2f} GiB are free here: give more memory, or a smaller model{lighter}; "
        "headrace-server plan says what a model takes"
    ).naming("dtype", "quantization")


def _load_weights(
    path: Path,
    load_config: LoadConfig,
    device: torch.device,
    progress: Callable[[str], None],
    ranks: Ranks | None,
) -> PreTrainedModel:
    checkpoint = read_checkpoint(path)
    check_stored(checkpoint, load_config, device)
    if checkpoint.left_out:
        parts = ", ".join(f"{one} ({n / 1e6:,.1f} MB)" for one, n in checkpoint.left_out.items())
        total = sum(checkpoint.left_out.values()) / 1e6
        progress(f"left out, as only text is served: {parts}; {total:,.1f} MB that are not read")
    dtype: torch.dtype | None = None
    if load_config.dtype != "auto":
        dtype = getattr(torch, load_config.dtype)
    if device.type == "cpu" and ranks is None:
        available = HostLimits.read().memory_available
        choice = choose_dtype(checkpoint, load_config, device, available)
        if choice.why:
            progress(choice.why)
        if choice.why or checkpoint.stored is not None:
            dtype = choice.dtype
        _check_room(checkpoint, choice.dtype, load_config, available)
    if ranks is not None:
        check_plan(checkpoint.config, checkpoint.model_class, ranks.place.world_size)
    if not sys.stderr.isatty():
        disable_progress_bar()  # a progress bar is for a terminal, not for a log
    try:
        sharded = {} if ranks is None else sharding(ranks.place.world_size)
        model, missing = read_weights(checkpoint, dtype, **sharded)
    except SafetensorError as error:
        raise ModelRefusedError(
            f"{path}: the weights cannot be read: a safetensors file is damaged, or was not copied "
            f"to its end ({error}); download it again"
        ) from error
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelRefusedError(f"{path}: the weights cannot be read: {error}") from error
    if missing:
        raise ModelRefusedError(
            f"{path}: {len(missing)} weights are not in the checkpoint ({', '.join(missing[:3])}); "
            "they would be random numbers"
        )
    return model.eval().to(device)


def _device(load_config: LoadConfig) -> torch.device:
    """Return the device to use, resolving "auto".

    Raises:
        ModelRefusedError: CUDA is requested but not available, or there is a GPU whose driver is
            too old for this torch.
    """
    wanted = load_config.device
    if torch.cuda.is_available():
        return torch.device("cuda:0" if wanted == "auto" else wanted)
    device = torch.device("cpu" if wanted == "auto" else wanted)
    if wanted != "cpu" and (why := why_unusable(torch.version.cuda)) is not None:
        raise ModelRefusedError(f"device is {wanted}, and {why}, or use cpu")
    if device.type == "cuda":
        raise ModelRefusedError("device is cuda, but torch finds no CUDA device here; use cpu")
    return device


def set_threads(load_config: LoadConfig, device: torch.device, sharers: int) -> None:
    """Set torch's number of threads.

    `sharers` is the number of our processes that share this host.
    """
    limits = HostLimits.read()
    threads = load_config.threads or (max(1, limits.cpus // sharers) if device.type == "cpu" else 1)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    source = "threads" if load_config.threads else limits.cpu_source
    logger.info("CPU threads for the model: %d, because of %s", threads, source)
    if device.type == "cpu" and threads * sharers > max(limits.cpus, sharers):
        logger.warning(
            "threads is %d, more than the CPUs that may be used, %d by %s: they take turns and "
            "wait for each other, which is slower; leave threads out, or allow more CPUs",
            threads,
            limits.cpus,
            limits.cpu_source,
        )
