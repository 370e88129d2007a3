"""Compares a decoder of ours with what the unmodified model computed, layer by layer and part by
part.

    Record ─▶ each layer, each magnitude: each part on the model's own input of that part
           ─▶ the whole layer in one call, in steps over a paged cache: equal to its parts
           ─▶ embedding, last norm, output layer, logits

Parts without a sum must be equal, bit for bit. Norms and activations may differ by one neighbouring
number in at most 1 % of places: their sums are in another order, and e^x has other last bits. In a
product, each output's error over the tokens must be below half a percent of that output, apart from
single elements that are rounded the other way; an error of 1 % in one row of one weight is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from engine.attention.base import AttentionContext, AttentionParams, BatchLayout, LayerCache
from engine.errors import ModelRefusedError
from engine.models.parts import Kind, LayerParts, OurDecoder, Tables, walk
from engine.models.recording import LayerRecord, Record

_MOST_NEIGHBOURS = 0.01
"""The part of a norm's elements that may be rounded the other way."""
_FEWEST = 2
"""As many may be in any case: 1 % of few elements is none."""
_PRODUCT = {torch.bfloat16: 5e-3, torch.float32: 1e-4}
"""The allowed error of an output over all tokens, relative to that output."""
_ATTENTION = {torch.bfloat16: 3e-2, torch.float32: 2e-3}
"""The allowed error of attention, relative to its largest element, as in the load gate."""
_FLOAT32_NORM = 2.0**-20
"""The allowed relative error of a norm in float32."""
_FLOOR = 2.0**-18
"""Errors below this, relative to the largest element, are those of sums in another order."""
_FLOOR_OF_OUTPUT = 2.0**-11
"""The same, relative to all of an output, for single elements of a product."""
_BLOCK_SIZE = 4


def compare(decoder: OurDecoder, record: Record, windows: Sequence[int | None]) -> None:
    """Compare; see the module.

    Args:
        decoder: ours.
        record: the model's.
        windows: those of its layers.

    Raises:
        ModelRefusedError: a part differs; the message says which, in which layer, and how far.
    """
    check = _Check(decoder.description.family)
    threads = torch.get_num_threads()
    # The work of each part is so small that on a busy machine threads would only wait.
    torch.set_num_threads(1)
    try:
        _compare(decoder, record, windows, check)
    finally:
        torch.set_num_threads(threads)


def _compare(
    decoder: OurDecoder, record: Record, windows: Sequence[int | None], check: _Check
) -> None:
    one = decoder.description
    tables = decoder.tables(torch.arange(len(record.token_ids), device=decoder.device))
    with torch.inference_mode():
        check("embedding", "exact", decoder.embed(record.token_ids), record.layers[0][0].x)
        for layer, window, records in zip(decoder.layers, windows, record.layers, strict=True):
            for found in records:
                _compare_layer(check, decoder, layer, window, tables, found)
        last = record.layers[-1][0].parts["result"].contiguous()
        check(f"{one.norm.module}", "norm", decoder.norm(last), record.normed)
        check(f"{one.output}", "product", decoder.output(record.normed), record.product)
        check("logits", "exact", decoder.finish(record.product), record.logits)


def _compare_layer(
    check: _Check,
    decoder: OurDecoder,
    layer: LayerParts,
    window: int | None,
    tables: Sequence[Tables],
    record: LayerRecord,
) -> None:
    one, x = layer.description, record.x.contiguous()
    name = f"layer {one.index}, {{}}, with inputs times {record.magnitude:g}"
    scaling, softcap, sinks = (record.options.get(key) for key in ("scaling", "softcap", "s_aux"))
    given = (one.attention.head_dim**-0.5 if scaling is None else scaling, softcap, sinks)
    ours = (one.attention.scaling, one.attention.softcap, None)
    if given != ours:
        raise check.refusal(
            f"layer {one.index}, attention: scaling, softcap and sinks are {given} in the model, "
            f"and {ours} in ours"
        )
    own = None if one.attention.rotary is None else tables[one.attention.rotary]
    steps = _Steps(decoder, layer, window, len(x))
    for part in walk(layer, x, own, steps.attend, layer.mix, record.parts):
        if part.name in record.parts:
            check(name.format(part.name), part.kind, part.made, record.parts[part.name])
    if record.magnitude == 1.0:
        alone = walk(layer, x, own, steps.attend, steps.mix, {})[-1].made
        check(name.format("in one call"), decoder.one_call, steps.compute(x, tables), alone)


