"""Errors of a call: a wrong message or field, or a call at the wrong time. `status_table` maps
these classes to gRPC codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.contract.errors import EngineUnavailableError, HeadraceError


class NotReadyError(EngineUnavailableError):
    """The server currently accepts no requests.

    `reason`: LOADING, DRAINING, ENGINE_RESTARTING or ENGINE_STOPPED.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class FieldError(HeadraceError):
    """A field of a message is wrong. `path`: its path in the message; see `convert.fields` for
    nested messages.
    """

    def __init__(self, path: str, description: str) -> None:
        super().__init__(f"{path}: {description}")
        self.path = path
        self.description = description


class UnsupportedFieldError(FieldError):
    """A field of a message asks for something that this server does not support."""


class CapabilityMissingError(HeadraceError):
    """A message requires a capability that this server does not have.

    `available`: the capabilities that it has. `why`: why it lacks this one, and what to do; empty
    if that is not known.
    """

    def __init__(self, capability: str, available: Iterable[str], why: str) -> None:
        known = ", ".join(sorted(available)) or "none yet"
        super().__init__(
            f"required_capabilities: this server does not have {capability!r}, which the message "
            f"requires: {why or 'leave out what needs it, or use another server'} (it has {known})"
        )
        self.capability = capability


class ModelNotFoundError(HeadraceError):
    """A request is for a model that this server does not have.

    Attributes:
        model: the requested name.
        served: the names of the served model.
    """

    def __init__(self, field: str, model: str, served: Sequence[str]) -> None:
        super().__init__(
            f"{field}: {model[:64]!r} is not served here; leave the field out, use another server, "
            f"or name the model that is: {', '.join(served)}"
        )
        self.model = model
        self.served = served


class NoTokenizerError(HeadraceError):
    """A call needs the model's tokenizer, but the model has none."""

    def __init__(self) -> None:
        super().__init__(
            "the model has no tokenizer, so no text becomes token ids here, nor token ids text: "
            "send tokens, read token_ids, and use the tokenizer where the text is"
        )


class MethodNotServedError(HeadraceError):
    """A method of a protocol that this server serves only partly. `why`: the reason, or what to
    use.
    """

    def __init__(self, service: str, method: str, why: str) -> None:
        super().__init__(f"{service}/{method} is not served here: {why}")


class WrongInstanceError(HeadraceError):
    """A call names another server process as the owner of the request.

    Attributes:
        owner: the named process.
        answering: this process.
    """

    def __init__(self, owner: str, answering: str) -> None:
        super().__init__(
            f"instance_id: {owner[:64]!r} has the request, and this is {answering!r}: send the "
            "call to that one (or leave instance_id out, to ask this one all the same)"
        )
        self.owner = owner
        self.answering = answering


class AnswerTooLargeError(HeadraceError):
    """An answer that cannot be divided is larger than a message may be. Sizes are in bytes.
    `remedy`: how to get the answer in another way.
    """

    def __init__(
        self,
        size: int,
        limit: int,
        remedy: str = "use GenerateStream, a session, or AddRequest and GetResult, which send it "
        "in parts, or ask for less",
    ) -> None:
        super().__init__(f"the answer takes {size} bytes and a message at most {limit}: {remedy}")
        self.size = size
        self.limit = limit


class MessageTooLargeError(HeadraceError):
    """A message is larger than the server accepts. Sizes are in bytes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the message takes {size} bytes, and at most {limit} are received "
            "(limits.max_message_bytes): send less in one message"
        )
        self.size = size
        self.limit = limit


class MessageTimeoutError(HeadraceError):
    """A call's message did not arrive in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the call's message was not there within {seconds:g} s: send it with the call"
        )


class MessageMissingError(HeadraceError):
    """A call ended without its message."""

    def __init__(self) -> None:
        super().__init__("the call has no message; it must have exactly one, which may be empty")


class TooManyCallsError(HeadraceError):
    """Too many calls are waiting for their message to be read."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} calls of this kind wait to be read already; try again in 1 s")
        self.retry_after_s = 1.0


class MalformedMessageError(HeadraceError):
    """A message is not valid protobuf of its type."""

    def __init__(self) -> None:
        super().__init__("the message is not valid protobuf of the type that this RPC takes")


class PreconditionError(HeadraceError):
    """A valid command at the wrong time."""


class UnknownCallerError(HeadraceError):
    """The caller sent no credentials, or wrong ones. `reason`: machine-readable."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotGrantedError(HeadraceError):
    """The caller is known but may not do this. `reason`: machine-readable."""

    def __init__(self, message: str, reason: str = "SERVICE_NOT_GRANTED") -> None:
        super().__init__(message)
        self.reason = reason


class CallerNameError(HeadraceError):
    """The name of the user that a gateway calls for is malformed."""


class LimitReachedError(HeadraceError):
    """A limit is reached: the limit of all callers, that of an identity, or a caller's share.

    Attributes:
        reason: the machine-readable reason.
        option, limit: the limit's name and value.
        present: the amount in use now.
        retry_after_s: when to try again, in seconds.
        held, share: the amount that the caller has, and its share while others want theirs. None if
            the caller's share is not the reason.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        option: str,
        limit: int,
        present: int,
        retry_after_s: float,
        held: int | None = None,
        share: int | None = None,
    ) -> None:
        super().__init__(f"{message}, or try again in {retry_after_s:.1f} s")
        self.reason = reason
        self.option = option
        self.limit = limit
        self.present = present
        self.retry_after_s = retry_after_s
        self.held = held
        self.share = share
