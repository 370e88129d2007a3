"""The engine's options: what each means, its bounds and its default.

`ContinuousBatchingConfig` carries the option names that users of transformers' continuous batching
know, with their meaning. What cannot be had on the device at hand is refused when a model is
loaded, with the reason: no option is swallowed. `LoadConfig` says how a model is brought into
memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

DEFAULT_BLOCK_SIZE = 256
CPU_TARGET_STEP_TIME = 0.25
"""Seconds, on a CPU where target_step_time is None."""
CUDA_TARGET_STEP_TIME = 0.05
"""The same on CUDA."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
AttentionName = Literal["auto", "torch", "native", "triton", "varlen"]
ATTENTIONS = ("auto", "torch", "native", "triton", "varlen")
Quantization = Literal["none", "int8"]
QUANTIZATIONS = ("none", "int8")
TensorParallel = Literal["none", "auto"]
TENSOR_PARALLELS = ("none", "auto")

_SPIN_COUNT = "10000"
_BOUNDS = {
    "block_size": (1, 4096),
    "num_blocks": (1, 2**31 - 1),
    "max_batch_tokens": (1, 2**20),
    "max_requests_per_batch": (1, 65536),
    "max_blocks_per_request": (0, 2**20),
    "q_padding_interval_size": (0, 2**16),
    "kv_padding_interval_size": (0, 2**20),
    "max_cached_graphs": (0, 4096),
    "default_compile_level": (0, 3),
    "max_queue_size": (0, 2**31 - 1),
    "max_unread_results": (1, 2**20),
    "max_unread_requests": (1, 2**24),
    "seed": (0, 2**64 - 1),
}
_FRACTIONS = {
    "max_memory_percent": 1.0,
    "safety_margin": 1.0,
    "cpu_offload_space": 1e6,
    "cpu_offload_space_safety_threshold": 1.0,
}
_SWITCHES = (
    "allow_block_sharing",
    "use_default_compile_configs",
    "return_logprobs",
    "per_request_processors",
    "drop_unsupported_processors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousBatchingConfig:
    """Options of continuous batching. Raises ConfigError for a value out of its bounds.

    Attributes:
        block_size: tokens in one block of the KV cache; 1 to 4096.
        page_size: another name of block_size, which newer versions of transformers use; moved there
            when the config is made.
        num_blocks: blocks for the layers with full attention; layers with a sliding window get as
            many as their window needs, at most this many. None: from the memory that may be used
            (see max_memory_percent).
        max_batch_tokens: most tokens computed in one step, prefill and decode together: the token
            budget. Longer prompts are cut in chunks of it. None: 1024 on a CPU, 8192 on CUDA.
        max_memory_percent: the part of the memory that is free after the model was loaded, within
            the container's limit, and on CUDA without what the largest step was seen to need, that
            the KV cache may take; above 0, at most 1. None: 0.5 on a
            CPU, on CUDA 0.9, or 0.8 where processors that need vocabulary-sized temporaries may be
            used. On a CPU the cache takes less where the allowed concurrency needs less.
        max_requests_per_batch: most requests that run at the same time. None: 64 on a CPU, 256 on
            CUDA.
        max_blocks_per_request: the decode fast path, in which all requests of a step compute one
            token, has block tables of up to this width; a step with a longer request takes the path
            for varying lengths. 0 turns the fast path off. None: as wide as the longest request.
        allow_block_sharing: whether requests share the blocks of a common prefix, and blocks that
            nobody holds keep their prefix until they are needed. It is allowed, not forced: a
            model that cannot do it does without.
        use_async_batching: whether the next step is prepared and launched while the last one runs,
            with two sets of input buffers. None: on CUDA yes, on a CPU no, where it gains nothing.
        use_cuda_graph: whether steps are captured as CUDA graphs and replayed: for both paths, or
            (varlen, decode). None: on CUDA the decode path, elsewhere no. On other devices than
            CUDA, True is refused when the model is loaded.
        q_padding_interval_size: the number of tokens of a step is padded to a multiple of this;
            0: for steps that are captured, to a power of two up to 64, then to a multiple of 64;
            for others not at all.
        kv_padding_interval_size: the length of the context that is read is padded to a multiple of
            this many tokens; 0: for steps that are captured, to 256, 1024 or a multiple of 4096,
            for others not at all.
        max_cached_graphs: most captured graphs that are kept, the one that was not used for longest
            goes first; 0: 32.
        varlen_compile_config, decode_compile_config: how torch.compile compiles the model for the
            path of varying lengths and for the decode fast path: a transformers CompileConfig, or
            any object with its fields; None: the generation config's compile_config, else see
            default_compile_level.
        default_compile_level: how paths without a compile config of their own are compiled. 0: not
            at all; 1: mode "default", dynamic; 2: mode "max-autotune-no-cudagraphs", dynamic; 3:
            the same for fixed shapes.
        use_default_compile_configs: True is default_compile_level 3.
        scheduler_type: the name of a scheduling policy: "fifo", "prefill_first", "priority",
            "fair", or one that was registered (see `engine.scheduler`).
        target_step_time: about how many seconds a step takes in which requests decode, where it is
            not the decoding alone that takes longer: the prompts beside them are cut in chunks
            that the time is enough for, by what steps were measured to take. At least a block of
            a prompt is computed, so that none waits for ever; steps in which nobody decodes are not
            cut. 0: there is no such limit; above 0: 0.0001 to 3600. None: 0.25 on a CPU, 0.05 on
            CUDA.
        safety_margin: no waiting request is started that would leave less than this part of the
            blocks free for the growth of the running ones; 0 to 1. None: the policy's own.
        return_logprobs: whether outputs of the offline API carry the chosen tokens'
            log-probabilities.
        seed: from which the seeds of requests that have none are drawn, in the order of their
            arrival; None: from the system's randomness.
        cpu_offload_space: GiB of host memory that are set aside for the KV of preempted requests;
            what fits there is brought back instead of computed again. 0: none.
        cpu_offload_space_safety_threshold: cpu_offload_space is cut to this part of the memory that
            the container allows; above 0, at most 1.
        max_queue_size: how many requests may wait; one more is refused at once. 0: no limit.
        max_unread_results: how many results of one streaming request (of each of its choices) the
            Python API keeps for a reader. Of more, the oldest is merged into the next one, which
            has its tokens, too; the last one is always kept. 1 to 1,048,576.
        max_unread_requests: how many requests (each choice counts) may have ended whose last result
            nobody has read; from then on the Python API refuses further ones. 1 to 16,777,216.
        per_request_processors: whether `add_request` takes sampling options of its own
            (temperature, top_k, …). Off, they are refused, and all requests use the generation
            config's.
        drop_unsupported_processors: what to do with options of a generation config that this engine
            does not do: True drops them with a warning, False raises.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    page_size: int | None = None
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_memory_percent: float | None = None
    max_requests_per_batch: int | None = None
    max_blocks_per_request: int | None = None
    allow_block_sharing: bool = True
    use_async_batching: bool | None = None
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    max_cached_graphs: int = 0
    varlen_compile_config: object | None = None
    decode_compile_config: object | None = None
    default_compile_level: int = 0
    use_default_compile_configs: bool = False
    scheduler_type: str = "fifo"
    target_step_time: float | None = 0.0
    safety_margin: float | None = None
    return_logprobs: bool = False
    seed: int | None = None
    cpu_offload_space: float = 0.0
    cpu_offload_space_safety_threshold: float = 0.8
    max_queue_size: int = 0
    max_unread_results: int = 4096
    max_unread_requests: int = 65536
    per_request_processors: bool = False
    drop_unsupported_processors: bool = True

    def __post_init__(self) -> None:
        _bounded("page_size", self.page_size, 1, 4096)
        if self.page_size is not None:
            if self.block_size not in (DEFAULT_BLOCK_SIZE, self.page_size):
                raise ConfigError(
                    "page_size",
                    f"is {self.page_size}, and block_size is {self.block_size}; they are the same "
                    "option, give one",
                )
            object.__setattr__(self, "block_size", self.page_size)
            object.__setattr__(self, "page_size", None)
        for option, (low, high) in _BOUNDS.items():
            _bounded(option, getattr(self, option), low, high)
        for option, highest in _FRACTIONS.items():
            value = getattr(self, option)
            if value is not None and not (_is_number(value) and 0.0 <= value <= highest):
                raise ConfigError(option, f"is {value!r}; it must be between 0 and {highest:g}")
        target = self.target_step_time
        if target is not None and not (
            _is_number(target) and (target == 0 or 1e-4 <= target <= 3600)
        ):
            raise ConfigError(
                "target_step_time",
                f"is {target!r}; it must be a number of seconds from 0.0001 to 3600, or 0 for no "
                "limit",
            )
        for option in ("max_memory_percent", "cpu_offload_space_safety_threshold"):
            if getattr(self, option) == 0:
                raise ConfigError(option, "is 0; it must be above 0 and at most 1")
        for option in _SWITCHES:
            if not isinstance(getattr(self, option), bool):
                raise ConfigError(option, f"is {getattr(self, option)!r}; it must be True or False")
        if not isinstance(self.use_async_batching, bool | None):
            raise ConfigError(
                "use_async_batching",
                f"is {self.use_async_batching!r}; it must be True, False or None",
            )
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
            )


def target_step_time(config: ContinuousBatchingConfig, device: str) -> float:
    """Seconds at which steps with decodes aim on a kind of device; 0: there is no target."""
    if config.target_step_time is not None:
        return config.target_step_time
    return CPU_TARGET_STEP_TIME if device == "cpu" else CUDA_TARGET_STEP_TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How a model is brought into memory. Raises ConfigError for a value out of bounds.

    Attributes:
        dtype: the type of the weights; "auto": the one that the checkpoint names.
        device: "auto" (cuda where there is one, else cpu), "cpu", "cuda" or "cuda:N".
        threads: CPU threads for the model. None: the CPUs that this process may use: its affinity,
            and the quota of its container.
        attention: what computes attention. "torch": plain torch, the reference, on any device;
            "native": the C++ kernels for CPUs, refused where they were not built; "triton": the
            kernels for CUDA devices, refused where Triton does not work; "varlen": torch's own
            FlashAttention for CUDA devices, from torch 2.12 on, refused but for 16-bit types,
            blocks of a multiple of 256 tokens, heads of one size up to 256, and layers without
            softcap or sinks; "auto": native on a CPU; on CUDA triton, else varlen; where none of
            these can be had, torch; and a line in the log that says which.
        quantization: "int8": the weights of bfloat16 linear layers are kept, on a CPU, as whole
            numbers from -127 to 127 with a scale for each output: half the memory, and up to twice
            the speed of a single request, for results that differ a little
            (docs/performance.md). Refused where it cannot be done. "none": as the checkpoint has
            them.
        pack_weights: whether the weights of bfloat16 linear layers are put, on a CPU, in the order
            in which its kernel reads them. Numbers stay what they are, and so does the memory.
            True: packed, or refused where they cannot be; None: where it pays, which a line in the
            log says. Only models that are loaded from disk are packed.
        fuse_layers: whether a model's layers are fused. In bfloat16 on a CPU: what stands between
            its matrix products (norms, gates, rotary embeddings) is computed by one kernel each;
            results differ by the order of sums and the last bits of e^x. Elsewhere: queries, keys
            and values are one matrix product, and so are the two halves of a gated layer; results
            differ by the order of sums at most, and the memory stays what it is. True: fused, or
            refused where it cannot be; None: on CUDA, and where kernels pay on a CPU. Only what is
            shown, at load, to compute the same is exchanged, and a line in the log says what; only
            models that are loaded from disk are changed.
        tensor_parallel: "auto": the model is divided among the processes that torchrun started, as
            transformers' tensor-parallel plan of the model says (docs/tensor-parallelism.md); each
            takes the device of its own. "none": this process has all of it.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    threads: int | None = None
    attention: AttentionName = "auto"
    quantization: Quantization = "none"
    pack_weights: bool | None = None
    fuse_layers: bool | None = None
    tensor_parallel: TensorParallel = "none"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ConfigError("device", f"is {self.device!r}; it must be auto, cpu, cuda or cuda:N")
        _bounded("threads", self.threads, 1, 1024)
        if self.attention not in ATTENTIONS:
            raise ConfigError(
                "attention", f"is {self.attention!r}; it must be one of {', '.join(ATTENTIONS)}"
            )
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                "quantization",
                f"is {self.quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}",
            )
        for option in ("pack_weights", "fuse_layers"):
            value = getattr(self, option)
            if not isinstance(value, bool | None):
                raise ConfigError(option, f"is {value!r}; it must be True, False or None")
        if self.tensor_parallel not in TENSOR_PARALLELS:
            raise ConfigError(
                "tensor_parallel",
                f"is {self.tensor_parallel!r}; it must be one of {', '.join(TENSOR_PARALLELS)}",
            )
        if self.tensor_parallel == "auto":
            self._check_parallel()

    def _check_parallel(self) -> None:
        """Refuse what goes with one process alone."""
        reason = "and tensor_parallel is auto: the weights of a divided model stay as they are; "
        if self.quantization != "none":
            raise ConfigError("quantization", f"is {self.quantization}, {reason}set it to none")
        for option in ("pack_weights", "fuse_layers"):
            if getattr(self, option):
                raise ConfigError(option, f"is True, {reason}leave it out, or set it to False")
        if ":" in self.device:
            raise ConfigError(
                "device",
                f"is {self.device}, and tensor_parallel is auto: each process takes the device of "
                "its own number on its machine; set it to auto, cuda or cpu",
            )


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where this process stands among those that torchrun started.

    Attributes:
        rank, world_size: its number among all of them, from 0, and how many they are.
        local_rank, local_world_size: the same among those on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> RankPlace | None:
        """What torchrun says in the environment; None: this process was not started by it.

        Raises:
            ConfigError: what the environment says cannot be.
        """
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        numbers = {}
        for name, least in (("WORLD_SIZE", 1), ("RANK", 0)):
            numbers[name] = _number(environ, name, least)
        for name, like, least in (
            ("LOCAL_WORLD_SIZE", "WORLD_SIZE", 1),
            ("LOCAL_RANK", "RANK", 0),
        ):
            numbers[name] = _number(environ, name, least) if name in environ else numbers[like]
        for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
            if numbers[rank] >= numbers[size]:
                raise ConfigError(
                    rank, f"is {numbers[rank]}, and {size} is {numbers[size]}; it must be below it"
                )
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_world_size=numbers["LOCAL_WORLD_SIZE"],
        )


def engine_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of an engine's process of its own.

    A step is some hundred short parallel regions, and a thread that waits for the others of its
    region spins first: GNU OpenMP (torch's) lets it do so for milliseconds. Where other processes
    want the CPUs, such as a front end under load, those that spin keep the one that all wait for
    from running, and a step takes up to a hundred times as long. A tenth of a millisecond is
    longer than regions are apart. What the operator has set stays.
    """
    if "GOMP_SPINCOUNT" in environ or "OMP_WAIT_POLICY" in environ:
        return dict(environ)
    return {**environ, "GOMP_SPINCOUNT": _SPIN_COUNT}


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    text = environ[name]
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            name, f"is {text!r} in the environment; torchrun sets it to a number from {least} up"
        )
    return int(text)


def _bounded(option: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            option, f"is {value!r}; it must be a whole number between {low} and {high}"
        )


def _is_number(value: object) -> bool:
    """Whether a value that says it is a number is one: configs are also made from text."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
