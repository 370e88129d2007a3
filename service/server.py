"""The server: wiring, start and ordered shutdown. `HeadraceServer` can be embedded (tests do);
`service.command.process` runs it as a process with signals.

Start: the port opens first, so that probes see a live process. While the model loads, everything
but health, reflection and ControlService is refused. Then the front end is made and the services
become ready.

Shutdown (`drain`):
1. the server is no longer ready: health says NOT_SERVING, Watches end, new work is refused with
    UNAVAILABLE; an operator's pause ends; the HTTP door accepts no more;
2. streams accept nothing new: idle sessions end now, others with their last request;
3. live requests finish; after the timeout they are cancelled, and their streams still get the end
  events;
4. the gRPC servers stop: first all calls end, with everything that their clients are still to read;
    then clients get a GOAWAY, and their connections close when they have read it (after a few
    seconds at most, if they do not read: `interceptors.Recovery`); so long the HTTP door may take;
5. the engine is closed, then the threads, the Unix sockets' files and telemetry.

If only some addresses serve ControlService, the process has two gRPC servers with otherwise the
same servicers. So the socket that a call came through decides what it may reach, not an address
that it claims.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import (
    control_service_pb2,
    control_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
)

from engine.contract.engine_client import EngineClient, ModelInfo, ProgressSink
from engine.contract.errors import ConfigError, HeadraceError
from engine.contract.outputs import StepOutputs
from engine.contract.startup import Paced, Transfer
from engine.logs.levels import replaced
from engine.text import Tokenizer, TokenizerMissingError, read_chat_template
from service.admission.admission_control import AdmissionBounds, AdmissionControl
from service.admission.bounds import Kind
from service.admission.freed_memory import GivingBack
from service.admission.phases import Drain, Phase
from service.admission.places import Places
from service.admission.text_pool import THREADS, TextPool
from service.config import ServiceConfig
from service.convert.converter import Converter, RequestLimits
from service.convert.inputs import InputEncoder
from service.convert.lacking import why_lacking
from service.convert.model import model_card
from service.convert.response import Responder
from service.delivery.flow import FlowOptions, WholeLimits
from service.delivery.kept import Retention
from service.delivery.load_watch import LoadWatch
from service.delivery.registry import Registry
from service.door.address import Address, parse_address
from service.door.auth import Authenticator
from service.door.health import HealthServicer
from service.door.health_listener import make_health_server
from service.door.interceptors import Entrance, Recovery
from service.door.listening import UnixSockets, bind, bind_door, wait_ended
from service.door.reading import Reading
from service.door.reflection import add_reflection
from service.door.thread_pool import started_pool
from service.door.tls import Tls
from service.door.transport import grpc_options, most_received
from service.door.unknown_methods import make_server
from service.replies import ModelFormat, format_option
from service.servicers.control_servicer import ControlServicer
from service.servicers.generation_servicer import GenerationServicer
from service.servicers.model_servicer import ModelServicer
from service.servicers.operator_control import Control
from service.servicers.supervision import RESTART_DELAY_S, Supervisor
from service.state import FrontEnd, ServerState
from service.telemetry import setup as telemetry
from service.telemetry.figures import Figures
from service.telemetry.summary import Summary
from service.telemetry.telemetry_config import TelemetryConfig

if TYPE_CHECKING:
    from service.door.openai_door import HttpDoor

logger = logging.getLogger(__name__)

SERVICES = (
    generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    model_service_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
CONTROL = control_service_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
GATEWAY = "vllm.grpc.engine.VllmEngine"
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
NO_TELEMETRY = TelemetryConfig()
_DOOR_STREAMS = 4096
"""Most calls of the HTTP door's connection, which carries all its clients."""
_CALLS_GRACE_S = 3.0
_CONNECTIONS_GRACE_S = 2.0
_CANCEL_GRACE_S = 5.0

TokenizerLoader = Callable[[ModelInfo], Tokenizer | None]


