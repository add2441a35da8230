from dataclasses import replace
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.errors import (
    ChecksumMismatch,
    DuplicateFrame,
    EpochMismatch,
    Incomplete,
    KvTransferError,
    MalformedFrame,
    OutOfRange,
    PromptMismatch,
    TicketClosed,
    TicketUnknown,
)
from kv_transfer.frame import FrameHeader, digest
from kv_transfer.landing import LandingZones, TransferClaim, ZoneState
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_plan import KvSlice

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32")
EPOCH, OLD_EPOCH = "00000000000000aa", "0000000000000099"
TICKET = "0" * 31 + "1"
TOKENS = range(4, 8)
PROMPT = 77


def header(number: int, layers: range, tokens: range, ticket: str = TICKET) -> FrameHeader:
    part = KvSlice(layers, tokens)
    return FrameHeader(ticket, EPOCH, number, part, range(1), part.num_cells * LAYOUT.token_bytes)


FRAMES = [header(0, range(2), range(4, 7)), header(1, range(2), range(7, 8))]
CLAIM = TransferClaim(num_frames=2, kv_bytes=2 * 4 * 8, digest=digest([100, 101]), prompt_hash=PROMPT)


@pytest.fixture
def zones() -> LandingZones:
    """Zones with one ticket that has been opened for a push."""
    zones = LandingZones(EPOCH, LAYOUT)
    zones.open(TICKET, TOKENS, PROMPT)
    zones.begin_push(TICKET, EPOCH)
    return zones


def deliver(zones: LandingZones, *frames: FrameHeader) -> None:
    for frame in frames:
        zones.place(frame, 100 + frame.frame_number)
        zones.placed(frame)


def test_a_whole_transfer_is_committed(zones: LandingZones) -> None:
    deliver(zones, *FRAMES)
    zones.commit(TICKET, CLAIM)
    assert zones.state(TICKET) is ZoneState.COMMITTED
    assert zones.num_open == 0
    assert zones.close(TICKET)


def test_order_does_not_matter(zones: LandingZones) -> None:
    deliver(zones, *reversed(FRAMES))
    zones.commit(TICKET, CLAIM)
    assert zones.state(TICKET) is ZoneState.COMMITTED


def test_nothing_lacking_commits_without_a_frame() -> None:
    zones = LandingZones(EPOCH, LAYOUT)
    zones.open(TICKET, range(4, 4), PROMPT)
    zones.begin_push(TICKET, EPOCH)
    zones.commit(TICKET, TransferClaim(0, 0, digest([]), PROMPT))
    assert zones.state(TICKET) is ZoneState.COMMITTED


@pytest.mark.parametrize(
    ("frames", "claim", "error"),
    [
        (FRAMES[:1], CLAIM, Incomplete),
        ([], CLAIM, Incomplete),
        (FRAMES, replace(CLAIM, num_frames=3), Incomplete),
        (FRAMES, replace(CLAIM, kv_bytes=63), Incomplete),
        (FRAMES, replace(CLAIM, digest=1), ChecksumMismatch),
        (FRAMES, replace(CLAIM, prompt_hash=78), PromptMismatch),
    ],
)
def test_a_commit_that_does_not_verify_fails_for_good(
    zones: LandingZones, frames: list[FrameHeader], claim: TransferClaim, error: type[KvTransferError]
) -> None:
    deliver(zones, *frames)
    with pytest.raises(error):
        zones.commit(TICKET, claim)
    with pytest.raises(error):
        zones.commit(TICKET, CLAIM)
    assert zones.state(TICKET) is ZoneState.FAILED
    with pytest.raises(TicketClosed):
        zones.place(FRAMES[1], 0)


def test_a_missing_token_is_named(zones: LandingZones) -> None:
    deliver(zones, FRAMES[0])
    with pytest.raises(Incomplete, match=r"2 of .* missing, first \(0, 7\)"):
        zones.commit(TICKET, CLAIM)


