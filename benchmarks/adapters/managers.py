"""A turn on a manager of continuous batching: ours, or that of transformers, which has the same
methods.
"""

from __future__ import annotations

from typing import Any

from benchmarks.adapters.loop import Turn


def serve_turn(manager: Any, turn: Turn, silence_s: float | None = None) -> None:
    """Run a turn on a manager that runs. silence_s: the longest wait for a result; None: until the
    manager has ended.

    Raises RuntimeError if a request failed, or no result comes any more.
    """
    names: dict[str, int] = {}
    while not turn.is_over:
        for index in turn.due():
            request = turn.requests[index]
            name = manager.add_request(
                list(request["prompt"]),
                max_new_tokens=request["max_tokens"],
                record_timestamps=True,
                **(request.get("sampling") or {}),
            )
            names[name] = index
        wait = turn.wait_s()
        output = manager.get_result(timeout=silence_s if wait is None else wait)
        if output is None:
            if wait is None:
                raise RuntimeError("no result comes any more")
            continue
        if output.error is not None:
            raise RuntimeError(output.error)
        if output.is_finished():
            index = names[output.request_id]
            turn.add(index, output.generated_tokens, output.timestamps)
            turn.finish(index)
