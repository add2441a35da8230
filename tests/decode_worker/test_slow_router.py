"""A router that stops reading a Decode stream: the sequence goes on to its end, and its blocks go back."""

import grpc
import pytest
import pytest_asyncio
from worker_rig import HELLO, decode_request, read, read_tokens

from baton.v1 import worker_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="session")

WINDOW_BYTES = 64
# A message with a token is 9 bytes or more, so that many fit; one more is on its way.
MAX_UNREAD_MESSAGES = WINDOW_BYTES // 9 + 1
NUM_TOKENS = 30


@pytest_asyncio.fixture(loop_scope="session")
async def slow_decode(workers):
    """Starts a Decode call whose client has a window of a few messages and reads only what it is told to."""
    _, decode = workers
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))
    opened = grpc.aio.insecure_channel(decode.address.address, options=options)
    stub = worker_pb2_grpc.DecodeServiceStub(opened)
    yield lambda: stub.Decode(decode_request([HELLO] * 33, NUM_TOKENS, prefill_locally=True))
    await opened.close()


def holds_nothing(decode):
    """No blocks and no sequence, though the call may still be open."""
    return decode.num_owned_blocks == 0 and decode.host.engine.load().num_sequences == 0


async def test_the_blocks_of_a_whole_answer_are_free_though_nobody_reads_it(workers, slow_decode, eventually):
    """What is not taken is joined, and all there for a router that reads late."""
    _, decode = workers
    usual = decode.decode(decode_request([HELLO] * 33, NUM_TOKENS, prefill_locally=True))
    await read(usual, "reserved")
    expected, _ = await read_tokens(usual)
    call = slow_decode()
    await read(call, "reserved")
    await eventually(lambda: holds_nothing(decode), timeout_s=60)
    assert not call.done()
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    assert [token_id for message in messages for token_id in message.tokens.token_ids] == expected
    assert len(expected) == NUM_TOKENS
    assert messages[-1].HasField("finished")
    assert len(messages) <= MAX_UNREAD_MESSAGES + 2  # all that was joined, and the end


async def test_others_go_on_beside_it(workers, slow_decode):
    _, decode = workers
    call = slow_decode()
    await read(call, "reserved")
    beside = decode.decode(decode_request([HELLO] * 33, prefill_locally=True))
    await read(beside, "reserved")
    assert len((await read_tokens(beside))[0]) == 5
    call.cancel()


@pytest.mark.parametrize("is_whole", [False, True])
async def test_a_router_that_leaves_without_reading_leaves_nothing_behind(workers, slow_decode, eventually, is_whole):
    """In the middle of the answer, and when only its messages are left."""
    _, decode = workers
    call = slow_decode()
    await read(call, "reserved")
    await eventually(lambda: decode.num_owned_blocks > 0 or is_whole)
    if is_whole:
        await eventually(lambda: holds_nothing(decode), timeout_s=60)
    call.cancel()
    await eventually(lambda: decode.is_clean)
