"""What a step of each family launches on CUDA: a decode and a prefill in bfloat16, traced without a
device (see `watch`), and compared with `launches.json`, which also has those of choices of tokens
(see `choices`).

A layer's launches are those from the begin of one layer's attention to that of the next, so what
one kernel computes for two layers is counted once. Where layers differ, the most are told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from engine.attention.interface import BatchLayout, LayerShape
from engine.attention.registry import ATTENTION_NAME, register
from engine.attention.torch_backend import TorchAttentionBackend
from engine.loading.gate import probe_layers
from engine.loading.joined_linears import join_linears
from engine.loading.kv_memory import allocate_caches, make_groups
from engine.loading.rotary import follow_lengths, keep_frequencies, read_rope
from engine.loading.view import ModelView
from engine.models.describing import NotDescribedError, describe
from engine.models.experts import choose_experts
from engine.models.torch_decoder import TorchDecoder
from engine.runner.forward import CausalModel, ModelForward
from engine.runner.kv_tensors import KVTensors
from engine.runner.runner_options import StepPath
from tests.engine.cuda import choices
from tests.engine.cuda.watch import (
    CUDA,
    HOPPER,
    DeviceFault,
    Properties,
    Watch,
    fake_cuda,
    to_fake_cuda,
)
from tests.model_recipes import RECIPES, Recipe
from tests.recurrent_recipes import RECURRENT
from tests.tiny_models import make_model

TABLE = Path(__file__).with_name("launches.json")
BLOCK = 64
REQUESTS = 8
DECODE_AT = 300
"""The position of a decode step's tokens: behind it, a context is cut and merged again."""
PREFILL = 40
"""Tokens of each request."""
KINDS = {"decode": "decode_kernel", "prefill": "prefill_kernel"}
"""The kinds of steps, and the Triton kernel with which attention begins to read."""


class Launches(NamedTuple):
    """Launching operators: of a layer (see the module), and of the whole step."""

    layer: int
    step: int


class Served(NamedTuple):
    """What computes a model's steps, how to move it to the device, the shapes of its layers' keys
    and values, and their type.
    """

    model: CausalModel
    move: Callable[[], None]
    shapes: Mapping[int, LayerShape]
    dtype: torch.dtype = torch.bfloat16


