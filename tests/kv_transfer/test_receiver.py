import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.errors import (
    ChecksumMismatch,
    DuplicateFrame,
    EpochMismatch,
    Incomplete,
    KvTransferError,
    OutOfRange,
    TicketClosed,
    TicketUnknown,
    TransferTimeout,
)
from kv_transfer.frame import FrameHeader, digest, seal
from kv_transfer.landing import TransferClaim, ZoneState
from kv_transfer.layout import KvLayout
from kv_transfer.pool import KvPool
from kv_transfer.receiver import LandingSink
from kv_transfer.transfer_plan import KvSlice

NewPool = Callable[[KvLayout, int, int], KvPool]
Snapshot = Callable[[KvPool], torch.Tensor]

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")
EPOCH, TICKET, PROMPT = "00000000000000aa", "1" * 32, 5
WHOLE = KvSlice(range(2), range(6))
PAYLOAD = bytes(range(1, 97)) * 4  # 2 layers, 6 tokens, 32 bytes each


class SlowPool(KvPool):
    """A pool whose writes wait for the test, as those on a device wait for the device."""

    def __init__(self, tensor: torch.Tensor, layout: KvLayout) -> None:
        super().__init__(tensor, layout)
        self.copies_wait = True
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.failure: Exception | None = None

    def write(self, block_ids: Sequence[int], layers: range, tokens: range, payload: memoryview) -> None:
        self.begun.set()
        assert self.go_on.wait(10)
        if self.failure is not None:
            raise self.failure
        super().write(block_ids, layers, tokens, payload)


def frame(part: KvSlice = WHOLE, payload: bytes = PAYLOAD, number: int = 0) -> bytes:
    sealed, _ = seal(FrameHeader(TICKET, EPOCH, number, part, range(2), len(payload)), payload)
    return sealed + payload


def claim_of(data: bytes) -> TransferClaim:
    return TransferClaim(1, len(data) - 64, digest([int.from_bytes(data[56:64], "little")]), PROMPT)


def opened(pool: KvPool) -> LandingSink:
    sink = LandingSink(EPOCH, pool)
    sink.open_zone(TICKET, [3, 1], range(6), PROMPT)
    sink.begin_push(TICKET, EPOCH)
    return sink


async def begun(pool: SlowPool) -> None:
    assert await asyncio.to_thread(pool.begun.wait, 10)


async def test_a_frame_lands_and_the_transfer_commits(new_pool: NewPool) -> None:
    pool = new_pool(LAYOUT, 5, 1)
    sink = opened(pool)
    data = frame()
    await sink.write(data)
    sink.commit(TICKET, claim_of(data))
    assert bytes(pool.read([3, 1], range(2), range(6))) == PAYLOAD
    assert sink.num_open == 0
    await sink.close(TICKET, 0)
    assert sink.state(TICKET) is None


async def test_a_flipped_byte_is_found_before_anything_is_written(new_pool: NewPool, snapshot: Snapshot) -> None:
    pool = new_pool(LAYOUT, 5, 1)
    before = snapshot(pool)
    sink = opened(pool)
    data = bytearray(frame())
    data[100] ^= 1
    with pytest.raises(ChecksumMismatch):
        await sink.write(data)
    with pytest.raises(ChecksumMismatch):
        sink.commit(TICKET, claim_of(frame()))
    assert torch.equal(snapshot(pool), before)
    await sink.close(TICKET, 0)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=200), keep=st.integers(0, 64))
async def test_noise_raises_only_typed_errors_and_writes_nothing(
    new_pool: NewPool, snapshot: Snapshot, noise: bytes, keep: int
) -> None:
    pool = new_pool(LAYOUT, 5, 1)
    before = snapshot(pool)
    with pytest.raises(KvTransferError):
        await opened(pool).write(frame()[:keep] + noise)
    assert torch.equal(snapshot(pool), before)


async def test_blocks_that_do_not_hold_the_tokens_are_refused_at_once(new_pool: NewPool) -> None:
    sink = LandingSink(EPOCH, new_pool(LAYOUT, 5, 1))
    with pytest.raises(OutOfRange):
        sink.open_zone(TICKET, [1], range(6), PROMPT)
    with pytest.raises(OutOfRange):
        sink.open_zone(TICKET, [1, 5], range(6), PROMPT)
    assert sink.num_open == 0


