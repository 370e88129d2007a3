"""Runs a process that torchrun started in addition to the server's. It holds a shard of the model
and opens no port.

It loads its shard, computes for rank 0's engine, and ends when rank 0 ends. Once loaded, it ignores
signals and leaves them to rank 0: a drain signals all processes, and requests need all of them to
finish. Before that, a signal ends it, because rank 0 may never start. SIGHUP is ignored because
there is nothing to read again.

rank 0 ends normally                              exit 0
the model is refused, here or on another rank     a message, exit 1
a rank dies, or fails in a step                   a message, exit 1
"""

from __future__ import annotations

import signal
import threading
from typing import NoReturn

from engine.api.following import follow
from engine.contract.config import LoadConfig
from engine.contract.errors import HeadraceError
from service.command.flags import describe
from service.command.process import end
from service.logs.output import Output


def follow_to_the_end(model: str, load_config: LoadConfig, rank: int, output: Output) -> NoReturn:
    """Follow rank 0, then end the process with the exit code. `rank`: this process's rank, for
    messages.
    """
    is_loaded = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if not is_loaded.is_set():
            output.say(f"headrace-server: rank {rank} was stopped while loading")
            end(128 + number, output)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        follow(model, load_config, is_loaded.set)
    except HeadraceError as error:
        output.say(f"headrace-server: {describe(error)}")
        end(1, output)
    output.say(f"headrace-server: rank {rank} has ended with rank 0")
    end(0, output)
