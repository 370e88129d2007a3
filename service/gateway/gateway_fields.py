"""Translates field names in errors from our contract to the gateway's protocol.

    FieldError("spec.sampling.top_p", …) ──▶ FieldError("sampling_params.top_p", …)

`convert.fields` does the same for the engine's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from service.errors.call_errors import FieldError, UnsupportedFieldError
from service.errors.contract_fields import contract_path
from service.errors.result_errors import AcceptedRequestFailedError

SPEC = "spec"
"""The path of the spec in our contract's message."""
_FIELDS: Mapping[str, str] = {
    "tokens.ids": "tokenized.input_ids",
    "text.text": "text",
    "sampling": "sampling_params",
    "stop": "sampling_params",
    "stop.stop_strings": "sampling_params.stop",
    "stop.include_stop": "sampling_params.include_stop_str_in_output",
    "output": "sampling_params",
    "structured_output": "sampling_params",
    "truncation.max_prompt_tokens": "sampling_params.truncate_prompt_tokens",
    "n": "sampling_params.n",
}
"""Maps path prefixes in our contract to those in the protocol. The rest of a path is unchanged."""


def gateway_path(path: str) -> str:
    """Return the protocol's path for a path in our contract; unchanged if the names are the
    same.
    """
    path = path.removeprefix(f"{SPEC}.")
    names = path.split("[")[0].split(".")
    for count in range(len(names), 0, -1):
        known = ".".join(names[:count])
        if known in _FIELDS:
            return _FIELDS[known] + path.removeprefix(known)
    return path


@contextmanager
def named_for_gateway() -> Iterator[None]:
    """Re-raise errors that name a field of our contract with the protocol's name for it."""
    try:
        yield
    except FieldError as error:
        kind = UnsupportedFieldError if isinstance(error, UnsupportedFieldError) else FieldError
        raise kind(gateway_path(error.path), error.description) from None
    except AcceptedRequestFailedError as error:
        failure = error.failure
        if failure.field is None or failure.retryable:
            raise
        description = failure.message.removeprefix(f"{failure.field}: ")
        raise FieldError(gateway_path(contract_path(failure.field)), description) from None