def test_a_write_in_flight_is_not_yet_there(zones: LandingZones) -> None:
    deliver(zones, FRAMES[0])
    zones.place(FRAMES[1], 101)
    with pytest.raises(Incomplete, match="1 frames are still in flight"):
        zones.commit(TICKET, CLAIM)


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (replace(FRAMES[0], epoch=OLD_EPOCH), EpochMismatch),
        (replace(FRAMES[0], ticket_id="2" * 32), TicketUnknown),
        (header(5, range(2), range(3, 5)), OutOfRange),
        (header(5, range(2), range(7, 9)), OutOfRange),
        (header(5, range(1, 3), range(4, 5)), OutOfRange),
        (replace(FRAMES[0], heads=range(1, 2)), OutOfRange),
        (replace(FRAMES[0], kv_bytes=8), MalformedFrame),
        (header(1, range(1), range(5, 6)), DuplicateFrame),
        (header(5, range(1), range(7, 8)), DuplicateFrame),
    ],
)
def test_a_refused_write_is_counted_and_does_no_harm(
    zones: LandingZones, frame: FrameHeader, error: type[KvTransferError]
) -> None:
    deliver(zones, FRAMES[1])
    with pytest.raises(error):
        zones.place(frame, 9)
    assert zones.stale_writes == 1
    deliver(zones, FRAMES[0])
    zones.commit(TICKET, CLAIM)


def test_a_frame_over_the_limit_is_refused() -> None:
    zones = LandingZones(EPOCH, LAYOUT, max_frame_bytes=64 + 47)
    zones.open(TICKET, TOKENS, PROMPT)
    zones.begin_push(TICKET, EPOCH)
    with pytest.raises(MalformedFrame, match="limit of 111"):
        zones.place(FRAMES[0], 0)


def test_a_push_begins_once_in_this_epoch(zones: LandingZones) -> None:
    with pytest.raises(EpochMismatch, match="get a new ticket"):
        zones.begin_push(TICKET, OLD_EPOCH)
    with pytest.raises(TicketUnknown):
        zones.begin_push("2" * 32, EPOCH)
    with pytest.raises(TicketClosed, match="is open, needed is reserved"):
        zones.begin_push(TICKET, EPOCH)


def test_nothing_lands_before_the_push_begins() -> None:
    zones = LandingZones(EPOCH, LAYOUT)
    zones.open(TICKET, TOKENS, PROMPT)
    with pytest.raises(TicketClosed):
        zones.place(FRAMES[0], 0)
    with pytest.raises(TicketClosed):
        zones.commit(TICKET, CLAIM)


def test_a_ticket_is_not_used_twice(zones: LandingZones) -> None:
    with pytest.raises(ValueError, match="never used twice"):
        zones.open(TICKET, TOKENS, PROMPT)


def test_a_dropped_write_fails_the_transfer_with_its_error(zones: LandingZones) -> None:
    zones.place(FRAMES[0], 0)
    zones.dropped(FRAMES[0], ChecksumMismatch("torn"))
    with pytest.raises(ChecksumMismatch, match="torn"):
        zones.commit(TICKET, CLAIM)


def test_a_closed_zone_is_drained_with_its_last_write(zones: LandingZones) -> None:
    for frame in FRAMES:
        zones.place(frame, 0)
    assert not zones.close(TICKET)
    assert not zones.close(TICKET)
    zones.placed(FRAMES[0])
    assert not zones.is_drained(TICKET)
    with pytest.raises(TicketClosed):
        zones.place(header(9, range(1), range(4, 5)), 0)
    with pytest.raises(TicketClosed):
        zones.commit(TICKET, CLAIM)
    zones.dropped(FRAMES[1], ChecksumMismatch("late"))
    assert zones.is_drained(TICKET)
    assert zones.num_open == 0
    with pytest.raises(TicketUnknown):
        zones.place(FRAMES[1], 0)


def test_closing_what_is_unknown_is_closing() -> None:
    assert LandingZones(EPOCH, LAYOUT).close(TICKET)


