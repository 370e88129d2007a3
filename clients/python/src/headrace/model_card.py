"""The server's description of its model and its limits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from headrace.v1 import generation_pb2, model_service_pb2


@dataclass(frozen=True, slots=True)
class Limits:
    """The server's limits. A request that exceeds one of them is refused."""

    max_context_tokens: int
    """The maximum number of tokens of prompt and output together."""
    max_prompt_tokens: int
    default_max_tokens: int
    """The `max_tokens` of requests that do not set it."""
    max_choices: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_message_bytes: int
    """The maximum size of a message that the server accepts, in bytes."""
    max_queue_size: int
    """The maximum number of waiting requests."""
    max_running_requests: int
    max_lease: float
    """The longest lease of a session, in seconds."""
    result_retention: float
    """How long the results of an ended request are kept, in seconds."""
    max_unread_tokens: int
    """How many tokens of a request may be unread before it is held or ended. The number is lower if
    the tokens have many details.
    """
    max_hold: float | None
    """How many seconds a held request waits to be read before it ends with RESULTS_NOT_READ; None
    if it is ended immediately.
    """


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model and the server."""

    name: str
    architecture: str
    parameters: int
    """The number of the model's parameters."""
    dtype: str
    quantization: str
    """The type in which the weights of linear layers are stored, such as "int8"; empty if it is
    `dtype`.
    """
    device: str
    vocab_size: int
    """The size of the vocabulary. All token ids are smaller than this."""
    eos_token_ids: tuple[int, ...]
    default_sampling: generation_pb2.SamplingOptions
    """The values used for sampling options that a request does not set."""
    limits: Limits
    capabilities: model_service_pb2.Capabilities
    """What the server can do with the model."""
    instance_id: str
    server_version: str
    schema_revision: int
    """The revision of the contract that the server was built with."""
    minimum_client_revision: int
    """The oldest revision whose clients the server still supports."""
    aliases: tuple[str, ...]
    """Other names that requests can use for the model."""

    @classmethod
    def from_proto(cls, card: model_service_pb2.ModelCard) -> ModelCard:
        """Converts the answer of `GetModel`."""
        limits = card.limits
        durations = ("max_lease", "result_retention", "max_hold")
        values: dict[str, Any] = {
            field.name: getattr(limits, field.name) for field in dataclasses.fields(Limits)
        }
        for name in durations:
            one = values[name]
            values[name] = one.seconds + one.nanos / 1e9
        if not limits.HasField("max_hold"):
            values["max_hold"] = None
        return cls(
            name=card.name,
            architecture=card.architecture,
            parameters=card.parameters,
            dtype=card.dtype,
            quantization=card.quantization,
            device=card.device,
            vocab_size=card.vocab_size,
            eos_token_ids=tuple(card.eos_token_ids),
            default_sampling=card.default_sampling,
            limits=Limits(**values),
            capabilities=card.capabilities,
            instance_id=card.instance_id,
            server_version=card.server_version,
            schema_revision=card.schema_revision,
            minimum_client_revision=card.minimum_client_revision,
            aliases=tuple(card.aliases),
        )
