"""A toy decode worker: the real machine and the real landing zones, and everything else made of toys."""

import pickle
from dataclasses import dataclass

from handoff_toys import LAYOUT, NUM_TOKENS, Message, Network, Pool, Terminals, checksum

from decode_worker.handoff_machine import Event, HandoffMachine, Instruction, State
from kv_transfer.errors import ChecksumMismatch, KvTransferError, TicketClosed, TicketUnknown
from kv_transfer.landing import LandingZones
from kv_transfer.transfer_plan import KvSlice
from worker.state_machine import Reactor


@dataclass(eq=False)
class Write:
    """A frame that was let in and is on its way into the blocks."""

    message: Message
    call: "DecodeCall"


class DecodeCall:
    """The router's call on the decode worker."""

    def __init__(self, worker: "DecodeWorker", ticket: str, prompt: int, num_cached_tokens: int) -> None:
        self.worker, self.ticket, self.prompt = worker, ticket, prompt
        self.lacking = range(num_cached_tokens, NUM_TOKENS)
        self.machine, self.blocks, self.push = HandoffMachine(), [], -1
        self.router, self.push_ends = Terminals(), Terminals()
        self.is_reserved = self.has_run = self.holds = False
        nothing = lambda: None  # noqa: E731
        do = Instruction
        self.handle = Reactor(
            self.machine,
            {
                do.OPEN_ZONE: lambda: worker.zones.open(ticket, self.lacking, prompt),
                do.SEND_RESERVED: lambda: setattr(self, "is_reserved", self.machine.state is State.RESERVED),
                do.ACCEPT_PUSH: lambda: worker.zones.begin_push(ticket, worker.epoch),
                do.REFUSE_PUSH: self._refuse,
                do.CLOSE_ZONE: self._close_zone,
                do.ACTIVATE: self._activate,
                do.ACKNOWLEDGE_PUSH: lambda: self._answer("committed"),
                do.END_PUSH: lambda: self._answer("ended"),
                do.SEND_COMMITTED: nothing,
                do.SEND_FINISHED: self.router.end("finished"),
                do.FAIL_CALL: self.router.end("failed"),
                do.REPORT_QUARANTINE: nothing,
                do.FREE_BLOCKS: self._free,
            },
        ).handle

    def admit(self, *, is_local: bool) -> None:
        blocks = self.worker.pool.take(self)
        if blocks is None:
            self.handle(Event.SEQUENCE_LOST, RuntimeError("no room"))
            return
        self.blocks, self.holds = blocks, True
        cached = {(layer, t): (self.prompt, layer, t) for layer in range(2) for t in range(self.lacking.start)}
        self.worker.pool.write(self, blocks, cached)
        self.handle(Event.PREFILL_QUEUED if is_local else Event.BLOCKS_RESERVED)

    def _free(self) -> None:
        self.worker.pool.give(self, self.blocks)
        self.holds = False

    def _refuse(self) -> None:
        raise TicketClosed(self.ticket)

    def _close_zone(self) -> None:
        if self.worker.zones.close(self.ticket):
            self.handle(Event.DRAINED)

    def _activate(self) -> None:
        """All KV is there, and it is this prompt's: nothing is missing, doubled or foreign."""
        found = self.worker.pool.read(self, self.blocks, KvSlice(range(2), range(NUM_TOKENS)))
        assert found == {(layer, t): (self.prompt, layer, t) for layer in range(2) for t in range(NUM_TOKENS)}
        self.has_run = True

    def _answer(self, kind: str) -> None:
        self.push_ends.end(kind)()
        self.worker.network.to_prefill.append(Message(kind, self.push))


class DecodeWorker:
    """One life of it."""

    def __init__(self, network: Network, epoch: str, num_blocks: int) -> None:
        self.network, self.epoch, self.pool = network, epoch, Pool(num_blocks)
        self.zones = LandingZones(epoch, LAYOUT)
        self.calls: dict[str, DecodeCall] = {}
        self.writes: list[Write] = []

    def receive(self, message: Message) -> None:
        try:
            getattr(self, f"_on_{message.kind}")(message)
        except KvTransferError as error:
            kind = "frame_refused" if message.header else "ended"
            number = message.header.frame_number if message.header else -1
            self.network.to_prefill.append(Message(kind, message.push, number=number, error=error))

    def land(self, write: Write) -> None:
        """The write ends. What was damaged on its way is not written."""
        message = write.message
        assert message.header is not None
        if checksum(message.header, message.cells) == message.checksum:
            self.pool.write(write.call, write.call.blocks, message.cells)
            self.zones.placed(message.header)
            self.network.to_prefill.append(Message("ack", message.push, number=message.header.frame_number))
        else:
            error = ChecksumMismatch("damaged")
            self.zones.dropped(message.header, error)
            refused = Message("frame_refused", message.push, number=message.header.frame_number, error=error)
            self.network.to_prefill.append(refused)
        self.writes.remove(write)
        if self.zones.is_drained(write.call.ticket):
            write.call.handle(Event.DRAINED)

    def _on_open(self, message: Message) -> None:
        self.zones.check_epoch(message.epoch)
        call = self._call(message)
        call.handle(Event.PUSH_OPENED)
        assert call.push == -1, "a ticket is for one push"
        call.push = message.push
        self.network.to_prefill.append(Message("opened", message.push))

    def _on_frame(self, message: Message) -> None:
        assert message.header is not None
        before = pickle.dumps(self.zones._zones)
        try:
            self.zones.place(message.header, message.checksum)
        except KvTransferError:
            assert pickle.dumps(self.zones._zones) == before, "a stale write has changed a zone"
            raise
        self.writes.append(Write(message, self._call(message)))

    def _on_commit(self, message: Message) -> None:
        call = self._call(message)
        if call.push != message.push:
            raise TicketClosed("this push was never opened")
        assert message.claim is not None
        try:
            self.zones.commit(message.ticket, message.claim)
        except KvTransferError as error:
            call.handle(Event.PUSH_REFUSED, error)
            raise
        call.handle(Event.COMMIT_VERIFIED)

    def _on_lost(self, message: Message) -> None:
        call = self.calls.get(message.ticket)
        if call is not None and call.push == message.push:
            call.handle(Event.PUSH_LOST, RuntimeError("the push is gone"))

    def _call(self, message: Message) -> DecodeCall:
        call = self.calls.get(message.ticket)
        if call is None:
            raise TicketUnknown(message.ticket)
        return call
