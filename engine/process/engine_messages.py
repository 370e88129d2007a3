"""The messages between the front end and the engine's process.

    front end ── Start, then a Call for each verb ────────────────────────▶ engine process
    front end ◀─ StartProgress, Started, Answer | Refused, Step, Died ───── engine process

Each message is one msgpack frame (see `engine.process.wire`) and has a type on both sides. Nothing
received is executed, and a message that does not match its type is an error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from engine.contract.adapters import AdapterLoad
from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.engine_client import ModelInfo
from engine.contract.errors import (
    AdapterExistsError,
    AdapterNotLoadedError,
    AdapterRefusedError,
    AdapterRoomError,
    CompileQueueFullError,
    ConfigError,
    DownloadError,
    DuplicateRequestError,
    EngineUnavailableError,
    HeadraceError,
    InsufficientMemoryError,
    InvalidRequestError,
    ModelRefusedError,
    QueueFullError,
    UnsupportedFeatureError,
)
from engine.contract.outputs import StepOutputs
from engine.contract.startup import Transfer


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to load. Options are keyword arguments of the config classes.
    `adapters`: those that the process before had; None: there was none.
    """

    model: str
    config: dict[str, Any]
    load_config: dict[str, Any]
    log_level: str
    log_level_of: tuple[str, ...] = ()
    adapters: tuple[AdapterLoad, ...] | None = None


class Call(msgspec.Struct, frozen=True, tag=True):
    """A verb of `EngineVerbs`, with its arguments (see `engine.process.verbs`). The answer is an
    Answer or Refused with the same id; a call with id 0 gets none.
    """

    call_id: int
    verb: str
    arguments: msgspec.Raw


Command = Start | Call


class StartProgress(msgspec.Struct, frozen=True, tag=True):
    """A line of start-up progress. `transfer` has the values of a `Transfer` if the line is one."""

    line: str
    transfer: tuple[int, int, float, float] | None = None

    @classmethod
    def of(cls, line: str) -> StartProgress:
        """Return the message for a line."""
        if isinstance(line, Transfer):
            return cls("", (line.done, line.total, line.seconds, line.rate))
        return cls(line)

    def text(self) -> str:
        """Return the line."""
        return self.line if self.transfer is None else Transfer(*self.transfer)


class Started(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and warm."""

    info: ModelInfo


class WireError(msgspec.Struct, frozen=True):
    """An error of the engine: the name of its class and the arguments to recreate it."""

    kind: str
    arguments: tuple[str | int | float | None, ...]
    mentions: tuple[str, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The call with this id could not be carried out. Id 0 means Start."""

    call_id: int
    error: WireError


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The result of the call with this id."""

    call_id: int
    value: msgspec.Raw


class Step(msgspec.Struct, frozen=True, tag=True):
    """Everything that one step produced."""

    outputs: StepOutputs


class Died(msgspec.Struct, frozen=True, tag=True):
    """The engine has failed beyond repair; the process ends."""

    message: str


Message = StartProgress | Started | Refused | Answer | Step | Died


def options_of(config: ContinuousBatchingConfig | LoadConfig) -> dict[str, Any]:
    """Return a config's options that differ from their defaults.

    Raises:
        ConfigError: an option is an object, which cannot be sent to another process.
    """
    options = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        plain = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(entry, bool | int | float | str | None) for entry in plain):
            raise ConfigError(
                field.name,
                "is an object, which an engine in a process of its own cannot be given; run the "
                "engine in the server's process, or leave it out",
            )
        options[field.name] = value
    return options


def batching_config(options: dict[str, Any]) -> ContinuousBatchingConfig:
    """Recreate the config from the result of `options_of`. Raises ConfigError like the config
    itself.
    """
    pairs: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    return ContinuousBatchingConfig(**pairs)


def to_wire(error: HeadraceError) -> WireError:
    """Convert an error to the representation in which it is sent."""
    match error:
        case InvalidRequestError() | UnsupportedFeatureError():
            return WireError(type(error).__name__, (error.field, error.description))
        case AdapterNotLoadedError():
            return WireError("AdapterNotLoadedError", (error.name, error.field))
        case AdapterExistsError():
            return WireError("AdapterExistsError", (error.name, error.what))
        case AdapterRoomError():
            told = (str(error), error.missing_bytes)
            return WireError("AdapterRoomError", told, error.mentions)
        case DuplicateRequestError():
            return WireError("DuplicateRequestError", (error.request_id,))
        case QueueFullError():
            of_caller = (error.held, error.share, error.kept)
            return WireError(
                "QueueFullError", (error.limit, error.retry_after_s, error.present, *of_caller)
            )
        case CompileQueueFullError():
            return WireError(
                "CompileQueueFullError",
                (error.limit, error.retry_after_s, error.present, error.waited_s),
            )
        case ConfigError():
            message = str(error).removeprefix(f"{error.option}: ")
            return WireError("ConfigError", (error.option, message), error.mentions)
        case DownloadError():
            return WireError("DownloadError", (error.cause, str(error)), error.mentions)
        case ModelRefusedError() | InsufficientMemoryError():
            return WireError(type(error).__name__, (str(error),), error.mentions)
        case _:
            return WireError("EngineUnavailableError", (str(error),))


_CLASSES: dict[str, type[HeadraceError]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequestError,
        UnsupportedFeatureError,
        AdapterExistsError,
        AdapterNotLoadedError,
        AdapterRefusedError,
        AdapterRoomError,
        DuplicateRequestError,
        QueueFullError,
        CompileQueueFullError,
        ConfigError,
        DownloadError,
        ModelRefusedError,
        InsufficientMemoryError,
        EngineUnavailableError,
    )
}


def from_wire(error: WireError) -> HeadraceError:
    """Recreate an error that was sent."""
    found = _CLASSES.get(error.kind, EngineUnavailableError)(*error.arguments)
    return found.naming(*error.mentions) if error.mentions else found
