"""The decode calls of one worker, by their tickets, and the blocks that outlast their calls."""

from collections.abc import Iterator
from contextlib import contextmanager

from decode_worker.handoff import Handoff
from decode_worker.handoff_machine import Event
from kv_transfer.errors import TicketUnknown, TransferTimeout
from kv_transfer.receiver import LandingSink
from worker.cleanup import Stragglers
from worker.host import WorkerHost

DRAIN_TIMEOUT_S = 10.0  # a write is a copy of at most 2 MiB


class Handoffs:
    """Belongs to the event loop. To be ended with `close_all`."""

    def __init__(self, host: WorkerHost, sink: LandingSink) -> None:
        self._host = host
        self._sink = sink
        self._open: dict[str, Handoff] = {}
        self._undrained: set[Handoff] = set()
        self._stragglers = Stragglers()
        self.address = ""  # host:port of this worker's server, known once it is bound

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks kept out of circulation, as a write into them has been in flight for too long."""
        return sum(handoff.num_quarantined_blocks for handoff in self._undrained)

    @contextmanager
    def call(self) -> Iterator[Handoff]:
        """The handoff of one call, found by its ticket for as long as the context lasts."""
        handoff = Handoff(self._host, self._sink, self.address, self._watch)
        self._open[handoff.ticket_id] = handoff
        try:
            yield handoff
        finally:
            del self._open[handoff.ticket_id]

    def find(self, ticket_id: str, epoch: str) -> Handoff:
        """The handoff of an open call. Raises EpochMismatch or TicketUnknown."""
        self._sink.check_epoch(epoch)
        handoff = self._open.get(ticket_id)
        if handoff is None:
            raise TicketUnknown(f"ticket {ticket_id} is unknown here: it never was, or has been closed")
        return handoff

    async def close_all(self) -> None:
        """Waits for writes no longer: the process ends."""
        await self._stragglers.close()

    def _watch(self, handoff: Handoff) -> None:
        self._stragglers.start(self._drain(handoff))

    async def _drain(self, handoff: Handoff) -> None:
        self._undrained.add(handoff)
        try:
            while not await self._is_drained(handoff):
                handoff.handle(Event.DRAIN_TIMED_OUT)
            handoff.handle(Event.DRAINED)
        finally:
            self._undrained.discard(handoff)

    async def _is_drained(self, handoff: Handoff) -> bool:
        try:
            await self._sink.close(handoff.ticket_id, DRAIN_TIMEOUT_S)
        except TransferTimeout:
            return False
        return True
