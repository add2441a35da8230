"""The workers the router knows: their identity, their load as they report it, and what was sent to them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from baton import channel
from baton.errors import BatonError, Unavailable
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.circuit_breaker import CircuitBreaker
from router.worker_view import WorkerView
from worker.conversion import fingerprint_from

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 5.0
SILENCE_LIMIT_S = 5.0  # a worker reports at least once a second
RECONNECT_DELAY_S = 0.5


class WorkerAddress(Protocol):
    """Where a worker is, as the controller says."""

    @property
    def name(self) -> str:
        """Stable name, such as prefill-0."""
        ...

    @property
    def address(self) -> str:
        """host:port."""
        ...

    @property
    def role(self) -> str:
        """prefill, decode or mixed."""
        ...

    @property
    def metrics_address(self) -> str:
        """host:port of its /metrics; empty if it has none."""
        ...


@dataclass(eq=False, slots=True)
class Assignment:
    """What one request puts on one worker, as the router counts it: tokens to be prefilled there, KV blocks."""

    prompt_tokens: int
    blocks: int


class LosableCall(Protocol):
    """A call that is open on a worker."""

    def lose(self, error: BatonError) -> None:
        """Ends it with this error: the worker does not speak any more."""
        ...


@dataclass(eq=False, slots=True)
class Member:
    """One worker. `info` and `state` are of the same life, and None until, or while not, it is reachable.

    `calls` are those open on it now, `sent` what they put on it.
    """

    name: str
    address: str
    channel: grpc.aio.Channel
    info: worker_pb2.GetWorkerInfoResponse | None = None
    state: worker_pb2.WatchStateResponse | None = None
    epoch: str = ""
    watch: asyncio.Task[None] | None = None
    sent: set[Assignment] = field(default_factory=set)
    num_ever_sent: int = 0
    calls: set[LosableCall] = field(default_factory=set)

    def view(self) -> WorkerView:
        """A snapshot; only while it is reachable."""
        info, state = self.info, self.state
        assert info is not None
        assert state is not None
        return WorkerView(
            name=self.name,
            can_prefill=info.role in (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_MIXED),
            can_decode=info.role in (worker_pb2.ROLE_DECODE, worker_pb2.ROLE_MIXED),
            is_ready=state.is_ready,
            fingerprint=fingerprint_from(info.fingerprint),
            block_size_tokens=info.block_size_tokens,
            num_blocks=info.num_blocks,
            max_batch_sequences=info.max_batch_sequences,
            max_step_tokens=info.max_step_tokens,
            load_free_blocks=state.num_free_blocks,
            load_sequences=state.num_running + state.num_waiting + state.num_reserved,
            load_queued_tokens=state.num_queued_tokens,
            sent_sequences=len(self.sent),
            sent_prompt_tokens=sum(a.prompt_tokens for a in self.sent),
            sent_blocks=sum(a.blocks for a in self.sent),
            num_ever_sent=self.num_ever_sent,
        )


class Membership:
    """Follows the workers it is told of. All methods belong to the event loop."""

    def __init__(self) -> None:
        self.breaker = CircuitBreaker()
        self._members: dict[str, Member] = {}
        self._left: set[Member] = set()  # those to which requests still go on
        self._closing: set[asyncio.Task[None]] = set()  # channels of those to which none does
        self._changed = asyncio.Event()

    async def set_workers(self, workers: Sequence[WorkerAddress]) -> None:
        """Follows these and no others. A name at another address is another worker.

        Requests go on that were sent to a worker before it left.
        """
        wanted = {w.name: w.address for w in workers}
        gone = [m for m in self._members.values() if wanted.get(m.name) != m.address]
        for member in gone:
            del self._members[member.name]
        for name, address in wanted.items():
            if name not in self._members:
                member = Member(name, address, channel.channel(address, internal=True))
                member.watch = asyncio.create_task(self._follow(member), name=f"watch {name}")
                self._members[name] = member
        self._wake()
        for member in gone:
            await self._dismiss(member)

    async def close(self) -> None:
        """Follows nobody any more, and ends what is still open."""
        await self.set_workers(())
        for member in list(self._left):
            await member.channel.close()
        self._left.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def views(self) -> list[WorkerView]:
        """A snapshot of the workers that are reachable and whose circuits are closed."""
        now_s = time.monotonic()
        return [m.view() for m in self._members.values() if m.info is not None and self.breaker.allows(m.name, now_s)]

    def blocked_pairs(self) -> frozenset[tuple[str, str]]:
        """Pairs (prefill, decode) whose circuits are open."""
        return frozenset(key for key in self.breaker.blocked(time.monotonic()) if isinstance(key, tuple))

    def workers_up(self) -> dict[str, bool]:
        """All workers by name, and whether requests may be sent there. From any thread."""
        now_s = time.monotonic()
        return {
            member.name: state is not None and state.is_ready and self.breaker.allows(member.name, now_s)
            for member in list(self._members.values())
            for state in (member.state,)
        }

    def num_circuits_open(self) -> int:
        """Workers and pairs that are left out now. From any thread."""
        return len(self.breaker.blocked(time.monotonic()))

    def infos(self) -> list[worker_pb2.GetWorkerInfoResponse]:
        """Identities of the workers that are reachable."""
        return [m.info for m in self._members.values() if m.info is not None]

    def member(self, name: str) -> Member | None:
        """One worker by name."""
        return self._members.get(name)

    async def wait_for_change(self) -> None:
        """Returns when a worker's state, or what was sent to it, has changed. The caller has the deadline."""
        await self._changed.wait()

    def take(self, member: Member, assignment: Assignment) -> None:
        """Counts what is sent to a worker, until `give_back`; so long its channel stays open."""
        member.sent.add(assignment)
        member.num_ever_sent += 1

    def give_back(self, member: Member, assignment: Assignment) -> None:
        """Counts it no more. May be called again."""
        member.sent.discard(assignment)
        self._wake()
        if member in self._left and not member.sent:
            self._left.discard(member)
            closing = asyncio.create_task(member.channel.close(), name=f"close the channel to {member.name}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def note_prefilled(self, assignment: Assignment) -> None:
        """Its prompt is computed: there is room for another one."""
        assignment.prompt_tokens = 0
        self._wake()

    async def _follow(self, member: Member) -> None:
        """Keeps one worker's figures fresh; a worker that falls silent is unknown until it speaks again."""
        stub = worker_pb2_grpc.WorkerServiceStub(member.channel)  # type: ignore[no-untyped-call]
        while True:
            try:
                info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=INFO_TIMEOUT_S)
                await self._read_states(member, stub, info)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if member.info is not None:
                    logger.warning("lost sight of %s at %s: %s", member.name, member.address, _brief(error))
                if isinstance(error, TimeoutError):
                    _lose_calls(member, f"the worker has been silent for {SILENCE_LIMIT_S:.0f} s")
            member.info = member.state = None
            self._wake()
            await asyncio.sleep(RECONNECT_DELAY_S)

    async def _read_states(
        self, member: Member, stub: worker_pb2_grpc.WorkerServiceStub, info: worker_pb2.GetWorkerInfoResponse
    ) -> None:
        call = stub.WatchState(worker_pb2.WatchStateRequest())
        try:
            while True:
                async with asyncio.timeout(SILENCE_LIMIT_S):
                    state = await call.read()
                if not isinstance(state, worker_pb2.WatchStateResponse) or state.epoch != info.epoch:
                    return  # it has ended, or another life of it has begun at its address
                if member.info is None:
                    self._note_life(member, info)
                member.info, member.state = info, state
                self._wake()
        finally:
            call.cancel()

    def _note_life(self, member: Member, info: worker_pb2.GetWorkerInfoResponse) -> None:
        """It can be reached. What failed in an earlier life does not count, and calls into it will never end."""
        if member.epoch != info.epoch:
            self.breaker.forget(member.name)
            _lose_calls(member, "the worker has begun a new life")
            member.epoch = info.epoch

    async def _dismiss(self, member: Member) -> None:
        assert member.watch is not None
        member.watch.cancel()
        await asyncio.wait({member.watch})
        if member.sent:
            self._left.add(member)
        else:
            await member.channel.close()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _lose_calls(member: Member, why: str) -> None:
    """Connections to a frozen process stay open, so its calls would end only with their deadlines."""
    for call in tuple(member.calls):
        call.lose(Unavailable(why, reason="WORKER_LOST", retry_after_s=1.0))


def _brief(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return "silent"
