"""`python -m tests.campaign.planted.serve NAME serve …`: the server with a planted fault."""

from __future__ import annotations

import sys

from service.command.cli import main
from tests.campaign.planted.plants import PLANTS

if __name__ == "__main__":
    PLANTS[sys.argv.pop(1)].apply()
    main()
