"""Serves metrics over HTTP in the text format of Prometheus. Only this module imports prometheus_client."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llamaq.common.errors import InvalidSettings
from llamaq.common.metrics.metric_definitions import Family, Histogram, Labels, Samples

log = logging.getLogger(__name__)

POLL_S = 0.1
"""How often the server checks whether it must stop."""
REQUEST_TIMEOUT_S = 30.0
"""A connection that sends nothing for this time is closed."""


class SamplesCollector(Collector):
    """Passes the values that `read` returns to prometheus_client, at each scrape."""

    def __init__(self, read: Callable[[], Samples]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Return all metrics with their values."""
        for family, values in self._read():
            yield _metric(family, values)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registration reads no values."""
        return ()


def _metric(family: Family, values: dict[Labels, float | Histogram]) -> Metric:
    labels = list(family.labels)
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.meaning, labels=labels)
        for names, value in values.items():
            if isinstance(value, Histogram):
                histogram.add_metric(names, _buckets(family, value), value.total)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.meaning, labels=labels)
    for names, value in values.items():
        if not isinstance(value, Histogram):
            metric.add_metric(names, value)
    return metric


def _buckets(family: Family, histogram: Histogram) -> list[tuple[str, float]]:
    """Return the cumulative counts by the upper bound. A worker that has run no tick has no counts."""
    counts = histogram.counts or (0,) * (len(family.bounds) + 1)
    return list(zip([*map(str, map(float, family.bounds)), "+Inf"], accumulate(counts), strict=True))


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name of the base class
        log.debug("metrics.request " + format, *args)  # noqa: G003


class MetricsServer:
    """An HTTP server with the paths `/metrics` and `/health`. Each request has a thread.

    Use it as a context manager. The metrics of the process itself (CPU time, memory, garbage collection) are included.
    """

    def __init__(
        self, read: Callable[[], Samples], is_healthy: Callable[[], bool], *, port: int, bind: str = "127.0.0.1"
    ) -> None:
        """Bind the address. `start` or the context begins to serve.

        Args:
            read: Returns the metrics. Called on the thread of a request.
            is_healthy: Returns whether `/health` answers with 200 instead of 503.
            port: The TCP port. 0: the system chooses one.
            bind: The address to listen on.

        Raises:
            InvalidSettings: The address cannot be used.
        """
        registry = CollectorRegistry()
        registry.register(SamplesCollector(read))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        self._metrics_app: Any = make_wsgi_app(registry)
        self._is_healthy = is_healthy

        class Server(ThreadingWSGIServer):
            address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET

        try:
            self._server = make_server(bind, port, self._answer, Server, handler_class=_Handler)
        except (OSError, OverflowError) as exc:
            raise InvalidSettings(f"metrics cannot be served at {bind} port {port}: {exc}") from exc
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="llamaq-metrics", daemon=True
        )

    @property
    def port(self) -> int:
        """The TCP port."""
        return self._server.server_port

    def _answer(self, environment: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if environment["REQUEST_METHOD"] == "HEAD":  # prometheus_client refuses it
            self._answer(environment | {"REQUEST_METHOD": "GET"}, start_response)
            return []
        path = environment["PATH_INFO"]
        if path == "/metrics":
            answer: list[bytes] = self._metrics_app(environment, start_response)
            return answer
        status, text = "404 Not Found", "the paths are /metrics and /health"
        if path == "/health":
            status, text = ("200 OK", "ok") if self._is_healthy() else ("503 Service Unavailable", "not healthy")
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text.encode() + b"\n"]

    def __enter__(self) -> Self:
        self._thread.start()
        log.info("metrics.served address=%s port=%d", self._server.server_address[0], self.port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __repr__(self) -> str:
        return f"<MetricsServer port={self.port}>"
