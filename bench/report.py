"""What many measurements say together. Pure."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.v1 import request_pb2
from bench.measurement import Measurement
from bench.statistics import Summary, summarize

# Fields of the timeline that have a meaning on every path, and those that need a transfer.
SERVER_FIELDS = ("queue_s", "reserve_s", "dispatch_s", "prefill_queue_s", "prefill_s")
TRANSFER_FIELDS = ("transfer_s", "transfer_tail_s", "first_decode_step_s", "kv_bytes")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One run. Rates count completed requests over `duration_s`, from the first one's start to the last one's end.

    `client` has ttft_s, tpot_s, itl_s and e2e_s as the client saw them; `server` the parts of TTFT, and the
    transfer of those requests that had one. A name without samples is left out. `exposed_share` is the part of
    all transfer time that came after prefill, None without transfers.
    """

    num_requests: int
    num_completed: int
    failures: Mapping[str, int]
    failure_messages: Mapping[str, str]
    paths: Mapping[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    kv_bytes: int
    exposed_share: float | None
    client: Mapping[str, Summary]
    server: Mapping[str, Summary]


def make_report(measurements: Sequence[Measurement]) -> LoadReport:
    """Sums up one run of at least one request."""
    completed = [m for m in measurements if not m.failure]
    timelines = [m.timeline for m in completed if m.timeline is not None]
    transfers = [t for t in timelines if t.path == request_pb2.PATH_DISAGGREGATED]
    duration_s = max(m.ended_at_s for m in measurements) - min(m.started_at_s for m in measurements)
    transfer_s = sum(t.transfer_s for t in transfers)
    return LoadReport(
        num_requests=len(measurements),
        num_completed=len(completed),
        failures=dict(Counter(m.failure for m in measurements if m.failure)),
        # The first message of each kind: a dict keeps the last of equal keys.
        failure_messages={m.failure: m.message for m in reversed(measurements) if m.failure},
        paths=dict(Counter(path_name(t) for t in timelines)),
        duration_s=duration_s,
        requests_per_s=_rate(len(completed), duration_s),
        output_tokens_per_s=_rate(sum(len(m.token_times_s) for m in completed), duration_s),
        kv_bytes=sum(t.kv_bytes for t in transfers),
        exposed_share=sum(t.transfer_tail_s for t in transfers) / transfer_s if transfer_s else None,
        client=_summaries(
            {
                "ttft_s": [m.ttft_s for m in completed if m.ttft_s is not None],
                "tpot_s": [m.tpot_s for m in completed if m.tpot_s is not None],
                "itl_s": [gap_s for m in completed for gap_s in m.itl_s],
                "e2e_s": [m.e2e_s for m in completed],
            }
        ),
        server=_summaries(
            {field: [getattr(t, field) for t in timelines] for field in SERVER_FIELDS}
            | {field: [getattr(t, field) for t in transfers] for field in TRANSFER_FIELDS}
        ),
    )


def path_name(timeline: request_pb2.Timeline) -> str:
    """The way a request took in one word, such as disaggregated or local_prefill."""
    return request_pb2.Path.Name(timeline.path).removeprefix("PATH_").lower()


def report_json(report: LoadReport, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """The report for programs, with a line for each request; starts in seconds after the first one's."""
    first_s = min(m.started_at_s for m in measurements)
    return {**dataclasses.asdict(report), "requests": [_request_json(m, first_s) for m in measurements]}


def _request_json(measurement: Measurement, first_s: float) -> dict[str, Any]:
    line: dict[str, Any] = {
        "start_s": measurement.started_at_s - first_s,
        "failure": measurement.failure,
        "message": measurement.message,
        "output_tokens": len(measurement.token_times_s),
        "ttft_s": measurement.ttft_s,
        "tpot_s": measurement.tpot_s,
        "e2e_s": measurement.e2e_s,
    }
    timeline = measurement.timeline
    if timeline is not None:
        line["path"] = path_name(timeline)
        line["prefill_worker"], line["decode_worker"] = timeline.prefill_worker, timeline.decode_worker
        line |= {field: getattr(timeline, field) for field in (*SERVER_FIELDS, *TRANSFER_FIELDS)}
    return line


def _summaries(samples: Mapping[str, Sequence[float]]) -> dict[str, Summary]:
    summaries = {name: summarize(values) for name, values in samples.items()}
    return {name: summary for name, summary in summaries.items() if summary is not None}


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
