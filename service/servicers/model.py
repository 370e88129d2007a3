"""ModelService: the model card and the tokenizer."""

from __future__ import annotations

from typing import Any

from headrace.v1 import model_service_pb2, model_service_pb2_grpc

from engine.errors import InvalidRequestError
from service.convert.unknown import refuse_unknown
from service.convert.values import check_ids
from service.errors import FieldError
from service.state import FrontEnd, ServerState

MIN_MOST_TOKENS = 1 << 17
"""So many token ids may be turned into text, or described, in one call, or as many as the model's
context has if that is more.
"""


class ModelServicer(model_service_pb2_grpc.ModelServiceServicer):
    """Answers ModelService."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def GetModel(
        self, request: model_service_pb2.GetModelRequest, context: Any
    ) -> model_service_pb2.GetModelResponse:
        """Describe the model and the server's limits."""
        refuse_unknown(request)
        return model_service_pb2.GetModelResponse(model=self._state.front.card)

    async def Tokenize(
        self, request: model_service_pb2.TokenizeRequest, context: Any
    ) -> model_service_pb2.TokenizeResponse:
        """Text or a conversation as token ids."""
        refuse_unknown(request)
        front = self._state.front
        try:
            ids = await _encode(front, request)
        except InvalidRequestError as error:
            raise FieldError(error.field, error.description) from error
        response = model_service_pb2.TokenizeResponse(token_ids=ids)
        if request.token_details:
            response.tokens.extend(front.responder.token(token_id) for token_id in ids)
        return response

    async def Detokenize(
        self, request: model_service_pb2.DetokenizeRequest, context: Any
    ) -> model_service_pb2.DetokenizeResponse:
        """Token ids as text."""
        refuse_unknown(request)
        front = self._state.front
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        try:
            ids = check_ids(
                request.token_ids,
                "token_ids",
                front.info.vocab_size,
                most=max(MIN_MOST_TOKENS, front.info.max_context_tokens),
            )
        except InvalidRequestError as error:
            raise FieldError(error.field, error.description) from error
        return model_service_pb2.DetokenizeResponse(text=await front.encoder.decode(ids, skip))


async def _encode(front: FrontEnd, request: model_service_pb2.TokenizeRequest) -> list[int]:
    match request.WhichOneof("input"):
        case "text":
            return await front.encoder.encode_text(request.text)
        case "chat":
            return await front.encoder.encode_chat(request.chat)
        case _:
            raise FieldError("input", "is missing; set one of text and chat")
