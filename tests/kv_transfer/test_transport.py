"""Conformance: what holds over every transport, from one pool into another."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import uuid4

import pytest
import torch

from kv_transfer.errors import (
    DuplicateFrame,
    EpochMismatch,
    Incomplete,
    KvTransferError,
    PromptMismatch,
    TicketClosed,
    TicketUnknown,
)
from kv_transfer.frame import Buffer, prompt_hash
from kv_transfer.landing import TransferClaim, ZoneState
from kv_transfer.layout import KvLayout
from kv_transfer.pool import KvPool
from kv_transfer.receiver import LandingSink
from kv_transfer.sender import PushLimits, PushSender, PushTarget, TransferSummary
from kv_transfer.transport import Link, Sink

NewPool = Callable[[KvLayout, int, int], KvPool]
KvOf = Callable[[KvPool, list[int], range], torch.Tensor]
Snapshot = Callable[[KvPool], torch.Tensor]
Connect = Callable[[Sink], Awaitable[Link]]

EPOCH = "00000000000000aa"
LIMITS = PushLimits(credit_bytes=1024, group_bytes=256)
PROMPT = prompt_hash(range(1000))


def layout(block_size: int, dtype: str = "bfloat16") -> KvLayout:
    return KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=block_size, dtype=dtype)


@dataclass
class Transfer:
    """One prompt's blocks on both sides."""

    ticket_id: str
    source_blocks: list[int]
    target_blocks: list[int]
    tokens: range


class Handoff:
    """A prefill pool, a decode pool and a link between them."""

    def __init__(self, source: KvPool, target: KvPool, sink: LandingSink, link: Link) -> None:
        self.source, self.target, self.sink, self.link = source, target, sink, link
        self.shuffle = random.Random(7)
        self.free = [list(range(pool.num_blocks)) for pool in (source, target)]
        for blocks in self.free:
            self.shuffle.shuffle(blocks)

    def reserve(self, tokens: range) -> Transfer:
        """Takes blocks in random order on both sides and opens the zone."""
        taken = []
        for pool, free in zip((self.source, self.target), self.free, strict=True):
            count = pool.layout.num_blocks_for(tokens.stop)
            taken.append([free.pop() for _ in range(count)])
        transfer = Transfer(uuid4().hex, taken[0], taken[1], tokens)
        self.sink.open_zone(transfer.ticket_id, transfer.target_blocks, tokens, PROMPT)
        self.sink.begin_push(transfer.ticket_id, EPOCH)
        return transfer

    def sender(self, transfer: Transfer, link: Link | None = None, epoch: str = EPOCH) -> PushSender:
        target = PushTarget(transfer.ticket_id, epoch, transfer.tokens)
        return PushSender(link or self.link, self.source, target, LIMITS)

    async def push(self, transfer: Transfer, chunk: int = 1000, link: Link | None = None) -> TransferSummary:
        """Computes in chunks from token 0, layer by layer."""
        sender = self.sender(transfer, link)
        try:
            for first in range(0, transfer.tokens.stop, chunk):
                tokens = range(first, min(first + chunk, transfer.tokens.stop))
                for layer in range(3):
                    sender.layer_ready(range(layer, layer + 1), tokens, transfer.source_blocks)
                await asyncio.sleep(0)
            return await sender.finish(20)
        finally:
            await sender.abort()

    def commit(self, transfer: Transfer, summary: TransferSummary, prompt: int = PROMPT) -> None:
        claim = TransferClaim(summary.num_frames, summary.kv_bytes, summary.digest, prompt)
        self.sink.commit(transfer.ticket_id, claim)


@pytest.fixture
def handoff(new_pool: NewPool, connect: Connect) -> Callable[..., Awaitable[Handoff]]:
    async def make(source: KvLayout | None = None, target: KvLayout | None = None, num_blocks: int = 30) -> Handoff:
        target_pool = new_pool(target or layout(8), num_blocks, 2)
        sink = LandingSink(EPOCH, target_pool)
        return Handoff(new_pool(source or layout(4), num_blocks, 1), target_pool, sink, await connect(sink))

    return make


class TamperingLink:
    """Passes frames on, as the test changes them; a change to nothing loses the frame and still says it arrived."""

    def __init__(self, link: Link, change: Callable[[int, bytes], list[bytes]]) -> None:
        self._link = link
        self._change = change
        self.frames: list[bytes] = []

    async def send(self, header: bytes, payload: Buffer, timeout_s: float) -> None:
        frame = b"".join((header, payload))
        self.frames.append(frame)
        for changed in self._change(len(self.frames) - 1, frame):
            await self._link.send(changed[:64], changed[64:], timeout_s)

    async def close(self) -> None:
        await self._link.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("source_size", "target_size"), [(4, 4), (4, 16), (16, 3), (1, 5)])
