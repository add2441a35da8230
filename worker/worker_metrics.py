"""What a worker tells Prometheus: its steps as they end, the rest when it is asked."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.metric_table import WORKER_METRICS, Kind
from baton.metrics import Instruments
from engine.engine import EngineLoad, StepRunner
from engine.runner import OnLayer
from engine.step_plan import StepPlan, StepResult
from worker.worker_service import LandingCounts

_PHASES = ("prefill", "decode", "mixed")
_ASKED = (
    "baton_sequences",
    "baton_queued_prompt_tokens",
    "baton_kv_cache_blocks",
    "baton_kv_cache_usage_ratio",
    "baton_kv_quarantined_blocks",
    "baton_ledger_repaired_blocks_total",
    "baton_stale_kv_writes_total",
    "baton_open_tickets",
    "baton_worker_info",
)
_TABLE = {metric.name: metric for metric in WORKER_METRICS}

Labels: TypeAlias = tuple[str, ...]
Figures: TypeAlias = Mapping[Labels, float]


class MeteredRunner:
    """Runs steps and measures them."""

    def __init__(self, runner: StepRunner, instruments: Instruments) -> None:
        self._runner = runner
        self._seconds = {phase: instruments.histogram("baton_engine_step_seconds", phase) for phase in _PHASES}
        self._tokens = {phase: instruments.counter("baton_engine_tokens_total", phase) for phase in _PHASES[:2]}
        self._batch_size = instruments.histogram("baton_decode_batch_size")

    def run(self, plan: StepPlan, on_layer: OnLayer) -> StepResult:
        """See `engine.runner.Runner.run`."""
        began_at_s = time.monotonic()
        result = self._runner.run(plan, on_layer)
        seconds = time.monotonic() - began_at_s
        num_decoding = sum(_is_decoding(len(s.token_ids), s.start) for s in plan.sequences)
        num_prefilled = plan.num_tokens - num_decoding
        self._seconds[_phase(num_prefilled, num_decoding)].observe(seconds)
        self._tokens["prefill"].inc(num_prefilled)
        self._tokens["decode"].inc(num_decoding)
        if num_decoding:
            self._batch_size.observe(num_decoding)
        return result


def worker_instruments() -> Instruments:
    """Those that are told as steps end."""
    return Instruments(metric for metric in WORKER_METRICS if metric.name not in _ASKED)


class WorkerCollector(Collector):
    """The figures of a moment, asked for at each scrape, on any thread."""

    def __init__(self, info: Labels, load: Callable[[], EngineLoad], landing: Callable[[], LandingCounts]) -> None:
        """`info` has the values of the labels of baton_worker_info."""
        self._info = info
        self._load = load
        self._landing = landing

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        load, landing = self._load(), self._landing()
        ledger = load.ledger
        blocks = {"free": ledger.free, "cached": ledger.cached, "owned": ledger.owned, "in_flight": ledger.in_flight}
        sequences = {"running": load.num_running, "waiting": load.num_waiting, "reserved": load.num_reserved}
        figures: dict[str, Figures] = {
            "baton_sequences": {(state,): count for state, count in sequences.items()},
            "baton_queued_prompt_tokens": {(): load.num_queued_tokens},
            "baton_kv_cache_blocks": {(state,): count for state, count in blocks.items()},
            "baton_kv_cache_usage_ratio": {(): (ledger.owned + ledger.in_flight) / ledger.total},
            "baton_kv_quarantined_blocks": {(): landing.num_quarantined_blocks},
            "baton_ledger_repaired_blocks_total": {(): load.num_repaired_blocks},
            "baton_stale_kv_writes_total": {(): landing.stale_writes},
            "baton_open_tickets": {(): landing.num_open_tickets},
            "baton_worker_info": {self._info: 1},
        }
        return _families(figures)


def _families(figures: Mapping[str, Figures]) -> Iterator[Metric]:
    for name, values in figures.items():
        metric = _TABLE[name]
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=metric.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        yield family


def _is_decoding(num_tokens: int, start: int) -> bool:
    """One token after others is an answer's next one; it may be a prompt's last, which costs the same."""
    return num_tokens == 1 and start > 0


def _phase(num_prefilled: int, num_decoding: int) -> str:
    if num_prefilled and num_decoding:
        return "mixed"
    return "decode" if num_decoding else "prefill"