class _Steps:
    """A prompt over a small paged cache in three steps: it begins, goes on, and decodes a token."""

    def __init__(
        self, decoder: OurDecoder, layer: LayerParts, window: int | None, tokens: int
    ) -> None:
        self._decoder = decoder
        self._layer = layer
        attention = layer.description.attention
        self._ends = (0, tokens // 2, tokens - 1, tokens)
        blocks = -(-tokens // _BLOCK_SIZE)
        shape = ((blocks + 1) * _BLOCK_SIZE, attention.kv_heads, attention.head_dim)
        keys, values = torch.zeros((2, *shape), dtype=decoder.dtype, device=decoder.device)
        self._cache = LayerCache(keys, values, group=0)
        self._backend = decoder.backend
        self._metadata = [
            self._backend.prepare(_layout(start, end, blocks), window, self._cache.keys)
            for start, end in pairwise(self._ends)
        ]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The attention of all steps; see `engine.models.parts.Attend`."""
        one = self._layer.description.attention
        params = AttentionParams(one.scaling, one.softcap)
        query, key, value = (one.transpose(0, 1) for one in (query, key, value))
        made = []
        for (start, end), metadata in zip(pairwise(self._ends), self._metadata, strict=True):
            step = slice(start, end)
            made.append(
                self._backend.forward(
                    query[:, step], key[:, step], value[:, step], self._cache, metadata, params
                )
            )
        return torch.cat(made)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """The experts of all steps; see `engine.models.parts.Mix`."""
        ends = pairwise(self._ends)
        return torch.cat([self._layer.mix(x[start:end]) for start, end in ends])

    def compute(self, x: torch.Tensor, tables: Sequence[Tables]) -> torch.Tensor:
        """The whole layer, one call a step: [T, K] → [T, K]."""
        made = []
        caches = {self._layer.description.index: self._cache}
        for (start, end), metadata in zip(pairwise(self._ends), self._metadata, strict=True):
            context = AttentionContext(self._backend, caches, [metadata])  # type: ignore[arg-type]  # by index
            own = [(cos[start:end], sin[start:end]) for cos, sin in tables]
            made.append(self._decoder.run((self._layer,), x[start:end], own, context))
        return torch.cat(made)


def _layout(start: int, end: int, blocks: int) -> BatchLayout:
    return BatchLayout(
        starts=np.array([start], dtype=np.int64),
        counts=np.array([end - start], dtype=np.int64),
        num_decodes=int(end - start == 1),
        positions=np.arange(start, end),
        tables=np.arange(1, blocks + 1, dtype=np.int32)[None, :],
        block_size=_BLOCK_SIZE,
    )


class _Check:
    """Judges parts of a model of a family."""

    def __init__(self, family: str) -> None:
        self._family = family

    def __call__(self, name: str, kind: Kind, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Refuse the model if a part is too far from the model's own."""
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            raise self.refusal(
                f"{name} is {actual.dtype} {list(actual.shape)}, not {expected.dtype} "
                f"{list(expected.shape)}"
            )
        where = _JUDGES[kind](actual, expected)
        if where is not None:
            raise self.refusal(f"{name} differs from the model's own {where}")

    def refusal(self, text: str) -> ModelRefusedError:
        """The error for a part that differs."""
        return ModelRefusedError(
            f"our decoder does not compute this {self._family} as the model does: {text}; report "
            "it, and start with decoder set to transformers meanwhile"
        ).naming("decoder")


def _exact(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
    return _told(wrong, actual, expected) if wrong.any() else None


def _norm(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    difference = (actual.float() - expected.float()).abs()
    floor = _largest(expected) * _FLOOR
    if expected.dtype is torch.float32:
        wrong = difference > expected.abs() * _FLOAT32_NORM + floor
        return _told(wrong, actual, expected) if wrong.any() else None
    other = (difference > floor) & (actual != expected)
    far = other & ((_in_order(actual) - _in_order(expected)).abs() > 1)
    if far.any():
        return _told(far, actual, expected)
    if int(other.sum()) > max(_FEWEST, _MOST_NEIGHBOURS * actual.numel()):
        return f"in {other.float().mean():.1%} of places, if only to the next number"
    return None


def _product(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    ours, theirs = actual.float(), expected.float()
    difference, sizes = (ours - theirs).abs(), theirs.norm(dim=0)
    floors = sizes * _FLOOR_OF_OUTPUT + sizes.max() * _FLOOR
    wrong = ~(difference.norm(dim=0) <= sizes * _PRODUCT[expected.dtype] + sizes.max() * _FLOOR)
    if expected.dtype is torch.bfloat16:
        # One element that is rounded the other way may be that much. An output is wrong if most of
        # its elements differ, or one by more than rounding.
        differs = ~(difference <= floors)
        far = differs & ((_in_order(actual) - _in_order(expected)).abs() > 1)
        wrong = (wrong & (2 * differs.sum(dim=0) >= len(differs))) | far.any(dim=0)
    if not wrong.any():
        return None
    relative = difference.norm(dim=0) / sizes.clamp(min=1e-30)
    worst = int(torch.where(wrong, relative.nan_to_num(torch.inf), -1.0).argmax())
    return f"by {relative[worst]:.2%} in output {worst}, {int(wrong.sum())} of {len(wrong)} outputs"


def _attention(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    difference = (actual.float() - expected.float()).abs()
    wrong = ~(difference <= _largest(expected) * _ATTENTION[expected.dtype])
    return _told(wrong, actual, expected) if wrong.any() else None


_JUDGES: dict[Kind, Callable[[torch.Tensor, torch.Tensor], str | None]] = {
    "exact": _exact,
    "norm": _norm,
    "product": _product,
    "attention": _attention,
    "experts": _attention,  # the model's own code: this shows that it got what it should
}


def _largest(tensor: torch.Tensor) -> float:
    return tensor.float().abs().max().item()


def _told(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """How far tensors differ, where they do."""
    difference = torch.where(wrong, (actual.float() - expected.float()).abs(), 0.0)
    far = difference.max().item() / max(_largest(expected), 1e-30)
    token, place = divmod(int(difference.argmax()), actual.shape[-1])
    return (
        f"by {far:.2%} of its largest element, token {token}, element {place}; "
        f"{int(wrong.sum())} of {wrong.numel()} elements"
    )


def _in_order(elements: torch.Tensor) -> torch.Tensor:
    """Map bfloat16 values to integers such that neighbouring values differ by 1."""
    bits = elements.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -0x8000 - bits, bits)
