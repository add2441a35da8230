"""Links within one process: for a worker that is both ends of a handoff, and for tests."""

import asyncio

from kv_transfer.errors import LinkLost, TransferTimeout
from kv_transfer.frame import Buffer
from kv_transfer.transport import Sink


class LocalTransport:
    """Reaches the sinks that were registered with this object; an address is the name given there."""

    kind = "local"

    def __init__(self) -> None:
        self._sinks: dict[str, Sink] = {}

    def register(self, address: str, sink: Sink) -> None:
        """Makes `sink` reachable, in place of an earlier one at that address."""
        self._sinks[address] = sink

    def unregister(self, address: str) -> None:
        """Makes the address unreachable, also for links that exist."""
        self._sinks.pop(address, None)

    def connect(self, address: str) -> "LocalLink":
        """A link to the sink that was registered last at `address`, looked up at each send."""
        return LocalLink(self._sinks, address)


class LocalLink:
    """A Link that calls the sink."""

    def __init__(self, sinks: dict[str, Sink], address: str) -> None:
        self._sinks = sinks
        self._address = address
        self._is_closed = False

    async def send(self, header: bytes, payload: Buffer, timeout_s: float) -> None:
        """See Link.send. The frame passes through the same bytes and checks as on a network."""
        sink = self._sinks.get(self._address)
        if self._is_closed or sink is None:
            raise LinkLost(f"nothing is registered at {self._address!r}, or the link was closed")
        try:
            async with asyncio.timeout(timeout_s):
                await sink.write(b"".join((header, payload)))
        except TimeoutError as error:
            raise TransferTimeout(f"{self._address!r} did not take a frame in {timeout_s} s") from error

    async def close(self) -> None:
        """See Link.close."""
        self._is_closed = True
