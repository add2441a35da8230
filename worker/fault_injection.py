"""Faults that are in place in this process, and what they do to requests that come by."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kv_transfer.faulty_link import LinkFaults, MessageFaults
from kv_transfer.frame import Buffer
from kv_transfer.transport import Link
from worker.fault_points import FaultPoint


@dataclass(frozen=True, slots=True)
class FaultHit:
    """A fault has struck this request, at a `point` or by what it did to a message (`what`)."""

    request_id: str
    peer: str
    point: FaultPoint | None = None
    what: str = ""


OnHit = Callable[[FaultHit], None]


@dataclass(frozen=True, slots=True)
class HoldSpec:
    """See HoldFault in fault.proto; `max_hits` 0 is no limit, `max_hold_s` 0 does not hold."""

    point: FaultPoint
    num_skipped: int = 0
    max_hits: int = 0
    max_hold_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Hold:
    spec: HoldSpec
    on_hit: OnHit
    num_passed: int = 0
    lifted: asyncio.Event = field(default_factory=asyncio.Event)

    def strike(self, hit: FaultHit) -> bool:
        """Whether this passing of the point is a hit; tells of it."""
        if hit.point is not self.spec.point:
            return False
        self.num_passed += 1
        number = self.num_passed - self.spec.num_skipped
        if number < 1 or 0 < self.spec.max_hits < number:
            return False
        self.on_hit(hit)
        return True


@dataclass(eq=False, slots=True)
class _Spoiling:
    faults: LinkFaults
    on_hit: OnHit


class InjectedFaults:
    """`FaultPoints` at which the faults in place strike, any number at once. To be made on the event loop.

    A fault is in place within the `with` block of the method that names it, and `on_hit` hears of each time it
    strikes, on the event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._holds: list[_Hold] = []
        self._spoilings: list[_Spoiling] = []

    @contextmanager
    def hold(self, spec: HoldSpec, on_hit: OnHit) -> Iterator[None]:
        """Holds requests at a point; those that are held go on when the block ends."""
        hold = _Hold(spec, on_hit)
        self._holds.append(hold)
        try:
            yield
        finally:
            self._holds.remove(hold)
            hold.lifted.set()

    @contextmanager
    def spoil_messages(self, faults: MessageFaults, on_hit: OnHit) -> Iterator[None]:
        """Lets KV messages go wrong, those of transfers under way included."""
        spoiling = _Spoiling(LinkFaults(faults), on_hit)
        self._spoilings.append(spoiling)
        try:
            yield
        finally:
            self._spoilings.remove(spoiling)

    async def reach(self, point: FaultPoint, request_id: str, peer: str = "") -> None:
        """See FaultPoints.reach. Cancelling the caller ends the hold."""
        arrived_at_s = time.monotonic()
        for hold in self._strike(FaultHit(request_id, peer, point)):
            await _wait(hold.lifted, arrived_at_s + hold.spec.max_hold_s - time.monotonic())

    def note(self, point: FaultPoint, request_id: str, peer: str = "") -> None:
        """See FaultPoints.note."""
        self._loop.call_soon_threadsafe(self._strike, FaultHit(request_id, peer, point))

    def link(self, link: Link, request_id: str, peer: str) -> Link:
        """See FaultPoints.link. Each of its messages passes the point PUSHING, and the faults of that moment."""
        return _DrilledLink(self, link, request_id, peer)

    def spoiled(self, link: Link, request_id: str, peer: str) -> Link:
        """The link with the message faults that are in place now."""
        for spoiling in self._spoilings:
            link = spoiling.faults.over(link, peer, _teller(spoiling.on_hit, request_id, peer))
        return link

    def _strike(self, hit: FaultHit) -> list[_Hold]:
        return [hold for hold in self._holds if hold.strike(hit)]


class _DrilledLink:
    """A Link whose faults may come and go while it is used."""

    def __init__(self, faults: InjectedFaults, link: Link, request_id: str, peer: str) -> None:
        self._faults = faults
        self._link = link
        self._request_id = request_id
        self._peer = peer

    async def send(self, header: bytes, payload: Buffer, timeout_s: float) -> None:
        """See Link.send. The time a message is held does not count: it is before the message is sent."""
        await self._faults.reach(FaultPoint.PUSHING, self._request_id, self._peer)
        await self._faults.spoiled(self._link, self._request_id, self._peer).send(header, payload, timeout_s)

    async def close(self) -> None:
        """See Link.close."""
        await self._link.close()


def _teller(on_hit: OnHit, request_id: str, peer: str) -> Callable[[str], None]:
    return lambda what: on_hit(FaultHit(request_id, peer, what=what))


async def _wait(lifted: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await lifted.wait()
    except TimeoutError:
        return
