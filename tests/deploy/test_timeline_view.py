"""The printed timeline tells the request's own numbers."""

import io

from rich.console import Console

from baton.v1 import request_pb2
from deploy.timeline_view import print_timeline


def printed(timeline: request_pb2.Timeline) -> str:
    output = io.StringIO()
    print_timeline(timeline, Console(file=output, width=120))
    return output.getvalue()


def test_parts_are_printed_and_sum_to_ttft() -> None:
    text = printed(
        request_pb2.Timeline(
            path=request_pb2.PATH_DISAGGREGATED,
            path_reason="least loaded",
            prefill_worker="prefill-3",
            decode_worker="decode-1",
            queue_s=0.001,
            reserve_s=0.002,
            dispatch_s=0.003,
            prefill_queue_s=0.004,
            prefill_s=0.020,
            ttft_s=0.030,
            kv_bytes=852480,
            transport="grpc",
            transfer_s=0.015,
            transfer_tail_s=0.005,
            e2e_s=0.5,
        )
    )
    assert "the parts sum to 30.0 ms" in text
    assert "disaggregated, prefill-3 → decode-1" in text
    assert "852480 bytes by grpc in 15.0 ms, 5.0 ms of it after prefill" in text
    assert "470.0 ms after token 0" in text


def test_bars_lie_one_after_the_other() -> None:
    lines = printed(request_pb2.Timeline(queue_s=0.5, prefill_s=0.5, ttft_s=1.0)).splitlines()
    queue, prefill = (next(line for line in lines if line.startswith(f"  {name}  ")) for name in ("queue", "prefill"))
    assert queue.rindex("█") + 1 == prefill.index("█")
    assert queue.count("█") == prefill.count("█")


def test_local_prefill_has_no_transfer() -> None:
    text = printed(request_pb2.Timeline(path=request_pb2.PATH_LOCAL_PREFILL, decode_worker="mixed-0"))
    assert "local prefill, mixed-0" in text
    assert "bytes" not in text


def test_empty_timeline_can_be_printed() -> None:
    assert "0.0 ms" in printed(request_pb2.Timeline())
