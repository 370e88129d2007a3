"""The input of a plan. It does not import torch, so that an invalid request is refused
immediately.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.errors import ConfigError

DEFAULT_PROMPT, DEFAULT_OUTPUT = 512, 256
DEFAULT_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The input of a plan.

    Attributes:
        memory: the available bytes. None for what is free on this machine.
        prompt_tokens, output_tokens: the length of a request. None for 512 and 256, or what the
            model allows.
        requests: how many of these requests are to run at once. None for what the options allow.
        bandwidth, rate: the machine's rates; see `given_rates`. None to run and time the steps
            instead.
        measures: whether steps are run and timed if no rates are given.
        num_adapters: how many adapters are loaded at the same time. 0: none.
        adapter_rank: the rank of each. None for DEFAULT_RANK.
    """

    memory: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    requests: int | None = None
    bandwidth: float | None = None
    rate: float | None = None
    measures: bool = True
    num_adapters: int = 0
    adapter_rank: int | None = None

    def __post_init__(self) -> None:
        if self.adapter_rank is not None and not self.num_adapters:
            raise ConfigError(
                "adapter_rank", "is that of adapters, and there are none; give num_adapters, too"
            ).naming("num_adapters")
        if (self.bandwidth is None) != (self.rate is None):
            raise ConfigError(
                "bandwidth", "and matrix_rate belong together; give both, or neither"
            ).naming("matrix_rate")
