"""Makes the front end of a loaded model: everything that takes a request from a message to its
answer.

InputEncoder ─▶ Converter ─▶ Registry ─▶ Responder          ModelCard, and why it lacks what
"""

from __future__ import annotations

from engine.contract.engine_client import EngineVerbs, ModelInfo
from engine.text import Tokenizer
from service.admission.served_adapters import ServedAdapters
from service.admission.text_pool import TextPool
from service.config import ServiceConfig
from service.convert.converter import Converter
from service.convert.inputs import InputEncoder
from service.convert.lacking import why_lacking
from service.convert.model import model_card
from service.convert.response import Responder
from service.delivery.load_watch import LoadWatch
from service.delivery.registry import Registry
from service.replies import ModelFormat
from service.server.server_limits import request_limits_of
from service.state import FrontEnd
from service.telemetry.setup import ServerTelemetry


def make_front_end(
    config: ServiceConfig,
    client: EngineVerbs,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    reply: ModelFormat | None,
    *,
    instance_id: str,
    registry: Registry,
    loads: LoadWatch,
    text_pool: TextPool,
    telemetry: ServerTelemetry,
) -> FrontEnd:
    """Make the front end of a model that the engine has loaded.

    Args:
        config: the server's options.
        client: the engine.
        info, tokenizer, reply: the model, as described by the engine and `ModelText`.
        instance_id, registry, loads, text_pool: the parts of the server that do not depend on the
            model.
        telemetry: receives the model's name; the front end uses its spans and metrics.

    Raises:
        ConfigError: an adapter has a name of the model.
    """
    encoder = None
    if tokenizer is not None:
        encoder = InputEncoder(
            tokenizer,
            text_pool,
            max_context_tokens=info.max_context_tokens,
            max_receive_bytes=config.max_receive_bytes,
        )
    card = model_card(info, tokenizer, config, instance_id, reply)
    lacking = why_lacking(tokenizer, reply, config.reply_parser)
    names = (card.name, *card.aliases)
    adapters = ServedAdapters(client, info, names)
    if (spans := telemetry.spans) is not None:
        spans.loaded(card.name, None if tokenizer is None else tokenizer.decode)
    limits = request_limits_of(config)
    return FrontEnd(
        info=info,
        card=card,
        encoder=encoder,
        lacking=lacking,
        converter=Converter(info, encoder, limits, names, adapters, reply, lacking),
        responder=Responder(tokenizer, instance_id),
        adapters=adapters,
        registry=registry,
        loads=loads,
        text_pool=text_pool,
        spans=spans,
        metrics=telemetry.metrics,
        max_lease_s=config.max_lease_s,
        max_send_bytes=config.max_send_bytes,
    )
