"""The input of a plan. It imports no torch, so that an invalid request is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.errors import ConfigError

DEFAULT_PROMPT, DEFAULT_OUTPUT = 512, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked of a plan.

    Attributes:
        memory: bytes that there are; None: as many as this machine has free.
        prompt_tokens, output_tokens: a request's length; None: 512 and 256, or what the model
            allows.
        requests: how many of these are to run at once; None: as many as the options allow.
        bandwidth, rate: the machine's rates, see `given_rates`; None: measured.
        measures: whether rates are measured that are not given.
    """

    memory: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    requests: int | None = None
    bandwidth: float | None = None
    rate: float | None = None
    measures: bool = True

    def __post_init__(self) -> None:
        if (self.bandwidth is None) != (self.rate is None):
            raise ConfigError(
                "bandwidth", "and matrix_rate belong together; give both, or neither"
            ).naming("matrix_rate")
