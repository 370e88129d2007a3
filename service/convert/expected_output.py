"""Converts the output that a caller expects to token ids."""

from __future__ import annotations

from headrace.v1 import generation_pb2

from engine.contract.engine_client import ModelInfo
from engine.contract.token_ids import NO_IDS, TokenIds
from service.admission.accounts import Account
from service.convert.inputs import InputEncoder
from service.convert.values import check_ids
from service.errors.call_errors import FieldError, NoTokenizerError


async def predicted_ids(
    account: Account,
    spec: generation_pb2.GenerationSpec,
    info: ModelInfo,
    encoder: InputEncoder | None,
) -> TokenIds:
    """Return the token ids of the expected output; none if there is none, or nothing is guessed.

    Args:
        account: the account that is charged for tokenizing a text.
        spec: the caller's spec.
        info: the model.
        encoder: None if the model has no tokenizer.

    Raises:
        FieldError: it is longer than the context, or an id is out of range.
    """
    if not spec.HasField("prediction"):
        return NO_IDS
    limit, expected = info.max_context_tokens, spec.prediction
    match expected.WhichOneof("content"):
        case "tokens":
            ids = check_ids(
                expected.tokens.ids, "prediction.tokens.ids", info.vocab_size, most=limit
            )
            return ids if info.speculates else NO_IDS
        case "text":
            if encoder is None:
                raise NoTokenizerError
            if not info.speculates:
                return NO_IDS
            encoded = await encoder.encode_prediction(account, expected.text)
            if len(encoded) > limit:
                raise FieldError(
                    "prediction.text",
                    f"has {len(encoded)} tokens; at most {limit} (limits.max_context_tokens) can "
                    "come; shorten it",
                )
            return TokenIds.of(encoded)
        case _:
            raise FieldError("prediction", "is empty; set text or tokens, or leave it out")
