"""The engine's options: what each means, its bounds and its default.

`ContinuousBatchingConfig` uses the option names of transformers' continuous batching, with the same
meanings. An option that the device does not support is refused, with the reason, when a model is
loaded; none is silently ignored. `LoadConfig` says how a model is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from engine.contract.adapters import at_start
from engine.contract.errors import ConfigError
from engine.contract.option_fields import check_bounds, option

DEFAULT_BLOCK_SIZE = 256
CPU_BLOCK_SIZE = 32
"""The default block size on a CPU."""
CUDA_BLOCK_SIZE = 64
"""The default block size on CUDA. It equals the number of tokens that the kernels read at a time,
so that each read looks up only one block.
"""
GROUP = "Model and engine"
"""The heading of these options in the server's help."""
CPU_TARGET_STEP_TIME = 0.25
"""The default of target_step_time on a CPU, in seconds."""
CUDA_TARGET_STEP_TIME = 0.05
"""The default of target_step_time on CUDA, in seconds."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "torch", "native", "triton")
QUANTIZATIONS = ("none", "int8", "int4", "int4-64")
"""Each but none is a module of `engine.models.formats`."""
SPECULATIONS = ("auto", "off", "history", "prediction", "grammar")
"""Each but the first two is a source of `engine.drafts`."""
DecoderChoice = Literal["own", "transformers"]
DECODERS = ("own", "transformers")
TensorParallel = Literal["none", "auto"]
TENSOR_PARALLELS = ("none", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousBatchingConfig:
    """Options of continuous batching.

    Raises ConfigError for a value out of bounds. Options that are also server flags are described
    at their fields below.

    Attributes:
        page_size: the name of block_size in newer versions of transformers. Copied to block_size
            when the config is created.
        max_blocks_per_request: the maximum block table width of the decode fast path, which
            computes steps with one token per request. A step with a longer request takes the path
            for varying lengths. 0 turns the fast path off. None: as wide as the longest request
            needs.
        allow_block_sharing: whether requests share the blocks of a common prefix, and unused blocks
            keep their prefix until they are needed. Ignored for a model that cannot share blocks.
        q_padding_interval_size: the number of tokens in a step is padded to a multiple of this. 0:
            captured decode steps are padded to 1, 2, 4, 8, 16, 24 or a multiple of 32, other
            captured steps to a power of two from 64 to 1,024, and all others are not padded.
        kv_padding_interval_size: the length of the context that attention in torch reads is padded
            to a multiple of this many tokens. 0: it is not padded. Captured steps read each context
            at its own length.
        use_cuda_graph: may also be a (varlen, decode) pair, which sets each step path separately.
        default_compile_level: how to compile paths that have no compile config of their own. 0: not
            at all; 1: mode "default", dynamic; 2: mode "max-autotune-no-cudagraphs", dynamic; 3:
            the same for fixed shapes.
        max_cached_graphs: the maximum number of captured step shapes. If there are more, every
            other one is left out, and its steps are padded to the next larger one. 0: 32. Each
            distinct number of requests among these adds two small graphs, which draw tokens.
        varlen_compile_config, decode_compile_config: how torch.compile compiles the model for the
            path of varying lengths and for the decode fast path: a transformers CompileConfig, or
            any object with its fields. None: the generation config's compile_config, or
            default_compile_level if that is not set.
        use_default_compile_configs: True is equivalent to default_compile_level 3.
        scheduler_type: the name of a scheduling policy: "fifo", "prefill_first", "priority",
            "fair", a registered policy (see `engine.scheduler.policies`), or your own class as
            "package.module:Class".
        safety_margin: the fraction of the blocks that must stay free for running requests to grow
            when a waiting one is started; 0 to 1. None: the policy's default.
        return_logprobs: whether outputs of the offline API include the chosen tokens'
            log-probabilities.
        seed: the seed from which requests without a seed get theirs, in order of arrival. None:
            from the system's randomness.
        cpu_offload_space_safety_threshold: cpu_offload_space is limited to this fraction of the
            container's memory; above 0, at most 1.
        max_queue_size: the maximum number of waiting requests; beyond it, requests are refused
            immediately. 0: no limit.
        max_unread_results: how many unread results of each choice of a streaming request the Python
            API keeps. Beyond that, the oldest is merged into the next one, which then includes its
            tokens. The last one is always kept. 1 to 1,048,576.
        max_unread_requests: how many choices may have ended without their last result being read.
            Beyond that, the Python API refuses further requests. 1 to 16,777,216.
        per_request_processors: whether `add_request` accepts sampling options (temperature, top_k,
            …). If not, all requests use those of the generation config.
        drop_unsupported_processors: what to do with options of a generation config that this engine
            does not support: True drops them with a warning, False raises.
    """

    block_size: int | None = option(
        DEFAULT_BLOCK_SIZE,
        "Tokens in a block of the KV cache.",
        low=1,
        high=4096,
        served=(None,),
        shown="32 on a CPU, 64 on CUDA",
        group=GROUP,
    )
    page_size: int | None = option(None, low=1, high=4096)
    num_blocks: int | None = option(
        None,
        "Blocks of the KV cache.",
        low=1,
        high=2**31 - 1,
        shown="from the memory",
        group=GROUP,
    )
    max_batch_tokens: int | None = option(
        None,
        "Most tokens computed in one step, prompts and outputs together.",
        more="Longer prompts are split into chunks.",
        low=1,
        high=2**20,
        shown="1024 on a CPU, at most 8192 on CUDA",
        group=GROUP,
    )
    kept_states: int | None = option(
        None,
        "Recurrent layers: most states that are kept for later requests with the same beginning, "
        "in memory beside that of running requests' states; 0: only where fewer requests run.",
        more="One more is kept for each prompt and for each end of a conversation; least recently "
        "used ones go first. [What is kept](models.md#models-with-recurrent-layers). Models "
        "without such layers keep none.",
        low=0,
        high=2**20,
        shown="1 to 4 for each request that may run, as memory allows",
        group=GROUP,
    )
    max_memory_percent: float | None = option(
        None,
        "The fraction of the free memory that the KV cache may take.",
        more="Free memory is what is left after the model is loaded, on CUDA without what the "
        "largest step needs.",
        low=0.0,
        high=1.0,
        above=True,
        shown="0.5 on a CPU, 0.8 on CUDA",
        group=GROUP,
    )
    max_requests_per_batch: int | None = option(
        None,
        "Most requests that run at the same time; others wait.",
        low=1,
        high=65536,
        shown="64 on a CPU, 256 on CUDA",
        group=GROUP,
    )
    max_blocks_per_request: int | None = option(
        None,
        low=0,
        high=2**20,
    )
    allow_block_sharing: bool = option(True, flag="prefix-cache")
    use_async_batching: bool | None = option(
        None,
        "Prepare and launch the next step while the previous one runs; `--no-async-batching`: do "
        "not.",
        switch=True,
        flag="async-batching",
        shown="on CUDA only",
        group=GROUP,
    )
    use_cuda_graph: bool | tuple[bool, bool] | None = option(
        None,
        "Capture all kinds of steps as CUDA graphs; `--no-cuda-graphs`: none.",
        flag="cuda-graphs",
        shown="on CUDA, steps of up to 1,024 tokens",
        group=GROUP,
    )
    q_padding_interval_size: int = option(
        0,
        low=0,
        high=2**16,
    )
    kv_padding_interval_size: int = option(
        0,
        low=0,
        high=2**20,
    )
    max_cached_graphs: int = option(
        0,
        low=0,
        high=4096,
    )
    varlen_compile_config: object | None = None
    decode_compile_config: object | None = None
    default_compile_level: int = option(
        0,
        "Optimization level of torch.compile: 0 off, 1 default, 2 max-autotune, 3 the same for "
        "fixed shapes.",
        low=0,
        high=3,
        flag="compile-level",
        group=GROUP,
    )
    use_default_compile_configs: bool = option(False)
    scheduler_type: str = option("fifo", flag="scheduler")
    target_step_time: float | None = option(
        0.0,
        "Target in seconds for the time of steps in which requests decode: prompts beside them "
        "are split into chunks that fit, of at least one block.",
        more="[How it works](schedulers.md#the-target-step-time).",
        low=1e-4,
        high=3600.0,
        zero="no limit",
        served=(None,),
        shown="0.25 on a CPU, 0.05 on CUDA",
        group=GROUP,
    )
    safety_margin: float | None = option(
        None,
        low=0.0,
        high=1.0,
    )
    speculation: str = option(
        "auto",
        "What guesses the tokens that follow, so that one step can compute several of a request: "
        "`off`, `auto` (on a CPU, as far as it is measured to pay), or one source: `history` (the "
        "request's own prompt and output), `prediction` (what its caller expects) or `grammar` "
        "(text that a structured output must have).",
        more="It changes no token on a CPU. [How it works](speculation.md).",
        group=GROUP,
        choices=SPECULATIONS,
    )
    max_drafts: int | None = option(
        None,
        "Most guessed tokens of a request in one step.",
        low=1,
        high=31,
        shown="15, as far as they pay",
        group=GROUP,
    )
    return_logprobs: bool = option(False)
    seed: int | None = option(
        None,
        low=0,
        high=2**64 - 1,
    )
    cpu_offload_space: float = option(
        0.0,
        "GiB of host memory for the KV cache of preempted requests, which is then copied back "
        "instead of computed again; 0: none.",
        low=0.0,
        high=1e6,
        group=GROUP,
    )
    cpu_offload_space_safety_threshold: float = option(
        0.8,
        low=0.0,
        high=1.0,
        above=True,
    )
    max_queue_size: int = option(
        0,
        low=0,
        high=2**31 - 1,
    )
    max_unread_results: int = option(
        4096,
        low=1,
        high=2**20,
    )
    max_unread_requests: int = option(
        65536,
        low=1,
        high=2**24,
    )
    per_request_processors: bool = option(False)
    drop_unsupported_processors: bool = option(True)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.page_size is not None:
            if self.block_size not in (None, DEFAULT_BLOCK_SIZE, self.page_size):
                raise ConfigError(
                    "page_size",
                    f"is {self.page_size}, and block_size is {self.block_size}; they are the same "
                    "option, give one",
                ).naming("block_size")
            object.__setattr__(self, "block_size", self.page_size)
            object.__setattr__(self, "page_size", None)
        graphs: object = self.use_cuda_graph  # configs are also made from text
        if not isinstance(graphs, bool | None) and not (
            isinstance(graphs, tuple)
            and len(graphs) == 2
            and all(isinstance(entry, bool) for entry in graphs)
        ):
            raise ConfigError(
                "use_cuda_graph",
                f"is {graphs!r}; it must be True, False, None or a pair of them: (varlen, decode)",
            )
        if self.use_default_compile_configs and self.default_compile_level not in (0, 3):
            raise ConfigError(
                "use_default_compile_configs",
                f"is level 3, and default_compile_level is {self.default_compile_level}; give one",
            ).naming("default_compile_level")


def block_size_on(config: ContinuousBatchingConfig, device: str) -> int:
    """Return the number of tokens in one KV cache block on this type of device."""
    if config.block_size is not None:
        return config.block_size
    return CPU_BLOCK_SIZE if device == "cpu" else CUDA_BLOCK_SIZE


def target_step_time(config: ContinuousBatchingConfig, device: str) -> float:
    """Return the target time, in seconds, of steps with decoding requests on this type of device. 0
    means no target.
    """
    if config.target_step_time is not None:
        return config.target_step_time
    return CPU_TARGET_STEP_TIME if device == "cpu" else CUDA_TARGET_STEP_TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How a model is loaded. Raises ConfigError for a value out of bounds. Each option is described
    at its field below.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Type of the weights: `auto` (the checkpoint's; `float32` in place of `bfloat16` on a CPU "
        "that is several times slower in it without our kernels, if memory permits), `float32`, "
        "`bfloat16` or `float16`.",
        group=GROUP,
        choices=DTYPES,
    )
    device: str = option(
        "auto",
        "`auto` (CUDA where there is one, else the CPU), `cpu`, `cuda` or `cuda:N`.",
        group=GROUP,
    )
    threads: int | None = option(
        None,
        "CPU threads for the model.",
        more="With a model on CUDA the default is 1.",
        group=GROUP,
        shown="the CPUs that are allowed",
        low=1,
        high=1024,
    )
    attention: str = option(
        "auto",
        "The attention implementation: `torch`, `native` (the C++ kernels for CPUs), `triton` "
        "(the kernels for CUDA devices; [what is known of "
        "them](architecture.md#kernels-for-cuda-devices)), or `auto`: native on a CPU, triton on "
        "CUDA, or torch if that is not available; or a backend of your own, as "
        "`package.module:Class`.",
        more="An unavailable one is refused.",
        group=GROUP,
        choices=ATTENTIONS,
        outside="Class",
    )
    quantization: str = option(
        "none",
        "`int8`: on a CPU, store the bfloat16 weights of linear layers as integers with a scale "
        "for each output: half the memory and a faster single request, with slightly different "
        "results. `int4`: as integers of 4 bits with a scale for each 32 inputs (the output layer "
        "as int8): a third of the memory, and about a hundred times int8's difference, so try "
        "your own prompts first ([figures](performance.md#weights-as-integers)). `int4-64`: with a "
        "scale for each 64 inputs: 6 % smaller, and a quarter more difference.",
        more="Of [quantized files](models.md#quantized-files), which lose less, `int8` is for what "
        "they have left in 16 bits. Refused if it is not possible.",
        group=GROUP,
        choices=QUANTIZATIONS,
    )
    pack_weights: bool | None = option(
        None,
        "On a CPU, store the weights of bfloat16 and float32 linear layers in the order in which "
        "the kernel reads them; `--no-pack-weights`: leave them as they are.",
        more="Values and memory use do not change. Refused if requested where it is not possible.",
        switch=True,
        group=GROUP,
        shown="where it pays",
    )
    decoder: DecoderChoice = option(
        "own",
        "What computes a model's steps. `own`: our decoder, for the models that it knows "
        "([which](models.md)), on CUDA and on a CPU with packed weights; elsewhere transformers' "
        "modules. `transformers`: its modules as they are.",
        more="The log says which it is, and why. Our decoder is compared with the unmodified model "
        "when it is loaded, and not used if it computes something else.",
        group=GROUP,
        choices=DECODERS,
    )
    tensor_parallel: TensorParallel = option(
        "none",
        "`auto`: split the model across the processes that `torchrun` started with this same "
        "command line; the first one serves ([tensor parallelism](tensor-parallelism.md)).",
        more="`none`: this process has the whole model.",
        group=GROUP,
        choices=TENSOR_PARALLELS,
    )

    adapters: tuple[str, ...] = option(
        (),
        "An adapter (LoRA) that requests may name, as `NAME=DIR`: a directory that peft has "
        "written ([adapters](adapters.md)).",
        more="May be repeated. It is pinned.",
        flag="adapter",
        group=GROUP,
    )
    adapter_root: str | None = option(
        None,
        "The directory below which operators may name adapters to load "
        "([LoadAdapter](adapters.md#while-it-serves)).",
        shown="none are loaded later",
        group=GROUP,
    )
    max_adapters: int = option(
        256,
        "Most adapters that requests may name.",
        low=1,
        high=4096,
        group=GROUP,
    )
    max_adapter_rank: int = option(
        64,
        "The highest rank of an adapter.",
        low=1,
        high=1024,
        group=GROUP,
    )
    max_adapter_bytes: int = option(
        2**30,
        "Most memory for all adapters together, with those that were unloaded or replaced and that "
        "requests still have.",
        low=1,
        high=2**40,
        group=GROUP,
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        object.__setattr__(self, "adapters", tuple(self.adapters))  # lists come from messages
        at_start(self.adapters)
        for name in ("adapters", "adapter_root"):
            if getattr(self, name) and self.tensor_parallel != "none":
                raise ConfigError(
                    name, "is given, and tensor_parallel is auto, which has none; leave one out"
                ).naming("tensor_parallel")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ConfigError("device", f"is {self.device!r}; it must be auto, cpu, cuda or cuda:N")
        if self.tensor_parallel == "auto":
            self._check_parallel()

    def _check_parallel(self) -> None:
        """Refuse options that a split model does not support."""
        reason = "and tensor_parallel is auto: the weights of a divided model stay as they are; "
        if self.quantization != "none":
            raise ConfigError(
                "quantization", f"is {self.quantization}, {reason}set it to none"
            ).naming("tensor_parallel")
        if self.pack_weights:
            raise ConfigError(
                "pack_weights", f"is True, {reason}leave it out, or set it to False"
            ).naming("tensor_parallel")
        if ":" in self.device:
            raise ConfigError(
                "device",
                f"is {self.device}, and tensor_parallel is auto: each process takes the device of "
                "its own number on its machine; set it to auto, cuda or cpu",
            ).naming("tensor_parallel")
