"""The Grafana dashboards, described once; `make dashboards` writes deploy/grafana/dashboards from this."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "grafana" / "dashboards"
SCHEMA_VERSION = 39
WIDTH, HEIGHT = 12, 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SELECTED = 'worker=~"$worker"'


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel: an expression in PromQL and what it is called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `unit` is Grafana's name for it; `kind` a panel type."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of panels, two in a row."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]


def _quantiles(metric: str, by: str = "", where: str = "") -> tuple[Query, ...]:
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))",
            f"p{round(q * 100)}{legend}",
        )
        for q in (0.5, 0.95, 0.99)
    )


def _rate(metric: str, by: str, where: str = "") -> tuple[Query, ...]:
    return (Query(f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))", f"{{{{{by}}}}}"),)


def _mean(metric: str, by: str) -> tuple[Query, ...]:
    total, count = (f"sum by ({by}) (rate({metric}_{part}[$__rate_interval]))" for part in ("sum", "count"))
    return (Query(f"{total} / {count}", f"{{{{{by}}}}}"),)


def _line(expr: str, legend: str) -> tuple[Query, ...]:
    return (Query(expr, legend),)


OVERVIEW = Dashboard(
    "baton-overview",
    "Baton: what users see",
    "Time to first token, time per token, goodput and errors of a whole cluster.",
    (
        Panel(
            "Time to first token",
            "From a request's arrival at the router until token 0 is handed out.",
            "s",
            (
                *_quantiles("baton_time_to_first_token_seconds"),
                *_line('baton_slo_target_seconds{slo="ttft"} > 0', "target"),
            ),
        ),
        Panel(
            "Where the time to first token goes",
            "Mean seconds of each part; they sum to the mean TTFT.",
            "s",
            _mean("baton_request_phase_seconds", "phase"),
        ),
        Panel(
            "Inter-token latency",
            "Between two tokens of an answer.",
            "s",
            _quantiles("baton_inter_token_latency_seconds"),
        ),
        Panel(
            "Time per output token",
            "Mean of each answer over its tokens but the first.",
            "s",
            (
                *_quantiles("baton_request_time_per_output_token_seconds"),
                *_line('baton_slo_target_seconds{slo="tpot"} > 0', "target"),
            ),
        ),
        Panel(
            "Requests by their end", "How requests end, per second.", "reqps", _rate("baton_requests_total", "status")
        ),
        Panel(
            "Goodput",
            "Share of whole answers that met the targets; nothing without targets.",
            "percentunit",
            _line(
                'sum(rate(baton_slo_requests_total{slo="met"}[$__rate_interval]))'
                " / sum(rate(baton_slo_requests_total[$__rate_interval]))",
                "met",
            ),
        ),
        Panel(
            "Tokens",
            "Per second: prompts of whole answers, and tokens handed out.",
            "short",
            (
                *_line("sum(rate(baton_prompt_tokens_total[$__rate_interval]))", "prompt"),
                *_line("sum(rate(baton_generation_tokens_total[$__rate_interval]))", "generated"),
            ),
        ),
        Panel(
            "Requests now",
            "Under way in the router, and those of them that wait for a place.",
            "short",
            (*_line("sum(baton_requests_running)", "running"), *_line("sum(baton_requests_waiting)", "waiting")),
        ),
    ),
)

POOLS = Dashboard(
    "baton-pools",
    "Baton: the two pools",
    "Prefill and decode workers side by side: load, batches, KV blocks, steps.",
    (
        Panel("Workers up", "Workers that can be sent requests.", "short", _line("baton_worker_up", "{{worker}}")),
        Panel(
            "Prompt tokens that wait",
            "What prefill has still to compute.",
            "short",
            _line(f"baton_queued_prompt_tokens{{{_SELECTED}}}", "{{worker}}"),
        ),
        Panel(
            "KV blocks held",
            "Share of each worker's blocks that requests hold, cached ones not counted.",
            "percentunit",
            _line(f"baton_kv_cache_usage_ratio{{{_SELECTED}}}", "{{worker}}"),
        ),
        Panel(
            "Sequences",
            "By worker and state.",
            "short",
            _line(f"baton_sequences{{{_SELECTED}}}", "{{worker}} {{state}}"),
        ),
        Panel(
            "Decode batch",
            "Sequences that get a token in a step, mean by worker.",
            "short",
            _mean("baton_decode_batch_size", "worker"),
        ),
        Panel("Step time", "One step of the model, mean by worker.", "s", _mean("baton_engine_step_seconds", "worker")),
        Panel(
            "Tokens computed",
            "Per second, by role and phase.",
            "short",
            _line(
                f"sum by (role, phase) (rate(baton_engine_tokens_total{{{_SELECTED}}}[$__rate_interval]))",
                "{{role}} {{phase}}",
            ),
        ),
        Panel(
            "Prompt tokens from caches",
            "Per second, by the side that held them.",
            "short",
            _rate("baton_prompt_tokens_cached_total", "source"),
        ),
    ),
)

WIRE = Dashboard(
    "baton-wire",
    "Baton: the wire",
    "KV on its way from prefill to decode workers: how much, how fast, how well hidden.",
    (
        Panel(
            "KV bytes per second",
            "That have crossed, by transport.",
            "Bps",
            _rate("baton_kv_transfer_bytes_total", "transport"),
        ),
        Panel(
            "Speed of a transfer",
            "Bytes over seconds of the transfers that ended.",
            "Bps",
            _line(
                "sum by (transport) (rate(baton_kv_transfer_bytes_total[$__rate_interval]))"
                " / sum by (transport) (rate(baton_kv_transfer_seconds_sum[$__rate_interval]))",
                "{{transport}}",
            ),
        ),
        Panel("Whole transfer", "From the first byte to the commit.", "s", _quantiles("baton_kv_transfer_seconds")),
        Panel(
            "Exposed transfer",
            "From the end of prefill to the commit: what computing did not hide.",
            "s",
            _quantiles("baton_kv_transfer_exposed_seconds"),
        ),
        Panel(
            "Answers by path",
            "Whether answers were disaggregated, per second.",
            "reqps",
            _rate("baton_requests_by_path_total", "path"),
        ),
        Panel(
            "Open tickets",
            "Landing zones that KV may be written to.",
            "short",
            _line("baton_open_tickets", "{{worker}}"),
        ),
    ),
)

WORKER = Dashboard(
    "baton-worker",
    "Baton: one worker in depth",
    "Choose a worker above.",
    (
        Panel(
            "KV blocks by state",
            "They sum to all blocks of the worker.",
            "short",
            _line(f"baton_kv_cache_blocks{{{_SELECTED}}}", "{{worker}} {{state}}"),
        ),
        Panel(
            "Steps per second",
            "By what is in them.",
            "short",
            _line(
                f"sum by (worker, phase) (rate(baton_engine_step_seconds_count{{{_SELECTED}}}[$__rate_interval]))",
                "{{worker}} {{phase}}",
            ),
        ),
        Panel("Step time", "By phase.", "s", _quantiles("baton_engine_step_seconds", "phase", _SELECTED)),
        Panel("Decode batch", "Sequences in a step.", "short", _quantiles("baton_decode_batch_size", "", _SELECTED)),
        Panel(
            "What it is",
            "Role, data type, blocks, and the epoch of its present life.",
            "short",
            _line(f"baton_worker_info{{{_SELECTED}}}", "{{worker}} {{epoch}}"),
            kind="table",
        ),
        Panel(
            "Sequences",
            "By state.",
            "short",
            _line(f"baton_sequences{{{_SELECTED}}}", "{{worker}} {{state}}"),
        ),
    ),
)

TROUBLE = Dashboard(
    "baton-trouble",
    "Baton: what went wrong",
    "All of these are flat at 0 on a good day.",
    (
        Panel(
            "Recoveries",
            "Times a request went on with other workers, per second by reason.",
            "short",
            _rate("baton_recoveries_total", "reason"),
        ),
        Panel(
            "Rejections",
            "Requests refused before anything was computed, per second by reason.",
            "reqps",
            _rate("baton_rejections_total", "reason"),
        ),
        Panel(
            "Failed requests",
            "Per second, but for those that clients sent wrong, cancelled, or that were rejected.",
            "reqps",
            _rate("baton_requests_total", "status", 'status=~"error|unavailable|deadline"'),
        ),
        Panel("Circuits open", "Workers and pairs left out.", "short", _line("sum(baton_circuits_open)", "open")),
        Panel(
            "Refused KV messages",
            "Late, doubled, or for another life, per second.",
            "short",
            _rate("baton_stale_kv_writes_total", "worker"),
        ),
        Panel(
            "Repaired and quarantined blocks",
            "A repaired block is a bug; a quarantined one waits for a write that has not ended.",
            "short",
            (
                *_line("sum by (worker) (baton_ledger_repaired_blocks_total)", "{{worker}} repaired"),
                *_line("sum by (worker) (baton_kv_quarantined_blocks)", "{{worker}} quarantined"),
            ),
        ),
    ),
)

DASHBOARDS = (OVERVIEW, POOLS, WIRE, WORKER, TROUBLE)


def as_json(dashboard: Dashboard) -> str:
    """What Grafana is to import."""
    panels = [_panel(number, panel) for number, panel in enumerate(dashboard.panels)]
    model = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["baton"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "links": [{"type": "dashboards", "title": "Baton", "tags": ["baton"], "asDropdown": True}],
        "panels": panels,
    }
    return json.dumps(model, indent=2) + "\n"


def _variables() -> list[dict[str, Any]]:
    worker = {
        "name": "worker",
        "type": "query",
        "label": "Worker",
        "datasource": _DATASOURCE,
        "query": "label_values(baton_worker_info, worker)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return [{"name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus"}, worker]


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": _targets(panel.queries, is_instant=panel.kind == "table"),
    }


def _targets(queries: Sequence[Query], *, is_instant: bool) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + number),
            "datasource": _DATASOURCE,
            "expr": query.expr.replace("{}", ""),
            "legendFormat": query.legend,
            "instant": is_instant,
        }
        for number, query in enumerate(queries)
    ]


def write(directory: Path = DIRECTORY) -> None:
    """Writes each dashboard into a file of its own."""
    for dashboard in DASHBOARDS:
        (directory / f"{dashboard.uid}.json").write_text(as_json(dashboard))


if __name__ == "__main__":
    write()
