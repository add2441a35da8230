"""Rules, alerts and dashboards: judged by promtool where there is one, and against the table of metrics."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from baton.metric_table import ROUTER_METRICS, WORKER_METRICS, Kind
from deploy.dashboards import DASHBOARDS, DIRECTORY, as_json

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = {rule["alert"]: rule for rule in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]}
RULES = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"][0]["rules"]

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Prometheus is not on the PATH")

HOUR = "240"  # steps of 15 s
MODEL = 'model_name="m"'
HEALTHY = {
    f'up{{job="baton", worker="decode-0", {MODEL}}}': f"1+0x{HOUR}",
    f'baton_worker_up{{worker="prefill-0", {MODEL}}}': f"1+0x{HOUR}",
    f'baton_worker_up{{worker="decode-0", {MODEL}}}': f"1+0x{HOUR}",
    f'baton_requests_total{{status="ok", {MODEL}}}': f"0+10x{HOUR}",
    f'baton_requests_total{{status="error", {MODEL}}}': f"0+0x{HOUR}",
    f'baton_requests_total{{status="rejected", {MODEL}}}': f"0+0x{HOUR}",
    f'baton_time_to_first_token_seconds_bucket{{le="0.25", {MODEL}}}': f"0+10x{HOUR}",
    f'baton_time_to_first_token_seconds_bucket{{le="2.5", {MODEL}}}': f"0+10x{HOUR}",
    f'baton_time_to_first_token_seconds_bucket{{le="+Inf", {MODEL}}}': f"0+10x{HOUR}",
    f'baton_request_time_per_output_token_seconds_bucket{{le="0.05", {MODEL}}}': f"0+10x{HOUR}",
    f'baton_request_time_per_output_token_seconds_bucket{{le="0.5", {MODEL}}}': f"0+10x{HOUR}",
    f'baton_request_time_per_output_token_seconds_bucket{{le="+Inf", {MODEL}}}': f"0+10x{HOUR}",
    f'baton_slo_target_seconds{{slo="ttft", {MODEL}}}': f"1+0x{HOUR}",
    f'baton_slo_target_seconds{{slo="tpot", {MODEL}}}': f"0.1+0x{HOUR}",
    f'baton_rejections_total{{reason="QUEUE_FULL", {MODEL}}}': f"0+0x{HOUR}",
    f'baton_recoveries_total{{reason="PREEMPTED", {MODEL}}}': f"0+1x{HOUR}",
    f'baton_recoveries_total{{reason="CONNECTION_LOST", {MODEL}}}': f"0+0x{HOUR}",
    f'baton_kv_cache_usage_ratio{{worker="decode-0", role="decode", {MODEL}}}': f"0.9+0x{HOUR}",
    f'baton_kv_cache_usage_ratio{{worker="prefill-0", role="prefill", {MODEL}}}': f"1+0x{HOUR}",
    f'baton_ledger_repaired_blocks_total{{worker="decode-0", {MODEL}}}': f"0+0x{HOUR}",
    f'baton_kv_quarantined_blocks{{worker="decode-0", {MODEL}}}': f"0+0x{HOUR}",
}
SICK = {
    "BatonTargetDown": {f'up{{job="baton", worker="decode-0", {MODEL}}}': f"0+0x{HOUR}"},
    "BatonNoPrefillWorker": {f'baton_worker_up{{worker="prefill-0", {MODEL}}}': f"0+0x{HOUR}"},
    "BatonNoDecodeWorker": {f'baton_worker_up{{worker="decode-0", {MODEL}}}': f"0+0x{HOUR}"},
    "BatonHighErrorRate": {f'baton_requests_total{{status="error", {MODEL}}}': f"0+1x{HOUR}"},
    "BatonTTFTAboveTarget": {f'baton_time_to_first_token_seconds_bucket{{le="0.25", {MODEL}}}': f"0+5x{HOUR}"},
    "BatonTPOTAboveTarget": {
        f'baton_request_time_per_output_token_seconds_bucket{{le="0.05", {MODEL}}}': f"0+5x{HOUR}"
    },
    "BatonRejecting": {f'baton_rejections_total{{reason="QUEUE_FULL", {MODEL}}}': f"0+10x{HOUR}"},
    "BatonKvNearlyFull": {f'baton_kv_cache_usage_ratio{{worker="decode-0", role="decode", {MODEL}}}': f"0.97+0x{HOUR}"},
    "BatonRecoveries": {f'baton_recoveries_total{{reason="CONNECTION_LOST", {MODEL}}}': f"0+1x{HOUR}"},
    "BatonLedgerRepaired": {f'baton_ledger_repaired_blocks_total{{worker="decode-0", {MODEL}}}': f"3+0x{HOUR}"},
    "BatonBlocksQuarantined": {f'baton_kv_quarantined_blocks{{worker="decode-0", {MODEL}}}': f"4+0x{HOUR}"},
    "BatonWorkerFlapping": {f'baton_worker_up{{worker="decode-0", {MODEL}}}': " ".join(["1 1 0"] * 80)},
}


def judged_by_promtool(directory, series, firing):
    """Runs promtool's unit test: after 30 minutes of these series exactly these alerts fire."""
    fixture = {
        "rule_files": [str(PROMETHEUS / "rules.yml"), str(PROMETHEUS / "alerts.yml")],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                        "eval_time": "30m",
                        "exp_samples": [{"labels": "{}", "value": float(name in firing)}],
                    }
                    for name in ALERTS
                ],
            }
        ],
    }
    path = directory / "test.yml"
    path.write_text(yaml.safe_dump(fixture))
    return subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)


