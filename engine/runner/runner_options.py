"""The options of a runner, resolved from the configuration for one device."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ConfigError
from engine.runner.buckets import Sizes, mixed_sizes

DEFAULT_MAX_GRAPHS = 32


class StepPath(enum.Enum):
    """The path on which a step is computed."""

    DECODE = "decode"
    """Every request computes one token."""
    VARLEN = "varlen"
    """Requests compute any number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """A runner's options. The defaults disable everything optional.

    Attributes:
        max_decode_blocks: a step in which every request computes one token takes the decode path if
            no request has more blocks than this. 0 to never take it.
        max_blocks: the maximum number of blocks of one request.
        q_interval: the tokens of a step are padded to a multiple of this. 0 for no padding.
        kv_interval: in steps without capture, the context to read is padded to a multiple of this
            many tokens. 0 for no padding.
        captured_paths: the paths whose steps are captured and replayed.
        max_graphs: the maximum number of captured shapes of steps. Captured draws do not count.
        max_tokens, max_requests: the size of the largest step.
        num_input_buffers: the number of sets of input buffers on the host, which limits how many
            steps may be pending at the same time.
    """

    max_decode_blocks: int = 0
    max_blocks: int = 1
    q_interval: int = 0
    kv_interval: int = 0
    captured_paths: frozenset[StepPath] = frozenset()
    max_graphs: int = DEFAULT_MAX_GRAPHS
    max_tokens: int = 1
    max_requests: int = 1
    num_input_buffers: int = 1

    @property
    def padded_sizes(self) -> Sizes | None:
        """The sizes in tokens to which steps with prompts are padded, or None if they are not
        padded.
        """
        if self.q_interval or StepPath.VARLEN in self.captured_paths:
            return mixed_sizes(self.q_interval)
        return None


PLAIN = RunnerOptions()
"""Steps without capture or padding, on the path for varying lengths."""


def resolve_options(
    config: ContinuousBatchingConfig,
    *,
    device: str,
    can_capture: bool,
    max_blocks: int,
    max_tokens: int,
    max_requests: int,
) -> RunnerOptions:
    """Resolve the options for a device.

    Args:
        config: the configuration.
        device: the device type, for messages.
        can_capture: whether the device's work can be captured.
        max_blocks: the number of blocks of the longest possible request.
        max_tokens, max_requests: the size of the largest step.

    Raises:
        ConfigError: an option asks for something that the device cannot do.
    """
    limit = config.max_blocks_per_request
    return RunnerOptions(
        max_decode_blocks=max_blocks if limit is None else min(limit, max_blocks),
        max_blocks=max_blocks,
        q_interval=config.q_padding_interval_size,
        kv_interval=config.kv_padding_interval_size,
        captured_paths=_captured_paths(config.use_cuda_graph, device, can_capture),
        max_graphs=config.max_cached_graphs or DEFAULT_MAX_GRAPHS,
        max_tokens=max_tokens,
        max_requests=max_requests,
        num_input_buffers=2 if _is_async(config.use_async_batching, device) else 1,
    )


def _is_async(asked: bool | None, device: str) -> bool:
    return device == "cuda" if asked is None else asked


def _captured_paths(
    asked: bool | tuple[bool, bool] | None, device: str, can_capture: bool
) -> frozenset[StepPath]:
    if asked is None:
        return frozenset(StepPath) if can_capture else frozenset()
    varlen, decode = asked if isinstance(asked, tuple) else (asked, asked)
    if (varlen or decode) and not can_capture:
        raise ConfigError(
            "use_cuda_graph",
            f"is {asked}, and the model is on {device}: CUDA graphs need a CUDA device; leave it "
            "out (None), or set it to False, or load the model on cuda",
        )
    paths = ((varlen, StepPath.VARLEN), (decode, StepPath.DECODE))
    return frozenset(path for wanted, path in paths if wanted)
