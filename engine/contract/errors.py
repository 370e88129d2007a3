"""The engine's errors: one class per cause, raised where the cause is known.

Each message says which field is wrong, which bound it violates and what to do about it. Messages
are safe to show to the caller; internal causes are logged and never included. The service maps
these classes to gRPC codes in one table.
"""

from __future__ import annotations

from typing import Self


class HeadraceError(Exception):
    """Base class of all errors that Headrace raises on purpose. `str(error)` may be shown to a
    caller.

    Attributes:
        mentions: the config options named in the text. Code that shows the text to users who know
            these options by other names, such as flags, replaces them.
    """

    mentions: tuple[str, ...] = ()

    def naming(self, *options: str) -> Self:
        """Record that this error's text names these options, and return the error."""
        self.mentions = options
        return self


class ConfigError(HeadraceError):
    """A configuration option is out of bounds, contradicts another, or is not supported yet."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


class InvalidRequestError(HeadraceError):
    """A field of a request is wrong.

    `field` is its path in the engine's own names, those of `GenerationRequest` and of the Python
    API's options, such as `stop.max_tokens` or `prompt[3]`. The service translates it into its own
    names.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class UnsupportedFeatureError(HeadraceError):
    """A field of a request asks for something that this engine does not support yet."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class DuplicateRequestError(HeadraceError):
    """A live request has the same id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request_id: {request_id!r} belongs to a request that is still live or whose results "
            "are still kept; choose another id, or wait for that request's end"
        )
        self.request_id = request_id


class RequestNotFoundError(HeadraceError):
    """No live request has that id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request_id: no request {request_id!r} is here: it has ended, and is not kept, or "
            "none with this id was accepted"
        )
        self.request_id = request_id


def kept_places(kept: int) -> str:
    """Return the text of a refusal about places reserved for the same caller's retries, or "" if
    there are none.
    """
    if not kept:
        return ""
    return f" (and {kept} of this caller's are due again, which go first)"


class QueueFullError(HeadraceError):
    """Too many requests are waiting.

    Attributes:
        limit, present: how many may wait, and how many do.
        retry_after_s: when to try again, in seconds.
        held, share: how many of the caller's requests wait, and how many may while other callers
            want their share. None if the caller's share is not the reason.
        kept: the number of queue places reserved for those of the caller's requests that come back
            when they were told to.
    """

    def __init__(
        self,
        limit: int,
        retry_after_s: float,
        present: int | None = None,
        held: int | None = None,
        share: int | None = None,
        kept: int = 0,
    ) -> None:
        """`present` defaults to `limit`."""
        self.present = limit if present is None else present
        others = ""
        if share is not None:
            others = (
                f"; others want theirs, and this caller has {held}, where its share is now {share}"
            )
        super().__init__(
            f"the queue is full: {self.present} requests are waiting{kept_places(kept)}, and "
            f"{limit} may (max_queue_size){others}; try again in {retry_after_s:.1f} s"
        )
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.held = held
        self.share = share
        self.kept = kept


class CompileQueueFullError(HeadraceError):
    """Too many grammars wait to be compiled, or this one waited too long.

    Attributes:
        limit, present: how many may wait, and how many do.
        retry_after_s: when to try again, in seconds.
        waited_s: how long this one waited to be compiled; 0 if it got no place in the queue, or
            lost it.
    """

    def __init__(
        self, limit: int, retry_after_s: float, present: int, waited_s: float = 0.0
    ) -> None:
        why = (
            f"its turn to be compiled has not come within {waited_s:g} s"
            if waited_s
            else "too many forms wait to be compiled"
        )
        super().__init__(
            f"{why}: {present} are waiting, and {limit} may; send forms that "
            f"were compiled before, or try again in {retry_after_s:.1f} s"
        )
        self.limit = limit
        self.present = present
        self.retry_after_s = retry_after_s
        self.waited_s = waited_s


class UnreadResultsError(HeadraceError):
    """Too many requests have ended with unread results, so no more are accepted."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the results of {limit} requests that have ended were not read, and no more may wait "
            "(max_unread_requests); read them by get_result or by iterating the manager, register "
            "result handlers, or raise the option"
        )
        self.limit = limit