def load_tokenizer(info: ModelInfo) -> Tokenizer | None:
    """Load the tokenizer of the loaded model; None: it has none, and token ids alone are served.

    Raises:
        TokenizerError: it has one that cannot be read.
    """
    try:
        return Tokenizer.load(Path(info.path), info.vocab_size)
    except TokenizerMissingError as error:
        logger.warning("%s", error)
        return None


def _add_gateway(server: grpc.aio.Server, control: Control) -> str:
    """Serve the gateways' protocol too; returns the service's name.

    Raises:
        ConfigError: its stubs are not installed.
    """
    try:
        from service.gateway.servicer import add_gateway
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise ConfigError(
            "gateway",
            "needs the package smg-grpc-proto, which is not installed: "
            "pip install 'headrace-server[gateway]'",
        ) from error
    return add_gateway(server, control)


def _limits(config: ServiceConfig) -> AdmissionBounds:
    return AdmissionBounds(
        max_open=config.max_open_requests,
        max_open_of_identity=config.max_requests_per_identity or None,
        max_tokens=config.max_reserved_tokens or None,
        max_tokens_of_identity=config.max_reserved_tokens_per_identity or None,
        max_undelivered_bytes=config.max_undelivered_bytes or None,
        max_live_bytes=config.max_live_bytes or None,
    )


def _retention(config: ServiceConfig) -> Retention:
    return Retention(
        retention_s=config.result_retention_s,
        max_results=config.max_kept_results,
        max_bytes=config.max_kept_bytes,
    )


def _flow(config: ServiceConfig) -> FlowOptions:
    return FlowOptions(
        max_unread_tokens=config.max_unread_tokens,
        max_unread_bytes=config.max_unread_bytes,
        ends=config.slow_reader == "end",
        max_hold_s=config.max_hold_s,
    )


def _sessions(config: ServiceConfig) -> Kind:
    return Kind(
        what="{present} sessions{of} are open",
        remedy="end one",
        reason="TOO_MANY_SESSIONS",
        option="max_sessions",
        limit=config.max_sessions,
        reason_of_identity="TOO_MANY_SESSIONS_OF_IDENTITY",
        option_of_identity="max_sessions_per_identity",
        limit_of_identity=config.max_sessions_per_identity or None,
    )


def _watches(config: ServiceConfig, name: str) -> Kind:
    return Kind(
        what=f"{{present}} {name} are open",
        remedy="end one",
        reason="TOO_MANY_WATCHES",
        option="max_watches",
        limit=config.max_watches,
    )


def credentials_of(
    config: ServiceConfig, door_secret: str | None = None
) -> tuple[Authenticator, Tls]:
    """Read the callers' file and the TLS files. `door_secret`: what the HTTP door knows.

    Raises:
        ConfigError: one of them cannot be used.
    """
    authenticator = Authenticator(
        config.auth_file,
        client_certificates=config.tls_client_ca is not None,
        door_secret=None if config.openai is None else door_secret,
    )
    return authenticator, Tls(config)


