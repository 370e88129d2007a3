"""The layouts of quantised files that are served. No torch: docs/models.md is written from here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """What a file is like.

    Attributes:
        zeros_less_one: whether it stores them so. None: as the name of the format says.
        special: what it has that others do not, for the table of docs/models.md.
    """

    method: str = "gptq"
    bits: int = 4
    group: int = 128
    symmetric: bool = True
    checkpoint_format: str | None = "gptq"
    zeros_less_one: bool | None = None
    desc_act: bool = False
    has_g_idx: bool = True
    lm_head: bool = False
    biases: bool = False
    scales: str = "float16"
    special: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> str:
        """What the table calls the method."""
        names = {"gptq": "GPTQ", "awq": "AWQ, version gemm", "auto-round": "AutoRound's GPTQ"}
        return names[self.config.get("quant_method", self.method)]

    def quantization_config(self) -> dict[str, Any]:
        if self.method == "awq":
            own: dict[str, Any] = {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": self.group,
                "zero_point": True,
                "version": "gemm",
            }
        else:
            own = {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group,
                "sym": self.symmetric,
                "desc_act": self.desc_act,
                "lm_head": self.lm_head,
            }
            if self.checkpoint_format is not None:
                own["checkpoint_format"] = self.checkpoint_format
        return own | self.config

    def stores_less_one(self) -> bool:
        if self.zeros_less_one is not None:
            return self.zeros_less_one
        return self.checkpoint_format in (None, "gptq")


def _all() -> Iterator[tuple[str, Recipe]]:
    yield "gptq", Recipe(special="symmetric")
    for bits in (4, 8):
        for group in (-1, 32, 64, 128, 24):
            for symmetric in (True, False):
                name = f"gptq-{bits}-{group}-{'sym' if symmetric else 'asym'}"
                special = "" if symmetric else "or not"
                yield name, Recipe(bits=bits, group=group, symmetric=symmetric, special=special)
        yield f"gptq-{bits}-order", Recipe(bits=bits, group=32, desc_act=True, special="`desc_act`")
        yield (
            f"gptq-{bits}-order-asym",
            Recipe(
                bits=bits, group=24, desc_act=True, symmetric=False, checkpoint_format="gptq_v2"
            ),
        )
    asym: dict[str, Any] = {"symmetric": False, "group": 32}
    yield "gptq-v2", Recipe(checkpoint_format="gptq_v2", special="`gptq_v2`", **asym)
    yield "gptq-planar", Recipe(checkpoint_format="gptq_p", special="`gptq_p`", **asym)
    yield "gptq-old", Recipe(checkpoint_format=None, has_g_idx=False, special="no name", **asym)
    yield (
        "gptq-format",
        Recipe(checkpoint_format=None, zeros_less_one=False, config={"format": "gptq_v2"}, **asym),
    )
    yield "gptq-wrong-name", Recipe(zeros_less_one=False, special="a wrong name")
    yield "gptq-v2-wrong-name", Recipe(checkpoint_format="gptq_v2", zeros_less_one=True)
    yield "gptq-lm-head", Recipe(lm_head=True, group=32, special="output layer")
    yield "gptq-biases", Recipe(biases=True, special="biases that the model has not")
    yield "gptq-bfloat16", Recipe(scales="bfloat16", symmetric=False, special="scales in bfloat16")
    for group in (-1, 32, 64, 128):
        yield (
            f"auto-round-{group}",
            Recipe(
                config={"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
                symmetric=False,
                checkpoint_format=None,
                group=group,
                special="not symmetric",
            ),
        )
    for group in (-1, 32, 64, 128, 24):
        yield f"awq-{group}", Recipe(method="awq", group=group, symmetric=False, special="zeros")
    yield "awq-lm-head", Recipe(method="awq", lm_head=True, special="output layer", **asym)
    yield (
        "awq-old-names",
        Recipe(
            method="awq",
            config={"version": "GEMM", "modules_to_not_convert": ["nothing"]},
            special="names of modules that are wrong",
            **asym,
        ),
    )


RECIPES = dict(_all())