class Hostile(RuleBasedStateMachine):
    """Messages of several transfers come late, doubled, reordered, to the wrong life, or not at all."""

    tickets: Bundle[str] = Bundle("tickets")
    names = st.sampled_from([range(1), range(1, 2), range(2)])

    @initialize()
    def start(self) -> None:
        self.zones = LandingZones(EPOCH, LAYOUT)
        self.ids = count(1)
        self.in_flight: dict[str, dict[int, FrameHeader]] = {}
        self.in_place: dict[str, dict[int, tuple[FrameHeader, int]]] = {}
        self.opened: set[str] = set()
        self.closed: set[str] = set()
        self.failed: set[str] = set()
        self.committed: set[str] = set()
        self.num_refused = 0

    @rule(target=tickets)
    def reserve(self) -> str:
        ticket = f"{next(self.ids):032x}"
        self.zones.open(ticket, TOKENS, PROMPT)
        self.in_flight[ticket], self.in_place[ticket] = {}, {}
        return ticket

    @rule(ticket=tickets, epoch=st.sampled_from([EPOCH, EPOCH, OLD_EPOCH]))
    def begin(self, ticket: str, epoch: str) -> None:
        may = epoch == EPOCH and ticket not in self.opened | self.closed
        try:
            self.zones.begin_push(ticket, epoch)
        except KvTransferError:
            assert not may
            return
        assert may
        self.opened.add(ticket)

    @rule(
        ticket=tickets,
        number=st.integers(0, 4),
        layers=names,
        first=st.integers(3, 8),
        num_tokens=st.integers(1, 4),
        epoch=st.sampled_from([EPOCH] * 4 + [OLD_EPOCH]),
    )
    def write(self, ticket: str, number: int, layers: range, first: int, num_tokens: int, epoch: str) -> None:
        frame = replace(header(number, layers, range(first, first + num_tokens), ticket), epoch=epoch)
        claimed = [*self.in_flight[ticket].values(), *(placed for placed, _ in self.in_place[ticket].values())]
        overlaps = any(
            set(other.part.layers) & set(layers) and set(other.part.tokens) & set(frame.part.tokens)
            for other in claimed
        )
        may = (
            epoch == EPOCH
            and ticket in self.opened - self.closed - self.failed - self.committed
            and set(frame.part.tokens) <= set(TOKENS)
            and number not in {other.frame_number for other in claimed}
            and not overlaps
        )
        try:
            self.zones.place(frame, 100 + number)
        except KvTransferError:
            assert not may
            self.num_refused += 1
            return
        assert may
        self.in_flight[ticket][number] = frame

    @precondition(lambda self: any(self.in_flight.values()))
    @rule(data=st.data(), is_good=st.sampled_from([True, True, True, False]))
    def settle(self, data: st.DataObject, is_good: bool) -> None:
        ticket = data.draw(st.sampled_from([name for name, frames in self.in_flight.items() if frames]))
        number = data.draw(st.sampled_from(sorted(self.in_flight[ticket])))
        frame = self.in_flight[ticket].pop(number)
        if is_good:
            self.zones.placed(frame)
            self.in_place[ticket][number] = (frame, 100 + number)
            return
        self.zones.dropped(frame, ChecksumMismatch("flipped"))
        self.failed.add(ticket)

    @rule(ticket=tickets)
    def deliver_the_rest_and_commit(self, ticket: str) -> None:
        placed = self.in_place[ticket]
        live = ticket in self.opened - self.closed - self.failed - self.committed
        covered = sum(frame.part.num_cells for frame, _ in placed.values())
        is_whole = live and covered == 8 and not self.in_flight[ticket]
        claim = TransferClaim(len(placed), covered * 8, digest(100 + n for n in sorted(placed)), PROMPT)
        try:
            self.zones.commit(ticket, claim)
        except KvTransferError:
            assert not is_whole
            if live:
                self.failed.add(ticket)
            return
        assert is_whole
        self.committed.add(ticket)

    @rule(ticket=tickets)
    def close(self, ticket: str) -> None:
        self.closed.add(ticket)
        assert self.zones.close(ticket) == (not self.in_flight[ticket])

    @invariant()
    def blocks_are_returned_only_when_no_write_can_reach_them(self) -> None:
        for ticket, frames in self.in_flight.items():
            assert self.zones.is_drained(ticket) == (ticket in self.closed and not frames)

    @invariant()
    def kv_counts_only_when_committed_whole(self) -> None:
        for ticket in self.in_flight:
            is_committed = self.zones.state(ticket) is ZoneState.COMMITTED
            assert is_committed == (ticket in self.committed - self.closed)
            if is_committed:
                assert sum(frame.part.num_cells for frame, _ in self.in_place[ticket].values()) == 8

    @invariant()
    def every_refusal_is_counted(self) -> None:
        assert self.zones.stale_writes == self.num_refused


TestHostile = Hostile.TestCase
TestHostile.settings = settings(max_examples=80, stateful_step_count=40)
