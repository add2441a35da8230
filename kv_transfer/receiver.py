"""The receiving side: checks each frame, then puts its KV into the reserved blocks of this worker's pool."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.errors import DuplicateFrame, KvTransferError, TransferTimeout
from kv_transfer.frame import DEFAULT_MAX_FRAME_BYTES, Buffer, Frame, FrameHeader, unpack, verify_checksum
from kv_transfer.landing import LandingZones, TransferClaim, ZoneState
from kv_transfer.pool import KvPool


@dataclass(slots=True)
class _Target:
    block_ids: tuple[int, ...]
    drained: asyncio.Future[None] | None = None


class LandingSink:
    """A Sink over one pool. All methods belong to one event loop."""

    def __init__(self, epoch: str, pool: KvPool, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self.epoch = epoch
        self._pool = pool
        self._zones = LandingZones(epoch, pool.layout, max_frame_bytes=max_frame_bytes)
        self._targets: dict[str, _Target] = {}
        self._landings: dict[tuple[str, int], asyncio.Future[KvTransferError | None]] = {}

    @property
    def stale_writes(self) -> int:
        """Writes refused since the start: wrong epoch, unknown ticket, closed zone, outside the range."""
        return self._zones.stale_writes

    @property
    def num_open(self) -> int:
        """Zones that are not committed and not drained."""
        return self._zones.num_open

    def state(self, ticket_id: str) -> ZoneState | None:
        """The zone's state; None if the ticket is unknown."""
        return self._zones.state(ticket_id)

    def open_zone(self, ticket_id: str, block_ids: Sequence[int], tokens: range, prompt_hash: int) -> None:
        """Reserves a zone: KV of `tokens`, of all layers, may land in `block_ids`.

        `block_ids` covers the sequence from token 0, blocks that are only read included. Raises
        OutOfRange if it does not cover `tokens`, ValueError if the ticket exists.
        """
        self._pool.check(block_ids, range(self._pool.layout.num_layers), tokens)
        self._zones.open(ticket_id, tokens, prompt_hash)
        self._targets[ticket_id] = _Target(tuple(block_ids))

    def check_epoch(self, epoch: str) -> None:
        """Raises EpochMismatch for what was meant for another life of this worker."""
        self._zones.check_epoch(epoch)

    def begin_push(self, ticket_id: str, epoch: str) -> None:
        """Lets a sender start. See LandingZones.begin_push for what it raises."""
        self._zones.begin_push(ticket_id, epoch)

    async def write(self, frame: Buffer) -> None:
        """See Sink.write. If the caller is cancelled meanwhile, the write still counts as in flight.

        A second copy of a frame is refused when the first is in place, and not before: its sender may take the
        refusal for the acknowledgement that it has missed.
        """
        received = unpack(frame)
        header = received.header
        try:
            self._zones.place(header, received.checksum)
        except DuplicateFrame:
            first = self._landings.get((header.ticket_id, header.frame_number))
            if first is not None:
                await asyncio.wait({first})
            raise
        block_ids = self._targets[header.ticket_id].block_ids
        if self._pool.copies_wait:
            error = await asyncio.shield(self._start_landing(received, block_ids))
        else:
            error = self._land(received, block_ids)
            self._settle(header, error)
        if error is not None:
            raise error

    def commit(self, ticket_id: str, claim: TransferClaim) -> None:
        """Verifies the transfer. See LandingZones.commit for what it raises."""
        self._zones.commit(ticket_id, claim)

    def close_now(self, ticket_id: str) -> bool:
        """Refuses later writes at once. True: none is in flight, so that the blocks may have another use."""
        is_drained = self._zones.close(ticket_id)
        if is_drained:
            self._targets.pop(ticket_id, None)
        return is_drained

    async def close(self, ticket_id: str, timeout_s: float) -> None:
        """Refuses later writes at once, then waits until none is in flight. May be called again, or late.

        After it has returned, and only then, the blocks may have another use. Raises TransferTimeout:
        they may not.
        """
        if self.close_now(ticket_id):
            return
        target = self._targets[ticket_id]
        if target.drained is None:
            target.drained = asyncio.get_running_loop().create_future()
        await asyncio.wait({target.drained}, timeout=timeout_s)
        if not target.drained.done():
            raise TransferTimeout(
                f"writes for ticket {ticket_id} are in flight after {timeout_s} s: keep the blocks, close again"
            )

    def _start_landing(self, frame: Frame, block_ids: Sequence[int]) -> asyncio.Future[KvTransferError | None]:
        header = frame.header
        landing = asyncio.get_running_loop().run_in_executor(None, self._land, frame, block_ids)
        self._landings[header.ticket_id, header.frame_number] = landing

        def settle(done: asyncio.Future[KvTransferError | None]) -> None:
            del self._landings[header.ticket_id, header.frame_number]
            self._settle(header, _outcome(done))

        landing.add_done_callback(settle)
        return landing

    def _land(self, frame: Frame, block_ids: Sequence[int]) -> KvTransferError | None:
        """Verifies, then writes; touches no state but the pool, so that it may run in a thread."""
        part = frame.header.part
        try:
            verify_checksum(frame)
            self._pool.write(block_ids, part.layers, part.tokens, frame.payload)
        except KvTransferError as error:
            return error
        return None

    def _settle(self, header: FrameHeader, error: KvTransferError | None) -> None:
        if error is None:
            self._zones.placed(header)
        else:
            self._zones.dropped(header, error)
        if self._zones.is_drained(header.ticket_id):
            target = self._targets.pop(header.ticket_id)
            if target.drained is not None:
                target.drained.set_result(None)


def _outcome(landing: asyncio.Future[KvTransferError | None]) -> KvTransferError | None:
    """What a write in a thread came to; any other exception is a bug or a device error, and fails the zone."""
    exception = landing.exception()
    if exception is None:
        return landing.result()
    return KvTransferError(f"the write failed: {exception!r}")
