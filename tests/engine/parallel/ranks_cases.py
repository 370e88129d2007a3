"""What a divided model is put through, and the same model in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.api.offline import LoadedModel
from engine.contract.config import ContinuousBatchingConfig
from tests.tiny_models import make_prompts

BLOCK = 8
LENGTHS = (33, 90, 3, 130)
NEW_TOKENS = 12
FEW_BLOCKS = -(-(max(LENGTHS) + NEW_TOKENS) // BLOCK)
"""As many as the longest prompt needs alone."""
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts, and how they are run.

    Attributes:
        prompts: their token ids.
        options: of continuous batching.
        choices: of each prompt.
        is_sampled: with temperature, penalties and a seed for each prompt; else greedy.
        one_by_one: each prompt when the one before it has ended.
    """

    prompts: list[list[int]]
    options: dict[str, Any] = field(default_factory=dict)
    choices: int = 1
    is_sampled: bool = False
    one_by_one: bool = False


def _sharing() -> list[list[int]]:
    """A prefix of five blocks and a half in common; one that ends with it, one that is the same."""
    (prefix,) = make_prompts((5 * BLOCK + 4,), seed=5)
    tails = make_prompts((7, 30), seed=6)
    return [prefix + tails[0], prefix + tails[1], list(prefix), prefix + tails[1]]


_PROMPTS = make_prompts(LENGTHS)
_MANY = make_prompts((200, 210, 220), seed=9)
"""One step of them is a message that takes more than one frame."""

CASES = {
    "together": Case(_PROMPTS + _MANY, {"num_blocks": 256, "max_batch_tokens": 1024}),
    "chunked": Case(_PROMPTS, {"num_blocks": 64, "max_batch_tokens": 48}),
    "padded": Case(
        _PROMPTS, {"num_blocks": 64, "max_batch_tokens": 48, "q_padding_interval_size": 16}
    ),
    "prefix shared": Case(_sharing(), {"num_blocks": 64, "max_batch_tokens": 48}, one_by_one=True),
    "preempted": Case(
        _PROMPTS,
        {"num_blocks": FEW_BLOCKS, "max_batch_tokens": 48, "allow_block_sharing": False},
    ),
    "offloaded": Case(
        _PROMPTS,
        {"num_blocks": FEW_BLOCKS, "max_batch_tokens": 48, "cpu_offload_space": 0.01},
    ),
    "choices": Case(
        _PROMPTS, {"num_blocks": 96, "max_batch_tokens": 48}, choices=3, is_sampled=True
    ),
}
GREEDY = tuple(name for name, case in CASES.items() if not case.is_sampled)


def run(loaded: LoadedModel, case: Case) -> dict[str, Any]:
    """A case's tokens, by the names of its results, and the engine's figures."""
    config = ContinuousBatchingConfig(block_size=BLOCK, per_request_processors=True, **case.options)
    manager = loaded.init_continuous_batching(continuous_batching_config=config)
    manager.start()
    outputs = []
    for index, prompt in enumerate(case.prompts):
        sampling: dict[str, Any] = (
            {
                "do_sample": True,
                "temperature": 0.9,
                "top_k": 40,
                "repetition_penalty": 1.1,
                "seed": 100 + index,
            }
            if case.is_sampled
            else {}
        )
        name = manager.add_request(
            prompt,
            request_id=str(index),
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
            n=case.choices,
            **sampling,
        )
        if case.one_by_one:
            outputs.append(manager.get_result(name, timeout=WAIT_S))
    manager.stop()
    outputs.extend(manager)
    stats = manager.stats()
    manager._loop._core.scheduler.kv_cache.check_integrity()
    return {
        "tokens": {out.request_id: list(out.generated_tokens) for out in outputs if out},
        "errors": [out.error if out else "no result" for out in outputs if not out or out.error],
        "preemptions": stats.preemptions,
        "prefix_hits": stats.prefix_hits,
        "offloads": stats.offloads,
        "restores": stats.restores,
    }
