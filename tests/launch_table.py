"""Write tests/engine/cuda/launches.json: what a step of each family launches on CUDA, traced
without a device (`make launch-table`).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.cuda.launches import write_table

if __name__ == "__main__":
    write_table()