async def test_close_waits_for_a_write_in_flight(new_pool: NewPool) -> None:
    pool = SlowPool(new_pool(LAYOUT, 5, 1)._tensor, LAYOUT)
    sink = opened(pool)
    writing = asyncio.create_task(sink.write(frame()))
    await begun(pool)
    with pytest.raises(TransferTimeout, match="keep the blocks"):
        await sink.close(TICKET, 0.01)
    with pytest.raises(TicketClosed):
        await sink.write(frame(number=1))
    closing = [asyncio.create_task(sink.close(TICKET, 10)) for _ in range(2)]
    pool.go_on.set()
    await asyncio.gather(*closing, writing)
    with pytest.raises(TicketUnknown):
        await sink.write(frame(number=1))
    assert (sink.stale_writes, sink.num_open) == (2, 0)


async def test_closing_now_tells_whether_the_blocks_may_have_another_use(new_pool: NewPool) -> None:
    pool = SlowPool(new_pool(LAYOUT, 5, 1)._tensor, LAYOUT)
    sink = opened(pool)
    writing = asyncio.create_task(sink.write(frame()))
    await begun(pool)
    assert not sink.close_now(TICKET)
    with pytest.raises(TicketClosed):
        await sink.write(frame(number=1))
    pool.go_on.set()
    await writing
    assert sink.close_now(TICKET)
    assert sink.state(TICKET) is None
    assert sink.num_open == 0


async def test_a_second_copy_is_refused_when_the_first_is_in_place_and_not_before(new_pool: NewPool) -> None:
    """The refusal stands in for the acknowledgement of the first one, so that a commit may follow it."""
    pool = SlowPool(new_pool(LAYOUT, 5, 1)._tensor, LAYOUT)
    sink = opened(pool)
    data = frame()
    first = asyncio.create_task(sink.write(data))
    await begun(pool)
    second = asyncio.create_task(sink.write(data))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not second.done()
    pool.go_on.set()
    with pytest.raises(DuplicateFrame):
        await second
    sink.commit(TICKET, claim_of(data))
    await first
    with pytest.raises(TicketClosed):
        await sink.write(data)
    assert sink.stale_writes == 2


async def test_only_this_life_is_meant(new_pool: NewPool) -> None:
    sink = LandingSink(EPOCH, new_pool(LAYOUT, 5, 1))
    sink.check_epoch(EPOCH)
    with pytest.raises(EpochMismatch, match=f"0123456789abcdef.*{EPOCH}"):
        sink.check_epoch("0123456789abcdef")


async def test_a_write_whose_caller_is_gone_is_still_in_flight(new_pool: NewPool) -> None:
    pool = SlowPool(new_pool(LAYOUT, 5, 1)._tensor, LAYOUT)
    sink = opened(pool)
    writing = asyncio.create_task(sink.write(frame()))
    await begun(pool)
    writing.cancel()
    await asyncio.wait({writing}, timeout=10)
    assert writing.cancelled()
    with pytest.raises(TransferTimeout):
        await sink.close(TICKET, 0.01)
    pool.go_on.set()
    await sink.close(TICKET, 10)
    assert bytes(pool.read([3, 1], range(2), range(6))) == PAYLOAD


async def test_a_commit_during_a_write_fails(new_pool: NewPool) -> None:
    pool = SlowPool(new_pool(LAYOUT, 5, 1)._tensor, LAYOUT)
    sink = opened(pool)
    writing = asyncio.create_task(sink.write(frame()))
    await begun(pool)
    with pytest.raises(Incomplete):
        sink.commit(TICKET, claim_of(frame()))
    pool.go_on.set()
    await writing
    assert sink.state(TICKET) is ZoneState.FAILED
    await sink.close(TICKET, 0)


async def test_an_error_of_the_device_fails_the_transfer(new_pool: NewPool) -> None:
    pool = SlowPool(new_pool(LAYOUT, 5, 1)._tensor, LAYOUT)
    pool.failure = RuntimeError("device lost")
    pool.go_on.set()
    sink = opened(pool)
    with pytest.raises(RuntimeError, match="device lost"):
        await sink.write(frame())
    with pytest.raises(KvTransferError, match="device lost"):
        sink.commit(TICKET, claim_of(frame()))
    await sink.close(TICKET, 0)


async def test_closing_twice_or_what_is_unknown_is_no_error(new_pool: NewPool) -> None:
    sink = opened(new_pool(LAYOUT, 5, 1))
    for ticket in (TICKET, TICKET, "2" * 32):
        await sink.close(ticket, 0)