@promtool
def test_nothing_fires_on_a_healthy_cluster(tmp_path):
    judged = judged_by_promtool(tmp_path, HEALTHY, set())
    assert judged.returncode == 0, judged.stdout + judged.stderr


@promtool
@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_fires_on_what_it_is_for_and_no_other_does(tmp_path, alert):
    judged = judged_by_promtool(tmp_path, HEALTHY | SICK[alert], {alert})
    assert judged.returncode == 0, judged.stdout + judged.stderr


@promtool
@pytest.mark.parametrize("command", [["config", "prometheus.yml"], ["rules", "rules.yml", "alerts.yml"]])
def test_promtool_has_no_complaint(command):
    checked = subprocess.run(
        ["promtool", "check", *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_labels_of_metrics_win_over_those_of_targets():
    """Else baton_worker_up has worker="router", and no alert on it can ever fire."""
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert job["honor_labels"] is True


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_runbook(alert):
    document, _, anchor = ALERTS[alert]["annotations"]["runbook_url"].partition("#")
    assert anchor == alert.lower()
    assert f"## {alert}\n" in (ROOT / document).read_text()
    assert ALERTS[alert]["labels"]["severity"] in ("warning", "critical")


def expressions():
    """Every expression of dashboards, rules and alerts, with the labels it may use."""
    yield from ((rule["record"], rule["expr"]) for rule in RULES)
    yield from ((name, rule["expr"]) for name, rule in ALERTS.items())
    for dashboard in DASHBOARDS:
        yield from ((f"{dashboard.uid}: {p.title}", query.expr) for p in dashboard.panels for query in p.queries)


@pytest.mark.parametrize(("where", "expr"), list(expressions()))
def test_expressions_use_metrics_that_there_are(where, expr):
    known = {"up", *(rule["record"] for rule in RULES)}
    for metric in (*ROUTER_METRICS, *WORKER_METRICS):
        parts = ("_sum", "_count", "_bucket") if metric.kind is Kind.HISTOGRAM else ("",)
        known |= {metric.name + part for part in parts}
    used = set(re.findall(r"\b(?:baton[a-z0-9_:]+|up)\b(?!\")", expr)) - {"baton"}
    assert used
    assert used <= known, where


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_the_file_of_a_dashboard_is_what_is_described(dashboard):
    """Write it anew with: make dashboards."""
    assert (DIRECTORY / f"{dashboard.uid}.json").read_text() == as_json(dashboard)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_panels_are_complete_and_do_not_overlap(dashboard):
    model = json.loads(as_json(dashboard))
    places = [tuple(panel["gridPos"].values()) for panel in model["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in model["panels"]}) == len(places)
    for panel in model["panels"]:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["legendFormat"] for target in panel["targets"])


def test_dashboards_have_ids_of_their_own():
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len(DASHBOARDS) == len(list(DIRECTORY.glob("*.json")))
