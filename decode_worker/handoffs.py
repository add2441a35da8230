"""The handoffs a decode worker waits for: from the ticket it gave out to the commit that ends the transfer."""

import asyncio
import logging
import uuid
from dataclasses import dataclass

from baton.v1 import worker_pb2
from kv_transfer.errors import TicketUnknown, TransferTimeout
from kv_transfer.frame import prompt_hash
from kv_transfer.landing import TransferClaim
from kv_transfer.receiver import LandingSink
from worker.conversion import fingerprint_message
from worker.host import WorkerHost

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a committed transfer brought."""

    first_token_id: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Handoff:
    """One ticket that is out; `delivery` is done when its KV was verified, or failed with what went wrong."""

    ticket_id: str
    sequence_id: str
    delivery: asyncio.Future[Delivery]


class Handoffs:
    """Gives out tickets and takes commits. All methods belong to the event loop."""

    def __init__(self, host: WorkerHost, sink: LandingSink) -> None:
        self._host = host
        self._sink = sink
        self._open: dict[str, Handoff] = {}
        self.address = ""  # host:port of this worker's server, known once it is bound

    def open(self, sequence_id: str, token_ids: list[int], num_cached_tokens: int, block_ids: list[int]) -> Handoff:
        """Opens the landing zone for what the reserved sequence lacks. `block_ids` covers all its tokens."""
        ticket_id = uuid.uuid4().hex
        delivery: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        handoff = Handoff(ticket_id, sequence_id, delivery)
        lacking = range(num_cached_tokens, len(token_ids))
        self._sink.open_zone(ticket_id, block_ids, lacking, prompt_hash(token_ids))
        self._open[ticket_id] = handoff
        return handoff

    def ticket(self, handoff: Handoff, num_cached_tokens: int, num_prompt_tokens: int) -> worker_pb2.Ticket:
        """The handoff's ticket, as it travels."""
        return worker_pb2.Ticket(
            id=handoff.ticket_id,
            epoch=self._host.epoch,
            worker=self._host.config.name,
            num_cached_tokens=num_cached_tokens,
            num_prompt_tokens=num_prompt_tokens,
            endpoints=[worker_pb2.Endpoint(transport="grpc", address=self.address)],
            fingerprint=fingerprint_message(self._host.fingerprint),
        )

    def begin(self, ticket_id: str, epoch: str) -> None:
        """A sender starts; raises the KvTransferError that refuses it."""
        self._sink.begin_push(ticket_id, epoch)

    def commit(self, ticket_id: str, claim: TransferClaim, first_token_id: int) -> None:
        """Verifies the transfer and hands it to its sequence; raises the KvTransferError that refuses it."""
        handoff = self._open.get(ticket_id)
        if handoff is None:
            raise TicketUnknown(f"no ticket {ticket_id} is open here")
        self._sink.commit(ticket_id, claim)
        if not handoff.delivery.done():
            handoff.delivery.set_result(Delivery(first_token_id, claim.kv_bytes))

    def fail(self, ticket_id: str, error: Exception) -> None:
        """The push ended without a commit: tells the sequence that waits for it."""
        handoff = self._open.get(ticket_id)
        if handoff is not None and not handoff.delivery.done():
            handoff.delivery.set_exception(error)

    async def close(self, handoff: Handoff) -> bool:
        """Closes the zone at once and waits for writes in flight. False: some remain; the blocks must not be used."""
        self._open.pop(handoff.ticket_id, None)
        if handoff.delivery.done() and not handoff.delivery.cancelled():
            handoff.delivery.exception()  # marks it as seen, whether or not anybody waited for it
        try:
            await self._sink.close(handoff.ticket_id, DRAIN_TIMEOUT_S)
        except TransferTimeout:
            logger.exception("sequence %s: its blocks stay out of circulation", handoff.sequence_id)
            return False
        return True
