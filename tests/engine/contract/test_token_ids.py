from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.errors import InvalidRequestError
from engine.contract.request import GenerationRequest, Request
from engine.contract.sampling_params import LogprobParams, SamplingParams, StopParams
from engine.contract.token_ids import NO_IDS, NO_VALUES, TokenIds, TokenValues
from engine.contract.types import CallerKey, RequestId

IDS = st.lists(st.integers(0, 2**31 - 1)).map(tuple)
INDICES = st.one_of(st.none(), st.integers(-20, 20))


@given(IDS, IDS, INDICES, INDICES, st.sampled_from([None, 1, 2, -1]))
def test_it_is_as_the_tuple_of_the_same_ids(
    ids: tuple[int, ...],
    others: tuple[int, ...],
    start: int | None,
    stop: int | None,
    step: int | None,
) -> None:
    packed = TokenIds.of(ids)
    assert packed == ids
    assert hash(packed) == hash(ids)
    assert (packed == TokenIds.of(others)) == (ids == others)
    assert (list(packed), len(packed), bool(packed)) == (list(ids), len(ids), bool(ids))
    assert packed[start:stop:step] == ids[start:stop:step]
    assert all(packed[index] == token and token in packed for index, token in enumerate(ids))
    assert all(type(token) is int for token in packed)
    assert packed.array.tolist() == list(ids)
    assert TokenIds.of(packed) is packed


@given(st.lists(st.integers(0, 200)), st.lists(st.integers(0, 20)))
def test_sets(ids: list[int], others: list[int]) -> None:
    packed = TokenIds.set_of(ids)
    assert list(packed) == sorted(set(ids))
    assert list(packed.without(TokenIds.of(others))) == sorted(set(ids) - set(others))


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(allow_nan=False))).map(tuple))
def test_biases_are_as_the_tuple_of_the_same_pairs(pairs: tuple[tuple[int, float], ...]) -> None:
    packed = TokenValues.of(pairs)
    assert packed == pairs
    assert hash(packed) == hash(pairs)
    assert (list(packed), len(packed), packed[:2]) == (list(pairs), len(pairs), pairs[:2])
    assert all(packed[index] == pair for index, pair in enumerate(pairs))
    assert packed.values.tolist() == [value for _, value in pairs]


@pytest.mark.parametrize("wrong", [-1, 2**31, True, 1.0, "7", None, np.int64(3)])
def test_what_is_no_id_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TokenIds.of([3, wrong, 5], "prompt")  # type: ignore[list-item]
    assert caught.value.field == "prompt[1]"
    assert repr(wrong) in caught.value.description


def _request() -> GenerationRequest:
    ids = tuple(range(1000, 5000))
    return GenerationRequest(
        request_id=RequestId("r"),
        prompt=TokenIds.of(ids),
        sampling=SamplingParams(
            logit_bias=TokenValues.of((token, 0.5) for token in ids[:1024]),
            allowed_token_ids=TokenIds.of(ids),
            banned_token_ids=TokenIds.of(ids[1:]),
        ),
        stop=StopParams(
            max_tokens=9, stop_token_ids=TokenIds.of(ids[:256]), eos_token_ids=TokenIds.of((2,))
        ),
        logprobs=LogprobParams(token_ids=TokenIds.of(ids[:128])),
        n=16,
        caller=CallerKey("somebody"),
        caller_group=CallerKey("some"),
        weight=2.5,
    )


def test_a_request_crosses_to_the_engine_s_process_as_it_is() -> None:
    request = _request()
    message = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.Decoder(GenerationRequest).decode(message) == request
    # Three lists of four bytes an id, pairs of twelve, and little else.
    assert len(message) < 3 * 4 * 4000 + 12 * 1024 + 4 * 400 + 1000


def test_a_request_s_choices_share_what_they_can() -> None:
    spec = _request()
    endings = spec.stop.ending_token_ids
    first, second = (
        Request(spec=spec, arrival=0.0, max_total_tokens=4009, ending_token_ids=endings, choice=i)
        for i in range(2)
    )
    assert first.ending_token_ids is second.ending_token_ids
    first.token_ids.append(7)
    assert first.token_ids.tolist() == [*range(1000, 5000), 7]
    assert second.token_ids.tolist() == [*range(1000, 5000)]
    assert first.token_ids.itemsize == 4


def test_nothing_is_nothing() -> None:
    assert not NO_IDS
    assert not NO_VALUES
    assert SamplingParams().allowed_token_ids == ()
    assert SamplingParams().logit_bias == ()
