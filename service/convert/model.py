"""The model card: what a client may need to know before it sends a request."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headrace.v1 import model_service_pb2

from engine.contract.engine_client import ModelInfo
from engine.contract.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from engine.text import Tokenizer
from service.config import ServiceConfig
from service.convert.response import sampling_message
from service.convert.values import to_duration
from service.replies import ModelFormat

SCHEMA_REVISION = 14
"""The revision of the contract. It grows with every change."""
MINIMUM_CLIENT_REVISION = 7
"""The oldest client revision that this server supports."""
FORMS = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")
"""The kinds of structured output, by their names in StructuredOutput."""


def server_version() -> str:
    """Return the version of the installed server."""
    try:
        return version("headrace-server")
    except PackageNotFoundError:
        return "unknown"


def model_card(
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    config: ServiceConfig,
    instance_id: str,
    reply: ModelFormat | None,
) -> model_service_pb2.ModelCard:
    """Describe the model and the server's limits. `tokenizer`: None if the model has none. `reply`:
    the format of its replies, or None if they are plain text.
    """
    name = config.served_name or info.name
    return model_service_pb2.ModelCard(
        name=name,
        aliases=[alias for alias in dict.fromkeys(config.served_alias) if alias != name],
        architecture=info.architecture,
        parameters=info.parameters,
        dtype=info.dtype,
        quantization="" if info.quantization == "none" else info.quantization,
        device=info.device,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        # Without a seed, because a missing one is drawn for each request.
        default_sampling=sampling_message(info.default_sampling, seed=False),
        limits=model_service_pb2.Limits(
            max_context_tokens=info.max_context_tokens,
            max_prompt_tokens=info.max_context_tokens - 1,
            default_max_tokens=config.default_max_tokens,
            max_choices=config.max_choices,
            max_logprobs=MAX_LOGPROBS,
            max_stop_strings=MAX_STOP_STRINGS,
            max_stop_string_bytes=MAX_STOP_STRING_BYTES,
            max_stop_token_ids=MAX_STOP_TOKEN_IDS,
            max_logit_bias=MAX_LOGIT_BIAS,
            max_message_bytes=config.max_receive_bytes,
            max_queue_size=info.max_queue_size,
            max_running_requests=info.max_running_requests,
            max_lease=to_duration(config.max_lease_s),
            result_retention=to_duration(config.result_retention_s),
            max_unread_tokens=config.max_unread_tokens,
            max_hold=(to_duration(config.max_hold_s) if config.slow_reader == "hold" else None),
        ),
        capabilities=_capabilities(info, tokenizer, config, reply),
        instance_id=instance_id,
        server_version=server_version(),
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=MINIMUM_CLIENT_REVISION,
    )


def _capabilities(
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    config: ServiceConfig,
    reply: ModelFormat | None,
) -> model_service_pb2.Capabilities:
    """Return what this server can do with its model. The names are those that mark fields of the
    contract (capability.proto).
    """
    text = tokenizer is not None
    chat = tokenizer is not None and tokenizer.has_chat_template
    return model_service_pb2.Capabilities(
        names=sorted(
            {
                *(("structured_output", "structural_tag") if text else ()),
                *(("chat", "tools", "content_parts") if chat else ()),
                *(("typed_replies",) if chat and reply is not None else ()),
                *(("tool_choice",) if chat and reply and reply.call_form else ()),
                *(("reasoning_budget",) if chat and reply and reply.reasons else ()),
                *(("adapters",) if info.serves_adapters else ()),
                *(("priorities",) if info.heeds_priorities else ()),
                "prediction",
            }
        ),
        input=model_service_pb2.InputCapabilities(
            text=text,
            token_ids=True,
            chat=chat,
            tools=chat,
            content_parts=["text"] if chat else [],
            chat_template="" if config.chat_template is None else Path(config.chat_template).name,
        ),
        output=model_service_pb2.OutputCapabilities(
            logprobs=True,
            prompt_logprobs=True,
            structured_output=FORMS if text else (),
            reply_parser=reply.format.name if chat and reply is not None else "",
            reply_parser_proof=reply.proof if chat and reply is not None else "",
        ),
        scheduling=model_service_pb2.SchedulingCapabilities(
            priorities=info.heeds_priorities,
            prefix_cache=config.prefix_cache,
            speculation=info.speculates,
        ),
    )
