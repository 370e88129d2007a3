"""The wiring: connects the packages of the service, from a socket to the engine.

    server         HeadraceServer: its start, its shutdown, what goes on in between
    server_limits  the limits on callers, from the server's options
    grpc_servers   a call's way to the servicers, and who may call (`service.door`)
    model_text     what is read of a model for the front end
    front_end      a message's way to the engine and back (`service.convert`, `service.delivery`)

There is no logic here. The other packages know each other only by the objects passed to them here.
"""

from __future__ import annotations

from service.server.grpc_servers import SERVICES, credentials_of
from service.server.model_text import TokenizerLoader, load_tokenizer
from service.server.server import NO_TELEMETRY, HeadraceServer

__all__ = [
    "NO_TELEMETRY",
    "SERVICES",
    "HeadraceServer",
    "TokenizerLoader",
    "credentials_of",
    "load_tokenizer",
]
