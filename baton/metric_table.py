"""Every metric there is: one table. Names and buckets follow what Prometheus, vLLM and OpenTelemetry have made usual.

Base units only: seconds, bytes, tokens, ratios from 0 to 1. A worker's metrics carry no label that names it: the target
does, which service discovery labels with worker, role and model_name.
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Of a metric, as Prometheus knows them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A counter's `name` ends in _total; `buckets` are a histogram's upper bounds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# Buckets of the OpenTelemetry semantic conventions for generative AI, which end early for long queues, begin late for
# small models, and so have a few more here.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0),
)
TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 10.0),
)
E2E_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84)
PHASE_BUCKETS = (0.001, 0.0025, 0.005, *E2E_BUCKETS)
BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels, buckets)


ROUTER_METRICS = (
    _counter("baton_requests_total", "Requests that have ended, each once.", "status"),
    _counter("baton_request_success_total", "Answers that are whole, by what ended them.", "finished_reason"),
    _counter("baton_rejections_total", "Requests refused before anything was computed.", "reason"),
    _gauge("baton_requests_running", "Requests under way, those that wait included."),
    _gauge("baton_requests_waiting", "Requests that wait in the router for a place on workers."),
    _histogram(
        "baton_time_to_first_token_seconds", "From a request's arrival until token 0 is handed out.", TTFT_BUCKETS
    ),
    _histogram(
        "baton_inter_token_latency_seconds", "Between tokens of an answer; of several at once, a share.", TOKEN_BUCKETS
    ),
    _histogram(
        "baton_request_time_per_output_token_seconds", "TPOT: mean over an answer's tokens but token 0.", TOKEN_BUCKETS
    ),
    _histogram("baton_e2e_request_latency_seconds", "From arrival to the last message of a whole answer.", E2E_BUCKETS),
    _histogram(
        "baton_request_phase_seconds",
        "The parts of TTFT, which sum to it: queue, reserve, dispatch, prefill_queue, prefill.",
        PHASE_BUCKETS,
        "phase",
    ),
    _counter("baton_prompt_tokens_total", "Prompt tokens of whole answers."),
    _counter("baton_generation_tokens_total", "Tokens handed out, those of answers that broke off included."),
    _counter("baton_prompt_tokens_cached_total", "Prompt tokens that a prefix cache held.", "source"),
    _counter("baton_requests_by_path_total", "Whole answers by the way they took.", "path"),
    _counter("baton_recoveries_total", "Times a request went on with other workers.", "reason"),
    _counter("baton_kv_transfer_bytes_total", "KV bytes that crossed to decode workers.", "transport"),
    _histogram("baton_kv_transfer_seconds", "From the first KV byte sent to the commit.", PHASE_BUCKETS, "transport"),
    _histogram(
        "baton_kv_transfer_exposed_seconds",
        "From the end of prefill to the commit: what computing did not hide.",
        PHASE_BUCKETS,
        "transport",
    ),
    _counter("baton_slo_requests_total", "Whole answers by whether they met the targets.", "slo"),
    _gauge("baton_slo_target_seconds", "The targets; 0 is none.", "slo"),
    _gauge("baton_worker_up", "1 for a worker that can be sent requests, else 0.", "worker"),
    _gauge("baton_circuits_open", "Workers and pairs that are left out as they have failed again and again."),
)

WORKER_METRICS = (
    _histogram("baton_engine_step_seconds", "One step of the model, by what is in it.", TOKEN_BUCKETS, "phase"),
    _histogram("baton_decode_batch_size", "Sequences that get a token in a step.", BATCH_BUCKETS),
    _counter("baton_engine_tokens_total", "Tokens computed, by phase.", "phase"),
    _gauge("baton_sequences", "Sequences by state: running, waiting, reserved.", "state"),
    _gauge("baton_queued_prompt_tokens", "Prompt tokens that wait to be computed."),
    _gauge("baton_kv_cache_blocks", "KV blocks by state: free, cached, owned, in_flight; they sum to all.", "state"),
    _gauge("baton_kv_cache_usage_ratio", "Share of KV blocks that requests hold."),
    _gauge("baton_kv_quarantined_blocks", "Blocks kept out of circulation as a write into them has not ended."),
    _counter("baton_ledger_repaired_blocks_total", "Blocks whose owner was wrong; more than 0 is a bug."),
    _counter("baton_stale_kv_writes_total", "KV messages refused: late, doubled, or for another life."),
    _gauge("baton_open_tickets", "Landing zones that KV may be written to now."),
    _gauge(
        "baton_worker_info", "1; what this worker is.", "worker", "role", "epoch", "dtype", "block_size", "num_blocks"
    ),
)
