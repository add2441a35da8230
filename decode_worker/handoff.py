"""One decode call on this worker: executes what its machine says."""

import asyncio
import logging
import uuid
from collections.abc import Callable

from baton.errors import Aborted
from baton.v1 import worker_pb2
from decode_worker.handoff_machine import Event, HandoffMachine, Instruction, State
from engine.sequence import FinishReason, Sequence
from kv_transfer.errors import TicketClosed
from kv_transfer.frame import prompt_hash
from kv_transfer.landing import TransferClaim
from kv_transfer.receiver import LandingSink
from worker.conversion import FINISH_REASONS, fingerprint_message, transfer_error
from worker.host import WorkerHost
from worker.outbox import Outbox
from worker.state_machine import Reactor

logger = logging.getLogger(__name__)


class Handoff:
    """From the call's arrival until its blocks are free. All methods belong to the event loop and wait for nothing.

    `outbox` is what the router gets. `push_over` is done with what the push gets: None for an acknowledgement.
    """

    def __init__(self, host: WorkerHost, sink: LandingSink, address: str, watch: Callable[["Handoff"], None]) -> None:
        """`address` is where KV may be delivered. `watch` is called when a closed zone still has writes in flight;
        DRAIN_TIMED_OUT or DRAINED must follow.
        """
        self.ticket_id = uuid.uuid4().hex
        self.sender = ""  # name of the prefill worker, once it pushes
        self.outbox: Outbox[worker_pb2.DecodeResponse] = Outbox()
        self.push_over: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._host = host
        self._sink = sink
        self._address = address
        self._watch = watch
        self._sequence: Sequence | None = None
        self._delivery = (0, 0)  # token 0, bytes of KV
        self._finished = worker_pb2.DecodeFinished()
        self._machine = HandoffMachine()
        self._reactor = Reactor(self._machine, self._actions())
        self.handle = self._reactor.handle

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks kept out of circulation, as a write into them has been in flight for too long."""
        if self._sequence is None or self._machine.state is not State.QUARANTINED:
            return 0
        num_shared_blocks = self._sequence.num_cached_tokens // self._host.config.block_size
        return len(self._sequence.block_ids) - num_shared_blocks

    def reserve(self, sequence: Sequence) -> None:
        """The engine holds blocks for the sequence, whose KV is to come."""
        self._sequence = sequence
        self.handle(Event.BLOCKS_RESERVED)

    def queue(self, sequence: Sequence) -> None:
        """The engine has the sequence and computes its prompt itself."""
        self._sequence = sequence
        self.handle(Event.PREFILL_QUEUED)

    def open_push(self, sender: str) -> None:
        """A push has begun. Raises TicketClosed if it may not."""
        self.handle(Event.PUSH_OPENED)
        self.sender = sender

    def commit(self, claim: TransferClaim, first_token_id: int) -> None:
        """The push says that all has been sent. Raises the KvTransferError that refuses the commit."""
        self._sink.commit(self.ticket_id, claim)
        self._delivery = first_token_id, claim.kv_bytes
        self.handle(Event.COMMIT_VERIFIED)

    def finish(self, reason: FinishReason, stop_token_id: int | None) -> None:
        """The last token was sent."""
        self._finished = worker_pb2.DecodeFinished(reason=FINISH_REASONS[reason], stop_token_id=stop_token_id)
        self.handle(Event.FINISHED)

    def hand_back(self, error: Aborted) -> None:
        """The worker drains: the call ends with the error, whatever it waits for."""
        self.handle(Event.HANDED_BACK, error)

    def _actions(self) -> dict[Instruction, Callable[[], None]]:
        return {
            Instruction.OPEN_ZONE: self._open_zone,
            Instruction.SEND_RESERVED: self._send_reserved,
            Instruction.ACCEPT_PUSH: lambda: self._sink.begin_push(self.ticket_id, self._host.epoch),
            Instruction.REFUSE_PUSH: self._refuse_push,
            Instruction.CLOSE_ZONE: self._close_zone,
            Instruction.ACTIVATE: self._activate,
            Instruction.ACKNOWLEDGE_PUSH: lambda: self.push_over.set_result(None),
            Instruction.END_PUSH: self._end_push,
            Instruction.SEND_COMMITTED: self._send_committed,
            Instruction.SEND_FINISHED: self._send_finished,
            Instruction.FAIL_CALL: lambda: self.outbox.end(self._machine.cause),
            Instruction.REPORT_QUARANTINE: self._report_quarantine,
            Instruction.FREE_BLOCKS: self._free_blocks,
        }

    @property
    def _held(self) -> Sequence:
        """The sequence; the machine asks for nothing that needs one before there is one."""
        assert self._sequence is not None
        return self._sequence

    def _open_zone(self) -> None:
        sequence = self._held
        lacking = range(sequence.num_cached_tokens, sequence.num_prompt_tokens)
        self._sink.open_zone(self.ticket_id, sequence.block_ids, lacking, prompt_hash(sequence.token_ids))

    def _close_zone(self) -> None:
        if self._sink.close_now(self.ticket_id):
            self.handle(Event.DRAINED)
        else:
            self._watch(self)

    def _refuse_push(self) -> None:
        raise TicketClosed(f"ticket {self.ticket_id} is {self._machine.state.value}, needed is {State.RESERVED.value}")

    def _end_push(self) -> None:
        closed = TicketClosed(f"ticket {self.ticket_id} is closed: its call has ended")
        self.push_over.set_result(self._machine.cause or transfer_error(closed))

    def _activate(self) -> None:
        first = self._host.engine.activate(self._held.sequence_id, self._delivery[0])
        if first.finish_reason is not None:
            self.finish(first.finish_reason, first.stop_token_id)

    def _free_blocks(self) -> None:
        self._host.engine.abort(self._held.sequence_id)

    def _report_quarantine(self) -> None:
        logger.error(
            "ticket %s of %s: a write has not ended; %d blocks stay out of circulation until it has",
            self.ticket_id,
            self.sender,
            self.num_quarantined_blocks,
        )

    def _send_reserved(self) -> None:
        reserved = worker_pb2.DecodeReserved()
        if self._machine.state is State.RESERVED:
            reserved.ticket.CopyFrom(self._ticket())
            reserved.num_cached_tokens = self._held.num_cached_tokens
        self.outbox.put(worker_pb2.DecodeResponse(reserved=reserved))

    def _send_committed(self) -> None:
        committed = worker_pb2.DecodeCommitted(kv_bytes=self._delivery[1])
        self.outbox.put(worker_pb2.DecodeResponse(committed=committed))

    def _send_finished(self) -> None:
        self.outbox.put(worker_pb2.DecodeResponse(finished=self._finished))
        self.outbox.end()

    def _ticket(self) -> worker_pb2.Ticket:
        return worker_pb2.Ticket(
            id=self.ticket_id,
            epoch=self._host.epoch,
            worker=self._host.config.name,
            num_cached_tokens=self._held.num_cached_tokens,
            num_prompt_tokens=self._held.num_prompt_tokens,
            endpoints=[worker_pb2.Endpoint(transport="grpc", address=self._address)],
            fingerprint=fingerprint_message(self._host.fingerprint),
        )
