"""Landing zones: who may write which KV into this worker, and when a transfer counts. Pure, no bytes, no clock."""

from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.errors import (
    ChecksumMismatch,
    DuplicateFrame,
    EpochMismatch,
    Incomplete,
    KvTransferError,
    PromptMismatch,
    TicketClosed,
    TicketUnknown,
)
from kv_transfer.frame import DEFAULT_MAX_FRAME_BYTES, FrameHeader, check_sizes, digest
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_plan import Coverage


class ZoneState(Enum):
    """Where a zone is in its life. A drained closed zone is forgotten, its ticket unknown."""

    RESERVED = "reserved"
    OPEN = "open"
    COMMITTED = "committed"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class TransferClaim:
    """What the sender says it sent. `kv_bytes` counts payloads only; `digest` is `frame.digest`."""

    num_frames: int
    kv_bytes: int
    digest: int
    prompt_hash: int


@dataclass(slots=True)
class _Zone:
    tokens: range
    prompt_hash: int
    coverage: Coverage
    state: ZoneState = ZoneState.RESERVED
    # Checksums by frame number: of frames permitted and not settled, and of frames in place.
    in_flight: dict[int, int] = field(default_factory=dict)
    placed: dict[int, int] = field(default_factory=dict)
    kv_bytes: int = 0
    failure: KvTransferError | None = None


