"""Overlap of a step's kernels: programmatic dependent launch, from compute capability 9.0 on.

    a kernel    ─ starts ─ lets the next one start ─ waits for the previous one ─ works ─ ends
    the next            └▶ starts ─ reads what no kernel writes ─ waits ─────────────────┴▶ works

This hides a kernel's launch and its independent work behind the previous kernel. A kernel launched
this way (`launch_pdl`) must wait before it reads anything that a kernel has written. It must also
wait before it writes anything, because memory may be reused while earlier kernels still read it. A
kernel that is launched normally waits for all previous kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have started."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAPS: tl.constexpr):
    """Wait until the previous kernel, and every kernel it waited for, has ended."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Let the next kernel start and wait for the previous one.

    Used by a kernel that has no independent work.
    """
    let_next_start(OVERLAPS)
    wait_for_last(OVERLAPS)
