"""One prefill call on this worker: executes what its machine says."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from baton.errors import Aborted, Unavailable
from baton.v1 import worker_pb2
from engine.sequence import Sequence
from kv_transfer.sender import TransferSummary
from prefill_worker.handoff_machine import Event, HandoffMachine, Instruction
from prefill_worker.push import Push
from worker.cleanup import Stragglers
from worker.conversion import REFUSALS, refusal, sampling_params
from worker.host import WorkerHost
from worker.outbox import Outbox
from worker.sequence_feed import SequenceFeed
from worker.state_machine import Reactor

logger = logging.getLogger(__name__)


class Handoff:
    """From the call's arrival until its blocks are free. All methods belong to the event loop and wait for nothing.

    `outbox` is what the router gets. `may_commit` is set once all KV has arrived and `first_token_id` is known.
    """

    def __init__(
        self,
        host: WorkerHost,
        request: worker_pb2.PrefillRequest,
        stragglers: Stragglers,
        on_started: Callable[[], None],
    ) -> None:
        """`stragglers` own what outlasts the call. `on_started` is called on the engine's thread, at the first step."""
        self.outbox: Outbox[worker_pb2.PrefillResponse] = Outbox()
        self.may_commit = asyncio.Event()
        self.first_token_id = 0
        self._host = host
        self._stragglers = stragglers
        self._on_started = on_started
        self._arrived_at = time.monotonic()
        self._sequence = _sequence(request)
        self._feed = SequenceFeed()
        self._first_token: asyncio.Task[None] | None = None
        self._computed_at_s = 0.0  # of the event loop's clock
        self._push: Push | None = None
        self._summary: TransferSummary | None = None
        self._machine = HandoffMachine()
        self._reactor = Reactor(self._machine, self._actions())
        self.handle = self._reactor.handle

    def open(self, push: Push | None) -> None:
        """The push is open; None if there is nobody to push to."""
        self._push = push
        if push is not None:
            push.answer.add_done_callback(self._on_answer)
        self.handle(Event.PUSH_OPENED)

    def acknowledge_kv(self, summary: TransferSummary | None) -> None:
        """All KV has arrived; nothing reads the blocks any more."""
        self._summary = summary
        self.handle(Event.KV_ACKNOWLEDGED)

    def hand_back(self, error: Aborted) -> None:
        """The worker drains: the call ends with the error, whatever it waits for."""
        self.handle(Event.HANDED_BACK, error)

    def end_call(self) -> None:
        """The call is over, for whatever reason: all it holds is released."""
        self.handle(Event.CALL_ENDED)
        if self._first_token is not None:
            self._first_token.cancel()

    def _actions(self) -> dict[Instruction, Callable[[], None]]:
        return {
            Instruction.START_PREFILL: self._start_prefill,
            Instruction.SEND_FIRST_TOKEN: self._send_first_token,
            Instruction.COMMIT: self.may_commit.set,
            Instruction.SEND_PUSHED: self._send_pushed,
            Instruction.FAIL_CALL: self._fail_call,
            Instruction.STOP_PUSH: self._stop_push,
            Instruction.REPORT_STUCK: self._report_stuck,
            Instruction.FREE_BLOCKS: lambda: self._host.engine.abort(self._sequence.sequence_id),
        }

    def _start_prefill(self) -> None:
        self._feed = self._new_feed()
        try:
            self._host.engine.add(self._sequence, self._feed)
        except REFUSALS as error:
            self.handle(Event.SEQUENCE_LOST, refusal(error))
            return
        self._first_token = asyncio.create_task(self._wait_first_token(), name="first token")

    def _new_feed(self) -> SequenceFeed:
        """Reports the sequence's KV to the push as it is computed: the cached tokens at its start, then each layer."""
        sequence, push = self._sequence, self._push
        if push is None:
            return SequenceFeed(on_started=lambda _: self._on_started())
        sender, all_layers = push.sender, range(self._host.kv_pool.layout.num_layers)

        def on_started(num_cached_tokens: int) -> None:
            self._on_started()
            sender.layer_ready(all_layers, range(num_cached_tokens), sequence.block_ids)

        def on_layer(layer: int, start: int, end: int) -> None:
            sender.layer_ready(range(layer, layer + 1), range(start, end), sequence.block_ids)

        return SequenceFeed(on_layer, on_started)

    async def _wait_first_token(self) -> None:
        try:
            item = await self._feed.next()
        except Exception as error:  # noqa: BLE001 - the root of the task; the call raises it
            self.handle(Event.SEQUENCE_LOST, error)
            return
        self.first_token_id = item.token_ids[0]
        self.handle(Event.FIRST_TOKEN)

    def _send_first_token(self) -> None:
        self._computed_at_s = asyncio.get_running_loop().time()
        if self._push is not None:
            self._push.limit_delivery()
        started_at = self._feed.started_at or self._arrived_at
        first_token = worker_pb2.PrefillFirstToken(
            token_id=self.first_token_id,
            queue_s=started_at - self._arrived_at,
            prefill_s=(self._feed.first_token_at or started_at) - started_at,
            num_cached_tokens=self._feed.num_cached_tokens,
        )
        self.outbox.put(worker_pb2.PrefillResponse(first_token=first_token))

    def _send_pushed(self) -> None:
        pushed = worker_pb2.PrefillPushed()
        if self._summary is not None:
            committed_at_s = asyncio.get_running_loop().time()
            pushed.kv_bytes = self._summary.kv_bytes
            pushed.transfer_s = committed_at_s - self._summary.first_send_at
            pushed.transfer_tail_s = committed_at_s - self._computed_at_s
            pushed.transport = "grpc"
        self.outbox.put(worker_pb2.PrefillResponse(pushed=pushed))
        self.outbox.end()

    def _fail_call(self) -> None:
        out_of_step = Unavailable("the decode worker says that it has committed, and was not asked to")
        self.outbox.end(self._machine.cause or out_of_step)

    def _on_answer(self, answer: asyncio.Task[None]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            self.handle(Event.COMMITTED)
        else:
            self.handle(Event.PUSH_LOST, error if isinstance(error, Exception) else None)

    def _stop_push(self) -> None:
        if self._push is None or self._push.stop():
            self.handle(Event.READS_STOPPED)
        else:
            self._stragglers.start(self._wait_stopped(self._push))

    async def _wait_stopped(self, push: Push) -> None:
        while not await push.stopped():
            self.handle(Event.STOP_TIMED_OUT)
        self.handle(Event.READS_STOPPED)

    def _report_stuck(self) -> None:
        num_blocks = len(self._sequence.block_ids)
        logger.error("sequence %s: a read of its %d blocks has not ended", self._sequence.sequence_id, num_blocks)


def _sequence(request: worker_pb2.PrefillRequest) -> Sequence:
    return Sequence(
        sequence_id=uuid.uuid4().hex,  # of our own: clients may use theirs twice at once
        token_ids=list(request.token_ids),
        num_prompt_tokens=len(request.token_ids),
        sampling=sampling_params(request.sampling),
        cache_salt=request.cache_salt,
        hold_after_prefill=True,
        priority=request.priority,
    )
