"""How kernels of a step overlap: programmatic dependent launch, from compute capability 9.0 on.

    a kernel    ─ starts ─ lets the next one start ─ waits for the one before ─ works ─ ends
    the next            └▶ starts ─ reads what no kernel writes ─ waits ───────────────┴▶ works

So a kernel's launch, and what it can do ahead, are hidden behind the kernel before it. Whoever is
launched so (`launch_pdl`) must wait before it reads what a kernel has written, and before it writes
anything: memory is used again as soon as nobody will read it. A kernel that is launched in the
ordinary way waits for all that came before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAPS: tl.constexpr):
    """Wait until the kernel before has ended, and all that it waited for."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Both, for a kernel that can do nothing ahead."""
    let_next_start(OVERLAPS)
    wait_for_last(OVERLAPS)
