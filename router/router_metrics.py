"""What the router tells Prometheus."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.errors import BatonError, ResourceExhausted
from baton.metric_table import ROUTER_METRICS
from baton.metrics import Instruments
from baton.v1 import request_pb2
from router.outcome import Outcome

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: "client_error",
    grpc.StatusCode.NOT_FOUND: "client_error",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "rejected",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.CANCELLED: "cancelled",
}
STATUSES = ("ok", *dict.fromkeys(_STATUSES.values()), "error")
PHASES = ("queue", "reserve", "dispatch", "prefill_queue", "prefill")
SLO_VERDICTS = ("met", "ttft_missed", "tpot_missed", "both_missed")
FINISHED = {request_pb2.FINISH_REASON_STOP: "stop", request_pb2.FINISH_REASON_LENGTH: "length"}
PATHS = {request_pb2.PATH_DISAGGREGATED: "disaggregated", request_pb2.PATH_LOCAL_PREFILL: "local_prefill"}
RECOVERY_REASONS = (
    *("CONNECTION_LOST", "WORKER_LOST", "LINK_LOST", "PUSH_ENDED", "CHECKSUM_MISMATCH", "INCOMPLETE"),
    *("PREEMPTED", "DRAINING", "OTHER"),
)
REJECTION_REASONS = ("QUEUE_FULL", "DEADLINE_UNREACHABLE", "OTHER")
_REASON_PATTERN = re.compile(r"[A-Z][A-Z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Seconds that a request should stay below; 0: no target."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class RouterMetrics:
    """Counts requests as they end. All methods but scraping belong to the event loop."""

    def __init__(self, targets: SloTargets | None = None) -> None:
        self._targets = targets or SloTargets()
        self.instruments = made = Instruments(ROUTER_METRICS)
        self._running = made.gauge("baton_requests_running")
        self._itl = made.histogram("baton_inter_token_latency_seconds")
        self._tokens = made.counter("baton_generation_tokens_total")
        for name, values in (
            ("baton_requests_total", STATUSES),
            ("baton_request_success_total", FINISHED.values()),
            ("baton_requests_by_path_total", PATHS.values()),
            ("baton_prompt_tokens_cached_total", ("prefill", "decode")),
            ("baton_slo_requests_total", SLO_VERDICTS),
            ("baton_recoveries_total", RECOVERY_REASONS),
            ("baton_rejections_total", REJECTION_REASONS),
        ):
            for value in values:  # there from the start: without a first value nothing has increased
                made.counter(name, value)
        made.gauge("baton_slo_target_seconds", "ttft").set(self._targets.ttft_s)
        made.gauge("baton_slo_target_seconds", "tpot").set(self._targets.tpot_s)

    def watch(
        self, num_waiting: Callable[[], int], workers_up: Callable[[], dict[str, bool]], num_open: Callable[[], int]
    ) -> None:
        """What is asked for at each scrape: requests that wait, workers by name, circuits that are open."""
        self.instruments.gauge("baton_requests_waiting").set_function(num_waiting)
        self.instruments.gauge("baton_circuits_open").set_function(num_open)
        self.instruments.replace("baton_worker_up", _WorkersUp(workers_up))

    def note_arrival(self) -> None:
        """A request has come."""
        self._running.inc()

    def token_meter(self) -> "TokenMeter":
        """For the tokens of one answer."""
        return TokenMeter(self._tokens, self._itl)

    def note_end(self, outcome: Outcome, error: BaseException | None) -> None:
        """A request has ended: whole, with an error, or cancelled."""
        self._running.dec()
        self.instruments.counter("baton_requests_total", _status(error)).inc()
        if outcome.timeline.ttft_s:  # also of an answer that broke off later
            self._note_first_token(outcome.timeline)
        for recovery in outcome.recoveries:
            self.instruments.counter("baton_recoveries_total", _reason(recovery)).inc()
        if error is None:
            self._note_whole(outcome)
        elif isinstance(error, ResourceExhausted):
            self.instruments.counter("baton_rejections_total", _reason(error)).inc()

    def _note_first_token(self, timeline: request_pb2.Timeline) -> None:
        """The parts are counted whenever the whole is, so that they sum to it."""
        self.instruments.histogram("baton_time_to_first_token_seconds").observe(timeline.ttft_s)
        for phase in PHASES:
            self.instruments.histogram("baton_request_phase_seconds", phase).observe(getattr(timeline, f"{phase}_s"))

    def _note_whole(self, outcome: Outcome) -> None:
        made, timeline = self.instruments, outcome.timeline
        made.counter("baton_request_success_total", FINISHED[outcome.reason]).inc()
        made.counter("baton_requests_by_path_total", PATHS[timeline.path]).inc()
        made.histogram("baton_e2e_request_latency_seconds").observe(timeline.e2e_s)
        tpot_s = (timeline.e2e_s - timeline.ttft_s) / max(outcome.num_tokens - 1, 1)
        if outcome.num_tokens > 1:
            made.histogram("baton_request_time_per_output_token_seconds").observe(tpot_s)
        made.counter("baton_prompt_tokens_total").inc(outcome.num_prompt_tokens)
        made.counter("baton_prompt_tokens_cached_total", "prefill").inc(outcome.prefill_cached_tokens)
        made.counter("baton_prompt_tokens_cached_total", "decode").inc(outcome.decode_cached_tokens)
        if timeline.kv_bytes:
            made.counter("baton_kv_transfer_bytes_total", timeline.transport).inc(timeline.kv_bytes)
            made.histogram("baton_kv_transfer_seconds", timeline.transport).observe(timeline.transfer_s)
            made.histogram("baton_kv_transfer_exposed_seconds", timeline.transport).observe(timeline.transfer_tail_s)
        if self._targets != SloTargets():
            made.counter("baton_slo_requests_total", slo_verdict(self._targets, timeline.ttft_s, tpot_s)).inc()


class TokenMeter:
    """Counts the tokens of one answer and the time between them."""

    def __init__(self, tokens: Counter, inter_token_latency: Histogram) -> None:
        self._tokens = tokens
        self._inter_token_latency = inter_token_latency
        self._last_at_s: float | None = None

    def note(self, num_tokens: int, now_s: float) -> None:
        """So many more tokens are here."""
        self._tokens.inc(num_tokens)
        if self._last_at_s is not None:
            for _ in range(num_tokens):
                self._inter_token_latency.observe((now_s - self._last_at_s) / num_tokens)
        self._last_at_s = now_s


class _WorkersUp(Collector):
    """The workers there are now, and no others: a worker that has left is no longer shown."""

    def __init__(self, workers_up: Callable[[], dict[str, bool]]) -> None:
        self._workers_up = workers_up

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See Collector."""
        metric = next(m for m in ROUTER_METRICS if m.name == "baton_worker_up")
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        for worker, is_up in self._workers_up().items():
            family.add_metric([worker], float(is_up))
        yield family


def slo_verdict(targets: SloTargets, ttft_s: float, tpot_s: float) -> str:
    """Which of the targets an answer has missed."""
    is_late = 0.0 < targets.ttft_s < ttft_s
    is_slow = 0.0 < targets.tpot_s < tpot_s
    return SLO_VERDICTS[is_late + 2 * is_slow]


def _status(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, BatonError):
        return _STATUSES.get(error.code, "error")
    return "error" if isinstance(error, Exception) else "cancelled"


def _reason(error: BatonError) -> str:
    """Reasons come from workers too: what is none must not become a label."""
    return error.reason if _REASON_PATTERN.fullmatch(error.reason) else "OTHER"
