"""The calls that have not ended yet, so that a drain can wait for the last of them.

gRPC stops politely: it says GOAWAY and pings, and knows by the answer that the client has read what
was sent before. But from then on it closes the connection with the last of its calls, and a client
that is writing at that moment finds the connection broken, and throws away what it has not read:
its end. So a server is stopped only when its calls have ended: then all ends come before the ping.
"""

from __future__ import annotations

import asyncio
from typing import Any


class OpenCalls:
    """All calls whose handlers run, or whose status is being sent. Of one event loop.

    Attributes:
        open: one for each call, done when it has ended.
    """

    def __init__(self) -> None:
        self.open: set[asyncio.Future[None]] = set()

    def add(self, context: Any) -> None:
        """A call has begun; its context tells when its status was sent, or it was cut."""
        ended = asyncio.get_running_loop().create_future()
        self.open.add(ended)

        def end(_context: Any) -> None:
            self.open.discard(ended)
            if not ended.done():  # else the loop is being closed
                ended.set_result(None)

        context.add_done_callback(end)

    async def settle(self, timeout_s: float) -> None:
        """Wait until those that are open now have ended, for so many seconds at most: not for later
        ones, for clients may try again and again.
        """
        if self.open:
            await asyncio.wait(self.open, timeout=timeout_s)
