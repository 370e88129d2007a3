"""The engine's options: what each means, its bounds, its default, and what is refused because it
does not act yet.

`ContinuousBatchingConfig` carries the option names that users of transformers' continuous batching
know, with their meaning. An option that this engine does not act on yet is refused when it is set
to anything but "off": it is never swallowed. `LoadConfig` says how a model is brought into memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

SCHEDULER_TYPES = ("fifo",)
DTYPES = ("auto", "float32", "bfloat16", "float16")

_NOT_YET: dict[str, tuple[object, ...]] = {
    # option: the values that mean "off", which is what the engine does
    "max_blocks_per_request": (None, 0),
    "allow_block_sharing": (False,),
    "use_async_batching": (None, False),
    "use_cuda_graph": (None, False, (False, False)),
    "q_padding_interval_size": (0,),
    "kv_padding_interval_size": (0,),
    "max_cached_graphs": (0,),
    "varlen_compile_config": (None,),
    "decode_compile_config": (None,),
    "use_default_compile_configs": (False,),
    "cpu_offload_space": (0.0,),
    "cpu_offload_space_safety_threshold": (0.8,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousBatchingConfig:
    """Options of continuous batching. Raises ConfigError for a value out of bounds or not supported
    yet.

    Attributes:
        block_size: tokens in one block of the KV cache; 1 to 4096.
        num_blocks: blocks for the layers with full attention; layers with a sliding window get as
            many as their window needs, at most this many. None: from the memory that may be used
            (see max_memory_percent).
        max_batch_tokens: most tokens computed in one step, prefill and decode together: the token
            budget. Longer prompts are cut in chunks of it. None: 1024 on a CPU, 8192 on CUDA.
        max_memory_percent: the part of the memory that is free after the model was loaded, within
            the container's limit, that the KV cache may take; above 0, at most 1. None: 0.5 on a
            CPU, on CUDA 0.9, or 0.8 where processors that need vocabulary-sized temporaries may be
            used. On a CPU the cache takes less where the allowed concurrency needs less.
        max_requests_per_batch: most requests that run at the same time. None: 64 on a CPU, 256 on
            CUDA.
        scheduler_type: "fifo": running requests first, decoding before prefilling; then the queue
            in its order.
        return_logprobs: whether outputs of the offline API carry the chosen tokens'
            log-probabilities.
        max_queue_size: how many requests may wait; one more is refused at once. 0: no limit.
        per_request_processors: whether `add_request` takes sampling options of its own
            (temperature, top_k, …). Off, they are refused, and all requests use the generation
            config's.
        drop_unsupported_processors: what to do with options of a generation config that this engine
            does not do: True drops them with a warning, False raises.
        max_blocks_per_request, allow_block_sharing, use_async_batching, use_cuda_graph,
        q_padding_interval_size, kv_padding_interval_size, max_cached_graphs, varlen_compile_config,
        decode_compile_config,
        use_default_compile_configs, cpu_offload_space, cpu_offload_space_safety_threshold: known,
            not supported yet; anything but "off" is refused.
    """

    block_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_memory_percent: float | None = None
    max_requests_per_batch: int | None = None
    scheduler_type: str = "fifo"
    return_logprobs: bool = False
    max_queue_size: int = 0
    per_request_processors: bool = False
    drop_unsupported_processors: bool = True
    max_blocks_per_request: int | None = None
    allow_block_sharing: bool = False
    use_async_batching: bool | None = None
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    max_cached_graphs: int = 0
    varlen_compile_config: object | None = None
    decode_compile_config: object | None = None
    use_default_compile_configs: bool = False
    cpu_offload_space: float = 0.0
    cpu_offload_space_safety_threshold: float = 0.8

    def __post_init__(self) -> None:
        _bounded("block_size", self.block_size, 1, 4096)
        _bounded("num_blocks", self.num_blocks, 1, 2**31 - 1)
        _bounded("max_batch_tokens", self.max_batch_tokens, 1, 2**20)
        _bounded("max_requests_per_batch", self.max_requests_per_batch, 1, 65536)
        _bounded("max_queue_size", self.max_queue_size, 0, 2**31 - 1)
        percent = self.max_memory_percent
        if percent is not None and not (_is_number(percent) and 0.0 < percent <= 1.0):
            raise ConfigError(
                "max_memory_percent", f"is {percent!r}; it must be above 0 and at most 1"
            )
        for option in ("return_logprobs", "per_request_processors", "drop_unsupported_processors"):
            if not isinstance(getattr(self, option), bool):
                raise ConfigError(option, f"is {getattr(self, option)!r}; it must be True or False")
        if self.scheduler_type not in SCHEDULER_TYPES:
            raise ConfigError(
                "scheduler_type",
                f"is {self.scheduler_type!r}; this version has {', '.join(SCHEDULER_TYPES)}",
            )
        for option, off in _NOT_YET.items():
            value = getattr(self, option)
            if not any(value is entry or (value == entry and entry is not None) for entry in off):
                raise ConfigError(
                    option,
                    f"is {value!r}; this version does not support it yet, leave it at {off[0]!r}",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How a model is brought into memory. Raises ConfigError for a value out of bounds.

    Attributes:
        dtype: the type of the weights; "auto": the one that the checkpoint names.
        device: "auto" (cuda where there is one, else cpu), "cpu", "cuda" or "cuda:N".
        threads: CPU threads for the model. None: the CPUs that this process may use: its affinity,
            and the quota of its container.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ConfigError("device", f"is {self.device!r}; it must be auto, cpu, cuda or cuda:N")
        _bounded("threads", self.threads, 1, 1024)


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
