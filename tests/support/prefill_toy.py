"""A toy prefill worker: the real machine, and everything else made of toys."""

from dataclasses import dataclass, replace
from typing import Any

from decode_toy import DecodeCall
from handoff_toys import LAYOUT, Message, Network, Pool, Terminals, checksum

from kv_transfer.errors import DuplicateFrame
from kv_transfer.frame import FrameHeader, digest
from kv_transfer.landing import TransferClaim
from kv_transfer.transfer_plan import KvSlice
from prefill_worker.handoff_machine import Event, HandoffMachine, Instruction, State
from worker.state_machine import Reactor

CHUNKS = (range(2), range(2, 4))


@dataclass(eq=False)
class Read:
    """A frame that is being made of the blocks."""

    number: int
    part: KvSlice


class PrefillCall:
    """The router's call on the prefill worker."""

    def __init__(self, worker: "PrefillWorker", push: int, prompt: int, ticket: DecodeCall) -> None:
        self.worker, self.push, self.prompt = worker, push, prompt
        self.ticket, self.epoch, self.lacking = ticket.ticket, ticket.worker.epoch, ticket.lacking
        self.machine, self.blocks = HandoffMachine(), []
        self.router = Terminals()
        self.uncomputed = [KvSlice(range(layer, layer + 1), chunk) for chunk in CHUNKS for layer in range(2)]
        self.due: list[KvSlice] = []
        self.reads: list[Read] = []
        self.sent: dict[int, int] = {}  # checksums by frame number
        self.acked: set[int] = set()
        self.num_frames = self.kv_bytes = 0
        self.is_stopped = self.holds = False
        nothing = lambda: None  # noqa: E731
        do = Instruction
        self.handle = Reactor(
            self.machine,
            {
                do.START_PREFILL: self._start,
                do.SEND_FIRST_TOKEN: nothing,
                do.COMMIT: self._commit,
                do.SEND_PUSHED: self.router.end("pushed"),
                do.FAIL_CALL: self.router.end("failed"),
                do.STOP_PUSH: self._stop,
                do.REPORT_STUCK: nothing,
                do.FREE_BLOCKS: self._free,
            },
        ).handle
        self._send("open")

    @property
    def can_compute(self) -> bool:
        return self.holds and bool(self.uncomputed) and not self.is_stopped

    @property
    def can_read(self) -> bool:
        return self.holds and bool(self.due) and not self.is_stopped

    @property
    def can_sample(self) -> bool:
        return self.holds and not self.uncomputed and self.machine.state in (State.COMPUTING, State.DELIVERED)

    def acknowledge(self, number: int) -> None:
        """A frame has arrived, says the decode worker, or says the network."""
        self.acked.add(number)
        self.check_acked()

    def compute(self) -> None:
        """The next layer of the next chunk."""
        part = self.uncomputed.pop(0)
        cells = {(layer, t): (self.prompt, layer, t) for layer in part.layers for t in part.tokens}
        self.worker.pool.write(self, self.blocks, cells)
        lacking = range(max(part.tokens.start, self.lacking.start), part.tokens.stop)
        if lacking:
            self.due.append(replace(part, tokens=lacking))
        self.check_acked()

    def begin_read(self) -> None:
        self.reads.append(Read(self.num_frames, self.due.pop(0)))
        self.num_frames += 1

    def end_read(self, read: Read) -> None:
        self.reads.remove(read)
        cells = self.worker.pool.read(self, self.blocks, read.part)
        assert {owner for owner, _, _ in cells.values()} == {self.prompt}
        if self.is_stopped:
            if not self.reads:
                self.handle(Event.READS_STOPPED)
            return
        num_bytes = len(cells) * LAYOUT.token_bytes
        header = FrameHeader(self.ticket, self.epoch, read.number, read.part, range(1), num_bytes)
        self.sent[read.number] = checksum(header, cells)
        self.kv_bytes += num_bytes
        self._send("frame", header=header, checksum=self.sent[read.number], cells=cells)

    def check_acked(self) -> None:
        if self.holds and not (self.uncomputed or self.due or self.reads) and self.acked == set(range(self.num_frames)):
            self.handle(Event.KV_ACKNOWLEDGED)

    def _start(self) -> None:
        blocks = self.worker.pool.take(self)
        if blocks is None:
            self.handle(Event.SEQUENCE_LOST, RuntimeError("no room"))
        else:
            self.blocks, self.holds = blocks, True

    def _commit(self) -> None:
        checksums = [self.sent[number] for number in sorted(self.sent)]
        claim = TransferClaim(self.num_frames, self.kv_bytes, digest(checksums), self.prompt)
        self._send("commit", claim=claim)

    def _stop(self) -> None:
        self.is_stopped = True
        self._send("lost")
        if not self.reads:
            self.handle(Event.READS_STOPPED)

    def _free(self) -> None:
        assert not self.reads, "the blocks are being read"
        if self.blocks:  # or the engine had no room
            self.worker.pool.give(self, self.blocks)
            self.holds = False

    def _send(self, kind: str, **fields: Any) -> None:
        message = Message(kind, self.push, ticket=self.ticket, epoch=self.epoch, **fields)
        self.worker.network.to_decode.append(message)


class PrefillWorker:
    """One life of it."""

    def __init__(self, network: Network, num_blocks: int) -> None:
        self.network, self.pool = network, Pool(num_blocks)
        self.calls: dict[int, PrefillCall] = {}

    def receive(self, message: Message) -> None:
        call = self.calls.get(message.push)
        if call is None:  # of an earlier life
            return
        if message.kind == "ack" or isinstance(message.error, DuplicateFrame):
            call.acknowledge(message.number)
        elif message.kind == "opened":
            call.handle(Event.PUSH_OPENED)
        elif message.kind == "committed":
            call.handle(Event.COMMITTED)
        else:
            call.handle(Event.PUSH_LOST, message.error or RuntimeError("the decode worker has ended the push"))
