"""Radix selection (see `engine.sampling.selection`) in Triton.

    add_up        one program per (row, cut of it): adds the masses to the table of the row's digits
    choose_digit  one program per row: the digit at which their sum reaches the target; clears the
                  table for the next pass

Each is launched once for each digit. Atomic operations add masses to the table in any order. The
masses are integers, so the sums are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_up(
    values,
    masses,
    known,
    sums,
    width,
    COUNTS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    LOWEST: tl.constexpr,
    BITS: tl.constexpr,
    STRIDE: tl.constexpr,
    CUT: tl.constexpr,
):
    """Add up masses by the current digit.

    values: int32 [R, V], the bits of floats. masses: int64 [R, V]; each counts as 1 if COUNTS is
    set. known: int32 [R], the digits found so far. sums: int64 [R, STRIDE].
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * CUT + tl.arange(0, CUT)
    wanted = places < width
    begin = tl.load(values + row * width + places, mask=wanted, other=0) >> LOWEST
    if not IS_FIRST:
        wanted = wanted & ((begin >> BITS) == tl.load(known + row))
    mass = tl.full((CUT,), 1, tl.int64)
    if not COUNTS:
        mass = tl.load(masses + row * width + places, mask=wanted, other=0)
    digits = begin & ((1 << BITS) - 1)
    tl.atomic_add(sums + row * STRIDE + digits, mass, mask=wanted, sem="relaxed")


@triton.jit
def choose_digit(
    sums,
    known,
    target,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    BITS: tl.constexpr,
    STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Choose the current digit of each row's bound.

    sums: see `add_up`; reset to zero. known: int32 [R]; this digit is added to it. target: int64
    [R]; reduced by the mass that comes before the digit. LARGEST: the largest bits of a bound.
    """
    row = tl.program_id(0).to(tl.int64)
    digits = tl.arange(0, 1 << BITS)
    place = sums + row * STRIDE + digits
    mass = tl.load(place)
    tl.store(place, tl.zeros_like(mass))
    wanted = tl.load(target + row)
    digit = tl.sum((tl.cumsum(mass, 0) < wanted).to(tl.int32), 0)
    digit = tl.minimum(digit, (1 << BITS) - 1)
    tl.store(target + row, wanted - tl.sum(tl.where(digits < digit, mass, 0), 0))
    if not IS_FIRST:
        digit = (tl.load(known + row) << BITS) | digit
    if IS_LAST:
        digit = tl.minimum(digit, LARGEST)
    tl.store(known + row, digit)