class TooManyHandlersError(HeadraceError):
    """Too many result handlers wait for requests that do not exist yet."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"request_id: {limit} result handlers wait for requests that were not added yet, and "
            "no more may; add those requests, or give up their ids with cancel_request"
        )
        self.limit = limit


class EngineUnavailableError(HeadraceError):
    """The engine accepts no requests now because it is loading, draining or stopped."""


class RanksLostError(EngineUnavailableError):
    """The processes that share a model no longer compute together, because one of them has ended or
    has failed in a step. All of them must be restarted.
    """


class ModelRefusedError(HeadraceError):
    """The model cannot be loaded, or would not run correctly. The message gives the reason."""


class DownloadError(ModelRefusedError):
    """A model cannot be downloaded from the hub. The message says what to do.

    Attributes:
        cause: the name of the cause, such as "gated"; docs/models.md lists them.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class ModelInUseError(HeadraceError):
    """A model cannot be removed because a process is downloading or using it."""


class ModelChangedError(ModelRefusedError):
    """The model has changed since it was verified."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; call engine.from_model again, so that what it computes now is verified"
        )


class AdapterRefusedError(ModelRefusedError):
    """An adapter cannot be loaded, or would not be computed correctly. The message says why."""


class AdapterRoomError(AdapterRefusedError):
    """There is no room for another adapter.

    Attributes:
        missing_bytes: how many bytes of memory are missing; 0 if something else is.
    """

    def __init__(self, message: str, missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes

    @classmethod
    def of(cls, missing_bytes: int, max_bytes: int, max_adapters: int) -> Self:
        """Return the error for bounds that pinned adapters and those with requests fill."""
        kept = "and all that are loaded are pinned or have requests: unload one, or raise it"
        if missing_bytes > 0:
            error = cls(
                f"{missing_bytes:,} bytes are missing: max_adapter_bytes is {max_bytes:,}, {kept}",
                missing_bytes,
            )
            return error.naming("max_adapter_bytes")
        return cls(f"max_adapters is {max_adapters}, {kept}").naming("max_adapters")


class AdapterExistsError(HeadraceError):
    """An adapter cannot be loaded under a name that another one has. `what`: what that is."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"name: an adapter with the name {name!r} {what}")
        self.name = name
        self.what = what


class AdapterNotLoadedError(HeadraceError):
    """A request names an adapter that is not loaded. `field`: where it names it."""

    def __init__(self, name: str, field: str = "adapter") -> None:
        super().__init__(
            f"{field}: no adapter with the name {name[:160]!r} is loaded here; name one that is, "
            "or leave it out"
        )
        self.name = name
        self.field = field


class WeightsRefusedError(ModelRefusedError):
    """The given new weights cannot be used. The message names the tensor."""


class NoStepError(ModelRefusedError):
    """The engine's attention was called outside the engine's steps."""

    def __init__(self, attention: str) -> None:
        super().__init__(
            f"the attention implementation {attention!r} is for the engine's own steps alone, and "
            "this call is not one; choose another: set_attn_implementation('sdpa')"
        )


class NoGradientsError(ModelRefusedError):
    """Gradients were requested from a model whose weights are packed."""

    def __init__(self) -> None:
        super().__init__(
            "the linear layers of this model are packed for the engine's kernels, and have no "
            "gradients; to train it, load it with pack_weights=False, or hand a model that you "
            "loaded yourself to engine.from_model"
        )


class InsufficientMemoryError(HeadraceError):
    """The KV cache does not fit in the allowed memory. The message gives the sizes and the option
    to change.
    """
