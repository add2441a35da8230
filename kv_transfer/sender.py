"""The sending side of one transfer: KV leaves as soon as it is computed, while the rest is being computed."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kv_transfer.errors import DuplicateFrame, KvTransferError, TransferAborted, TransferTimeout
from kv_transfer.frame import FrameHeader, digest, seal
from kv_transfer.pool import KvPool
from kv_transfer.transfer_plan import DEFAULT_GROUP_BYTES, Coverage, KvSlice, SliceGrouper
from kv_transfer.transport import Link

STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Whose KV goes where: the ticket, the epoch it was issued in, and the tokens that are lacking there."""

    ticket_id: str
    epoch: str
    tokens: range


@dataclass(frozen=True, slots=True)
class PushLimits:
    """`credit_bytes` bounds what is sent and not acknowledged; frames get smaller if it allows less than one.

    `send_timeout_s` is the deadline of each frame.
    """

    credit_bytes: int
    group_bytes: int = DEFAULT_GROUP_BYTES
    max_frames_in_flight: int = 4
    send_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """What was sent. Times are of the event loop's clock, in seconds; equal if there was nothing to send."""

    num_frames: int
    kv_bytes: int
    digest: int
    first_send_at: float
    last_ack_at: float


class PushSender:
    """Pushes KV of one sequence over a link. To be made on the event loop, and ended by `finish` or `abort`.

    The blocks must stay as they are until `finish` has returned a summary, `stop` True, or `abort` has returned.
    `failed` is done with the error as soon as the transfer cannot succeed any more, so that the prefill can stop.
    """

    def __init__(self, link: Link, pool: KvPool, target: PushTarget, limits: PushLimits) -> None:
        layout = pool.layout
        group_bytes = min(limits.group_bytes, limits.credit_bytes)
        if group_bytes < layout.token_bytes:
            raise ValueError(
                f"frames of {group_bytes} bytes cannot hold a token of one layer, {layout.token_bytes} bytes: "
                "raise credit_bytes or group_bytes"
            )
        self._link = link
        self._pool = pool
        self._target = target
        self._send_timeout_s = limits.send_timeout_s
        self._grouper = SliceGrouper(layout.num_layers, layout.token_bytes, group_bytes)
        self._reported = Coverage(layout.num_layers, target.tokens)
        self._num_unacked = self._reported.num_missing
        self._block_ids: tuple[int, ...] = ()
        self._due: asyncio.Queue[KvSlice] = asyncio.Queue()
        self._checksums: list[int] = []
        self._kv_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._first_send_at = self._last_ack_at = self._loop.time()
        self._reads: set[asyncio.Future[memoryview]] = set()
        self.failed: asyncio.Future[Exception] = self._loop.create_future()
        self._complete: asyncio.Future[None] = self._loop.create_future()
        if self._num_unacked == 0:
            self._complete.set_result(None)
        # A pump has one frame in flight, so their number is the bound of frames and, as frames are at most
        # group_bytes, of bytes.
        num_pumps = min(limits.max_frames_in_flight, limits.credit_bytes // group_bytes)
        self._pumps = {self._loop.create_task(self._pump()) for _ in range(max(1, num_pumps))}
        for pump in self._pumps:
            pump.add_done_callback(self._on_pump_done)

    def layer_ready(self, layers: range, tokens: range, block_ids: Sequence[int]) -> None:
        """Reports KV that is computed and in the pool. Callable from any thread; never blocks.

        `block_ids` covers tokens [0, tokens.stop). Tokens outside the target's range are left out. On a CUDA
        device the kernels that write this KV must have ended.
        """
        self._loop.call_soon_threadsafe(self._on_ready, layers, tokens, tuple(block_ids))

    async def finish(self, timeout_s: float | None = None) -> TransferSummary:
        """Waits until all KV of the target's tokens is in place at the peer; without limit if `timeout_s` is None.

        Raises the transfer's first failure, or TransferTimeout if KV is still not reported or not
        acknowledged; `stop` or `abort` must follow before the blocks may be reused.
        """
        ends: set[asyncio.Future[Any]] = {self.failed, self._complete}
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._complete.done():
            self._fail(
                TransferTimeout(
                    f"ticket {self._target.ticket_id}: after {timeout_s} s, {self._reported.num_missing} (layer, "
                    f"token) pairs were not computed and {self._num_unacked} not acknowledged"
                )
            )
        if self.failed.done():
            raise self.failed.result()
        await self._stop_pumps(STOP_TIMEOUT_S)
        return TransferSummary(
            len(self._checksums), self._kv_bytes, digest(self._checksums), self._first_send_at, self._last_ack_at
        )

    def stop(self) -> bool:
        """Begins no read any more, at once. True: nothing reads the blocks, so that they may be reused.

        May be called at any time, repeatedly. After False, `abort` waits.
        """
        self._fail(TransferAborted(f"the transfer of ticket {self._target.ticket_id} was aborted"))
        return not self._reads

    async def abort(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops, and returns when nothing reads the blocks and nothing is being sent. As often as one likes.

        Raises TransferTimeout if a read goes on: the blocks may not be reused.
        """
        self.stop()
        await self._stop_pumps(timeout_s)
        if self._reads:
            await asyncio.wait(self._reads, timeout=timeout_s)
        if self._reads:
            raise TransferTimeout(f"{len(self._reads)} reads of the KV pool go on after {timeout_s} s")

    def _on_ready(self, layers: range, tokens: range, block_ids: tuple[int, ...]) -> None:
        wanted = self._target.tokens
        lacking = range(max(tokens.start, wanted.start), min(tokens.stop, wanted.stop))
        if self.failed.done() or not lacking or not layers:
            return
        try:
            self._reported.claim(KvSlice(layers, lacking))
        except KvTransferError as error:
            self._fail(error)
            return
        if len(block_ids) >= len(self._block_ids):
            self._block_ids = block_ids
        due = self._grouper.add(layers, lacking)
        if self._reported.num_missing == 0:
            due += self._grouper.flush()
        for part in due:
            self._due.put_nowait(part)

    async def _pump(self) -> None:
        while True:
            part = await self._due.get()
            # Reserves the number, so that checksums stay in order while other pumps go on.
            number = len(self._checksums)
            self._checksums.append(0)
            payload = await self._read(part)
            header = FrameHeader(
                self._target.ticket_id,
                self._target.epoch,
                number,
                part,
                range(self._pool.layout.num_kv_heads),
                len(payload),
            )
            sealed, self._checksums[number] = seal(header, payload)
            if number == 0:
                self._first_send_at = self._loop.time()
            # Refused as delivered before, it is there: the first answer was lost. Should it be part of another frame
            # that is there, the commit does not verify.
            with contextlib.suppress(DuplicateFrame):
                await self._link.send(sealed, payload, self._send_timeout_s)
            self._on_ack(part, len(payload))

    def _on_ack(self, part: KvSlice, kv_bytes: int) -> None:
        self._last_ack_at = self._loop.time()
        self._kv_bytes += kv_bytes
        self._num_unacked -= part.num_cells
        if self._num_unacked == 0:
            self._complete.set_result(None)

    async def _read(self, part: KvSlice) -> memoryview:
        if self.failed.done():
            raise self.failed.result()  # stopped: by now the blocks may be somebody else's
        if not self._pool.copies_wait:
            return self._pool.read(self._block_ids, part.layers, part.tokens)
        read = self._loop.run_in_executor(None, self._pool.read, self._block_ids, part.layers, part.tokens)
        # A thread cannot be cancelled: abort waits for what is in here.
        self._reads.add(read)
        read.add_done_callback(self._on_read_done)
        return await asyncio.shield(read)

    def _on_read_done(self, read: asyncio.Future[memoryview]) -> None:
        self._reads.discard(read)
        if not read.cancelled():
            # Marks it as seen: after an abort nobody else asks.
            read.exception()

    def _on_pump_done(self, pump: asyncio.Task[None]) -> None:
        error = None if pump.cancelled() else pump.exception()
        if isinstance(error, Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self.failed.done() or self._complete.done():
            return
        self.failed.set_result(error)
        for pump in self._pumps:
            pump.cancel()

    async def _stop_pumps(self, timeout_s: float) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.wait(self._pumps, timeout=timeout_s)
