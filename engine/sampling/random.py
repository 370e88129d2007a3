"""One uniform random number per token, which depends only on (seed, choice, position).

A counter-based generator has no state, so a request's draws do not depend on other requests, on
preemption, or on how the batch was split. The mixing function is the finalizer of SplitMix64
(Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), applied once per
word of the key.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits.

    Args:
        seed: 64 bits.
        choice: the index of the continuation within its request.
        position: the number of output tokens before this one.
    """
    return (_mix(_mix(_mix(seed) ^ choice) ^ position) >> 11) * 2.0**-53


def derived_seed(seed: int, index: int) -> int:
    """Derive one of many seeds from a seed: 64 bits.

    Args:
        seed: 64 bits.
        index: the index of the derived seed.
    """
    return _mix(_mix(seed) ^ index)
