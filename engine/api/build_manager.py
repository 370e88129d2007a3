"""Builds a Python API manager around an engine assembled by `engine.assembly`."""

from __future__ import annotations

from collections.abc import Callable

from engine.api.generation_options import GenerationDefaults
from engine.api.manager import ContinuousBatchingManager, ManagerKeeper
from engine.api.observer import Observer
from engine.api.results import StopFinder
from engine.assembly import build_core, grammar_compiler
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.types import TokenId
from engine.loading.verified import VerifiedModel
from engine.text import TextStream, Tokenizer


def build_manager(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    progress: Callable[[str], None],
    *,
    defaults: GenerationDefaults,
    tokenizer: Tokenizer | None = None,
    keeper: ManagerKeeper | None = None,
    settings: object = None,
    observer: Observer | None = None,
) -> ContinuousBatchingManager:
    """Build an engine with the Python API.

    The other arguments are those of `build_core` and ContinuousBatchingManager.

    Args:
        tokenizer: used for stop strings and structured output. If None, both are refused.
    """
    core, limits, _ = build_core(verified, config, progress)
    compiler = grammar_compiler(verified, tokenizer)
    seen = verified.refresh()

    def refresh() -> bool:
        nonlocal seen
        before, seen = seen, verified.refresh()
        if seen.parts != before.parts:
            core.runner.forget_model()
        return seen != before

    return ContinuousBatchingManager(
        core,
        limits,
        max_queue_size=config.max_queue_size,
        max_unread_results=config.max_unread_results,
        max_unread_requests=config.max_unread_requests,
        defaults=defaults,
        per_request_processors=config.per_request_processors,
        compile_grammar=None if compiler is None else compiler.begin,
        make_stop_finder=None if tokenizer is None else _StopFinders(tokenizer),
        keeper=keeper,
        settings=settings,
        refresh_model=refresh,
        observer=observer,
    )


class _StopFinders:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, stop_strings: tuple[str, ...]) -> StopFinder:
        stream = TextStream(self._tokenizer, stop_strings=stop_strings)

        def find(token_ids: tuple[TokenId, ...]) -> int | None:
            was_over = stream.stop is not None
            stream.push(token_ids)
            return None if stream.stop is None or was_over else stream.stop.num_tokens

        return find
