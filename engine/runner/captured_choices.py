"""Captures how a step's tokens are chosen. `engine.sampling.plain` defines which choices can be
captured.

    a step's graph ─▶ logits ─▶ the most likely tokens ─┬───────────────────▶ tokens, for the next
                                                        └▶ a draw's graph ─▶  step and for the host

Every captured step also chooses the most likely tokens, which costs next to nothing. Draws depend
only on the number of rows, so they have separate graphs. There are two for each number of requests
of a captured step, with and without filters. They are captured after the steps, in the same memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from engine.runner.cuda_graph import CapturedGraph, GraphBackend
from engine.runner.static_inputs import InputMemory
from engine.sampling.plain import Draws, PlainChoice, PlainKind, choose_draws

logger = logging.getLogger(__name__)


class CapturedChoices:
    """Captures draws and replays them. All calls are made in inference mode.

    Attributes:
        draws: the captured draws by kind, each with its number of rows, the smallest first.
    """

    def __init__(self, memory: InputMemory, graphs: GraphBackend) -> None:
        self._memory = memory
        self._graphs = graphs
        self.draws: dict[PlainKind, list[tuple[int, CapturedGraph]]] = {
            PlainKind.DRAWN: [],
            PlainKind.FILTERED: [],
        }

    def capture(self, logits: torch.Tensor, sizes: Collection[int]) -> None:
        """Capture draws for each of these numbers of rows of captured logits, [R, V]."""
        try:
            draws = choose_draws(logits[: max(sizes, default=0)])
        except torch.OutOfMemoryError:
            logger.warning("not enough memory to capture how tokens are drawn")
            return
        for kind in (PlainKind.DRAWN, PlainKind.FILTERED):
            for rows in sorted(sizes, reverse=True):
                try:
                    graph = self._capture(kind, logits[:rows], draws)
                except torch.OutOfMemoryError:
                    logger.warning("not enough memory to capture how %d tokens are drawn", rows)
                except RuntimeError as error:
                    logger.warning(
                        "%s tokens are chosen as they come: that cannot be captured (%s)",
                        *(kind.name.lower(), str(error).partition("\n")[0]),
                    )
                    break
                else:
                    self.draws[kind].insert(0, (rows, graph))

    def _capture(self, kind: PlainKind, logits: torch.Tensor, draws: Draws) -> CapturedGraph:
        # What is run before a step was filled in finds zeros: rows without a token, which is fine.
        numbers, tokens = self._memory.numbers(len(logits)), self._memory.tokens[: len(logits)]

        def run() -> torch.Tensor:
            draws(kind, logits, numbers, tokens)
            return tokens

        return self._graphs.capture(run)

    def has(self, choice: PlainChoice, rows: int) -> bool:
        """Return whether captured work can choose the tokens of `rows` rows."""
        return choice.kind is PlainKind.GREEDY or self._find(choice.kind, rows) is not None

    def choose(self, choice: PlainChoice, rows: int) -> torch.Tensor:
        """Queue the choice of tokens after the replay of their step; see `has`.

        Returns:
            int64 [R]. The next step overwrites them.
        """
        draw = self._find(choice.kind, rows)
        if draw is not None:
            draw.replay()
        return self._memory.tokens[:rows]

    def keep(self, token_ids: torch.Tensor) -> None:
        """Store tokens that were chosen in another way, for the next captured step."""
        self._memory.tokens[: len(token_ids)] = token_ids

    def _find(self, kind: PlainKind, rows: int) -> CapturedGraph | None:
        found = (graph for most, graph in self.draws.get(kind, ()) if rows <= most)
        return next(found, None)