@pytest.mark.parametrize(
    ("tokens", "chunk"),
    [(range(16), 1000), (range(21), 1000), (range(5, 21), 1000), (range(16, 17), 8), (range(3, 21), 7)],
)
async def test_bytes_land_exactly(
    handoff: Callable[..., Awaitable[Handoff]],
    kv_of: KvOf,
    dtype: str,
    source_size: int,
    target_size: int,
    tokens: range,
    chunk: int,
) -> None:
    pair = await handoff(layout(source_size, dtype), layout(target_size, dtype))
    every_block = list(range(30))
    everything = range(30 * target_size)
    before = kv_of(pair.target, every_block, everything)
    transfer = pair.reserve(tokens)
    summary = await pair.push(transfer, chunk)
    pair.commit(transfer, summary)
    assert summary.kv_bytes == 3 * len(tokens) * pair.source.layout.token_bytes
    for t in tokens:
        slot = transfer.target_blocks[t // target_size] * target_size + t % target_size
        before[slot] = kv_of(pair.source, transfer.source_blocks, range(t, t + 1))[0]
    assert torch.equal(kv_of(pair.target, every_block, everything), before)
    await pair.sink.close(transfer.ticket_id, 0)
    assert (pair.sink.stale_writes, pair.sink.num_open) == (0, 0)


async def test_transfers_interleave(handoff: Callable[..., Awaitable[Handoff]], kv_of: KvOf) -> None:
    pair = await handoff(num_blocks=100)
    transfers = [pair.reserve(range(n % 3, 8 + n)) for n in range(16)]
    summaries = await asyncio.gather(*(pair.push(transfer, 5) for transfer in transfers))
    for transfer, summary in zip(transfers, summaries, strict=True):
        pair.commit(transfer, summary)
        sent = kv_of(pair.source, transfer.source_blocks, transfer.tokens)
        assert torch.equal(kv_of(pair.target, transfer.target_blocks, transfer.tokens), sent)
    assert pair.sink.num_open == 0


@pytest.mark.parametrize("seed", range(4))
async def test_no_order_of_transfers_in_both_directions_can_lock_them(
    handoff: Callable[..., Awaitable[Handoff]], kv_of: KvOf, seed: int
) -> None:
    """Two workers send to each other at once, over one link each, in another order than was reserved; one leaves."""
    shuffle = random.Random(seed)
    directions = [await handoff(num_blocks=100), await handoff(num_blocks=100)]
    transfers = [(pair, pair.reserve(range(8 + n))) for pair in directions for n in range(8)]
    begun = {
        transfer.ticket_id: asyncio.create_task(pair.push(transfer, 5))
        for pair, transfer in shuffle.sample(transfers, len(transfers))
    }
    await asyncio.sleep(0)
    (_, left), *others = transfers
    begun[left.ticket_id].cancel()
    for pair, transfer in others:
        pair.commit(transfer, await asyncio.wait_for(begun[transfer.ticket_id], 10))
        sent = kv_of(pair.source, transfer.source_blocks, transfer.tokens)
        assert torch.equal(kv_of(pair.target, transfer.target_blocks, transfer.tokens), sent)
    await asyncio.wait({begun[left.ticket_id]})
    await directions[0].sink.close(left.ticket_id, 10)
    assert [pair.sink.num_open for pair in directions] == [0, 0]


async def test_reordered_frames_land_exactly(handoff: Callable[..., Awaitable[Handoff]], kv_of: KvOf) -> None:
    pair = await handoff()
    transfer = pair.reserve(range(21))
    held: list[bytes] = []

    def swap(index: int, frame: bytes) -> list[bytes]:
        if index % 2 == 0:
            held.append(frame)
            return []
        return [frame, held.pop()]

    link = TamperingLink(pair.link, swap)
    summary = await pair.push(transfer, link=link)
    for frame in held:
        await pair.link.send(frame[:64], frame[64:], 10)
    pair.commit(transfer, summary)
    sent = kv_of(pair.source, transfer.source_blocks, transfer.tokens)
    assert torch.equal(kv_of(pair.target, transfer.target_blocks, transfer.tokens), sent)


@pytest.mark.parametrize("num_acked", range(7))
async def test_an_abort_at_any_step_frees_both_sides_and_disturbs_nobody(
    handoff: Callable[..., Awaitable[Handoff]], snapshot: Snapshot, kv_of: KvOf, num_acked: int
) -> None:
    pair = await handoff()
    transfer, other = pair.reserve(range(16)), pair.reserve(range(21))
    reached, hold = asyncio.Event(), asyncio.Event()

    class StoppingLink(TamperingLink):
        async def send(self, header: bytes, payload: Buffer, timeout_s: float) -> None:
            await super().send(header, payload, timeout_s)
            if len(self.frames) > num_acked:
                reached.set()
                await hold.wait()

    link = StoppingLink(pair.link, lambda index, frame: [frame])
    sender = pair.sender(transfer, link)
    sender.layer_ready(range(3), range(16), transfer.source_blocks)
    if num_acked < 6:
        await asyncio.wait_for(reached.wait(), 10)
    await sender.abort()
    await pair.sink.close(transfer.ticket_id, 10)
    after = snapshot(pair.target)
    for frame in link.frames:
        with pytest.raises(TicketUnknown):
            await pair.link.send(frame[:64], frame[64:], 10)
    # More, if one that was under way when its sender stopped arrived after the close.
    assert pair.sink.stale_writes >= len(link.frames)
    assert torch.equal(snapshot(pair.target), after)
    pair.commit(other, await pair.push(other))
    sent = kv_of(pair.source, other.source_blocks, other.tokens)
    assert torch.equal(kv_of(pair.target, other.target_blocks, other.tokens), sent)


async def test_a_frame_delivered_twice_is_refused_and_the_first_stands(
    handoff: Callable[..., Awaitable[Handoff]], kv_of: KvOf
) -> None:
    pair = await handoff()
    transfer = pair.reserve(range(16))
    link = TamperingLink(pair.link, lambda index, frame: [frame])
    summary = await pair.push(transfer, link=link)
    for frame in link.frames:
        with pytest.raises(DuplicateFrame):
            await pair.link.send(frame[:64], frame[64:], 10)
    pair.commit(transfer, summary)
    for frame in link.frames:
        with pytest.raises(TicketClosed):
            await pair.link.send(frame[:64], frame[64:], 10)
    sent = kv_of(pair.source, transfer.source_blocks, transfer.tokens)
    assert torch.equal(kv_of(pair.target, transfer.target_blocks, transfer.tokens), sent)


@pytest.mark.parametrize("position", [*range(64), 64, 150, -1])
async def test_a_flipped_byte_fails_the_transfer_and_nothing_of_the_frame_is_written(
    handoff: Callable[..., Awaitable[Handoff]], snapshot: Snapshot, position: int
) -> None:
    pair = await handoff()
    before = snapshot(pair.target)
    transfer = pair.reserve(range(5))

    def flip(index: int, frame: bytes) -> list[bytes]:
        changed = bytearray(frame)
        changed[position] ^= 0x10
        return [bytes(changed)]

    with pytest.raises(KvTransferError) as caught:
        await pair.push(transfer, link=TamperingLink(pair.link, flip))
    assert caught.value.reason in {"malformed", "ticket_unknown", "epoch_mismatch", "out_of_range", "checksum_mismatch"}
    assert torch.equal(snapshot(pair.target), before)
    await pair.sink.close(transfer.ticket_id, 10)


@pytest.mark.parametrize("lost", range(6))
async def test_a_lost_frame_is_noticed_at_the_commit(handoff: Callable[..., Awaitable[Handoff]], lost: int) -> None:
    pair = await handoff()
    transfer = pair.reserve(range(16))
    link = TamperingLink(pair.link, lambda index, frame: [] if index == lost else [frame])
    summary = await pair.push(transfer, link=link)
    assert summary.num_frames == 6
    with pytest.raises(Incomplete, match="are missing"):
        pair.commit(transfer, summary)
    assert pair.sink.state(transfer.ticket_id) is ZoneState.FAILED
    await pair.sink.close(transfer.ticket_id, 10)


async def test_kv_of_another_prompt_is_not_committed(handoff: Callable[..., Awaitable[Handoff]]) -> None:
    pair = await handoff()
    transfer = pair.reserve(range(16))
    summary = await pair.push(transfer)
    with pytest.raises(PromptMismatch):
        pair.commit(transfer, summary, prompt_hash([1, 2, 3]))


async def test_a_frame_for_an_earlier_life_is_refused(
    handoff: Callable[..., Awaitable[Handoff]], snapshot: Snapshot
) -> None:
    pair = await handoff()
    before = snapshot(pair.target)
    transfer = pair.reserve(range(16))
    sender = pair.sender(transfer, epoch="00000000000000ab")
    sender.layer_ready(range(3), range(16), transfer.source_blocks)
    with pytest.raises(EpochMismatch, match="get a new ticket"):
        await sender.finish(10)
    await sender.abort()
    assert torch.equal(snapshot(pair.target), before)
    assert pair.sink.stale_writes > 0


async def test_one_failed_transfer_leaves_others_on_the_link_alone(
    handoff: Callable[..., Awaitable[Handoff]], kv_of: KvOf
) -> None:
    pair = await handoff(num_blocks=60)
    good, bad = pair.reserve(range(21)), pair.reserve(range(21))
    await pair.sink.close(bad.ticket_id, 10)
    results = await asyncio.gather(pair.push(good, 4), pair.push(bad, 4), return_exceptions=True)
    assert isinstance(results[1], TicketUnknown)
    assert isinstance(results[0], TransferSummary)
    pair.commit(good, results[0])
    sent = kv_of(pair.source, good.source_blocks, good.tokens)
    assert torch.equal(kv_of(pair.target, good.target_blocks, good.tokens), sent)
