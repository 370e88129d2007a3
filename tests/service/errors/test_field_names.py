"""What the engine names when it refuses something, and what the caller is told: one map, which
knows every field that a request can be wrong about."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import model_service_pb2

import engine
from engine.contract.errors import (
    AdapterNotLoadedError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import (
    GrammarKind,
    GrammarParams,
    LogprobParams,
    SamplingParams,
    StopParams,
    check_stop_strings,
)
from engine.contract.token_ids import TokenIds
from engine.contract.types import CallerKey, RequestId
from engine.core.admission import AdmissionLimits
from service.errors.call_errors import FieldError, UnsupportedFieldError
from service.errors.contract_fields import CONTRACT_FIELDS, contract_path, field_error

SERVERS_OWN = {"request_id", "caller", "caller_group", "weight", "ticket"}
"""Fields of a GenerationRequest that the server fills in: no caller can be wrong about them. (A
caller's request id is checked before it is a ticket.)"""
OFFLINE = {"batching_options", "generation_options", "manager", "results", "offline"}
"""Modules of the Python API alone, where the engine's own names are the caller's."""
HOSTILE: tuple[Any, ...] = (
    *(-1, 2**70, math.nan, math.inf, -1e9, 1.5, 0, 0.0, "x", b"x" * 999),
    *((), (-1,), (2**40,), tuple(range(300)), range((1 << 18) + 1), ("\udcff",), ("",)),
    *(((1, math.nan),), ((-1, 1.0),), ((500, 1.0),), tuple((i, 1.0) for i in range(1025))),
)
LIMITS = AdmissionLimits(vocab_size=200, model_context=64, cache_context=64, heeds_priorities=True)


def request(**fields: Any) -> GenerationRequest:
    given: dict[str, Any] = {
        "request_id": RequestId("a"),
        "prompt": TokenIds.of([1]),
        "sampling": SamplingParams(),
        "stop": StopParams(max_tokens=4),
    }
    return GenerationRequest(**(given | fields))


def check(**fields: Any) -> None:
    LIMITS.check(request(**fields))


def attempts() -> Iterator[tuple[str, Any]]:
    """For each field of a request, hostile values in it: (its name, a call that takes one)."""
    parts: dict[str, type[Any]] = {
        "sampling": SamplingParams,
        "stop": StopParams,
        "logprobs": LogprobParams,
    }
    for field in dataclasses.fields(GenerationRequest):
        if field.name in parts or field.name == "grammar":
            continue
        for value in HOSTILE:
            yield field.name, lambda name=field.name, value=value: check(**{name: value})
    for part, kind in parts.items():
        needed = {"max_tokens": 4} if kind is StopParams else {}
        for field in dataclasses.fields(kind):
            for value in HOSTILE:
                yield (
                    f"{part}.{field.name}",
                    lambda part=part, kind=kind, given=needed | {field.name: value}: check(
                        **{part: kind(**given)}
                    ),
                )
    for form in GrammarKind:
        for text in ("", "\udcff", "x" * (1 << 19)):
            yield (
                f"grammar.{form.value}",
                lambda form=form, text=text: GrammarParams(kind=form, text=text, choices=(text,)),
            )
    for strings in ((1,), ("",), ("x" * 300,), ("x",) * 99):
        yield "stop_strings", lambda strings=strings: check_stop_strings(strings)


def refusals() -> dict[str, set[str]]:
    """What the engine names, by the field that was given the hostile values."""
    found: dict[str, set[str]] = {}
    for name, attempt in attempts():
        try:
            attempt()
        except (InvalidRequestError, UnsupportedFeatureError) as error:
            found.setdefault(name, set()).add(error.field)
        except AdapterNotLoadedError:
            found.setdefault(name, set()).add("adapter")
        except (TypeError, ValueError, AttributeError, OverflowError):
            pass  # of a type that no message has there
    return found


def is_in(path: str, message: Descriptor) -> bool:
    """Whether a path names a field of a message."""
    names = re.sub(r"\[[^]]*\]", "", path).split(".")
    for index, name in enumerate(names):
        field = message.fields_by_name.get(name)
        if field is None:
            return False
        if index + 1 == len(names):
            return True
        if name.endswith("_json"):  # the path goes on into the text
            return True
        if field.message_type is None:
            return False
        message = field.message_type
    return False


def is_contracts(path: str) -> bool:
    return is_in(path, pb.GenerationSpec.DESCRIPTOR) or is_in(
        path, model_service_pb2.DetokenizeRequest.DESCRIPTOR
    )


def is_known(field: str) -> bool:
    """Whether the map says what an engine's field is called, and it is called so."""
    is_mapped = any(re.match(re.escape(known) + r"($|[.\[])", field) for known in CONTRACT_FIELDS)
    return is_mapped and is_contracts(contract_path(field))


def test_each_name_of_the_map_is_a_field_of_the_contract() -> None:
    for engines, contracts in CONTRACT_FIELDS.items():
        assert is_contracts(contracts), f"{engines} is called {contracts}, which is no field"


def test_every_field_of_a_request_has_a_name_in_the_contract() -> None:
    names = {field.name for field in dataclasses.fields(GenerationRequest)}
    parts = {"sampling": SamplingParams, "stop": StopParams, "logprobs": LogprobParams}
    for part, kind in parts.items():
        names.remove(part)
        names |= {f"{part}.{field.name}" for field in dataclasses.fields(kind)}
    names -= {"logprobs.top_n", "logprobs.token_ids"}  # whose options have names of their own
    names |= {"logprobs", "logprob_token_ids"}
    names.remove("grammar")
    names |= {f"grammar.{form.value}" for form in GrammarKind}
    assert {name for name in names if not is_known(name)} == SERVERS_OWN


def test_whatever_the_engine_refuses_has_a_name_in_the_contract() -> None:
    found = refusals()
    bounded = {
        name
        for name, _ in attempts()
        if name.rpartition(".")[2]
        not in {"bypass_prefix_cache", "ignore_eos", "request_id", "ticket"}
    }
    assert set(found) == bounded, "a field that takes whatever it is given, or a new one"
    named = set().union(*found.values())
    assert {name for name in named if not is_known(name)} == SERVERS_OWN - {"request_id", "ticket"}


def test_every_field_that_the_engines_code_names_has_a_name_in_the_contract() -> None:
    unknown = set()
    for path in sorted(Path(engine.__file__).parent.rglob("*.py")):
        if path.stem in OFFLINE:
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            if call.func.id in {"InvalidRequestError", "UnsupportedFeatureError"}:
                named = beginning(call.args[0])
                if named is not None and not is_known(named):
                    unknown.add(named)
    assert unknown <= SERVERS_OWN


def beginning(argument: ast.expr) -> str | None:
    """What a string begins with, up to what is put in; None: with something that is put in."""
    if isinstance(argument, ast.JoinedStr):
        argument = argument.values[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value.rstrip(".[")
    return None


@pytest.mark.parametrize(
    ("error", "kind", "path"),
    [
        (InvalidRequestError("cache_salt", "is long"), FieldError, "add.spec.cache.salt"),
        (InvalidRequestError("prompt[3]", "is wrong"), FieldError, "add.spec.tokens.ids[3]"),
        (
            InvalidRequestError("prompt_logprobs", "is"),
            FieldError,
            "add.spec.output.prompt_logprobs",
        ),
        (FieldError("truncation.side", "is wrong"), FieldError, "add.spec.truncation.side"),
        (
            UnsupportedFeatureError("grammar", "is not there"),
            UnsupportedFieldError,
            "add.spec.structured_output",
        ),
        (UnsupportedFieldError("adapter", "not yet"), UnsupportedFieldError, "add.spec.adapter"),
    ],
)
def test_errors_of_a_part_name_the_whole_path(
    error: FieldError | InvalidRequestError | UnsupportedFeatureError,
    kind: type[FieldError],
    path: str,
) -> None:
    told = field_error(error, "add.spec.")
    assert (type(told), told.path, told.description) == (kind, path, error.description)
    assert str(told) == f"{path}: {error.description}"
    assert f"add.spec.{field_error(error).path}" == path


def test_a_field_that_the_contract_lacks_stays_as_it_is() -> None:
    assert contract_path(CallerKey("caller")) == "caller"
