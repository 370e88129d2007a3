"""Makes a runner from a model's path: reads and verifies the model, sizes the cache, and wires the
parts.

    path ─▶ config ─▶ check_config ─▶ weights ─▶ probe_layers, record ─▶ pack ─▶ view, decoder
         ─▶ compare, self_check
           └────────────────────────────────── load_model ──────────────────────────────────┘
    ─▶ measure_step ─▶ plan_cache ─▶ ModelRunner
       └──────────── build_runner ────────────┘

Only safetensors are read, and no code in the model's directory is run. All ranks of a split model
(`engine.parallel.ranks`) load it in lockstep; rank 0 builds the runner.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
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
    check_block_size,
    choose_backend,
    fall_back,
    register,
)
from engine.config import (
    ContinuousBatchingConfig,
    LoadConfig,
    RankPlace,
    block_size_on,
)
from engine.errors import InsufficientMemoryError, ModelChangedError, ModelRefusedError
from engine.kv_cache.groups import LayerGroup
from engine.loading.checkpoint import Checkpoint, read_checkpoint, resolve_path
from engine.loading.gate import (
    ModelProbe,
    check_config,
    num_embeddings,
    probe_layers,
    self_check,
)
from engine.loading.memory import GIB, CachePlan, HostLimits, StepLimits, plan_cache, step_limits
from engine.loading.model_defaults import context_length, default_sampling, eos_token_ids
from engine.loading.packing import Packing, choose_packing, pack_model
from engine.loading.profiling import (
    DeviceMemory,
    device_memory,
    fitting_step,
    measure_graphs,
    measure_step,
)
from engine.loading.view import ModelView
from engine.models.choosing import NOT_ASKED, CausalDecoder, make_decoder, plan_decoder
from engine.parallel.sharding import check_plan, sharding, whole_logits
from engine.rope import RopeLengths
from engine.runner.buckets import Sizes
from engine.runner.compile import compile_model, compile_options
from engine.runner.cuda_graph import CapturingBackend, CudaCapture, GraphBackend
from engine.runner.forward import CausalModel, ModelForward
from engine.runner.kv_tensors import KVTensors, allocate_kv, make_groups
from engine.runner.model_runner import ModelRunner
from engine.runner.rope import follow_lengths, read_rope
from engine.runner.runner_options import RunnerOptions, resolve_options
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.startup import CACHE, KERNELS, VERIFY, WEIGHTS, enter
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


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner around a verified model, with its KV cache's groups and size.

    Attributes:
        overlap: whether the runner has two sets of input buffers, so that the core may launch a
            step before it collects the last one.
        padded_sizes: the sizes in tokens to which steps with prompts are padded; None: not padded.
    """

    runner: ModelRunner
    groups: tuple[LayerGroup, ...]
    plan: CachePlan
    overlap: bool
    padded_sizes: Sizes | None


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
        model: the model. Its modules are replaced if its weights are packed; on CUDA our decoder
            makes some of its parameters views of longer ones. Otherwise it is not changed.
        path: its local directory.
        progress: gets a line for each stage.
        attention: see LoadConfig.
        packing: how its weights are packed, if they are. What is packed is compared with the model
            as it was before; with int8, which changes results, with the packed model.
        own_decoder: whether our decoder computes its steps if it can.
        ranks: the processes across which it is split; all of them call this. The gate then compares
            with the results of the whole model.

    Raises:
        ModelRefusedError: the model would be run wrongly.
        ConfigError: that attention is not available here.
    """
    enter(progress, KERNELS)
    register()
    check_config(model.config, type(model))
    text_config = model.config.get_text_config()
    backend = choose_backend(model.device, model.dtype, attention)
    parameters = model.num_parameters()  # packed weights are no longer parameters
    if packing == "int8":
        progress(str(pack_model(model, packing)))
    original, view = model, None
    if ranks is None:  # the hooks of a split model are bound to its own modules
        view = ModelView.of(original)
        model = view.model
    rope = None if view is None else _read_rope(model)
    try:
        probe = probe_layers(model, backend, text_config.num_hidden_layers)
    except AttentionUnavailableError as error:
        backend = fall_back(attention, error)
        probe = probe_layers(model, backend, text_config.num_hidden_layers)
    plan = NOT_ASKED
    if own_decoder:
        is_packed = packing in ("native", "int8")
        plan = plan_decoder(model, backend, probe.prompts[-1], is_packed=is_packed)
    was_packed = packing not in (None, "int8")
    if packing not in (None, "int8"):
        view, model = None, original  # the view would hold the originals of packed weights
        progress(str(pack_model(original, packing)))
        view = ModelView.of(original)
        model = view.model
        rope = _read_rope(model)
    enter(progress, VERIFY)
    decoder = make_decoder(model, plan, backend, [shape.window for shape in probe.shapes], progress)
    if ranks is not None:
        probe = replace(probe, logits=whole_logits(model, probe))
    self_check(model, probe, backend, model.device, decoder, was_packed=was_packed)
    progress(f"verified: paged attention ({backend.name}) equals the model's own in every layer")
    vocab_size = min(num_embeddings(model), probe.logits[0].shape[-1])
    leader = None
    if ranks is not None and ranks.leads:
        from engine.parallel.leader import Leader  # see `load_model`

        leader = Leader(ranks)
    return VerifiedModel(
        model=model,
        original=original,
        path=path,
        device=model.device,
        dtype=model.dtype,
        backend=backend,
        probe=probe,
        context_length=context_length(text_config, rope),
        vocab_size=vocab_size,
        parameters=parameters,
        eos_token_ids=eos_token_ids(model.generation_config, model.config, vocab_size),
        default_sampling=default_sampling(model.generation_config),
        ranks=ranks,
        leader=leader,
        view=view,
        rope=rope,
        decoder=decoder,
    )


def _read_rope(model: PreTrainedModel) -> RopeLengths | None:
    """How a model's rotary frequencies depend on a request's length, if they do and its view could
    be made to follow.
    """
    rope = read_rope(model)
    return rope if rope is not None and follow_lengths(model, rope) else None


def build_runner(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    progress: Callable[[str], None],
    *,
    graphs: GraphBackend | None = None,
    memory: DeviceMemory | None = None,
) -> LoadedRunner:
    """Size the KV cache, allocate it, and put a runner around a verified model.

    Args:
        verified: the model.
        config: the options.
        progress: gets a line for each stage.
        graphs: captures steps; None: CUDA graphs if the model is on CUDA.
        memory: the memory of the model's device; None: read from the device.

    Raises:
        ConfigError: an option asks for what the device cannot do.
        InsufficientMemoryError: the KV cache does not fit, or not even a step.
        RanksLostError: the model is split, and another rank has ended.
    """
    enter(progress, CACHE)
    probe, device, leader = verified.probe, verified.device, verified.leader
    check_block_size(verified.backend, block_size_on(config, device.type))
    groups = make_groups(probe.shapes, probe.dtype)
    can_capture = graphs is not None or device.type == "cuda"
    runner_id, step_bytes = 0, 0
    if leader is None:
        memory = memory or device_memory(device)
        config, step_bytes = _largest_step(verified, config, groups, memory)
        step_bytes += _graph_bytes(verified, config, groups, memory, can_capture=can_capture)
        available, host_available = memory.available(), HostLimits.read().memory_available
    else:
        # No step is measured, because the other ranks can only follow one when they have a cache.
        config = leader.config(config)
        runner_id, available, host_available = leader.begin(*free_memory(verified))
    plan = plan_cache(
        config,
        groups,
        device=device,
        model_context=verified.context_length,
        available=available,
        host_available=host_available,
        step_bytes=step_bytes,
    )
    options = resolve_options(
        config,
        device=device.type,
        can_capture=can_capture,
        max_blocks=_longest_in_blocks(groups, plan, verified.context_length),
        max_tokens=plan.max_batch_tokens,
        max_requests=plan.max_requests,
    )

    def allocate() -> KVTensors:
        return allocate_kv(probe.shapes, groups, plan, probe.dtype, device)

    kv = allocate() if leader is None else leader.allocate(runner_id, plan, allocate)
    _report_sizes(plan, progress)
    if graphs is None and device.type == "cuda" and options.captured_paths:
        graphs = CapturingBackend(CudaCapture(device))
    runner = ModelRunner(
        _compiled_forward(verified, config, kv)
        if leader is None
        else leader.forward(runner_id, verified.model, kv, verified.backend),
        sampler=Sampler(probe.logits[0].shape[-1], device),
        options=options,
        rope=verified.rope,
        copier=None if leader is None else leader.copier(runner_id, kv),
        graphs=graphs,
        progress=progress,
    )
    return LoadedRunner(
        runner,
        groups,
        plan,
        overlap=options.num_input_buffers > 1,
        padded_sizes=options.padded_sizes,
    )


def _report_sizes(plan: CachePlan, progress: Callable[[str], None]) -> None:
    progress(
        f"KV cache: {plan.total_bytes / 2**20:.0f} MiB, {' + '.join(map(str, plan.num_blocks))} "
        f"blocks of {plan.block_size} tokens"
    )
    if plan.host_bytes:
        progress(
            f"KV offload: {plan.host_bytes / 2**20:.0f} MiB of host memory, "
            f"{' + '.join(map(str, plan.host_blocks))} blocks"
        )


def _largest_step(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    groups: tuple[LayerGroup, ...],
    memory: DeviceMemory,
) -> tuple[ContinuousBatchingConfig, int]:
    """The memory of the largest step, measured once for a model and a size; and the config, with
    as many max_batch_tokens as the memory allows if it leaves them open.
    """
    device = verified.device
    block_size = block_size_on(config, device.type)

    def measure(limits: StepLimits) -> int:
        measured = (limits, block_size)
        if measured not in verified.step_bytes:
            verified.step_bytes[measured] = measure_step(
                memory,
                verified.steps,
                verified.backend,
                verified.probe,
                groups,
                device=device,
                limits=limits,
                block_size=block_size,
                model_context=verified.context_length,
            )
        return verified.step_bytes[measured]

    limits = step_limits(config, device)
    if config.max_batch_tokens is not None:
        return config, measure(limits)
    limits, step_bytes = fitting_step(measure, limits, memory.available())
    return replace(config, max_batch_tokens=limits.max_batch_tokens), step_bytes


def _graph_bytes(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    groups: tuple[LayerGroup, ...],
    memory: DeviceMemory,
    *,
    can_capture: bool,
) -> int:
    """The memory of captured steps, measured once for a model and its options."""
    limits = step_limits(config, verified.device)
    block_size = block_size_on(config, verified.device.type)
    options = resolve_options(
        config,
        device=verified.device.type,
        can_capture=can_capture,
        max_blocks=-(-verified.context_length // block_size),
        max_tokens=limits.max_batch_tokens,
        max_requests=limits.max_requests,
    )
    measured = (options, block_size)
    if measured not in verified.step_bytes:
        verified.step_bytes[measured] = measure_graphs(
            memory,
            verified.steps,
            verified.backend,
            verified.probe,
            groups,
            device=verified.device,
            options=options,
            block_size=block_size,
        )
    return verified.step_bytes[measured]


def free_memory(verified: VerifiedModel) -> tuple[int, int]:
    """The bytes that a KV cache could take now on this process's device and on its host. Processes
    on the same host share its memory evenly.
    """
    sharers = 1 if verified.ranks is None else verified.ranks.place.local_world_size
    device_sharers = sharers if verified.device.type == "cpu" else 1
    host = HostLimits.read().memory_available
    return device_memory(verified.device).available() // device_sharers, host // sharers


def _compiled_forward(
    verified: VerifiedModel, config: ContinuousBatchingConfig, kv: KVTensors
) -> ModelForward:
    fallback = getattr(verified.original.generation_config, "compile_config", None)
    compiled = compile_model(verified.model, compile_options(config, fallback), verified.device)
    return ModelForward(verified.steps, kv, verified.backend, compiled)


def _longest_in_blocks(groups: tuple[LayerGroup, ...], plan: CachePlan, context: int) -> int:
    """How many blocks the longest request has that model and cache allow."""
    full = [n for n, group in zip(plan.num_blocks, groups, strict=True) if group.window is None]
    return min([-(-context // plan.block_size), *full])


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
