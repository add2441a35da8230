import asyncio

import pytest

from kv_transfer.errors import LinkLost, TransferTimeout
from kv_transfer.frame import Buffer
from kv_transfer.local import LocalTransport


class HangingSink:
    async def write(self, frame: Buffer) -> None:
        await asyncio.get_running_loop().create_future()


async def test_nobody_there_is_a_lost_link() -> None:
    transport = LocalTransport()
    link = transport.connect("decode-0")
    with pytest.raises(LinkLost, match="'decode-0'"):
        await link.send(b"h", b"p", 1)


async def test_a_sink_that_left_or_a_closed_link_is_a_lost_link() -> None:
    transport = LocalTransport()
    transport.register("decode-0", HangingSink())
    left, closed = transport.connect("decode-0"), transport.connect("decode-0")
    await closed.close()
    with pytest.raises(LinkLost):
        await closed.send(b"h", b"p", 1)
    transport.unregister("decode-0")
    with pytest.raises(LinkLost):
        await left.send(b"h", b"p", 1)


async def test_a_sink_that_takes_nothing_times_out() -> None:
    transport = LocalTransport()
    transport.register("decode-0", HangingSink())
    with pytest.raises(TransferTimeout, match=r"0\.01 s"):
        await transport.connect("decode-0").send(b"h", b"p", 0.01)