class LandingZones:
    """The zones of one life of a worker.

    | event      | unknown  | RESERVED | OPEN                 | COMMITTED | FAILED        | CLOSED        |
    |------------|----------|----------|----------------------|-----------|---------------|---------------|
    | open       | RESERVED | exists   | exists               | exists    | exists        | exists        |
    | begin_push | unknown  | OPEN     | closed               | closed    | closed        | closed        |
    | place      | unknown  | closed   | in flight or refused | closed    | closed        | closed        |
    | placed     | -        | -        | in place             | -         | in flight - 1 | in flight - 1 |
    | dropped    | -        | -        | FAILED               | -         | in flight - 1 | in flight - 1 |
    | commit     | unknown  | closed   | COMMITTED or FAILED  | closed    | its failure   | closed        |
    | close      | drained  | drained  | CLOSED               | drained   | CLOSED        | CLOSED        |

    In small letters: the error raised, TicketUnknown, TicketClosed or, for exists, ValueError.
    CLOSED becomes unknown, which is drained, with the last write in flight, at once if there is none. Only
    then may the blocks have another use: no time-out stands in for it. Every refusal of `place` leaves the
    zone as it was and counts as a stale write. No event leads from FAILED or CLOSED to COMMITTED, and KV
    counts only in COMMITTED: a transfer is whole or nothing.
    """

    def __init__(self, epoch: str, layout: KvLayout, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._epoch = epoch
        self._layout = layout
        self._max_frame_bytes = max_frame_bytes
        self._zones: dict[str, _Zone] = {}
        self._stale_writes = 0

    @property
    def stale_writes(self) -> int:
        """Writes refused since the start."""
        return self._stale_writes

    @property
    def num_open(self) -> int:
        """Zones that are not committed and not drained."""
        return sum(zone.state is not ZoneState.COMMITTED for zone in self._zones.values())

    def state(self, ticket_id: str) -> ZoneState | None:
        """The zone's state; None if the ticket is unknown."""
        zone = self._zones.get(ticket_id)
        return None if zone is None else zone.state

    def open(self, ticket_id: str, tokens: range, prompt_hash: int) -> None:
        """Reserves a zone for `tokens` of all layers. Raises ValueError if the ticket exists."""
        if ticket_id in self._zones:
            raise ValueError(f"ticket {ticket_id} exists: a ticket is never used twice")
        coverage = Coverage(self._layout.num_layers, tokens)
        self._zones[ticket_id] = _Zone(tokens, prompt_hash, coverage)

    def check_epoch(self, epoch: str) -> None:
        """Raises EpochMismatch for what was meant for another life of this worker."""
        if epoch != self._epoch:
            raise EpochMismatch(f"meant for epoch {epoch}, this is {self._epoch}: get a new ticket")

    def begin_push(self, ticket_id: str, epoch: str) -> None:
        """A sender starts, the only one this ticket will have.

        Raises EpochMismatch, TicketUnknown, TicketClosed.
        """
        self.check_epoch(epoch)
        self._zone(ticket_id, ZoneState.RESERVED).state = ZoneState.OPEN

    def place(self, header: FrameHeader, checksum: int) -> None:
        """Permits the write of one frame, to be settled by `placed` or `dropped`; raises a refusal.

        Raises EpochMismatch, TicketUnknown, TicketClosed, OutOfRange,
        MalformedFrame (wrong size) or DuplicateFrame.
        """
        try:
            self.check_epoch(header.epoch)
            zone = self._zone(header.ticket_id, ZoneState.OPEN)
            check_sizes(header, self._layout, self._max_frame_bytes)
            number = header.frame_number
            if number in zone.in_flight or number in zone.placed:
                raise DuplicateFrame(f"frame {number} of ticket {header.ticket_id} was delivered before")
            zone.coverage.claim(header.part)
        except KvTransferError:
            self._stale_writes += 1
            raise
        zone.in_flight[number] = checksum

    def placed(self, header: FrameHeader) -> None:
        """A permitted write is complete and in place."""
        zone = self._zones[header.ticket_id]
        zone.placed[header.frame_number] = zone.in_flight.pop(header.frame_number)
        zone.kv_bytes += header.kv_bytes
        self._forget_if_drained(header.ticket_id)

    def dropped(self, header: FrameHeader, error: KvTransferError) -> None:
        """A permitted write will not happen, because of `error`: the transfer has failed."""
        zone = self._zones[header.ticket_id]
        del zone.in_flight[header.frame_number]
        if zone.state is ZoneState.OPEN:
            zone.state, zone.failure = ZoneState.FAILED, error
        self._forget_if_drained(header.ticket_id)

    def commit(self, ticket_id: str, claim: TransferClaim) -> None:
        """Verifies the transfer; the zone is COMMITTED, or FAILED and the reason is raised.

        Raises Incomplete, ChecksumMismatch, PromptMismatch, or what `dropped` was
        given; TicketUnknown or TicketClosed if there is nothing to commit.
        """
        failed = self._zones.get(ticket_id)
        if failed is not None and failed.state is ZoneState.FAILED and failed.failure is not None:
            raise failed.failure
        zone = self._zone(ticket_id, ZoneState.OPEN)
        zone.failure = _verify(zone, claim)
        if zone.failure is not None:
            zone.state = ZoneState.FAILED
            raise zone.failure
        zone.state = ZoneState.COMMITTED

    def close(self, ticket_id: str) -> bool:
        """Ends the zone at once: later writes are refused. True if no write is in flight (drained)."""
        zone = self._zones.get(ticket_id)
        if zone is not None:
            zone.state = ZoneState.CLOSED
            self._forget_if_drained(ticket_id)
        return self.is_drained(ticket_id)

    def is_drained(self, ticket_id: str) -> bool:
        """True once a closed zone has no write in flight: its blocks may be returned."""
        return ticket_id not in self._zones

    def _forget_if_drained(self, ticket_id: str) -> None:
        zone = self._zones[ticket_id]
        if zone.state is ZoneState.CLOSED and not zone.in_flight:
            del self._zones[ticket_id]

    def _zone(self, ticket_id: str, needed: ZoneState) -> _Zone:
        zone = self._zones.get(ticket_id)
        if zone is None:
            raise TicketUnknown(f"ticket {ticket_id} is unknown here: it never was, or has been closed")
        if zone.state is not needed:
            raise TicketClosed(f"ticket {ticket_id} is {zone.state.value}, needed is {needed.value}")
        return zone


def _verify(zone: _Zone, claim: TransferClaim) -> KvTransferError | None:
    if zone.in_flight:
        return Incomplete(f"{len(zone.in_flight)} frames are still in flight at the commit")
    missing = zone.coverage.first_missing()
    if missing is not None:
        return Incomplete(
            f"{zone.coverage.num_missing} of the transfer's (layer, token) pairs are missing, first {missing}"
        )
    arrived = (len(zone.placed), zone.kv_bytes)
    if arrived != (claim.num_frames, claim.kv_bytes):
        return Incomplete(
            f"{arrived[0]} frames, {arrived[1]} bytes arrived; {claim.num_frames}, {claim.kv_bytes} were sent"
        )
    actual = digest(zone.placed[number] for number in sorted(zone.placed))
    if actual != claim.digest:
        return ChecksumMismatch(f"the digest of what arrived is {actual:016x}, sent was {claim.digest:016x}")
    if zone.prompt_hash != claim.prompt_hash:
        return PromptMismatch(f"the KV is of prompt {claim.prompt_hash:016x}, reserved was for {zone.prompt_hash:016x}")
    return None
