"""Compares our decoder with what the unmodified model computed, operation by operation in each
layer.

    ModelRecord ─▶ each layer: each operation on the model's own input of it, in all magnitudes
                ─▶ the whole layer in one call per step, over a paged cache: equal to the operations
                ─▶ embedding, last norm, output layer, logits

Operations without a sum must be equal, bit for bit. Norms may sum in a different order, and the e^x
of activations may differ in its last bits. So up to 1 % of their elements may differ, by one or two
representable values (two, because some are rounded twice). But if an element differs in half of the
tokens, that is a fault in one weight. In a product, each output's error over the tokens must be
below half a percent of that output, apart from single elements that round the other way. This finds
an error of 1 % in one row of one weight. A delta rule is judged as a product is.

Loading waits for the comparison, so each weight is read only three times: once for all magnitudes
together, and once for each of the two steps that compute the layer in one call. The results are
judged on one thread: they are so small that on a busy machine several threads would only wait for
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.attention.interface import AttentionParams, LayerShape
from engine.attention.small_cache import SmallCache, Span, zeros
from engine.attention.step_states import Recurrence
from engine.contract.errors import ModelRefusedError
from engine.models import description as described
from engine.models.decoder_frame import DecoderFrame
from engine.models.layer_parts import Kind, LayerParts, Walk
from engine.models.operations import Tables
from engine.models.recording import (
    GROWTH,
    MAGNITUDES,
    LayerRecord,
    Observation,
    enlarge_first,
    enlarge_last,
)

_MOST_NEIGHBOURS = 0.01
"""The fraction of a norm's elements that may round the other way."""
_FEWEST = 2
"""The number of elements that may always differ, because 1 % of a few elements is less than one."""
_TWICE = 2
"""The allowed distance, in representable values, of results that are rounded again after they are
multiplied by a norm's weight or by `up`. The second rounding can add to the error of the first.
"""
_COLUMN = 4
"""The minimum number of tokens that must differ in one element of a norm to count as a fault."""
_PRODUCT = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-4}
"""The allowed error of an output over all tokens, relative to that output."""
_ATTENTION = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 2e-3}
"""The allowed error of attention, relative to its largest element, as in the load gate. In 16 bits,
`_SCORE` adds to it.
"""
_SCORE = {torch.bfloat16: 2.0**-10, torch.float16: 2.0**-13, torch.float32: 0.0}
"""The additional error of attention that is allowed per unit of the largest score.

The model's own code loses about this much when it rounds scores, and e^x turns the loss into a
fraction of the probability. This matters where attention is confident, with scores of 10 or more,
as in trained models (3.01 % was seen with a score of 44).
"""
_FLOAT32_NORM = 2.0**-20
"""The allowed relative error of a norm in float32."""
_FLOOR = 2.0**-18
"""Errors below this, relative to the largest element, come from summing in a different order."""
_FLOOR_OF_OUTPUT = 2.0**-11
"""The same threshold for single elements of a product, relative to the size of the whole output."""
_BLOCK_SIZE = 4


class DiffersError(Exception):
    """The model's own code computes something else than our decoder. The message is worded to
    complete a sentence.
    """


def compare(decoder: DecoderFrame, observation: Observation) -> None:
    """Compare our decoder with the model. See the module for the criteria.

    Args:
        decoder: our decoder.
        observation: the model, recorded.

    Raises:
        DiffersError: a result differs. The message says which, in which layer, and by how much.
        ModelRefusedError: the embedding or a product differs, so that the weights are not what they
            were. Without our decoder they would be read, too.
    """
    one, check, record = decoder.description, _Check(decoder.description.family), observation.record
    if record is None:
        raise ValueError("nothing was recorded")
    tokens = len(record.token_ids)
    with torch.inference_mode():
        check("embedding", "lookup", decoder.embed(record.token_ids), record.layers[0].x[:tokens])
        tables = decoder.tables(torch.cat([record.positions.flatten(), record.positions[0]]))
        for layer, found in zip(decoder.layers, record.layers, strict=True):
            carried = _Carried.of(layer, observation)
            _compare_layer(check, decoder, layer, carried, tables, found)
        last = record.layers[-1].parts["result"][:tokens]
        for magnitude, normed in zip(
            MAGNITUDES[last.dtype], record.normed.chunk(len(record.positions)), strict=True
        ):
            name = f"{one.norm.module}, with inputs times {magnitude:g}"
            check(name, "norm", decoder.norm(last * magnitude), normed)
        check(one.output, "product", decoder.output(record.normed[:tokens]), record.product)
        logits = decoder.finish(enlarge_first(record.product))
        check("logits", "exact", logits, record.logits)


