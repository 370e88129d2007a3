"""What ranks run in tests: rank 0 puts a divided model through every case and writes what came out;
the others never get beyond `engine.load`.

    python ranks_work.py MODEL RESULTS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import engine
from engine.api.offline import LoadedModel
from engine.contract.errors import ConfigError, HeadraceError
from engine.parallel import leader
from tests.engine.parallel.ranks_cases import CASES, run
from tests.tiny_models import make_prompts

REFUSED: dict[str, Any] = {
    "use_cuda_graph": True,
    "use_async_batching": True,
    "default_compile_level": 1,
    "use_default_compile_configs": True,
    "num_blocks": 2**30,
}


def _refusals(loaded: LoadedModel) -> dict[str, str]:
    """What is said to options that a divided model cannot have; it is used on afterwards."""
    said = {}
    for option, value in REFUSED.items():
        try:
            loaded.generate_batch([[5]], max_new_tokens=1, progress_bar=False, **{option: value})
        except HeadraceError as error:
            said[option] = f"{type(error).__name__}: {error}"
    return said


def _one_batch_fails(loaded: LoadedModel) -> list[str | None]:
    """The errors of three batches, the second of which fails before it is sent."""
    errors = []
    of = leader.RankStep.of

    def fail(*_: object) -> leader.RankStep:
        leader.RankStep.of = of  # type: ignore[method-assign]
        raise RuntimeError("as the test wants it")

    with loaded.continuous_batching_context_manager(warmup=False) as manager:
        for index, prompt in enumerate(make_prompts((5, 6, 7))):
            if index == 1:
                leader.RankStep.of = fail  # type: ignore[method-assign, assignment]
            name = manager.add_request(prompt, max_new_tokens=2, ignore_eos=True)
            output = manager.get_result(name, timeout=60)
            errors.append("no result" if output is None else output.error)
    return errors


def main(model: str, results: str) -> None:
    """Run on every rank."""
    loaded = engine.load(model, tensor_parallel="auto", threads=1)
    said: dict[str, Any] = {name: run(loaded, case) for name, case in CASES.items()}
    said["kv_heads"] = [shape.num_kv_heads for shape in loaded._verified.probe.shapes.values()]
    said["refused"] = _refusals(loaded)
    said["errors"] = _one_batch_fails(loaded)
    try:
        engine.load(model, tensor_parallel="auto")
    except ConfigError as error:
        said["second load"] = str(error)
    Path(results).write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
