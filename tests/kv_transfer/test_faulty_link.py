import asyncio
import random
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import ChecksumMismatch, DuplicateFrame, Incomplete, LinkLost, TransferTimeout
from kv_transfer.faulty_link import Fate, FaultDice, LinkFaults, MessageFaults, SlowLine, damaged
from kv_transfer.landing import TransferClaim
from kv_transfer.layout import KvLayout
from kv_transfer.receiver import LandingSink
from kv_transfer.sender import PushLimits, PushSender, PushTarget

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
EPOCH, TICKET, PROMPT = "00000000000000aa", "1" * 32, 77
LIMITS = PushLimits(credit_bytes=1024, group_bytes=128)
TIMEOUT_S = 20.0


class Recorder:
    """A link that keeps what is sent and raises what it is told to."""

    def __init__(self):
        self.sent = []
        self.timeouts_s = []
        self.errors = []
        self.is_closed = False

    async def send(self, header, payload, timeout_s):
        self.sent.append((header, bytes(payload)))
        self.timeouts_s.append(timeout_s)
        if self.errors and (error := self.errors.pop(0)):
            raise error

    async def close(self):
        self.is_closed = True


def faulty(link, peer="decode-0", **faults):
    heard = []
    return LinkFaults(MessageFaults(**faults)).over(link, peer, heard.append), heard


class TestDice:
    def test_the_same_seed_gives_the_same_fates(self):
        faults = MessageFaults(seed=3, drop=0.2, corrupt=0.2, duplicate=0.2, delay=0.3, delay_s=1.0)
        first, second = FaultDice(faults), FaultDice(faults)
        fates = [first.roll() for _ in range(100)]
        assert fates == [second.roll() for _ in range(100)]
        other = FaultDice(MessageFaults(seed=4, drop=0.2, corrupt=0.2, duplicate=0.2, delay=0.3, delay_s=1.0))
        assert fates != [other.roll() for _ in range(100)]

    def test_probabilities_are_met(self):
        dice = FaultDice(MessageFaults(seed=1, drop=0.1, corrupt=0.2, duplicate=0.3, delay=0.25, delay_s=2.0))
        fates = [dice.roll() for _ in range(20_000)]
        shares = {what: count / 20_000 for what, count in Counter(fate.what for fate in fates).items()}
        # Three standard deviations of a share are at most 0.0107 here.
        assert shares == pytest.approx({"drop": 0.1, "corrupt": 0.2, "duplicate": 0.3, "": 0.4}, abs=0.0107)
        late = [fate.delay_s for fate in fates if fate.delay_s]
        assert len(late) / 20_000 == pytest.approx(0.25, abs=0.0107)
        assert set(late) == {2.0}

    def test_one_probability_does_not_shift_what_else_happens(self):
        few, many = (FaultDice(MessageFaults(seed=9, drop=p, delay=0.5, delay_s=1.0)) for p in (0.1, 0.6))
        pairs = [(few.roll(), many.roll()) for _ in range(500)]
        assert all(a.delay_s == b.delay_s for a, b in pairs)
        assert all(b.what == "drop" for a, b in pairs if a.what == "drop")

    @pytest.mark.parametrize(
        "wrong",
        [{"drop": 1.1}, {"corrupt": -0.1}, {"drop": 0.6, "duplicate": 0.5}, {"delay_s": -1.0}, {"bytes_per_s": 1e999}],
    )
    def test_impossible_faults_are_refused(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MessageFaults(**wrong)


@given(st.binary(min_size=1, max_size=50), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_damage_changes_exactly_one_byte(payload, place, flip):
    changed = damaged(payload, Fate("corrupt", 0.0, place, flip))
    assert len(changed) == len(payload)
    assert sum(a != b for a, b in zip(changed, payload, strict=True)) == 1


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 1000)), min_size=1, max_size=30), st.floats(1, 1e4))
def test_a_slow_line_never_carries_faster_than_its_rate_and_never_idles_with_work(messages, bytes_per_s):
    line, now_s, free_s = SlowLine(bytes_per_s), 0.0, 0.0
    for gap_s, num_bytes in messages:
        now_s += gap_s
        free_s = max(free_s, now_s) + num_bytes / bytes_per_s
        assert line.arrival_s(num_bytes, now_s) == pytest.approx(free_s)