def _compare_layer(
    check: _Check,
    decoder: DecoderFrame,
    layer: LayerParts,
    carried: _Carried,
    tables: Sequence[Tables],
    record: LayerRecord,
) -> None:
    one = layer.description
    turned = None
    if isinstance(one.mixer, described.Attention):
        _compare_options(check, one.index, layer.params, one.mixer.head_dim, record)
        turned = None if one.mixer.rotary is None else tables[one.mixer.rotary]
    magnitudes = MAGNITUDES[record.x.dtype]
    tokens = len(record.x) // len(magnitudes)
    # A part's input is the model's own in each magnitude; in one copy more it is our own.
    x = torch.cat([record.x, record.x[:tokens]])
    copies = len(magnitudes) + 1
    prompts, alone = (_Prompts(decoder, layer, carried, tokens, count) for count in (copies, 1))

    def mix(between: torch.Tensor) -> torch.Tensor:
        recorded, ours = between[: len(record.x)], between[len(record.x) :]
        return torch.cat([layer.mix(recorded), alone.mix(ours)])

    enlarged = {
        name: enlarge_last(name, record.parts[name].view(len(magnitudes), tokens, -1)).flatten(0, 1)
        for name in GROWTH[x.dtype].keys() & record.parts.keys()
    }
    walk = Walk(layer, record.parts | enlarged)
    walk.run(x, turned, prompts.attend, prompts.recur, mix)
    made = alone.compute(record.x[:tokens], [(cos[:tokens], sin[:tokens]) for cos, sin in tables])
    judged = _in_range(record, len(magnitudes))
    with _one_thread():
        for part in walk.parts:
            if part.name in record.parts:
                actual = part.made[: len(record.x)].chunk(len(magnitudes))
                expected = record.parts[part.name].chunk(len(magnitudes))
                for magnitude, is_judged, score, computed, wanted in zip(
                    magnitudes, judged, prompts.scores[:-1], actual, expected, strict=True
                ):
                    name = f"layer {one.index}, {part.name}, with inputs times {magnitude:g}"
                    if is_judged:
                        check(name, part.kind, computed, wanted, score)
        name = f"layer {one.index}, in one call, with inputs times 1"
        check(name, decoder.one_call, made, walk.parts[-1].made[len(record.x) :])


def _compare_options(
    check: _Check, layer: int, params: AttentionParams, head_dim: int, record: LayerRecord
) -> None:
    scaling, softcap, sinks = (record.options.get(key) for key in ("scaling", "softcap", "s_aux"))
    given = (head_dim**-0.5 if scaling is None else scaling, softcap, _numbers(sinks))
    ours = (params.scaling, params.softcap, _numbers(params.sinks))
    if given != ours:
        raise check.error(
            f"layer {layer}, attention: scaling, softcap and sinks are {given} in the model, "
            f"and {ours} in ours",
            "attention",
        )


def _numbers(sinks: torch.Tensor | None) -> list[float] | None:
    return None if sinks is None else sinks.tolist()


def _in_range(record: LayerRecord, magnitudes: int) -> list[bool]:
    """Return, for each magnitude, whether the model's own results are finite.

    Results that are not finite cannot be compared: in float16 a scaled-up input may overflow. The
    unscaled input always counts.
    """
    if record.x.dtype is not torch.float16:
        return [True] * magnitudes
    finite = torch.stack(
        [
            torch.stack([one.isfinite().all() for one in part.chunk(magnitudes)])
            for part in record.parts.values()
        ]
    )
    return [True, *finite.all(dim=0).tolist()[1:]]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class _Carried:
    """What a layer keeps of earlier tokens.

    Attributes:
        shapes: of its keys and values, by its index; empty if it does not attend.
        recurrence: its states.
    """

    shapes: Mapping[int, LayerShape]
    recurrence: Recurrence

    @classmethod
    def of(cls, layer: LayerParts, observation: Observation) -> _Carried:
        """Return what a layer was seen to keep. Keys and values are of the described shape."""
        one, every = layer.description, observation.recurrence
        if not isinstance(one.mixer, described.Attention):
            own = tuple(shape for shape in every.shapes if shape.layer == one.index)
            return cls({}, replace(every, shapes=own))
        window, dim = observation.shapes[one.index].window, one.mixer.head_dim
        shape = LayerShape(one.mixer.kv_heads, dim, dim, window)
        return cls({one.index: shape}, replace(every, shapes=()))


