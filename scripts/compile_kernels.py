"""Compile every Triton kernel for an H100, for all sizes, block sizes and types, and say what comes
out (`make kernels`). Ends with 1 if a kernel is not as it should be.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.cuda.kernel_cases import every_case, faults
from tests.engine.cuda.kernels import compile_all


def main() -> bool:
    """Whether all are as they should be."""
    is_fine = True
    for case in every_case():
        for found in compile_all(case.run):
            wrong = faults(case, found)
            is_fine = is_fine and not wrong
            sys.stdout.write(
                f"{case.name}: {found.kernel}, {found.shared} bytes shared, {found.spilled} "
                f"spilled, products {found.products}, copies {found.copies}"
                + "".join(f"; WRONG: {one}" for one in wrong)
                + "\n"
            )
            sys.stdout.flush()
    return is_fine


if __name__ == "__main__":
    sys.exit(not main())
