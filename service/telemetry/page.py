"""Prometheus' page: the metrics, pulled by HTTP from a separate address.

    Prometheus ──GET /metrics──▶ a thread ──▶ the OpenTelemetry reader ──▶ text

Threads serve the page, so a busy event loop delays it only by a few thread switches. It is for the
operator's network: it has no TLS and no authentication, and by default it is reachable only from
this machine. Even so, the resources that a client can use are bounded. PLACES connections are
served at a time, each has PATIENCE_S seconds for its whole request and page, and only one page is
made at a time.

The endpoint picker of the Gateway API Inference Extension has its own small page, because it reads
a few metrics twenty times a second. Their names are vLLM's unless it is configured otherwise. These
are not valid names in OpenTelemetry, and Prometheus' own linter rejects them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import MetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from engine.contract.errors import ConfigError
from engine.contract.stats import EngineStats
from service.telemetry.metrics import EngineView

logger = logging.getLogger(__name__)

PATH = "/metrics"
PICKER_PATH = "/metrics/picker"
PLACES = 8
"""How many connections are served at the same time; further ones are closed."""
PATIENCE_S = 10.0

_PICKER: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    ("vllm:num_requests_running", "Requests in the batch.", lambda s: s.running),
    (
        "vllm:kv_cache_usage_perc",
        "Part of the KV cache that requests hold; 1 is all of it.",
        lambda s: s.kv_usage,
    ),
)
_COUNTED: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:spec_decode_num_drafts", "Requests' drafts in steps.", lambda s: s.drafts),
    ("vllm:spec_decode_num_draft_tokens", "Tokens of drafts.", lambda s: s.draft_tokens),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Tokens of drafts that were right.",
        lambda s: s.accepted_draft_tokens,
    ),
)


class Page:
    """The page and its server.

    Attributes:
        reader: the reader of the metrics' provider from which the page is made.
    """

    def __init__(self, host: str, port: int, view: Callable[[], EngineView]):
        """Bind the address; `start` serves.

        Args:
            host, port: the address; port 0 takes a free port.
            view: returns what is known of the engine.

        Raises:
            ConfigError: the address cannot be used.
        """
        registry = CollectorRegistry(auto_describe=False)
        self.reader: MetricReader = PrometheusMetricReader(
            scope_info_enabled=False, registry=registry
        )
        picker = CollectorRegistry(auto_describe=False)
        picker.register(cast(Any, _PickerNames(view)))
        self._pages = {PATH: registry, PICKER_PATH: picker}
        self._making = threading.Lock()
        try:
            family, address = _resolve(host, port)
            self._server = _Server(family, address, self._made)
        except OSError as error:
            raise ConfigError(
                "OTEL_EXPORTER_PROMETHEUS_PORT",
                f"is {port}, at {host[:64]!r}, and cannot be listened on "
                f"({error.strerror or error}); choose another address",
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics-page", daemon=True
        )

    @property
    def url(self) -> str:
        """The URL of the page."""
        host, port = self._server.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}{PATH}"

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()

    def _made(self, path: str, accepted: str) -> tuple[str, bytes] | None:
        """Return a page and its content type; None if there is none. `accepted` has the types that
        the client accepts.
        """
        registry = self._pages.get(path)
        if registry is None:
            return None
        encode, kind = choose_encoder(accepted)
        with self._making:
            return kind, encode(registry)


class _PickerNames:
    """The metrics of the endpoint picker."""

    def __init__(self, view: Callable[[], EngineView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Return their current values."""
        view = self._view()
        model, stats = view.model, view.stats
        if stats is None:
            return
        for name, text, read in _PICKER:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([model], read(stats))
            yield family
        for name, text, read in _COUNTED:
            counted = CounterMetricFamily(name, text, labels=["model_name"])
            counted.add_metric([model], read(stats))
            yield counted
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's shape.",
            labels=["block_size", "num_gpu_blocks"],
        )
        family.add_metric([str(stats.block_size), str(stats.blocks_total)], 1.0)
        yield family
        if stats.max_adapters:
            yield _adapters(view, stats)


def _adapters(view: EngineView, stats: EngineStats) -> Metric:
    """Return which adapters are here. Their names have no commas. None has to be fetched before it
    runs, so all that requests may name are told as running, whether or not they have requests: a
    picker that prefers a server with a request's adapter then finds one.
    """
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters that are loaded, those with requests in the queue, and how many there may be; "
        "the value is when that was so.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    waiting = sorted(one.name for one in stats.by_adapter if one.waiting)
    family.add_metric(
        [str(stats.max_adapters), ",".join(view.adapters), ",".join(waiting)], view.taken_at
    )
    return family


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # IPv4 first: "localhost" is both, and scrapers of a machine expect 127.0.0.1.
    family, *_, address = min(found, key=lambda one: one[0] is not socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        made: Callable[[str, str], tuple[str, bytes] | None],
    ) -> None:
        self.address_family = family
        self.made = made
        self._open: dict[socket.socket, float] = {}  # since when, in monotonic seconds
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks for the machine's name, and may wait long for it.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= PLACES:
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            del self._open[request]
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._open[request]

    def service_actions(self) -> None:
        """Several times per second: close the connections whose time is up."""
        latest = time.monotonic() - PATIENCE_S
        for request, began in list(self._open.items()):
            if began < latest:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a scrape failed: %s", sys.exception())


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE_S
    server_version = "headrace"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with a page."""
        path = self.path.partition("?")[0]
        made = cast(_Server, self.server).made(path, self.headers.get("Accept", ""))
        if made is None:
            self.send_error(404, f"the metrics are at {PATH}")
            return
        kind, page = made
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because anybody who reaches the address could trigger it."""