class TestLink:
    async def test_without_faults_messages_pass_unchanged(self):
        recorder = Recorder()
        link, heard = faulty(recorder)
        await link.send(b"h", memoryview(b"payload"), 5.0)
        assert recorder.sent == [(b"h", b"payload")]
        assert 0 < recorder.timeouts_s[0] <= 5.0
        assert heard == []

    async def test_a_dropped_message_is_not_sent_and_looks_delivered(self):
        recorder = Recorder()
        link, heard = faulty(recorder, drop=1.0)
        await link.send(b"h", b"payload", 5.0)
        assert (recorder.sent, heard) == ([], ["drop"])

    async def test_a_corrupted_message_differs_in_one_payload_byte(self):
        recorder = Recorder()
        link, heard = faulty(recorder, corrupt=1.0)
        payload = bytearray(b"payload")
        await link.send(b"h", payload, 5.0)
        ((header, sent),) = recorder.sent
        assert (header, heard) == (b"h", ["corrupt"])
        assert sum(a != b for a, b in zip(sent, b"payload", strict=True)) == 1
        assert payload == b"payload", "the sender's KV stays as it is"

    async def test_the_refusal_of_a_duplicate_is_ignored_that_of_the_message_is_not(self):
        recorder = Recorder()
        recorder.errors = [None, DuplicateFrame("seen")]
        link, heard = faulty(recorder, duplicate=1.0)
        await link.send(b"h", b"payload", 5.0)
        assert recorder.sent == [(b"h", b"payload")] * 2
        assert heard == ["duplicate"]
        recorder.errors = [LinkLost("gone")]
        with pytest.raises(LinkLost):
            await link.send(b"h", b"payload", 5.0)
        assert len(recorder.sent) == 3

    async def test_a_delay_takes_from_the_time_of_the_message(self):
        recorder = Recorder()
        link, heard = faulty(recorder, delay=1.0, delay_s=0.05)
        began_at_s = time.monotonic()
        await link.send(b"h", b"payload", 60.0)
        assert time.monotonic() - began_at_s >= 0.05
        assert recorder.timeouts_s[0] <= 59.95
        assert heard == ["delay"]

    async def test_a_delay_longer_than_the_deadline_is_a_timeout(self):
        recorder = Recorder()
        link, _ = faulty(recorder, delay=1.0, delay_s=60.0)
        with pytest.raises(TransferTimeout):
            await link.send(b"h", b"payload", 0.01)
        assert recorder.sent == []

    async def test_a_slow_line_is_shared_by_all_links_to_a_peer_and_by_no_others(self):
        faults = LinkFaults(MessageFaults(bytes_per_s=1000.0))
        links = [faults.over(Recorder(), peer, lambda _: None) for peer in ("decode-0", "decode-0", "decode-1")]

        async def seconds(link):
            began_at_s = time.monotonic()
            await link.send(b"h", bytes(49), 60.0)
            return time.monotonic() - began_at_s

        first_s, second_s, _ = await asyncio.gather(*map(seconds, links))
        assert first_s >= 0.05
        assert second_s >= 0.1

    async def test_faults_lie_over_each_other(self):
        recorder = Recorder()
        inner, inner_heard = faulty(recorder, duplicate=1.0)
        outer, outer_heard = faulty(inner, corrupt=1.0)
        await outer.send(b"h", b"payload", 5.0)
        assert (inner_heard, outer_heard) == (["duplicate"], ["corrupt"])
        assert recorder.sent[0] == recorder.sent[1]
        assert recorder.sent[0] != (b"h", b"payload")

    async def test_closing_closes_the_link(self):
        recorder = Recorder()
        await faulty(recorder)[0].close()
        assert recorder.is_closed


class TestReceiver:
    """What a real receiver makes of it, over each transport."""

    @pytest.fixture
    async def push(self, connect, new_pool):
        async def push(**faults):
            """A transfer of 12 tokens over a faulty link; returns its sink and the result of the commit."""
            source, target = new_pool(LAYOUT, 4, 1), new_pool(LAYOUT, 4, 2)
            sink = LandingSink(EPOCH, target)
            blocks = random.Random(5).sample(range(4), 3)
            sink.open_zone(TICKET, blocks, range(12), PROMPT)
            sink.begin_push(TICKET, EPOCH)
            link, heard = faulty(await connect(sink), **faults)
            sender = PushSender(link, source, PushTarget(TICKET, EPOCH, range(12)), LIMITS)
            try:
                sender.layer_ready(range(2), range(12), [0, 1, 2])
                summary = await sender.finish(TIMEOUT_S)
            finally:
                await sender.abort()
            sink.commit(TICKET, TransferClaim(summary.num_frames, summary.kv_bytes, summary.digest, PROMPT))
            return sink, heard

        return push

    async def test_a_lost_message_is_found_at_the_commit(self, push):
        with pytest.raises(Incomplete):
            await push(seed=1, drop=0.5)

    async def test_a_damaged_message_is_refused(self, push):
        with pytest.raises(ChecksumMismatch):
            await push(corrupt=1.0)

    async def test_doubled_messages_do_no_harm_and_are_counted(self, push):
        sink, heard = await push(duplicate=1.0)
        assert sink.stale_writes == len(heard) > 1
