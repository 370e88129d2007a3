"""What ranks run in tests of what goes wrong; see TROUBLES.

python ranks_trouble.py MODEL TROUBLE
"""

from __future__ import annotations

import os
import sys

import engine
from engine.contract.errors import HeadraceError, ModelRefusedError
from engine.loading import loader
from engine.parallel import follower
from engine.runner.forward import ModelForward

TROUBLES = ("killed", "a follower fails", "a follower refuses")
LAST = int(os.environ["RANK"]) > 0


def _fail(*_: object) -> None:
    raise RuntimeError("as the test wants it")


def _refuse(*_: object, **__: object) -> None:
    raise ModelRefusedError("not as the test wants it")


class _FailsLater(ModelForward):
    """Fails in its tenth step, when the others are in the middle of it."""

    steps = 0

    def as_it_comes(self, inputs, fill_in):  # type: ignore[no-untyped-def]
        self.steps += 1
        if self.steps == 10:
            _fail()
        return super().as_it_comes(inputs, fill_in)


def main(model: str, trouble: str) -> int:
    """Run on every rank."""
    if LAST and trouble == "a follower fails":
        follower.ModelForward = _FailsLater  # type: ignore[misc]
    if LAST and trouble == "a follower refuses":
        loader.self_check = _refuse
    try:
        loaded = engine.load(model, tensor_parallel="auto", threads=1)
    except HeadraceError as error:
        sys.stdout.write(f"not loaded: {type(error).__name__}: {error}\n")
        return 3
    sys.stdout.write("loaded\n")
    with loaded.continuous_batching_context_manager(block=True) as manager:
        name = manager.add_request([5, 6, 7], max_new_tokens=400, ignore_eos=True, streaming=True)
        for output in manager.request_id_iter(name):
            if len(output.generated_tokens) == 2:
                sys.stdout.write("running\n")
                sys.stdout.flush()
        sys.stdout.write(f"last: {output.status.name} {output.error}\n")
    try:
        loaded.generate_batch([[5]], max_new_tokens=1, progress_bar=False)
    except HeadraceError as error:
        sys.stdout.write(f"afterwards: {type(error).__name__}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