class HeadraceServer:
    """A server around an engine. All methods run on one event loop.

    Attributes:
        registry: its requests.
        state, control: its phase, and the operators' controls.
        recovery, reading, text_pool: track its calls, read their messages, and process long texts.
        servers: the gRPC servers, by whether they serve ControlService; None: that of the door.
        sessions, watches: the places for sessions and Watches.
        health, supervisor: report its readiness, and restart the engine.
        bound, health_bound, sockets: the addresses on which it listens.
        door: the process that serves OpenAI's HTTP API; None: it is off, or not started yet.
    """

    def __init__(
        self,
        config: ServiceConfig,
        client: EngineClient,
        *,
        telemetry_config: TelemetryConfig = NO_TELEMETRY,
        progress: ProgressSink | None = None,
        tokenizer_loader: TokenizerLoader = load_tokenizer,
        restart_delay_s: float = RESTART_DELAY_S,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Wire the server; `start` opens the ports.

        Args:
            config: the service's options.
            client: the engine, not started yet.
            telemetry_config: where metrics and spans go.
            progress: called with lines of start-up progress; by default they are logged.
            tokenizer_loader: loads the model's tokenizer, in a thread.
            restart_delay_s: the delay before the first restart of a dead engine.
            clock, jitter: monotonic seconds, and random numbers from 0 to 1, for the advice when
                refused callers may try again.
        """
        self._config = config
        self._telemetry_config = telemetry_config
        self._client = client
        self._progress = progress or Paced(logger.info)
        self._format_of = format_option("none")
        self._chat_template: str | None = None
        self._load_tokenizer = tokenizer_loader
        self.instance_id = f"hr-{secrets.token_hex(8)}"
        self.state = ServerState(self.instance_id)
        # One more thread, which loads tokenizers and gives memory back.
        self._threads = started_pool(THREADS + 1, "headrace-text")
        freed = GivingBack(self._threads).freed
        self._admission = AdmissionControl(_limits(config), clock, jitter, freed)
        self.registry = Registry(client, _retention(config), self._admission, _flow(config))
        self.text_pool = TextPool(self._threads, clock)
        has_control = any(config.serves_control(parse_address(text)) for text in config.listen)
        self._health_watches = Places(_watches(config, "health Watches"), clock, jitter)
        self.health = HealthServicer(
            (*SERVICES, GATEWAY) if config.gateway else SERVICES,
            (CONTROL,) if has_control else (),
            watches=self._health_watches,
            why=lambda: self.state.why_not_ready,
        )
        self.sessions = Places(_sessions(config), clock, jitter)
        self.watches = Places(_watches(config, "WatchStatistics"), clock, jitter)
        self.loads = LoadWatch(client, clock)
        self._telemetry = telemetry.ServerTelemetry()
        self.servers: dict[bool | None, grpc.aio.Server] = {}
        self._health_server: grpc.Server | None = None
        self._authenticator = Authenticator(None)
        self.recovery = Recovery(self.state.refusals)
        self._tls: Tls | None = None
        self.reading = Reading(
            config.message_timeout_s, config.max_receive_bytes, most_received(config)
        )
        self._loading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[Exception] | None = None
        self.supervisor = Supervisor(
            client, self.state, self.health, self._load, first_delay_s=restart_delay_s
        )
        self._startup: dict[str, float] = {}
        self._figures = self._make_figures()
        self.control = Control(
            client,
            self.state,
            self.registry,
            log_level=config.log_level,
            figures=self._figures,
            begin_drain=self.begin_drain,
        )
        self._polling: asyncio.Task[None] | None = None
        self._summing_up: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._drain_begun = asyncio.Event()
        self._unreachable = asyncio.Event()
        self._closed = False
        self.bound: tuple[Address, ...] = ()
        self.health_bound: Address | None = None
        self.sockets = UnixSockets()
        self._door_secret = secrets.token_hex(32)
        self.door: HttpDoor | None = None

    def _make_figures(self) -> Figures:
        return Figures(
            live_bytes=lambda: self._admission.live_bytes,
            unknown_fields=lambda: self.state.incoming.unknown,
            refusals=self.state.refusals.counts,
            phase=lambda: self.state.phase.value,
            restarts=lambda: self.supervisor.restarts,
            door_restarts=lambda: 0 if self.door is None else self.door.restarts,
            sessions=lambda: self.sessions.taken,
            startup=lambda: self._startup,
            transfer=lambda: self.state.transfer,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses on which the server listens, as gRPC targets."""
        return tuple(address.target for address in self.bound)

    async def start(self) -> None:
        """Open the ports and start to load the model; `ready` waits for it.

        Raises:
            ConfigError: for example, an address is taken, or a TLS file, the callers' file or a
                format of replies from outside the tree cannot be used, or the packages of the HTTP
                door are missing.
        """
        if self._config.openai is not None:
            from service.door.openai_door import HttpDoor, check_packages

            check_packages()
        self._format_of = format_option(self._config.reply_parser)
        if self._config.chat_template is not None:
            self._chat_template = read_chat_template(self._config.chat_template)
        self._authenticator, self._tls = credentials_of(self._config, self._door_secret)
        self._telemetry = telemetry.set_up(self._telemetry_config, self._figures)
        self.recovery.watchers = self._telemetry.watchers
        if self._config.health_listen is not None:
            self._health_server = make_health_server(self.health)
        try:
            self.bound, self.health_bound = bind(
                self._config, self._tls, self._server_of, self._health_server, self.sockets
            )
            if self._config.openai is not None:
                server = self.servers[None] = self._make_server(
                    has_control=False, max_streams=_DOOR_STREAMS
                )
                door_addresses = bind_door(self._config.openai, server, self.sockets)
        except HeadraceError:
            self.sockets.unlink()
            await self._telemetry.shutdown()
            raise
        if self._health_server is not None:
            self._health_server.start()
        for server in self.servers.values():
            await server.start()
        if self._config.openai is not None:
            self.door = HttpDoor(self._config, *door_addresses, self._door_secret)
        if self._telemetry.page is not None:
            self._telemetry.page.start()
            self._progress(f"metrics at {self._telemetry.page.url}")
        self._loading = asyncio.create_task(self._load_first())

    def _server_of(self, address: Address) -> grpc.aio.Server:
        has_control = self._config.serves_control(address)
        if has_control not in self.servers:
            self.servers[has_control] = self._make_server(has_control)
        return self.servers[has_control]

    def _make_server(self, has_control: bool, max_streams: int | None = None) -> grpc.aio.Server:
        metrics = self._telemetry.metrics
        server = make_server(
            self._authenticator,
            None if metrics is None else metrics.unknown_call_ended,
            # Recovery is outermost; spans also cover calls that the entrance refuses.
            interceptors=(
                self.recovery,
                *self._telemetry.interceptors,
                Entrance(
                    self._authenticator, self.state, self.reading, self._config.max_send_bytes
                ),
            ),
            options=grpc_options(
                self._config
                if max_streams is None
                else replace(self._config, max_streams_per_connection=max_streams),
                self._config.max_queue_size,
            ),
        )
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self.state, self.sessions), server
        )
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(), server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        names = [*SERVICES, _HEALTH]
        if has_control:
            control_service_pb2_grpc.add_ControlServiceServicer_to_server(
                ControlServicer(self.control, self.watches), server
            )
            names.insert(0, CONTROL)
        if self._config.gateway:
            names.append(_add_gateway(server, self.control))
        add_reflection(server, names)
        return server

    async def _load_first(self) -> None:
        try:
            await self._load()
        except Exception:
            self.state.phase = Phase.FAILED
            raise
        if self.state.phase is Phase.READY:
            if self._config.log_summary_s:
                summary = Summary(self._client, self.state.refusals, self._config.log_summary_s)
                self._summing_up = asyncio.create_task(summary.run())
            self._watching = asyncio.create_task(self.supervisor.run())
            if (metrics := self._telemetry.metrics) is not None:
                metrics.loaded(self.state.front.card.name)
                self._polling = asyncio.create_task(metrics.poll(self._client))

    async def _load(self) -> None:
        """Start the engine, make the front end for its model, and become ready."""
        metrics = self._telemetry.metrics
        if metrics is not None:
            metrics.engine_starts()
        began = time.monotonic()
        info = await self._client.start(self._on_step, self._on_progress)
        started = time.monotonic()
        text = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._load_text, info
        )
        await self.control.engine_started()
        self.state.loaded(self._front_end(info, *text))
        measured = sum(seconds for _, seconds in info.startup)
        self._startup = {
            "process": max(started - began - measured, 0.0),
            **dict(info.startup),
            "front_end": time.monotonic() - started,
        }
        told = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._startup.items())
        self._progress(f"started in {sum(self._startup.values()):.1f} s: {told}")
        if self.state.phase is Phase.READY:
            self.health.set_ready(True)

    def _load_text(self, info: ModelInfo) -> tuple[Tokenizer | None, ModelFormat | None]:
        """The tokenizer of a model, and how the model writes; its chat template, a stranger's
        program, is tried for that.
        """
        tokenizer = self._load_tokenizer(info)
        if self._chat_template is not None:
            if tokenizer is None:
                raise ConfigError(
                    "chat_template",
                    "needs the model's tokenizer.json, which its directory lacks",
                )
            tokenizer.use_chat_template(self._chat_template)
        return tokenizer, self._format_of(tokenizer)

    def _on_progress(self, line: str) -> None:
        if isinstance(line, Transfer):
            self.state.transfer = line
        self._progress(line)

    def _on_step(self, step: StepOutputs) -> None:
        """The engine's sink. Clients come first."""
        self.registry.on_step(step)
        if self._telemetry.metrics is not None:
            self._telemetry.metrics.on_step(step)
        if self._telemetry.spans is not None:
            self._telemetry.spans.on_step(step)

    def _front_end(
        self, info: ModelInfo, tokenizer: Tokenizer | None, reply: ModelFormat | None
    ) -> FrontEnd:
        config = self._config
        encoder = None
        if tokenizer is not None:
            encoder = InputEncoder(
                tokenizer,
                self.text_pool,
                max_context_tokens=info.max_context_tokens,
                max_receive_bytes=config.max_receive_bytes,
            )
        limits = RequestLimits(
            default_max_tokens=config.default_max_tokens,
            default_time_limit_s=config.default_time_limit_s or None,
            max_time_limit_s=config.max_time_limit_s or None,
            max_choices=config.max_choices,
            max_send_bytes=config.max_send_bytes,
            whole=WholeLimits(
                max_undelivered_bytes=config.max_undelivered_bytes or None,
                max_kept_bytes=config.max_kept_bytes,
                max_send_bytes=config.max_send_bytes,
            ),
        )
        card = model_card(info, tokenizer, config, self.instance_id, reply)
        lacking = why_lacking(tokenizer, reply, config.reply_parser)
        names = (card.name, *card.aliases)
        if (spans := self._telemetry.spans) is not None:
            spans.loaded(card.name, None if tokenizer is None else tokenizer.decode)
        return FrontEnd(
            info=info,
            card=card,
            encoder=encoder,
            lacking=lacking,
            converter=Converter(info, encoder, limits, names, reply, lacking),
            responder=Responder(tokenizer, self.instance_id),
            registry=self.registry,
            loads=self.loads,
            text_pool=self.text_pool,
            spans=spans,
            metrics=self._telemetry.metrics,
            max_lease_s=config.max_lease_s,
            max_send_bytes=config.max_send_bytes,
        )

    async def ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            HeadraceError: the model cannot be loaded; the message gives the reason.
        """
        if self._loading is not None:
            await asyncio.shield(self._loading)

    async def failed(self) -> Exception:
        """Wait until the engine is dead for good, or the server no longer listens (ListeningError);
        returns why. Call it after `ready`.
        """
        ends: set[asyncio.Task[Exception]] = {
            asyncio.create_task(self._engine_failed()),
            *(asyncio.create_task(wait_ended(server)) for server in self.servers.values()),
        }
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    async def _engine_failed(self) -> Exception:
        if self._watching is None:
            return await self._client.wait_failed()
        return await asyncio.shield(self._watching)

    def reload(self) -> None:
        """Read the callers' file and the TLS files again now, and log the result. If a file cannot
        be used, its last good content stays in use.
        """
        tls = self._tls
        if self._authenticator.knows_callers:
            self._authenticator.reload()
        if tls is not None and tls.is_used:
            tls.reload()
        elif not self._authenticator.knows_callers:
            logger.info("nothing to read again: there is neither a callers' file nor TLS")

    def read_credentials(self, config: ServiceConfig) -> None:
        """Use the callers' file and the TLS files of a config from now on, if all can be used. Only
        those that the server has may be others. Takes long; runs in any thread, once the server has
        been started.

        Raises:
            ConfigError: one of them cannot be used; nothing has changed.
        """
        authenticator, tls = credentials_of(config)
        self._authenticator.become(authenticator)
        if self._tls is not None:
            self._tls.become(tls)

    async def apply(self, config: ServiceConfig) -> None:
        """Have the limits, the drain's time and the log levels of a config from now on; the rest of
        it must be that of the present one. What runs goes on.
        """
        before, self._config = self._config, config
        self._admission.change(_limits(config))
        self.sessions.change(_sessions(config))
        self.watches.change(_watches(config, "WatchStatistics"))
        self._health_watches.change(_watches(config, "health Watches"))
        level_of = before.log_level_of, config.log_level_of
        if config.log_level != before.log_level or level_of[0] != level_of[1]:
            # An operator may have set another level since.
            is_new = config.log_level != before.log_level
            level = config.log_level if is_new else self.control.log_level
            await self.control.set_log_levels(level, replaced(*level_of))

    async def drain(self, timeout_s: float | None = None) -> None:
        """Finish live requests, then stop. After `timeout_s` (default: the configured one) the rest
        is cancelled. If a drain has already begun, it goes on unchanged.
        """
        await asyncio.shield(self.begin_drain(timeout_s))

    def begin_drain(self, timeout_s: float | None = None, reason: str = "") -> asyncio.Task[None]:
        """Start a drain, unless there is one already; the task ends when the server has ended."""
        if self._draining is None:
            timeout_s = self._config.drain_timeout_s if timeout_s is None else timeout_s
            self.state.drain = Drain(reason, time.time(), timeout_s)
            logger.info(
                "draining, at most %g s: %s", timeout_s, reason or "a signal, or no reason given"
            )
            self._enter_drain()
            self._draining = asyncio.create_task(self._drain(timeout_s))
        return self._draining

    async def drain_begun(self) -> None:
        """Wait until a drain begins, or the server is stopped."""
        await self._drain_begun.wait()

    async def unreachable(self) -> None:
        """Wait until the gRPC servers have stopped and no call is in progress."""
        await self._unreachable.wait()

    async def _drain(self, timeout_s: float) -> None:
        if not await self._idle_within(timeout_s):
            logger.warning(
                "%d requests are still live after %g s of draining; they are cancelled",
                self.registry.live,
                timeout_s,
            )
            self.registry.cancel_all()
            await self._idle_within(_CANCEL_GRACE_S)
        await self._shut_down(_CALLS_GRACE_S, _CONNECTIONS_GRACE_S)

    async def stop(self) -> None:
        """Stop at once; live requests are lost."""
        self._enter_drain()
        await self._shut_down(0, 0)
        if self._draining is not None:
            await asyncio.gather(self._draining, return_exceptions=True)

    def _enter_drain(self) -> None:
        self.state.phase = Phase.DRAINING
        self._drain_begun.set()
        self.health.end()
        if self.door is not None:
            self.door.drain()
        for stream in list(self.registry.streams):
            stream.close()

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self.control.end_pause()
                await self.registry.wait_idle()
        except TimeoutError:
            return False
        return True

    async def _shut_down(self, calls_grace_s: float, connections_grace_s: float) -> None:
        """End everything. Grace periods in seconds: how long calls may go on, and how long clients
        then have to read what was sent.
        """
        if self._closed:
            return
        self._closed = True
        for task in (self._watching, self._polling, self._summing_up):
            if task is not None:
                task.cancel()
        self.control.ending.set()
        await self.recovery.settle(calls_grace_s)
        servers = self.servers.values()
        stops = [server.stop(connections_grace_s) for server in servers]
        if self.door is not None:
            stops.append(self.door.stop(connections_grace_s))
        await asyncio.gather(*stops)
        if self._health_server is not None:
            self._health_server.stop(0)
        self._unreachable.set()
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
        await self.loads.close()
        await self._client.close()
        await self.registry.close()
        for task in (self._loading, self._watching, self._polling, self._summing_up):
            if task is not None:
                await asyncio.gather(task, return_exceptions=True)
        self.text_pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.sockets.unlink()
        await self._telemetry.shutdown()