class _Prompts:
    """Copies of a prompt over a small paged cache, computed in several steps.

    In the first step, the two halves of each copy are two requests that share a cache. This shows
    that all keys of a step are written before any is read. In the last step, each copy decodes
    its last token. A recurrence needs the state that the first half leaves, so there the second
    half is a step of its own.
    """

    def __init__(
        self,
        decoder: DecoderFrame,
        layer: LayerParts,
        carried: _Carried,
        tokens: int,
        copies: int,
    ) -> None:
        self._decoder, self._layer, self._copies = decoder, layer, copies
        self.scores = [0.0] * copies
        """The largest absolute score of each copy."""
        small = SmallCache(
            decoder.backend,
            carried.shapes,
            [tokens] * copies,
            _BLOCK_SIZE,
            zeros(decoder.dtype, decoder.device),
            carried.recurrence,
        )
        first, second, last = (0, tokens // 2), (tokens // 2, tokens - 1), (tokens - 1, tokens)
        steps = ((second, first), (last,)) if carried.shapes else ((first,), (second,), (last,))
        self._steps = [
            small.step([Span(copy, *span) for span in spans for copy in range(copies)])
            for spans in steps
        ]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute attention alone; see `engine.models.layer_parts.Attend`."""
        index, one = self._layer.description.index, self._layer.description.attention
        made, params = torch.empty_like(query), self._layer.params
        # [copies, kv heads, heads of a group, T, head_dim] and [copies, kv heads, 1, T, head_dim]
        shape = (self._copies, -1, one.kv_heads, one.heads // one.kv_heads, one.head_dim)
        q = query.float().view(shape).permute(0, 2, 3, 1, 4)
        k = key.float().view(*shape[:3], 1, one.head_dim).permute(0, 2, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).tril().abs().flatten(1).amax(dim=1) * one.scaling
        self.scores = scores.tolist() if one.softcap is None else [one.softcap] * self._copies
        for step in self._steps:
            q, k, v = (given[step.rows].transpose(0, 1) for given in (query, key, value))
            made[step.rows] = step.context.attend(index, q, k, v, params)
        return made

    def recur(self, projected: torch.Tensor) -> torch.Tensor:
        """Compute the recurrence alone; see `engine.models.layer_parts.Recur`."""
        made = []
        for step in self._steps:
            states = step.context.states
            if states is None:
                raise TypeError(f"{self._layer.description.module} carries no state")
            made.append(self._layer.recur(projected[step.rows], states))
        rows = torch.cat([step.rows for step in self._steps])
        return torch.cat(made).index_select(0, rows.argsort())

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the experts, whose results may depend on neighbouring rows; see
        `layer_parts.Mix`.
        """
        made = torch.empty_like(x)
        for step in self._steps:
            made[step.rows] = self._layer.mix(x[step.rows])
        return made

    def compute(self, x: torch.Tensor, tables: Sequence[Tables]) -> torch.Tensor:
        """Compute the whole layer with one call per step: [T, K] → [T, K]."""
        made = torch.empty_like(x)
        for step in self._steps:
            own = [(cos[step.rows], sin[step.rows]) for cos, sin in tables]
            made[step.rows] = self._decoder.run((self._layer,), x[step.rows], own, step.context)
        return made


class _Check:
    """Compares results with those of a model. `family` appears in the error messages."""

    def __init__(self, family: str) -> None:
        self._family = family

    def __call__(
        self,
        name: str,
        kind: Kind,
        actual: torch.Tensor,
        expected: torch.Tensor,
        score: float = 0.0,
    ) -> None:
        """Raise the error if a result is too far from the model's own.

        `score` is the largest attention score of the layer.
        """
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            raise self.error(
                f"{name} is {actual.dtype} {list(actual.shape)}, not {expected.dtype} "
                f"{list(expected.shape)}",
                kind,
            )
        if kind == "attention":
            where = _attention(actual, expected, score)
        else:
            where = _JUDGES[kind](actual, expected)
        if where is not None:
            raise self.error(f"{name} differs from the model's own {where}", kind)

    def error(self, text: str, kind: Kind) -> Exception:
        """Return the error to raise when the result of an operation differs."""
        text = f"our decoder does not compute this {self._family} as the model does: {text}"
        is_weight = kind in ("lookup", "product")
        if not is_weight:
            return DiffersError(text)
        return ModelRefusedError(
            f"{text}; report it, and start with decoder set to transformers and pack_weights off "
            "meanwhile"
        ).naming("decoder", "pack_weights")


def _exact(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    if torch.equal(actual, expected):
        return None
    wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
    return _told(wrong, actual, expected) if wrong.any() else None


def _norm(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    places = (actual != expected) & ~(actual.isnan() & expected.isnan())
    ours, theirs = actual[places], expected[places]  # a few of many
    difference, floor = (ours.float() - theirs.float()).abs(), _largest(expected) * _FLOOR
    if expected.dtype is torch.float32:
        far = ~(difference <= theirs.abs() * _FLOAT32_NORM + floor)
    else:
        other = ~(difference <= floor)
        far = other & (_are_apart(ours, theirs, _TWICE) | _are_common(places, other))
        count = int(other.sum())
        if not far.any() and count > max(_FEWEST, _MOST_NEIGHBOURS * actual.numel()):
            return f"in {count / actual.numel():.1%} of places, if only to the next number"
    return _told(places.masked_scatter(places, far), actual, expected) if far.any() else None


def _product(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    theirs = expected.float()
    difference = (actual.float() - theirs).abs_()
    infinite = theirs.isinf()  # a bias that masks an output; it must be so in ours
    if infinite.any():
        difference[infinite & (actual == expected)] = 0.0
        theirs = theirs.masked_fill(infinite, 0.0)
    errors, sizes = (one.square().sum(dim=0).sqrt_() for one in (difference, theirs))
    largest = sizes.max()
    wrong = ~(errors <= sizes * _PRODUCT[expected.dtype] + largest * _FLOOR)
    if expected.dtype is not torch.float32:
        # One element that is rounded the other way may be that much. An output is wrong if most of
        # its elements differ, or one by more than rounding.
        differs = ~(difference <= sizes * _FLOOR_OF_OUTPUT + largest * _FLOOR)
        wrong &= 2 * differs.sum(dim=0) >= len(differs)
        token, output = differs.nonzero(as_tuple=True)
        far = _are_apart(actual[token, output], expected[token, output])
        wrong[output[far]] = True
    if not wrong.any():
        return None
    relative = errors / sizes.clamp(min=1e-30)
    worst = int(torch.where(wrong, relative.nan_to_num(torch.inf), -1.0).argmax())
    return f"by {relative[worst]:.2%} in output {worst}, {int(wrong.sum())} of {len(wrong)} outputs"


def _attention(actual: torch.Tensor, expected: torch.Tensor, score: float = 0.0) -> str | None:
    difference = (actual.float() - expected.float()).abs_()
    allowed = _ATTENTION[expected.dtype] + _SCORE[expected.dtype] * score
    wrong = ~(difference <= _largest(expected) * allowed)
    return _told(wrong, actual, expected) if wrong.any() else None


_JUDGES: dict[Kind, Callable[[torch.Tensor, torch.Tensor], str | None]] = {
    "exact": _exact,
    "lookup": _exact,
    "norm": _norm,
    "product": _product,
    "recurrence": _product,
    "experts": _attention,  # many sums one after another, as in attention
}


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


def _told(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Describe how far two tensors differ at the given elements."""
    difference = torch.where(wrong, (actual.float() - expected.float()).abs(), 0.0)
    far = difference.max().item() / max(_largest(expected), 1e-30)
    token, place = divmod(int(difference.argmax()), actual.shape[-1])
    return (
        f"by {far:.2%} of its largest element, token {token}, element {place}; "
        f"{int(wrong.sum())} of {wrong.numel()} elements"
    )


def _are_common(places: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which of these elements [T, width] are in columns where at least half of the tokens
    differ.

    Rounding differences are scattered, but a fault in one element of a weight is not.
    """
    columns = places.nonzero()[:, 1]
    counts = torch.bincount(columns[other], minlength=places.shape[1])
    return (counts >= max(_COLUMN, len(places) / 2))[columns]


def _are_apart(one: torch.Tensor, other: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """Return whether 16-bit elements are more than `steps` representable values apart."""
    return (_in_order(one) - _in_order(other)).abs() > steps


def _in_order(elements: torch.Tensor) -> torch.Tensor:
    """Map 16-bit values to integers so that neighbouring values differ by 1."""
    bits = elements.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -0x8000 - bits, bits)
