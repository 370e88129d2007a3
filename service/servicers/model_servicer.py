"""ModelService: the model card, the adapters and the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.v1 import model_service_pb2, model_service_pb2_grpc

from service.admission.accounts import Account
from service.convert.adapter_messages import adapters_page
from service.convert.inputs import InputEncoder
from service.convert.values import check_ids
from service.delivery.events import detail_bytes
from service.door.auth import current_permit
from service.errors.call_errors import FieldError, NoTokenizerError
from service.state import FrontEnd, current_front

MIN_MOST_TOKENS = 1 << 17
"""The most token ids that one call may convert to text, or the model's context length if that is
larger.
"""
MIN_MOST_DETAILS = 1 << 14
"""The same limit for tokens with details; one takes about 200 bytes."""


class ModelServicer(model_service_pb2_grpc.ModelServiceServicer):
    """Implements ModelService."""

    async def GetModel(
        self, request: model_service_pb2.GetModelRequest, context: Any
    ) -> model_service_pb2.GetModelResponse:
        """Describe the model and the server's limits."""
        return model_service_pb2.GetModelResponse(model=current_front.get().card)

    async def ListAdapters(
        self, request: model_service_pb2.ListAdaptersRequest, context: Any
    ) -> model_service_pb2.ListAdaptersResponse:
        """List the adapters that the caller may use, in pages."""
        may_use = current_permit.get().caller.may_use
        adapters = await current_front.get().adapters.all()
        return adapters_page(request, [one for one in adapters if may_use(one.name)])

    async def Tokenize(
        self, request: model_service_pb2.TokenizeRequest, context: Any
    ) -> model_service_pb2.TokenizeResponse:
        """Convert text or a conversation to token ids."""
        front, account = current_front.get(), current_permit.get().account
        ids = await _encode(front, account, request)
        if not request.token_details:
            return model_service_pb2.TokenizeResponse(token_ids=ids)
        if len(ids) > (most := max(MIN_MOST_DETAILS, front.info.max_context_tokens)):
            raise FieldError(
                "token_details",
                f"asks for the details of {len(ids)} tokens; at most {most} are described: leave "
                "it out, or shorten the text",
            )

        def describe() -> model_service_pb2.TokenizeResponse:
            return model_service_pb2.TokenizeResponse(
                token_ids=ids, tokens=map(front.responder.token, ids)
            )

        return await front.text_pool.answer(account, detail_bytes(0) * len(ids), describe)

    async def Detokenize(
        self, request: model_service_pb2.DetokenizeRequest, context: Any
    ) -> model_service_pb2.DetokenizeResponse:
        """Convert token ids to text."""
        front, account = current_front.get(), current_permit.get().account
        encoder = _encoder(front)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        ids = check_ids(
            request.token_ids,
            "token_ids",
            front.info.vocab_size,
            most=max(MIN_MOST_TOKENS, front.info.max_context_tokens),
        )
        return model_service_pb2.DetokenizeResponse(text=await encoder.decode(account, ids, skip))


def _encoder(front: FrontEnd) -> InputEncoder:
    if front.encoder is None:
        raise NoTokenizerError
    return front.encoder


async def _encode(
    front: FrontEnd, account: Account, request: model_service_pb2.TokenizeRequest
) -> Sequence[int]:
    encoder = _encoder(front)
    match request.WhichOneof("input"):
        case "text":
            return await encoder.encode_text(account, request.text)
        case "chat":
            return (await encoder.encode_chat(account, request.chat)).ids
        case _:
            raise FieldError("input", "is missing; set one of text and chat")
