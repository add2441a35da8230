"""Channels to decode workers, one for each address, kept between requests."""

import asyncio

import grpc

from baton import channel
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.transport import Link

MAX_PEERS = 64
CLOSE_GRACE_S = 60.0  # longer than a push may take


class Peers:
    """Owns the channels. The oldest is closed when there are more than `MAX_PEERS`: addresses of dead workers."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._transport = GrpcTransport(self.channel)
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port."""
        found = self._channels.pop(address, None) or channel.channel(address, internal=True)
        self._channels[address] = found  # the latest used stands last
        if len(self._channels) > MAX_PEERS:
            oldest = self._channels.pop(next(iter(self._channels)))
            closing = asyncio.create_task(oldest.close(CLOSE_GRACE_S), name="close oldest channel")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return found

    def link(self, address: str) -> Link:
        """A link for KV over the channel to host:port."""
        return self._transport.connect(address)

    async def close(self) -> None:
        """Closes all channels."""
        for open_channel in self._channels.values():
            await open_channel.close()
        self._channels.clear()
        closing = tuple(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
