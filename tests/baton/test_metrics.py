import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.metric_table import ROUTER_METRICS, WORKER_METRICS, Kind, Metric
from baton.metrics import DISCOVERY_PATH, Instruments, MetricsServer

METRICS_DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
TABLE = (
    Metric("test_things_total", Kind.COUNTER, "Things.", ("kind",)),
    Metric("test_level", Kind.GAUGE, "A level."),
    Metric("test_seconds", Kind.HISTOGRAM, "Time.", (), (0.1, 1.0)),
)


@pytest.fixture
def instruments():
    return Instruments(TABLE)


@pytest.fixture
def serve(instruments):
    servers = []

    def start(targets=None):
        servers.append(MetricsServer(instruments.registry, "127.0.0.1", 0, targets))
        return servers[-1].address

    yield start
    for server in servers:
        server.stop()


def get(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        return response.headers["Content-Type"], response.read().decode()


def samples(text):
    return {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}


def test_what_was_counted_is_served(instruments, serve):
    address = serve()
    instruments.counter("test_things_total", "a").inc(3)
    instruments.gauge("test_level").set(0.5)
    instruments.histogram("test_seconds").observe(0.5)
    _, text = get(address, "/metrics")
    found = samples(text)
    assert found["test_things_total", "a"] == 3
    assert found["test_level",] == 0.5
    assert [found["test_seconds_bucket", bound] for bound in ("0.1", "1.0", "+Inf")] == [0, 1, 1]
    assert not [name for name, *_ in found if name.endswith("_created")]


def test_two_processes_worth_of_instruments_do_not_meet():
    first, second = Instruments(TABLE), Instruments(TABLE)
    first.gauge("test_level").set(1)
    second.gauge("test_level").set(2)
    assert first.registry.get_sample_value("test_level") == 1


def test_targets_are_served_as_prometheus_reads_them(serve):
    targets = [{"targets": ["127.0.0.1:1"], "labels": {"worker": "decode-0"}}]
    kind, text = get(serve(lambda: targets), DISCOVERY_PATH)
    assert (kind, json.loads(text)) == ("application/json", targets)


@pytest.mark.parametrize("path", ["/", "/nothing", DISCOVERY_PATH])
def test_what_is_not_there_is_not_found(serve, path):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(serve(), path)
    caught.value.close()
    assert caught.value.code == 404


@pytest.mark.parametrize("metric", [*ROUTER_METRICS, *WORKER_METRICS], ids=lambda metric: metric.name)
def test_names_follow_the_rules_of_prometheus(metric):
    assert re.fullmatch(r"baton_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.help.endswith(".")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert not re.search(r"_(ms|milliseconds|mb|percent)(_|$)", metric.name)


def test_names_are_unique():
    names = [metric.name for metric in (*ROUTER_METRICS, *WORKER_METRICS)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("metric", [*ROUTER_METRICS, *WORKER_METRICS], ids=lambda metric: metric.name)
def test_the_document_has_the_same_table(metric):
    row = f"| `{metric.name}` | {metric.kind.value} | {', '.join(metric.labels)} | {metric.help} |"
    assert row in METRICS_DOCUMENT.splitlines()


def test_the_documents_queries_use_metrics_that_there_are():
    suffixes = ("", "_sum", "_count", "_bucket")
    known = {metric.name + suffix for metric in (*ROUTER_METRICS, *WORKER_METRICS) for suffix in suffixes}
    assert set(re.findall(r"baton_[a-z0-9_]+", METRICS_DOCUMENT)) <= known
