"""`python -m benchmarks.trust.planted.serve NAME serve …`: the server with a planted fault."""

from __future__ import annotations

import sys

from benchmarks.trust.planted.plants import PLANTS
from service.command.cli import main

if __name__ == "__main__":
    PLANTS[sys.argv.pop(1)].apply()
    main()
