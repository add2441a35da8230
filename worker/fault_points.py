"""Points in the life of a request where a drill may step in. By default nothing happens there."""

from enum import Enum
from typing import Protocol

from kv_transfer.transport import Link


class FaultPoint(Enum):
    """See FaultPoint in fault.proto."""

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    PUSHING = "pushing"
    PUSHED = "pushed"
    FIRST_STEP = "first_step"
    DECODING = "decoding"


class FaultPoints(Protocol):
    """What services call at these points. `peer` is the other worker of the handoff, if it is known there."""

    async def reach(self, point: FaultPoint, request_id: str, peer: str = "") -> None:
        """The request has come to this point; may hold it for a while."""
        ...

    def note(self, point: FaultPoint, request_id: str, peer: str = "") -> None:
        """The request has passed this point. From any thread, never blocks."""
        ...

    def link(self, link: Link, request_id: str, peer: str) -> Link:
        """The link by which the request's KV goes to `peer`, with the faults of the day."""
        ...


class NoFaults:
    """The default."""

    async def reach(self, point: FaultPoint, request_id: str, peer: str = "") -> None:
        """Passes."""

    def note(self, point: FaultPoint, request_id: str, peer: str = "") -> None:
        """Passes."""

    def link(self, link: Link, request_id: str, peer: str) -> Link:
        """The link itself."""
        return link


NO_FAULTS = NoFaults()
