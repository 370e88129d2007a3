"""Refuses fields of the contract that this server does not support yet, by name, with
UNIMPLEMENTED.

A field with its neutral value requests nothing, and is accepted.
"""

from __future__ import annotations

from headrace.v1 import generation_pb2

from service.errors.call_errors import UnsupportedFieldError

_NO_ADAPTERS = (
    "names an adapter, and this server has none, which its operator adds with --adapter or "
    "--adapter-root"
)


_NO_TOKENIZER = "the model has no tokenizer"


def refuse_unsupported(
    spec: generation_pb2.GenerationSpec,
    *,
    has_adapters: bool,
    heeds_priorities: bool,
    has_tokenizer: bool,
) -> None:
    """Refuse fields that are not supported yet, or not supported by this server's configuration or
    model.

    Raises:
        UnsupportedFieldError: a field is not supported. The error has its path in the spec.
    """
    if spec.adapter and not has_adapters:
        raise UnsupportedFieldError("adapter", f"{_NO_ADAPTERS}; leave it out")
    if spec.scheduling.priority != 0 and not heeds_priorities:
        raise UnsupportedFieldError(
            "scheduling.priority",
            "is not heeded by this server's scheduler, which its operator changes with --scheduler "
            "fair; leave it out",
        )
    if not has_tokenizer:
        _refuse_text(spec)


def _refuse_text(spec: generation_pb2.GenerationSpec) -> None:
    """Refuse fields that need text, for a model without a tokenizer."""
    instead = f"{_NO_TOKENIZER}; send token ids (tokens)"
    stop, output = spec.stop, spec.output
    for field, asked, why in (
        ("text", spec.HasField("text"), instead),
        ("chat", spec.HasField("chat"), instead),
        (
            "prediction.text",
            spec.prediction.HasField("text"),
            f"{_NO_TOKENIZER}; send token ids (prediction.tokens)",
        ),
        (
            "stop.stop_strings",
            stop.stop_strings,
            f"are matched in the text, and {_NO_TOKENIZER}; send stop_token_ids",
        ),
        (
            "stop.include_stop",
            stop.include_stop,
            f"is about the text, and {_NO_TOKENIZER}; leave it out: token_ids have the token that "
            "ended the output",
        ),
        (
            "output.echo",
            output.echo,
            f"asks for the prompt's text, and {_NO_TOKENIZER}; leave it out",
        ),
        (
            "output.token_details",
            output.token_details,
            f"asks for the tokens' texts, and {_NO_TOKENIZER}; leave it out: token_ids come anyway",
        ),
        (
            "structured_output",
            spec.HasField("structured_output"),
            f"needs the tokens' texts, and {_NO_TOKENIZER}; leave it out, or list "
            "sampling.allowed_token_ids",
        ),
    ):
        if asked:
            raise UnsupportedFieldError(field, why)
