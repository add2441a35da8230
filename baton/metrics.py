"""Instruments from the table of metrics, and the HTTP server that shows them to Prometheus."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from socketserver import ThreadingMixIn
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, make_wsgi_app
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from baton.metric_table import Kind, Metric

DISCOVERY_PATH = "/sd/prometheus"
STOP_TIMEOUT_S = 5.0

Target = Mapping[str, Any]
M = TypeVar("M", Counter, Gauge, Histogram)


class Instruments:
    """The metrics of one process by name, in a registry of its own."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._by_name: dict[str, MetricWrapperBase] = {m.name: _make(m, self.registry) for m in metrics}

    def counter(self, name: str, *labels: str) -> Counter:
        """With its labels, from where it counts."""
        return self._child(name, Counter, labels)

    def gauge(self, name: str, *labels: str) -> Gauge:
        """With its labels, to be set."""
        return self._child(name, Gauge, labels)

    def histogram(self, name: str, *labels: str) -> Histogram:
        """With its labels, to observe."""
        return self._child(name, Histogram, labels)

    def replace(self, name: str, collector: Collector) -> None:
        """Lets `collector` tell a metric, whose labels come and go."""
        self.registry.unregister(self._by_name.pop(name))
        self.registry.register(collector)

    def _child(self, name: str, kind: type[M], labels: tuple[str, ...]) -> M:
        metric = self._by_name[name]
        assert isinstance(metric, kind)
        return metric.labels(*labels) if labels else metric


def _make(metric: Metric, registry: CollectorRegistry) -> MetricWrapperBase:
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
    kinds: dict[Kind, type[Counter] | type[Gauge]] = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge}
    return kinds[metric.kind](metric.name, metric.help, metric.labels, registry=registry)


class MetricsServer:
    """Serves GET /metrics, and where processes are found GET /sd/prometheus, in threads of its own."""

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, targets: Callable[[], Sequence[Target]] | None = None
    ) -> None:
        """Listens; port 0 is any free one. Raises OSError if it cannot."""
        metrics = make_wsgi_app(registry)

        def application(environ: dict[str, Any], start_response: Any) -> Any:
            path = environ.get("PATH_INFO", "")
            if path == DISCOVERY_PATH and targets is not None:
                start_response("200 OK", [("Content-Type", "application/json")])
                return [json.dumps(list(targets())).encode()]
            if path == "/metrics":
                return metrics(environ, start_response)
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"there is /metrics\n"]

        self._server = make_server(host, port, application, _ThreadingServer, _SilentHandler)
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listens no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(STOP_TIMEOUT_S)


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _SilentHandler(WSGIRequestHandler):
    timeout = 10  # for one who connects and says nothing

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""
