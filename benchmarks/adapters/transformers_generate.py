"""transformers' `model.generate` on padded batches, each run to its longest output.

A batch has as many requests as may be in the system at the same time. Tokens beyond a request's
length do not count. It cannot accept requests while it runs, so turns with arrival times are
refused.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.adapters.loop import Turn, main, versions


class TransformersGenerate:
    """Padded batches with `model.generate`."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(order["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            order["model"], dtype=getattr(torch, order["dtype"])
        ).eval()
        return {
            "settings": {"attention": self._model.config._attn_implementation},
            "versions": versions("torch", "transformers"),
        }

    def run(self, turn: Turn) -> None:
        if any(request["at"] > 0 for request in turn.requests):
            raise RuntimeError("model.generate takes no requests while it runs")
        while not turn.is_over:
            self._batch(turn, turn.due())

    def _batch(self, turn: Turn, indexes: list[int]) -> None:
        requests = [turn.requests[index] for index in indexes]
        longest = max(len(request["prompt"]) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)  # [batch, longest]
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, longest - len(request["prompt"]) :] = 1
        steps = _Steps()
        output = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(request["max_tokens"] for request in requests),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=steps,
        )
        for index, request, row in zip(
            indexes, requests, output[:, longest:].tolist(), strict=True
        ):
            count = request["max_tokens"]
            turn.add(index, row[:count], steps.times[:count])
            turn.finish(index)


class _Steps(BaseStreamer):  # type: ignore[misc]  # its types are not read
    """Records when each step's tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt:
            self.times.append(time.perf_counter())
        self._saw_prompt = True

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main(TransformersGenerate())
