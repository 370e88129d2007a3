"""The environment variables that the engine reads, and those that it sets for an engine subprocess.
No other module of the engine reads environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from engine.contract.errors import ConfigError

_SPIN_COUNT = "10000"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This process's rank among the processes that torchrun started.

    Attributes:
        rank, world_size: its index among all the processes, from 0, and their number.
        local_rank, local_world_size: the same for the processes on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> RankPlace | None:
        """Read torchrun's environment variables. Return None if torchrun did not start this
        process.

        Raises:
            ConfigError: the variables contradict each other, or are not numbers.
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
    """Return the environment for an engine in a process of its own.

    A step runs hundreds of short parallel regions. At the end of each, threads wait for the slowest
    one by spinning; in GNU OpenMP, which torch uses, they spin for milliseconds. If other processes
    need the CPUs, such as a front end under load, the spinning threads keep the slowest one from
    running, and a step takes up to a hundred times as long. Spinning is therefore limited to a
    tenth of a millisecond, which is longer than the time between regions. The operator's own
    settings take precedence.
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
