"""The state of the process: its phase and, once the model is loaded, the front end that serves
requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import Message
from headrace.v1 import model_service_pb2

from engine.contract.engine_client import ModelInfo
from engine.contract.startup import Transfer, size_text
from service.admission.phases import NO_NEW_WORK, Drain, Phase
from service.admission.served_adapters import ServedAdapters
from service.admission.text_pool import TextPool
from service.convert.converter import Converter
from service.convert.incoming import IncomingCheck
from service.convert.inputs import InputEncoder
from service.convert.response import Responder
from service.delivery.load_watch import LoadWatch
from service.delivery.registry import Registry
from service.errors.call_errors import NotReadyError, WrongInstanceError
from service.errors.refusals import Refusals

if TYPE_CHECKING:
    from service.telemetry.metrics import Metrics
    from service.telemetry.request_spans import Spans


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Everything that requests need, made when the model is loaded. `lacking` maps the capabilities
    that the card lacks to the reasons. `spans` and `metrics` are None if they are off.
    """

    info: ModelInfo
    card: model_service_pb2.ModelCard
    lacking: Mapping[str, str]
    encoder: InputEncoder | None
    converter: Converter
    responder: Responder
    adapters: ServedAdapters
    registry: Registry
    loads: LoadWatch
    text_pool: TextPool
    spans: Spans | None
    metrics: Metrics | None
    max_lease_s: float
    max_send_bytes: int


current_front: ContextVar[FrontEnd] = ContextVar("front")
"""The front end for the RPC that this task serves; set once the entrance has checked the phase."""


class ServerState:
    """The phase and the front end; set by `service.server`, read by interceptors and servicers."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.incoming = IncomingCheck()
        self.refusals = Refusals()
        self.phase = Phase.LOADING
        self.transfer: Transfer | None = None
        self.drain: Drain | None = None
        self._front: FrontEnd | None = None

    def loaded(self, front: FrontEnd) -> None:
        """Record that the model was loaded, for the first time or again."""
        self._front = front
        self.incoming.capabilities = frozenset(front.card.capabilities.names)
        self.incoming.lacking = front.lacking
        if self.phase in (Phase.LOADING, Phase.RESTARTING):
            self.phase = Phase.READY

    @property
    def front(self) -> FrontEnd:
        """Return the front end.

        Raises:
            NotReadyError: the model is still loading.
        """
        if self._front is None:
            raise NotReadyError("LOADING", f"{self.why_not_ready}; try again soon")
        return self._front

    @property
    def why_not_ready(self) -> str:
        """Return why the server is not ready, in words; empty if it is ready."""
        if self._front is not None:
            return NO_NEW_WORK[self.phase][1] if self.phase in NO_NEW_WORK else ""
        if self.phase is Phase.FAILED:
            return "the model could not be loaded"
        found = self.transfer
        if found is None or found.done >= found.total:
            return "the model is still loading"
        return (
            f"the model is still being downloaded, {size_text(found.done)} of "
            f"{size_text(found.total)}"
        )

    @property
    def model_name(self) -> str:
        """The model's name; empty while it loads."""
        return "" if self._front is None else self._front.card.name

    def check_instance(self, instance_id: str) -> None:
        """Refuse a call that names another process; an empty id is always accepted.

        Raises:
            WrongInstanceError: it names another process.
        """
        if instance_id and instance_id != self.instance_id:
            raise WrongInstanceError(instance_id, self.instance_id)

    def enter(self, *, new_work: bool) -> None:
        """Set the front end for the RPC that this task serves; see `check`."""
        current_front.set(self.check(new_work=new_work))

    def check_message(self, message: Message) -> None:
        """Check a message before any other code reads it (`convert.incoming`)."""
        self.incoming.check(message)

    def check(self, *, new_work: bool) -> FrontEnd:
        """Return the front end if this phase serves the RPC. `new_work` says whether the RPC may
        start requests.

        Raises:
            NotReadyError: this phase does not serve the RPC. The error has the reason.
        """
        if self._front is None:
            if self.phase is Phase.FAILED:
                raise NotReadyError("ENGINE_STOPPED", self.why_not_ready)
            raise NotReadyError("LOADING", f"{self.why_not_ready}; try again soon")
        if new_work and self.phase in NO_NEW_WORK:
            raise NotReadyError(*NO_NEW_WORK[self.phase])
        return self._front
