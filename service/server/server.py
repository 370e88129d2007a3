"""The server: its start and its ordered shutdown. `HeadraceServer` can be embedded (tests do);
`service.command.process` runs it as a process with signals.

Start: the port opens first, so that probes see a live process. While the model loads, everything
but health, reflection and ControlService is refused. Then the front end is made and the services
become ready.

Shutdown (`drain`):
1. the server is no longer ready: health says NOT_SERVING, Watches end, new work is refused with
    UNAVAILABLE; an operator's pause ends; the HTTP door accepts no new connections;
2. streams accept nothing new: idle sessions end now, others with their last request; a new session
    may attach requests whose stream was lost;
3. live requests finish; after the timeout they are cancelled, and their streams still get the end
  events;
4. the gRPC servers stop: first all calls end, with everything that their clients are still to read;
    then clients get a GOAWAY, and their connections close when they have read it (after a few
    seconds at most, if they do not read: `interceptors.Recovery`); the HTTP door has the same time;
5. the engine is closed, then the threads, the Unix sockets' files and telemetry.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from engine.contract.engine_client import EngineClient, ProgressSink
from engine.contract.errors import HeadraceError
from engine.contract.outputs import StepOutputs
from engine.contract.startup import Paced, Transfer
from engine.logs.levels import replaced
from service.admission.freed_memory import GivingBack
from service.admission.phases import Drain, Phase
from service.admission.text_pool import THREADS, TextPool
from service.config import ServiceConfig
from service.delivery.load_watch import LoadWatch
from service.delivery.registry import Registry
from service.door.address import Address, parse_address
from service.door.auth import Authenticator
from service.door.health import HealthServicer
from service.door.health_listener import make_health_server
from service.door.interceptors import Recovery
from service.door.listening import UnixSockets, bind, bind_door, wait_ended
from service.door.reading import Reading
from service.door.thread_pool import started_pool
from service.door.tls import Tls
from service.door.transport import most_received
from service.server.front_end import make_front_end
from service.server.grpc_servers import (
    CONTROL,
    GATEWAY,
    SERVICES,
    GrpcServers,
    ServerParts,
    credentials_of,
)
from service.server.model_text import ModelText, TokenizerLoader, load_tokenizer
from service.server.server_limits import ServerLimits, flow_of, retention_of
from service.servicers.operator_control import Control
from service.servicers.supervision import RESTART_DELAY_S, Supervisor
from service.state import ServerState
from service.telemetry import setup as telemetry
from service.telemetry.figures import Figures
from service.telemetry.summary import Summary
from service.telemetry.telemetry_config import TelemetryConfig

if TYPE_CHECKING:
    from service.door.openai_door import HttpDoor

logger = logging.getLogger(__name__)

NO_TELEMETRY = TelemetryConfig()
_CALLS_GRACE_S = 3.0
_CONNECTIONS_GRACE_S = 2.0
_CANCEL_GRACE_S = 5.0


class HeadraceServer:
    """A server around an engine. All methods run on one event loop.

    Attributes:
        limits: what callers may have at the same time.
        registry: its requests.
        state, control: its phase, and the operators' controls.
        recovery, reading, text_pool: track its calls, read their messages, and process long texts.
        servers: the gRPC servers.
        health, supervisor: report its readiness, and restart the engine.
        bound, health_bound, sockets: the addresses on which it listens.
        door: the process that serves OpenAI's HTTP API; None if it is off or not started yet.
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
        """Create the server; `start` opens the ports.

        Args:
            config: the service's options.
            client: the engine, not started yet.
            telemetry_config: where metrics and spans go.
            progress: called with lines of start-up progress; by default they are logged.
            tokenizer_loader: loads the model's tokenizer, in a thread.
            restart_delay_s: the delay before the first restart of a dead engine.
            clock, jitter: return monotonic seconds and random numbers from 0 to 1, which determine
                when refused callers are advised to retry.
        """
        self._config = config
        self._client = client
        self._telemetry_config = telemetry_config
        self._progress = progress or Paced(logger.info)
        self._load_tokenizer = tokenizer_loader
        self.instance_id = f"hr-{secrets.token_hex(8)}"
        self.state = ServerState(self.instance_id)
        self._door_secret = secrets.token_hex(32)
        self._startup: dict[str, float] = {}
        self._wire_calls()
        self._wire_requests(clock, jitter)
        self._wire_engine(restart_delay_s, clock)
        self._expect_start()

    def _wire_calls(self) -> None:
        """What calls meet first: it counts them, and reads their messages within limits."""
        config = self._config
        self.recovery = Recovery(self.state.refusals)
        self.reading = Reading(
            config.message_timeout_s, config.max_receive_bytes, most_received(config)
        )

    def _wire_requests(self, clock: Callable[[], float], jitter: Callable[[], float]) -> None:
        """What admits requests, keeps them until their end, and processes long texts."""
        config = self._config
        # One more thread, which loads tokenizers and gives memory back.
        self._threads = started_pool(THREADS + 1, "headrace-text")
        freed = GivingBack(self._threads).freed
        self.limits = ServerLimits(config, clock, jitter, freed)
        self.registry = Registry(
            self._client, retention_of(config), self.limits.admission, flow_of(config)
        )
        self.text_pool = TextPool(self._threads, clock)

    def _wire_engine(self, restart_delay_s: float, clock: Callable[[], float]) -> None:
        """What watches the engine, restarts it, and reports on it."""
        self.loads = LoadWatch(self._client, clock)
        self._telemetry = telemetry.ServerTelemetry()
        self.health = self._make_health()
        self.supervisor = Supervisor(
            self._client, self.state, self.health, self._load, first_delay_s=restart_delay_s
        )
        self._figures = self._make_figures()
        self.control = Control(
            self._client,
            self.state,
            self.registry,
            log_level=self._config.log_level,
            figures=self._figures,
            begin_drain=self.begin_drain,
        )

    def _expect_start(self) -> None:
        """What `start` makes, and the tasks that run from then on."""
        self._authenticator = Authenticator(None)
        self._tls: Tls | None = None
        self._text: ModelText | None = None
        self.servers: tuple[grpc.aio.Server, ...] = ()
        self._health_server: grpc.Server | None = None
        self.bound: tuple[Address, ...] = ()
        self.health_bound: Address | None = None
        self.sockets = UnixSockets()
        self.door: HttpDoor | None = None
        self._loading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[Exception] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._summing_up: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._drain_begun = asyncio.Event()
        self._unreachable = asyncio.Event()
        self._closed = False

    def _make_health(self) -> HealthServicer:
        config = self._config
        has_control = any(config.serves_control(parse_address(text)) for text in config.listen)
        return HealthServicer(
            (*SERVICES, GATEWAY) if config.gateway else SERVICES,
            (CONTROL,) if has_control else (),
            watches=self.limits.health_watches,
            why=lambda: self.state.why_not_ready,
        )

    def _make_figures(self) -> Figures:
        return Figures(
            live_request_bytes=lambda: self.limits.admission.live_bytes,
            unknown_field_messages=lambda: self.state.incoming.unknown,
            refusals=self.state.refusals.counts,
            phase=lambda: self.state.phase.value,
            engine_restarts=lambda: self.supervisor.restarts,
            door_restarts=lambda: 0 if self.door is None else self.door.restarts,
            open_sessions=lambda: self.limits.sessions.taken,
            startup=lambda: self._startup,
            transfer=lambda: self.state.transfer,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses on which the server listens, as gRPC targets."""
        return tuple(address.target for address in self.bound)

    async def start(self) -> None:
        """Open the ports and start loading the model; `ready` waits for it.

        Raises:
            ConfigError: for example, an address is taken, or a TLS file, the callers' file or a
                format of replies from outside the tree cannot be used, or the packages of the HTTP
                door are missing.
        """
        config = self._config
        if config.openai is not None:
            from service.door.openai_door import HttpDoor, check_packages

            check_packages()
        self._text = ModelText(config, self._load_tokenizer)
        self._authenticator, self._tls = credentials_of(config, self._door_secret)
        self._telemetry = telemetry.set_up(self._telemetry_config, self._figures)
        self.recovery.watchers = self._telemetry.watchers
        if config.health_listen is not None:
            self._health_server = make_health_server(self.health)
        servers = GrpcServers(
            config,
            ServerParts(
                state=self.state,
                limits=self.limits,
                health=self.health,
                control=self.control,
                recovery=self.recovery,
                reading=self.reading,
            ),
            self._authenticator,
            self._telemetry,
        )
        try:
            self.bound, self.health_bound = bind(
                config, self._tls, servers.at, self._health_server, self.sockets
            )
            if config.openai is not None:
                door_addresses = bind_door(config.openai, servers.for_door(), self.sockets)
        except HeadraceError:
            self.sockets.unlink()
            await self._telemetry.shutdown()
            raise
        if self._health_server is not None:
            self._health_server.start()
        self.servers = tuple(servers.made.values())
        for server in self.servers:
            await server.start()
        if config.openai is not None:
            self.door = HttpDoor(config, *door_addresses, self._door_secret)
        if self._telemetry.page is not None:
            self._telemetry.page.start()
            self._progress(f"metrics at {self._telemetry.page.url}")
        self._loading = asyncio.create_task(self._load_first())

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
                metrics.loaded(self.state.front.card.name, lambda: self.state.front.adapters.names)
                self._polling = asyncio.create_task(metrics.poll(self._client))

    async def _load(self) -> None:
        """Start the engine, make the front end for its model, and become ready."""
        if self._text is None:
            raise RuntimeError("the server was not started")
        metrics = self._telemetry.metrics
        if metrics is not None:
            metrics.engine_starts()
        began = time.monotonic()
        info = await self._client.start(self._on_step, self._on_progress)
        started = time.monotonic()
        tokenizer, reply = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._text.read, info
        )
        await self.control.engine_started()
        front = make_front_end(
            self._config,
            self._client,
            info,
            tokenizer,
            reply,
            instance_id=self.instance_id,
            registry=self.registry,
            loads=self.loads,
            text_pool=self.text_pool,
            telemetry=self._telemetry,
        )
        self.state.loaded(front)
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

    def _on_progress(self, line: str) -> None:
        if isinstance(line, Transfer):
            self.state.transfer = line
        self._progress(line)

    def _on_step(self, step: StepOutputs) -> None:
        """Handle a step of the engine. Clients are served before telemetry."""
        self.registry.on_step(step)
        if self._telemetry.metrics is not None:
            self._telemetry.metrics.on_step(step)
        if self._telemetry.spans is not None:
            self._telemetry.spans.on_step(step)

    async def ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            HeadraceError: the model cannot be loaded; the message gives the reason.
        """
        if self._loading is not None:
            await asyncio.shield(self._loading)

    async def failed(self) -> Exception:
        """Wait until the engine is dead for good or the server no longer listens (ListeningError),
        and return the reason. Call it after `ready`.
        """
        ends: set[asyncio.Task[Exception]] = {
            asyncio.create_task(self._engine_failed()),
            *(asyncio.create_task(wait_ended(server)) for server in self.servers),
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
        be used, its last valid content stays in use.
        """
        tls = self._tls
        if self._authenticator.knows_callers:
            self._authenticator.reload()
        if tls is not None and tls.is_used:
            tls.reload()
        elif not self._authenticator.knows_callers:
            logger.info("nothing to read again: there is neither a callers' file nor TLS")

    def read_credentials(self, config: ServiceConfig) -> None:
        """Use the callers' file and the TLS files of a new config, if all of them can be used. Only
        files that the server already uses may change. This is slow, and may be called from any
        thread after the server was started.

        Raises:
            ConfigError: one of them cannot be used; nothing has changed.
        """
        authenticator, tls = credentials_of(config)
        self._authenticator.become(authenticator)
        if self._tls is not None:
            self._tls.become(tls)

    async def apply(self, config: ServiceConfig) -> None:
        """Apply the limits, the drain timeout and the log levels of a new config. The rest of it
        must be the same as in the current one. Running requests continue.
        """
        before, self._config = self._config, config
        self.limits.change(config)
        level_of = before.log_level_of, config.log_level_of
        if config.log_level != before.log_level or level_of[0] != level_of[1]:
            # An operator may have set another level since.
            is_new = config.log_level != before.log_level
            level = config.log_level if is_new else self.control.log_level
            await self.control.set_log_levels(level, replaced(*level_of))

    async def drain(self, timeout_s: float | None = None) -> None:
        """Finish live requests, then stop. After `timeout_s` (default: the configured timeout) the
        remaining requests are cancelled. If a drain has already begun, it continues unchanged.
        """
        await asyncio.shield(self.begin_drain(timeout_s))

    def begin_drain(self, timeout_s: float | None = None, reason: str = "") -> asyncio.Task[None]:
        """Start a drain unless one is running. The returned task ends when the server has
        stopped.
        """
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
        """Stop immediately; live requests are lost."""
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
        self._close_streams()

    def _close_streams(self) -> None:
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
        """Shut everything down. The grace periods, in seconds, are how long calls may continue and
        how long clients then have to read what was sent.
        """
        if self._closed:
            return
        self._closed = True
        self._close_streams()  # those that attached requests during the drain
        for task in (self._watching, self._polling, self._summing_up):
            if task is not None:
                task.cancel()
        self.control.ending.set()
        await self.recovery.settle(calls_grace_s)
        stops = [server.stop(connections_grace_s) for server in self.servers]
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
