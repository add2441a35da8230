"""What a transport of KV frames is: a link that sends them, and a sink that they end in."""

from typing import Protocol

from kv_transfer.frame import Buffer


class Sink(Protocol):
    """The receiving side's end of every transport."""

    async def write(self, frame: Buffer) -> None:
        """Takes one whole frame, header and payload.

        Returns when the KV is in place. Raises a KvTransferError, with nothing written.
        """
        ...


class Link(Protocol):
    """A way to one peer, shared by all transfers to it. Order between frames is not kept."""

    async def send(self, header: bytes, payload: Buffer, timeout_s: float) -> None:
        """Delivers one frame and returns when the peer has it in place.

        `payload` is not referred to after the call ends. Raises the peer's refusal as it was raised there,
        LinkLost, or TransferTimeout: then the frame may or may not arrive later.
        """
        ...

    async def close(self) -> None:
        """Ends the link; later sends raise LinkLost."""
        ...


class Transport(Protocol):
    """One kind of link."""

    kind: str

    def connect(self, address: str) -> Link:
        """A link to `address`, in the form this kind has. Waits for nothing: a dead peer shows on `send`."""
        ...
