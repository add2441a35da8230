import time

import pytest

from baton.v1 import request_pb2, worker_pb2
from router.outcome import Outcome


@pytest.fixture
def outcome():
    return Outcome(time.monotonic() - 5.0)


def test_the_parts_sum_to_ttft(outcome):
    outcome.note_assigned("why")
    outcome.note_reserved(worker_pb2.DecodeReserved(num_cached_tokens=16))
    outcome.arrived_at -= 3.0  # three more seconds until token 0, of which the worker tells two and a half
    outcome.note_prefilled(0.5, 2.0, 0, is_local=False)
    t = outcome.timeline
    assert t.queue_s == pytest.approx(5.0, abs=0.1)
    assert t.dispatch_s == pytest.approx(0.5, abs=0.1)
    assert t.queue_s + t.reserve_s + t.dispatch_s + t.prefill_queue_s + t.prefill_s == pytest.approx(t.ttft_s)
    assert (t.path_reason, outcome.decode_cached_tokens) == ("why", 16)


@pytest.mark.parametrize(("queue_s", "prefill_s"), [(0.0, 100.0), (100.0, 1.0), (100.0, 100.0), (0.0, 0.0)])
def test_the_parts_sum_to_ttft_and_none_is_negative_whatever_a_worker_tells(outcome, queue_s, prefill_s):
    outcome.note_assigned("why")
    outcome.note_reserved(worker_pb2.DecodeReserved())
    outcome.arrived_at -= 3.0
    outcome.note_prefilled(queue_s, prefill_s, 0, is_local=False)
    t = outcome.timeline
    parts = (t.queue_s, t.reserve_s, t.dispatch_s, t.prefill_queue_s, t.prefill_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(t.ttft_s)


def test_the_first_decode_step_counts_from_the_commit_and_once(outcome):
    outcome.note_committed()
    outcome.committed_at -= 2.0
    outcome.note_tokens(3)
    outcome.committed_at -= 2.0
    outcome.note_tokens(2)
    assert outcome.timeline.first_decode_step_s == pytest.approx(2.0, abs=0.1)
    assert outcome.num_tokens == 5


def test_without_a_transfer_there_is_no_decode_step(outcome):
    outcome.note_tokens(3)
    assert outcome.timeline.first_decode_step_s == 0.0


def test_the_transfer_is_told(outcome):
    outcome.note_pushed(worker_pb2.PrefillPushed(kv_bytes=9, transport="grpc", transfer_s=0.5, transfer_tail_s=0.25))
    t = outcome.timeline
    assert (t.kv_bytes, t.transport, t.transfer_s, t.transfer_tail_s) == (9, "grpc", 0.5, 0.25)


def test_the_end(outcome):
    outcome.finish(request_pb2.FINISH_REASON_STOP, 2)
    assert (outcome.reason, outcome.stop_token_id) == (request_pb2.FINISH_REASON_STOP, 2)
