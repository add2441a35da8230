import io
import json

import pytest
from rich.console import Console

from baton.v1 import request_pb2
from bench.measurement import Measurement
from bench.report import make_report, report_json
from bench.report_view import print_report


def _timeline(**fields):
    return request_pb2.Timeline(**{"path": request_pb2.PATH_DISAGGREGATED, **fields})


MEASUREMENTS = [
    Measurement(
        10.0, 12.0, (10.5, 11.0, 12.0), _timeline(prefill_s=0.25, transfer_s=0.5, transfer_tail_s=0.25, kv_bytes=4)
    ),
    Measurement(
        11.0, 14.0, (12.5, 13.0, 14.0), _timeline(prefill_s=0.75, transfer_s=1.5, transfer_tail_s=0.25, kv_bytes=6)
    ),
    Measurement(12.0, 13.0, (12.5, 12.75, 13.0), request_pb2.Timeline(path=request_pb2.PATH_LOCAL_PREFILL)),
    Measurement(12.0, 20.0, (19.0,), None, "UNAVAILABLE", "decode-0: gone"),
    Measurement(12.0, 12.5, (), None, "QUEUE_FULL", "first"),
    Measurement(12.0, 12.5, (), None, "QUEUE_FULL", "second"),
]


def test_counts_and_rates_by_hand():
    report = make_report(MEASUREMENTS)
    assert (report.num_requests, report.num_completed) == (6, 3)
    assert report.failures == {"UNAVAILABLE": 1, "QUEUE_FULL": 2}
    assert report.failure_messages == {"UNAVAILABLE": "decode-0: gone", "QUEUE_FULL": "first"}
    assert report.paths == {"disaggregated": 2, "local_prefill": 1}
    assert report.duration_s == 10.0  # from 10 to 20, though the last to end failed
    assert report.requests_per_s == pytest.approx(0.3)
    assert report.output_tokens_per_s == pytest.approx(0.9)  # nine tokens of completed requests


def test_latencies_are_of_completed_requests():
    client = make_report(MEASUREMENTS).client
    assert (client["ttft_s"].count, client["ttft_s"].p50) == (3, 0.5)  # of 0.5, 1.5, 0.5
    assert client["e2e_s"].mean == pytest.approx(2.0)  # of 2, 3, 1
    assert client["tpot_s"].p50 == pytest.approx(0.75)  # of 0.75, 0.75, 0.25
    assert client["itl_s"].count == 6


def test_transfers_count_only_where_kv_was_moved():
    report = make_report(MEASUREMENTS)
    assert report.kv_bytes == 10
    assert report.exposed_share == pytest.approx(0.25)  # 0.5 s of 2 s
    assert report.server["transfer_s"].count == 2
    assert report.server["transfer_s"].mean == pytest.approx(1.0)
    assert report.server["prefill_s"].count == 3


def test_a_run_without_success_has_no_latencies():
    report = make_report(MEASUREMENTS[3:])
    assert (report.num_completed, report.requests_per_s, report.exposed_share) == (0, 0.0, None)
    assert report.client == report.server == {}


def test_json_has_summaries_and_a_line_for_each_request():
    written = json.loads(json.dumps(report_json(make_report(MEASUREMENTS), MEASUREMENTS)))
    assert written["client"]["ttft_s"]["p50"] == 0.5
    assert written["failures"] == {"UNAVAILABLE": 1, "QUEUE_FULL": 2}
    assert [line["start_s"] for line in written["requests"]] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert written["requests"][1]["kv_bytes"] == 6
    assert written["requests"][3]["message"] == "decode-0: gone"


@pytest.mark.parametrize("measurements", [MEASUREMENTS, MEASUREMENTS[2:3], MEASUREMENTS[3:]])
def test_the_table_fits_a_terminal_and_names_what_failed(measurements):
    output = io.StringIO()
    report = make_report(measurements)
    print_report(report, Console(file=output, width=80))
    shown = output.getvalue()
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    assert "…" not in shown
    assert ("TTFT" in shown) == bool(report.client)
    for reason in report.failures:
        assert reason in shown


def test_the_table_shows_milliseconds():
    output = io.StringIO()
    print_report(make_report(MEASUREMENTS[:1]), Console(file=output, width=80))
    rows = {line.split()[0]: line.split()[1:5] for line in output.getvalue().splitlines() if line.strip()}
    assert rows["TTFT"] == ["500.0"] * 4
    assert rows["TPOT"] == ["750.0"] * 4
    assert rows["transfer"] == ["500.0"] * 4
