"""Judges with transformers in float32 whether greedy tokens are right.

This is not a system of the comparison: the harness asks it after the last turn of a case.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.adapters.loop import Turn, main
from benchmarks.models import built_model

NEAR = 0.1
"""A tolerance, as a fraction of the logits' standard deviation. A token this close to the best one
is not an error in bfloat16.
"""


class Judge:
    """The reference model. A turn's requests have "tokens", which are what a system generated."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(order["threads"])
        made = built_model(order)
        if made is None:
            made = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32).eval()
        self._device = torch.device(order.get("device", "cpu"))
        self._model = made.to(self._device, torch.float32)
        self._is_exact = order["dtype"] == "float32"
        return {}

    @torch.inference_mode()
    def run(self, turn: Turn) -> list[dict[str, Any]]:
        return [self._judge(request["prompt"], request["tokens"]) for request in turn.requests]

    def _judge(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        ids = torch.tensor([prompt + tokens[:-1]], device=self._device)
        kept = len(tokens)
        logits = self._model(ids, logits_to_keep=kept).logits[0].float()  # [tokens, vocabulary]
        chosen = logits.gather(1, torch.tensor(tokens, device=self._device)[:, None])[:, 0]
        gaps = (logits.max(-1).values - chosen) / logits.std(-1)  # in standard deviations
        verdict: dict[str, Any] = {
            "tokens": len(tokens),
            "distinct": len(set(tokens)),
            "best": int((gaps == 0).sum()),
            "near": int((gaps <= NEAR).sum()),
            "worst_gap": float(gaps.max()),
        }
        if self._is_exact:
            prompt_ids = torch.tensor([prompt], device=self._device)
            reference = self._model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                max_new_tokens=len(tokens),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            verdict["equal"] = reference[0, len(prompt) :].tolist() == tokens
        return verdict


if __name__ == "__main__":
    main(Judge())
