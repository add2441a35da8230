"""A real Prometheus finds a live cluster by the router's list alone, and every panel and rule has data in it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from ray_nodes import wait_for

from baton.aio_client import AsyncClient
from deploy.cluster_record import RecordStore
from deploy.cluster_spec import ClusterSpec
from deploy.dashboards import DASHBOARDS
from deploy.lifecycle import cluster_status, start_cluster, stop_cluster
from deploy.local_ray import free_port

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not on the PATH"),
]

FILES = Path(__file__).parents[2] / "deploy" / "prometheus"
ALERTS = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"][0]["rules"]
PROMPT = "Here is a long story about the sea and those who live by it:"
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def record(tmp_path_factory, model_dir):
    store = RecordStore(tmp_path_factory.mktemp("state"))
    spec = ClusterSpec(
        str(model_dir),
        "smollm2",
        name="test-metrics",
        num_prefill=2,
        num_decode=2,
        dtype="float32",
        kv_memory_bytes=128 << 20,
        slo_ttft_s=60.0,
        slo_tpot_s=60.0,
    )
    started = start_cluster(spec, store)
    yield started
    stop_cluster(started, store, grace_s=1.0)


class Prometheus:
    """A server on loopback."""

    def __init__(self, directory: Path, discovery_url: str) -> None:
        self._address = f"127.0.0.1:{free_port()}"
        config = yaml.safe_load((FILES / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FILES / name) for name in config["rule_files"]]
        config["scrape_configs"][0]["http_sd_configs"] = [{"url": discovery_url, "refresh_interval": "1s"}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def query(self, expr: str) -> list[dict]:
        query = urllib.parse.urlencode({"query": expr})
        with urllib.request.urlopen(f"http://{self._address}/api/v1/query?{query}", timeout=10) as response:
            return json.load(response)["data"]["result"]

    def has(self, expr: str) -> bool:
        """Whether it has an answer; not while it starts."""
        try:
            return bool(self.query(expr))
        except OSError:
            return False


@pytest.fixture(scope="module")
def prometheus(record, tmp_path_factory):
    metrics_address = cluster_status(record).router.report.metrics_address
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), f"http://{metrics_address}/sd/prometheus")
    yield server
    server.stop()


async def ask(address: str, count: int, **options) -> list:
    """So many answers at a time, whole."""
    async with AsyncClient(address, timeout_s=120.0) as client:

        async def one(number: int):
            stream = client.generate(f"{number}. {PROMPT}", temperature=0.0, ignore_eos=True, **options)
            await stream.read()
            return stream

        return await asyncio.gather(*(one(number) for number in range(count)))


@pytest.fixture(scope="module")
def answered(record, prometheus):
    """The streams of a load, and of requests whose worker died; Prometheus has seen it all."""
    wait_for(lambda: prometheus.has('count(up{job="baton"} == 1) == 5'), LIMIT_S)
    streams = asyncio.run(ask(record.router_address, 8, max_tokens=24))
    streams += asyncio.run(_ask_while_a_worker_dies(record))
    wait_for(lambda: cluster_status(record).is_ready, LIMIT_S)
    streams += asyncio.run(ask(record.router_address, 8, max_tokens=24))
    total = f'sum(baton_requests_total{{status="ok"}}) == {len(streams)}'
    wait_for(lambda: prometheus.has(total), LIMIT_S)
    time.sleep(3.0)  # two more scrapes, for the rates
    return streams


async def _ask_while_a_worker_dies(record) -> list:
    asking = asyncio.create_task(ask(record.router_address, 6, max_tokens=60))
    await asyncio.sleep(2.0)
    victim = next(w for w in cluster_status(record).workers if w.name == "decode-0")
    os.kill(victim.report.pid, signal.SIGKILL)
    return await asking


def _expressions():
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                yield f"{dashboard.uid}: {panel.title}", query.expr
    for rule in yaml.safe_load((FILES / "rules.yml").read_text())["groups"][0]["rules"]:
        yield rule["record"], rule["record"]


@pytest.mark.parametrize(("where", "expr"), list(_expressions()))
def test_every_panel_and_every_recorded_series_has_data(answered, prometheus, where, expr):
    expr = expr.replace("$__rate_interval", "5m").replace("$worker", ".*").replace("{}", "")
    assert prometheus.query(expr), where


def test_sums_agree_with_what_clients_were_told(answered, prometheus):
    def value(expr: str) -> float:
        ((_, text),) = [result["value"] for result in prometheus.query(expr)]
        return float(text)

    assert value("sum(baton_generation_tokens_total)") == sum(s.usage.completion_tokens for s in answered)
    assert value("sum(baton_prompt_tokens_total)") == sum(s.usage.prompt_tokens for s in answered)
    assert value("sum(baton_time_to_first_token_seconds_sum)") == pytest.approx(
        sum(s.timeline.ttft_s for s in answered)
    )
    assert value("sum(baton_request_phase_seconds_sum)") == pytest.approx(sum(s.timeline.ttft_s for s in answered))
    assert value("sum(baton_e2e_request_latency_seconds_sum)") == pytest.approx(sum(s.timeline.e2e_s for s in answered))
    assert value("sum(baton_recoveries_total)") == sum(s.timeline.num_recoveries for s in answered)
    assert value("sum(baton_kv_transfer_bytes_total)") == sum(s.timeline.kv_bytes for s in answered)


def test_blocks_of_every_worker_sum_to_all_it_has(answered, prometheus):
    totals = {
        r["metric"]["worker"]: float(r["value"][1]) for r in prometheus.query("sum by (worker) (baton_kv_cache_blocks)")
    }
    infos = {r["metric"]["worker"]: float(r["metric"]["num_blocks"]) for r in prometheus.query("baton_worker_info")}
    assert totals == infos
    assert len(totals) == 4


def test_alerts_on_workers_see_each_of_them(answered, prometheus):
    up = {result["metric"]["worker"]: result["value"][1] for result in prometheus.query("baton_worker_up")}
    assert up == dict.fromkeys(("prefill-0", "prefill-1", "decode-0", "decode-1"), "1")
    for name in ("BatonNoPrefillWorker", "BatonNoDecodeWorker"):
        (rule,) = [r for r in ALERTS if r["alert"] == name]
        assert prometheus.query(rule["expr"].replace("== 0", ">= 0")), name


def test_the_death_of_a_worker_lights_recoveries_and_nothing_that_it_should_not(answered, prometheus):
    assert any(stream.timeline.num_recoveries for stream in answered)
    assert prometheus.query('sum(increase(baton_recoveries_total{reason="CONNECTION_LOST"}[5m])) > 0')
    firing = {r["metric"]["alertname"] for r in prometheus.query('ALERTS{alertstate="firing"}')}
    assert firing <= {"BatonRecoveries", "BatonTargetDown"}
