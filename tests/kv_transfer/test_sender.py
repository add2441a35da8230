import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from kv_transfer.errors import (
    DuplicateFrame,
    LinkLost,
    OutOfRange,
    TicketClosed,
    TransferAborted,
    TransferTimeout,
)
from kv_transfer.frame import Buffer, Frame, digest, unpack
from kv_transfer.layout import KvLayout
from kv_transfer.pool import KvPool
from kv_transfer.sender import PushLimits, PushSender, PushTarget

NewPool = Callable[[KvLayout, int, int], KvPool]

LAYOUT = KvLayout(num_layers=4, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
TOKEN_BYTES = 32
BLOCKS = (3, 0, 4, 1)
TARGET = PushTarget("1" * 32, "00000000000000aa", range(2, 14))
ALL = set(product(range(4), range(2, 14)))
# One layer of four tokens a frame, two frames in flight.
LIMITS = PushLimits(credit_bytes=8 * TOKEN_BYTES, group_bytes=4 * TOKEN_BYTES)


class RecordingLink:
    """Keeps what is sent; acknowledges as far as the test has allowed."""

    def __init__(self, *, num_allowed: int = 10**6) -> None:
        self.frames: list[Frame] = []
        self.num_in_flight = 0
        self.max_bytes_in_flight = 0
        self.max_in_flight = 0
        self.failures: dict[int, Exception] = {}
        self._bytes_in_flight = 0
        self._allowed = asyncio.Semaphore(num_allowed)
        self._changed = asyncio.Condition()

    async def send(self, header: bytes, payload: Buffer, timeout_s: float) -> None:
        index = len(self.frames)
        self.frames.append(unpack(b"".join((header, payload))))
        self.num_in_flight += 1
        self._bytes_in_flight += len(payload)
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        self.max_bytes_in_flight = max(self.max_bytes_in_flight, self._bytes_in_flight)
        try:
            async with self._changed:
                self._changed.notify_all()
            if index in self.failures:
                raise self.failures[index]
            await self._allowed.acquire()
        finally:
            self.num_in_flight -= 1
            self._bytes_in_flight -= len(payload)

    async def close(self) -> None:
        pass

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._allowed.release()

    async def sent(self, count: int) -> None:
        """Waits until `count` frames were handed over."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: len(self.frames) >= count)

    @property
    def cells(self) -> list[tuple[int, int]]:
        return [cell for frame in self.frames for cell in product(frame.header.part.layers, frame.header.part.tokens)]


class SlowPool(KvPool):
    """A pool whose reads wait for the test, as those on a device wait for the device."""

    def __init__(self, tensor: torch.Tensor, layout: KvLayout) -> None:
        super().__init__(tensor, layout)
        self.copies_wait = True
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def read(self, block_ids: Sequence[int], layers: range, tokens: range) -> memoryview:
        self.begun.set()
        assert self.go_on.wait(10)
        return super().read(block_ids, layers, tokens)


@pytest.fixture
def pool(new_pool: NewPool) -> KvPool:
    return new_pool(LAYOUT, 5, 1)


async def test_an_engine_thread_reports_layers_and_all_arrives_once(pool: KvPool) -> None:
    link = RecordingLink()
    sender = PushSender(link, pool, TARGET, LIMITS)

    def compute() -> None:
        for tokens in (range(8), range(8, 14)):
            for layer in range(4):
                sender.layer_ready(range(layer, layer + 1), tokens, BLOCKS[: LAYOUT.num_blocks_for(tokens.stop)])

    engine = threading.Thread(target=compute)
    engine.start()
    summary = await sender.finish(10)
    engine.join()
    assert sorted(link.cells) == sorted(ALL)
    assert summary.num_frames == len(link.frames)
    assert summary.kv_bytes == len(ALL) * TOKEN_BYTES
    by_number = sorted(link.frames, key=lambda frame: frame.header.frame_number)
    assert [frame.header.frame_number for frame in by_number] == list(range(len(by_number)))
    assert summary.digest == digest(frame.checksum for frame in by_number)
    assert summary.first_send_at <= summary.last_ack_at
    assert not sender.failed.done()
    for frame in link.frames:
        assert frame.payload == pool.read(BLOCKS, frame.header.part.layers, frame.header.part.tokens)


async def test_a_chunk_leaves_while_the_next_is_not_computed_and_no_layer_before_its_time(pool: KvPool) -> None:
    link = RecordingLink()
    sender = PushSender(link, pool, TARGET, LIMITS)
    reported: set[tuple[int, int]] = set()
    for tokens, num_frames in ((range(5), 4), (range(5, 9), 8), (range(9, 14), 16)):
        for layer in range(4):
            # What is not computed yet has other content, which a frame sent too early would carry.
            kv = memoryview(bytes([layer + 1]) * (len(tokens) * TOKEN_BYTES))
            pool.write(BLOCKS, range(layer, layer + 1), tokens, kv)
            sender.layer_ready(range(layer, layer + 1), tokens, BLOCKS)
            reported |= set(product([layer], tokens)) & ALL
            await asyncio.sleep(0)
            assert set(link.cells) <= reported
        await link.sent(num_frames)
        assert set(link.cells) == reported
    await sender.finish(10)
    for frame in link.frames:
        layer = frame.header.part.layers.start
        assert set(frame.payload) == {layer + 1}


@pytest.mark.parametrize(
    ("limits", "num_frames", "num_bytes"),
    [
        (PushLimits(credit_bytes=10**6, group_bytes=32), 4, 128),
        (PushLimits(credit_bytes=10**6, group_bytes=32, max_frames_in_flight=2), 2, 64),
        (PushLimits(credit_bytes=95, group_bytes=32), 2, 64),
        (PushLimits(credit_bytes=64, group_bytes=10**6), 1, 64),
    ],
)
async def test_credit_bounds_what_is_in_flight(
    pool: KvPool, limits: PushLimits, num_frames: int, num_bytes: int
) -> None:
    link = RecordingLink(num_allowed=0)
    sender = PushSender(link, pool, TARGET, limits)
    sender.layer_ready(range(4), range(14), BLOCKS)
    await link.sent(num_frames)
    for count in range(num_frames + 1, 13):
        link.allow(1)
        await link.sent(count)
    link.allow(100)
    await sender.finish(10)
    assert (link.max_in_flight, link.max_bytes_in_flight) == (num_frames, num_bytes)


async def test_the_first_failure_ends_the_transfer_and_is_told_early(pool: KvPool) -> None:
    link = RecordingLink(num_allowed=0)
    link.failures = {1: LinkLost("gone")}
    sender = PushSender(link, pool, TARGET, LIMITS)
    sender.layer_ready(range(2), range(14), BLOCKS)
    async with asyncio.timeout(10):
        assert isinstance(await sender.failed, LinkLost)
    num_frames = len(link.frames)
    sender.layer_ready(range(2, 4), range(14), BLOCKS)
    for _ in range(2):
        with pytest.raises(LinkLost, match="gone"):
            await sender.finish(10)
    await sender.abort()
    assert len(link.frames) == num_frames
    assert link.num_in_flight == 0


async def test_a_bug_in_the_link_fails_the_transfer_too(pool: KvPool) -> None:
    link = RecordingLink()
    link.failures = {0: ZeroDivisionError("bug")}
    sender = PushSender(link, pool, TARGET, LIMITS)
    sender.layer_ready(range(4), range(14), BLOCKS)
    with pytest.raises(ZeroDivisionError):
        await sender.finish(10)
    await sender.abort()


@pytest.mark.parametrize("num_acked", range(13))
async def test_an_abort_at_any_step_leaves_nothing_running(pool: KvPool, num_acked: int) -> None:
    link = RecordingLink(num_allowed=num_acked)
    sender = PushSender(link, pool, TARGET, LIMITS)
    sender.layer_ready(range(4), range(14), BLOCKS)
    await link.sent(min(num_acked + 2, 12))
    finishing = asyncio.create_task(sender.finish(10))
    await asyncio.sleep(0)
    await sender.abort()
    await sender.abort()
    assert link.num_in_flight == 0
    sender.layer_ready(range(4), range(14), BLOCKS)
    num_frames = len(link.frames)
    if num_acked < 12:
        with pytest.raises(TransferAborted):
            await finishing
        assert num_frames <= num_acked + 2
    else:
        assert (await finishing).num_frames == 12
    await asyncio.sleep(0)
    assert len(link.frames) == num_frames


async def test_an_abort_waits_for_reads_of_the_blocks(pool: KvPool) -> None:
    slow = SlowPool(pool._tensor, LAYOUT)
    sender = PushSender(RecordingLink(), slow, TARGET, LIMITS)
    sender.layer_ready(range(4), range(14), BLOCKS)
    await asyncio.sleep(0)
    assert await asyncio.to_thread(slow.begun.wait, 10)
    with pytest.raises(TransferTimeout, match="2 reads"):
        await sender.abort(timeout_s=0.01)
    aborting = asyncio.create_task(sender.abort())
    await asyncio.sleep(0)
    assert not aborting.done()
    slow.go_on.set()
    await aborting


async def test_after_a_stop_the_blocks_are_read_no_more(pool: KvPool) -> None:
    """At once: whoever gets the blocks next may write to them before anything else happens."""
    reads: list[range] = []

    class Watched(KvPool):
        def read(self, block_ids: Sequence[int], layers: range, tokens: range) -> memoryview:
            reads.append(layers)
            return super().read(block_ids, layers, tokens)

    link = RecordingLink(num_allowed=0)
    sender = PushSender(link, Watched(pool._tensor, LAYOUT), TARGET, LIMITS)
    sender.layer_ready(range(4), range(14), BLOCKS)
    await link.sent(2)
    assert len(reads) == 2
    link.allow(1)  # what is acknowledged in this very moment makes no difference
    assert sender.stop()
    assert sender.stop()
    sender.layer_ready(range(4), range(14), BLOCKS)
    await sender.abort()
    assert len(reads) == len(link.frames) == 2


async def test_a_stop_tells_of_reads_that_go_on(pool: KvPool) -> None:
    slow = SlowPool(pool._tensor, LAYOUT)
    sender = PushSender(RecordingLink(), slow, TARGET, LIMITS)
    sender.layer_ready(range(4), range(14), BLOCKS)
    await asyncio.sleep(0)
    assert await asyncio.to_thread(slow.begun.wait, 10)
    assert not sender.stop()
    slow.go_on.set()
    await sender.abort()
    assert sender.stop()


async def test_a_frame_refused_as_delivered_before_is_there(pool: KvPool) -> None:
    """Its first copy arrived, but not the answer."""
    link = RecordingLink()
    link.failures = {0: DuplicateFrame("frame 0 was delivered before"), 11: DuplicateFrame("so was frame 11")}
    sender = PushSender(link, pool, TARGET, LIMITS)
    sender.layer_ready(range(4), range(14), BLOCKS)
    summary = await sender.finish(10)
    assert (summary.num_frames, summary.kv_bytes) == (12, len(ALL) * TOKEN_BYTES)
    assert summary.digest == digest(
        frame.checksum for frame in sorted(link.frames, key=lambda f: f.header.frame_number)
    )


async def test_reads_in_threads_bring_the_same_bytes(pool: KvPool) -> None:
    slow, link = SlowPool(pool._tensor, LAYOUT), RecordingLink()
    slow.go_on.set()
    sender = PushSender(link, slow, TARGET, LIMITS)
    sender.layer_ready(range(4), range(14), BLOCKS)
    await sender.finish(10)
    assert sorted(link.cells) == sorted(ALL)
    for frame in link.frames:
        assert frame.payload == pool.read(BLOCKS, frame.header.part.layers, frame.header.part.tokens)


async def test_a_finish_without_all_layers_times_out_and_says_what_lacks(pool: KvPool) -> None:
    sender = PushSender(RecordingLink(), pool, TARGET, LIMITS)
    sender.layer_ready(range(3), range(14), BLOCKS)
    with pytest.raises(TransferTimeout, match=r"12 \(layer, token\) pairs were not computed"):
        await sender.finish(0.05)
    await sender.abort()


async def test_a_layer_reported_twice_fails_the_transfer(pool: KvPool) -> None:
    sender = PushSender(RecordingLink(), pool, TARGET, LIMITS)
    sender.layer_ready(range(1), range(6), BLOCKS)
    sender.layer_ready(range(1), range(5, 8), BLOCKS)
    with pytest.raises(DuplicateFrame):
        await sender.finish(10)
    await sender.abort()


async def test_layers_or_blocks_that_do_not_exist_fail_the_transfer(pool: KvPool) -> None:
    for layers, blocks in ((range(5), BLOCKS), (range(4), BLOCKS[:3])):
        sender = PushSender(RecordingLink(), pool, TARGET, LIMITS)
        sender.layer_ready(layers, range(14), blocks)
        with pytest.raises(OutOfRange):
            await sender.finish(10)
        await sender.abort()


async def test_nothing_to_send_is_finished_at_once(pool: KvPool) -> None:
    link = RecordingLink()
    sender = PushSender(link, pool, PushTarget("1" * 32, "00000000000000aa", range(5, 5)), LIMITS)
    sender.layer_ready(range(4), range(5), BLOCKS)
    summary = await sender.finish(10)
    assert (summary.num_frames, summary.kv_bytes, summary.digest) == (0, 0, digest([]))
    assert summary.first_send_at == summary.last_ack_at
    assert link.frames == []


async def test_a_refusal_reaches_finish_as_it_was_raised(pool: KvPool) -> None:
    link = RecordingLink()
    link.failures = {0: TicketClosed("closed")}
    sender = PushSender(link, pool, TARGET, LIMITS)
    sender.layer_ready(range(4), range(14), BLOCKS)
    with pytest.raises(TicketClosed, match="closed"):
        await sender.finish(10)
    await sender.abort()


async def test_limits_below_one_token_are_refused(pool: KvPool) -> None:
    with pytest.raises(ValueError, match="frames of 31 bytes cannot hold a token of one layer, 32 bytes"):
        PushSender(RecordingLink(), pool, TARGET, PushLimits(credit_bytes=31))
