"""Limits a process to a smaller instruction set, to show how it would do on an older processor.

Three things must be limited alike: our kernels use the set that they are given, torch's libraries
read variables of their process when they are loaded, and the loader asks torch what the processor
supports. The memory and the caches remain those of this machine. OpenVINO obeys two of the
variables; other peers must be checked one by one.
"""

from __future__ import annotations

import ctypes

from engine.native.build import LIBRARY

ENVIRONMENTS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OV_CPU_MAX_ISA": "AVX2",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    },
    "avx512_bf16": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    },
}
"""Variants of our kernels, and the variables that limit a process's other libraries in the same
way.
"""


def limit(name: str) -> None:
    """Limit our kernels, and the loader's view of the processor, to this instruction set.

    Call it before the engine loads its kernels, in a process with the set's variables.

    Raises:
        ValueError: this processor does not have the set, or the library has no such variant.
    """
    import torch  # here, as the command that offers the sets does not need it

    handle = ctypes.CDLL(str(LIBRARY))
    handle.headrace_use.restype = ctypes.c_bool
    if not handle.headrace_use(name.encode()):
        raise ValueError(f"our kernels have no {name} on this processor")
    torch.cpu._is_amx_tile_supported = lambda: False
    if name != "avx512_bf16":
        torch.cpu._is_avx512_bf16_supported = lambda: False
