"""Tasks that wait for an event of a request. A list of futures, so that checking for waiters costs
nothing if there are none.
"""

from __future__ import annotations

import asyncio


class Waiters(list["asyncio.Future[None]"]):
    """The waiting tasks, on one event loop."""

    async def wait(self) -> None:
        """Wait until `wake` is called."""
        future = asyncio.get_running_loop().create_future()
        self.append(future)
        try:
            await future
        finally:
            if future in self:
                self.remove(future)

    def wake(self) -> None:
        """Wake all tasks that are waiting."""
        for future in self:
            if not future.done():
                future.set_result(None)
        self.clear()
