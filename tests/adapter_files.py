"""Adapters for tiny models, written by peft with random weights, and what peft itself generates."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.tiny_models import greedy_reference


class PeftAdapter:
    """An adapter in a directory, and peft's own model with it."""

    def __init__(
        self,
        model: PreTrainedModel,
        directory: Path,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        size: float = 0.3,
        **options: Any,
    ) -> None:
        """Write an adapter.

        Args:
            model: the base model, which is copied.
            directory: where it is written.
            seed: of its weights.
            dtype: of its weights.
            size: their standard deviation in A, relative to what keeps the size of x.
            options: of peft's LoraConfig.
        """
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        config = LoraConfig(**{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM", **options})
        with warnings.catch_warnings():  # peft calls what transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            self.model = get_peft_model(copy.deepcopy(model), config).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_A" in name:
                    parameter.normal_(0.0, size * parameter.shape[1] ** -0.5)
                elif "lora_B" in name:
                    parameter.normal_(0.0, size)
                if "lora_" in name:
                    parameter.copy_(parameter.to(dtype))
        self.directory = directory
        saved = self.model
        if dtype is not torch.float32:
            saved = copy.deepcopy(self.model)
            for name, parameter in saved.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.to(dtype)
        saved.save_pretrained(str(directory))

    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """What peft's model generates for a prompt alone."""
        return greedy_reference(self.model.base_model.model, prompt, max_new_tokens)


def linear_targets(model: PreTrainedModel) -> list[str]:
    """The last names of the linear layers inside of a model's attention and MLP modules."""
    output = model.get_output_embeddings()
    return sorted({
        name.rpartition(".")[2]
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.Linear) and one is not output
    })  # fmt: skip
