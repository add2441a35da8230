import asyncio
import threading

import pytest

from kv_transfer.faulty_link import MessageFaults
from worker.fault_injection import FaultHit, HoldSpec, InjectedFaults
from worker.fault_points import FaultPoint

TIMEOUT_S = 20.0


class Recorder:
    def __init__(self):
        self.sent = []
        self.is_closed = False

    async def send(self, header, payload, timeout_s):
        self.sent.append(bytes(payload))

    async def close(self):
        self.is_closed = True


@pytest.fixture
async def faults():
    return InjectedFaults()


def _reach(faults, request_id="r", point=FaultPoint.QUEUED, peer=""):
    return asyncio.create_task(faults.reach(point, request_id, peer))


async def test_without_faults_everything_passes(faults):
    await faults.reach(FaultPoint.QUEUED, "r")
    recorder = Recorder()
    await faults.link(recorder, "r", "decode-0").send(b"h", b"kv", TIMEOUT_S)
    assert recorder.sent == [b"kv"]


async def test_a_held_request_goes_on_when_the_fault_is_lifted(faults):
    hits = []
    with faults.hold(HoldSpec(FaultPoint.QUEUED, max_hold_s=60.0), hits.append):
        held = _reach(faults, peer="decode-1")
        await asyncio.sleep(0.02)
        assert not held.done()
        assert hits == [FaultHit("r", "decode-1", FaultPoint.QUEUED)]
    await asyncio.wait_for(held, TIMEOUT_S)
    await faults.reach(FaultPoint.QUEUED, "r2")
    assert len(hits) == 1


async def test_no_request_is_held_longer_than_allowed(faults):
    with faults.hold(HoldSpec(FaultPoint.QUEUED, max_hold_s=0.01), lambda _: None):
        await asyncio.wait_for(faults.reach(FaultPoint.QUEUED, "r"), TIMEOUT_S)


async def test_other_points_pass(faults):
    hits = []
    with faults.hold(HoldSpec(FaultPoint.PUSHED, max_hold_s=60.0), hits.append):
        for point in set(FaultPoint) - {FaultPoint.PUSHED}:
            await faults.reach(point, "r")
    assert hits == []


async def test_skipped_and_surplus_requests_pass(faults):
    hits = []
    with faults.hold(HoldSpec(FaultPoint.QUEUED, num_skipped=2, max_hits=1, max_hold_s=60.0), hits.append):
        tasks = [_reach(faults, str(number)) for number in range(5)]
        await asyncio.wait([tasks[i] for i in (0, 1, 3, 4)], timeout=TIMEOUT_S)
        assert [task.done() for task in tasks] == [True, True, False, True, True]
    await tasks[2]
    assert [hit.request_id for hit in hits] == ["2"]


async def test_zero_hold_only_notices(faults):
    hits = []
    with faults.hold(HoldSpec(FaultPoint.DECODING), hits.append):
        for number in range(3):
            await faults.reach(FaultPoint.DECODING, str(number))
    assert len(hits) == 3


async def test_a_cancelled_request_is_let_go(faults):
    with faults.hold(HoldSpec(FaultPoint.QUEUED, max_hold_s=60.0), lambda _: None):
        held = _reach(faults)
        await asyncio.sleep(0)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held


async def test_two_holds_at_one_point_both_notice_and_both_hold(faults):
    first_hits, second_hits = [], []
    with faults.hold(HoldSpec(FaultPoint.QUEUED, max_hold_s=60.0), first_hits.append):
        with faults.hold(HoldSpec(FaultPoint.QUEUED, max_hold_s=60.0), second_hits.append):
            held = _reach(faults)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert not held.done()
    await asyncio.wait_for(held, TIMEOUT_S)
    assert len(first_hits) == len(second_hits) == 1


async def test_a_note_from_another_thread_is_heard_on_the_loop(faults):
    heard = asyncio.Queue()
    here = threading.get_ident()
    spec = HoldSpec(FaultPoint.PREFILLING, max_hits=1)
    with faults.hold(spec, lambda hit: heard.put_nowait((hit, threading.get_ident()))):
        await asyncio.to_thread(faults.note, FaultPoint.PREFILLING, "r", "decode-0")
        hit, thread = await asyncio.wait_for(heard.get(), TIMEOUT_S)
    assert hit == FaultHit("r", "decode-0", FaultPoint.PREFILLING)
    assert thread == here


class TestLink:
    async def test_each_message_passes_the_pushing_point(self, faults):
        recorder, hits = Recorder(), []
        link = faults.link(recorder, "r", "decode-0")
        with faults.hold(HoldSpec(FaultPoint.PUSHING, num_skipped=1, max_hold_s=60.0), hits.append):
            await link.send(b"h", b"first", TIMEOUT_S)
            second = asyncio.create_task(link.send(b"h", b"second", TIMEOUT_S))
            await asyncio.sleep(0.01)
            assert recorder.sent == [b"first"]
        await asyncio.wait_for(second, TIMEOUT_S)
        assert recorder.sent == [b"first", b"second"]
        assert hits == [FaultHit("r", "decode-0", FaultPoint.PUSHING)]

    async def test_faults_come_and_go_under_a_link_in_use(self, faults):
        recorder, hits = Recorder(), []
        link = faults.link(recorder, "r", "decode-0")
        with faults.spoil_messages(MessageFaults(drop=1.0), hits.append):
            await link.send(b"h", b"lost", TIMEOUT_S)
        await link.send(b"h", b"kept", TIMEOUT_S)
        assert recorder.sent == [b"kept"]
        assert hits == [FaultHit("r", "decode-0", what="drop")]

    async def test_several_faults_at_once_strike_the_same_message(self, faults):
        recorder, corrupted, doubled = Recorder(), [], []
        link = faults.link(recorder, "r", "decode-0")
        with (
            faults.spoil_messages(MessageFaults(duplicate=1.0), doubled.append),
            faults.spoil_messages(MessageFaults(corrupt=1.0), corrupted.append),
        ):
            await link.send(b"h", b"kv", TIMEOUT_S)
        assert len(recorder.sent) == 2
        assert b"kv" not in recorder.sent
        assert (len(corrupted), len(doubled)) == (1, 1)

    async def test_it_closes_the_link_below(self, faults):
        recorder = Recorder()
        await faults.link(recorder, "r", "decode-0").close()
        assert recorder.is_closed