def by_transformers(recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> Served:
    """A family's tiny model as it is served where there is no decoder of ours for it."""
    register()
    model = make_model(recipe.config(eos_token_id=None))
    view = ModelView.of(model).model
    found = probe_layers(view, TorchAttentionBackend())
    _follow_lengths(view)
    view.set_attn_implementation(ATTENTION_NAME)

    def move() -> None:
        from engine.attention.triton_backend import TritonAttentionBackend

        to_fake_cuda(view, dtype)
        choose_experts(view, TritonAttentionBackend(), lambda line: None)
        keep_frequencies(view)
        join_linears(view, found.joinable)

    return Served(view, move, found.shapes, dtype)


def _follow_lengths(model: PreTrainedModel) -> None:
    """As a view of it does, if its rotary frequencies depend on lengths."""
    rope = read_rope(model)
    assert rope is None or follow_lengths(model, rope)


def by_ours(recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> Served | None:
    """The same with our own decoder; None: it does not know the family."""
    model = make_model(recipe.config(eos_token_id=None))
    _follow_lengths(model)
    try:
        described = describe(model)
    except NotDescribedError:
        return None
    shapes = probe_layers(model, TorchAttentionBackend()).shapes
    made: list[Any] = []

    def move() -> None:
        from engine.attention.triton_backend import TritonAttentionBackend
        from engine.models.triton_operations import TritonOperations

        to_fake_cuda(model, dtype)
        backend = TritonAttentionBackend()
        choose_experts(model, backend, lambda line: None)
        made.append(TorchDecoder(model, described, TritonOperations(), backend))

    return Served(lambda **inputs: made[0](**inputs), move, shapes, dtype)


DECODERS: dict[str, Callable[[Recipe], Served | None]] = {
    "transformers": by_transformers,
    "own": by_ours,
}
"""What may compute a family's steps. Where there is an own one, the server takes that."""


def trace(served: Served, properties: Properties = HOPPER) -> dict[str, list[str]]:
    """What a step of each kind launches, by name, in order. properties: the device's.

    Raises:
        DeviceFault: it waits for the device, or copies from the host.
    """
    pytest.importorskip("triton", reason="Triton is not installed here")
    watch = Watch()
    found: dict[str, list[str]] = {}
    with fake_cuda(watch, properties=properties), torch.inference_mode():
        from engine.attention.triton_backend import TritonAttentionBackend

        served.move()
        kv, backend = cache_of(served.shapes, served.dtype), TritonAttentionBackend()
        forward = ModelForward(served.model, kv, backend)
        for kind in KINDS:
            layout, is_decode = _layout(kind), kind == "decode"
            metadata = [
                backend.prepare(layout, group.window, kv.caches[group.layers[0]].keys)
                for group in kv.groups
            ]
            shape = (2, len(layout.positions))
            ids, positions = torch.zeros(shape, dtype=torch.int64, device=CUDA).unbind()
            rows = None if is_decode else torch.zeros_like(ids[:REQUESTS])
            path = StepPath.DECODE if is_decode else StepPath.VARLEN
            watch.launches = []
            with watch.watching(allows_copies=False):
                forward(path, ids, positions, rows, metadata)
            found[kind] = watch.launches
    return found


def count(launches: Sequence[str], kind: str) -> Launches:
    """The launches of a layer and of the step."""
    begins = [place for place, name in enumerate(launches) if name == KINDS[kind]]
    return Launches(max(end - begin for begin, end in pairwise(begins)), len(launches))


def measure(family: str) -> dict[str, Any]:
    """A family's entry in the table: by decoder."""
    served = {name: make(RECIPES[family]) for name, make in DECODERS.items()}
    return {name: _entry(one) for name, one in served.items() if one is not None}


def _entry(served: Served) -> dict[str, Any]:
    try:
        found = trace(served)
    except DeviceFault as fault:
        return {"waits": str(fault)}
    return {kind: count(launches, kind)._asdict() for kind, launches in found.items()}


def read_table() -> dict[str, Any]:
    """The table: the version of transformers that it is of; the launches of choices; and by family
    and decoder the launches by kind of step, or why its steps wait.
    """
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def traced() -> list[str]:
    """The families in the table: all but those with recurrent layers, which have no kernels on CUDA
    and whose own code runs once for each request.
    """
    return [name for name, recipe in RECIPES.items() if recipe.is_known and name not in RECURRENT]


def write_table() -> None:
    """Write the table anew, from all families."""
    families = {name: measure(name) for name in traced()}
    text = f'{{\n "transformers": "{transformers.__version__}",\n'
    text += f' "choices": {{\n{_lines(choices.measure())}\n }},\n'
    text += f' "families": {{\n{_lines(families)}\n }}\n}}\n'
    TABLE.write_text(text, encoding="utf-8")


def _lines(entries: Mapping[str, Any]) -> str:
    return ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in entries.items())


def cache_of(shapes: Mapping[int, LayerShape], dtype: torch.dtype = torch.bfloat16) -> KVTensors:
    """A cache on the device, for REQUESTS requests. Call it within `fake_cuda`."""
    groups = make_groups(shapes, dtype)
    blocks = [REQUESTS * (DECODE_AT // BLOCK + 1)] * len(groups)
    caches = allocate_caches(shapes, groups, blocks, BLOCK, dtype, CUDA)
    return KVTensors(groups, caches, {}, BLOCK)


def _layout(kind: str) -> BatchLayout:
    """Some requests, all alike."""
    start, new = (DECODE_AT, 1) if kind == "decode" else (0, PREFILL)
    width = DECODE_AT // BLOCK + 1
    return BatchLayout(
        starts=np.full(REQUESTS, start),
        counts=np.full(REQUESTS, new),
        num_decodes=REQUESTS if kind == "decode" else 0,
        positions=np.tile(np.arange(start, start + new), REQUESTS),
        tables=np.arange(1, REQUESTS * width + 1, dtype=np.int32).reshape(REQUESTS, width),
        block_size=BLOCK,
    )
