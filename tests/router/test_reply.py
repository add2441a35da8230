"""An answer's messages are joined while the client does not take them; none is lost, doubled or out of order."""

import asyncio

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Cancelled, DeadlineExceeded
from baton.v1.inference_pb2 import Finish, GenerateResponse, PromptInfo
from router.reply import MAX_JOINED_TOKENS, Reply


class Client:
    """Takes one message for each permit, as an HTTP/2 window does."""

    def __init__(self, permits=0):
        self.messages = []
        self.num_pending = 0
        self._permits = asyncio.Semaphore(permits)

    async def write(self, message):
        assert self.num_pending == 0, "gRPC permits one write at a time"
        self.num_pending += 1
        await self._permits.acquire()
        self.num_pending -= 1
        self.messages.append(message)

    def permit(self, count=1):
        for _ in range(count):
            self._permits.release()

    @property
    def token_ids(self):
        return [token_id for message in self.messages for token_id in message.token_ids]

    @property
    def text(self):
        return "".join(message.text for message in self.messages)


def reply_to(client, stall_limit_s=60.0, failures=None):
    return Reply(client.write, stall_limit_s, (failures if failures is not None else []).append)


def delta(*token_ids):
    return GenerateResponse(text="".join(f"<{token_id}>" for token_id in token_ids), token_ids=token_ids)


def waiting_tokens(reply):
    return [len(message.token_ids) for message in reply._waiting]


async def test_a_client_that_takes_everything_gets_each_message_at_once(eventually):
    client = Client(permits=10)
    async with reply_to(client) as reply:
        for i in range(3):
            reply.add(delta(i))
            await eventually(lambda i=i: client.messages == [delta(j) for j in range(i + 1)])
        await reply.flush()
    assert reply.num_tokens_sent == 3


async def test_what_is_not_taken_is_joined(eventually):
    client = Client()
    async with reply_to(client) as reply:
        reply.add(GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=5), text="<0>", token_ids=[0]))
        await eventually(lambda: client.num_pending)
        for i in range(1, 100):
            reply.add(delta(i))
        reply.add(GenerateResponse(text=".", finish=Finish()))
        assert waiting_tokens(reply) == [99]
        assert reply.num_tokens_sent == 1
        client.permit(2)
        await reply.flush()
    first, second = client.messages
    assert (first.prompt_info.num_prompt_tokens, first.HasField("finish")) == (5, False)
    assert (second.HasField("prompt_info"), second.HasField("finish")) == (False, True)
    assert client.token_ids == list(range(100))
    assert client.text == "".join(f"<{i}>" for i in range(100)) + "."


async def test_a_message_that_waits_does_not_grow_without_bound(eventually):
    client = Client()
    async with reply_to(client) as reply:
        reply.add(delta(0))
        await eventually(lambda: client.num_pending)
        for i in range(1, 5 * MAX_JOINED_TOKENS + 1):
            reply.add(delta(i))
        assert waiting_tokens(reply) == [MAX_JOINED_TOKENS] * 5


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3), st.integers(0, 2)), max_size=12))
def test_any_pace_of_writer_and_reader_gives_the_same_answer(steps):
    """Each step adds so many tokens, lets the client take so many messages, and lets so many turns pass."""

    async def run():
        client, expected = Client(), []
        async with reply_to(client) as reply:
            reply.add(GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=1)))
            for num_tokens, num_permits, num_turns in steps:
                token_ids = range(len(expected), len(expected) + num_tokens)
                expected += token_ids
                reply.add(delta(*token_ids))
                client.permit(num_permits)
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                assert len(client.token_ids) <= reply.num_tokens_sent <= len(expected)
                assert sum(waiting_tokens(reply)) == len(expected) - reply.num_tokens_sent
            reply.add(GenerateResponse(finish=Finish()))
            client.permit(100)
            await reply.flush()
        assert client.token_ids == expected
        assert client.text == delta(*expected).text
        assert reply.num_tokens_sent == len(expected)
        last = len(client.messages) - 1
        assert [i for i, message in enumerate(client.messages) if message.HasField("prompt_info")] == [0]
        assert [i for i, message in enumerate(client.messages) if message.HasField("finish")] == [last]
        assert all(len(message.token_ids) < MAX_JOINED_TOKENS + 700 for message in client.messages)

    asyncio.run(run())


async def test_a_client_that_takes_nothing_is_given_up_with_a_clear_error(eventually):
    client, failures = Client(), []
    async with reply_to(client, stall_limit_s=0.05, failures=failures) as reply:
        reply.add(delta(1, 2))
        await eventually(lambda: client.num_pending)
        reply.add(delta(3))
        await eventually(lambda: failures)
        with pytest.raises(DeadlineExceeded, match=r"no message for 0\.05 s"):
            await reply.flush()
    (failure,) = failures
    assert failure.reason == "CLIENT_STALLED"
    assert reply.num_tokens_sent == 2  # gRPC has the first message, and the client gets it if it reads on
    assert client.messages == []


async def test_the_limit_is_for_each_message(eventually):
    """A slow client that takes one now and then is none that takes nothing."""
    client, failures = Client(), []
    loop = asyncio.get_running_loop()
    async with reply_to(client, stall_limit_s=1.0, failures=failures) as reply:
        started_at = loop.time()
        while loop.time() - started_at < 1.3:
            reply.add(delta(len(client.messages)))
            client.permit()
            num_taken = len(client.messages)
            await eventually(lambda n=num_taken: len(client.messages) > n)
            await asyncio.sleep(0.2)
        await reply.flush()
    assert failures == []


async def test_a_last_message_that_is_not_taken_is_left_to_grpc(eventually):
    """The answer is whole and costs the workers nothing: whoever reads late gets it, and no error after its end."""
    client, failures = Client(permits=1), []
    async with reply_to(client, stall_limit_s=0.05, failures=failures) as reply:
        reply.add(delta(1))
        await eventually(lambda: client.messages)
        reply.add(GenerateResponse(token_ids=[2], finish=Finish()))
        await reply.flush()
    assert (failures, reply.num_tokens_sent) == ([], 2)


async def test_a_client_that_has_gone_away_ends_the_writing(eventually):
    async def write(message):
        raise grpc.aio.BaseError("failed")

    failures = []
    async with Reply(write, 60.0, failures.append) as reply:
        reply.add(delta(1))
        await eventually(lambda: failures)
    (failure,) = failures
    assert (type(failure), failure.reason) == (Cancelled, "CLIENT_GONE")


async def test_a_bug_in_the_writing_is_told_as_it_is(eventually):
    failures = []

    async def write(message):
        raise ValueError("cannot be serialized")

    async with Reply(write, 60.0, failures.append) as reply:
        reply.add(delta(1))
        await eventually(lambda: failures)
    assert [str(failure) for failure in failures] == ["cannot be serialized"]


async def test_leaving_early_gives_up_what_waits_and_leaves_no_task(eventually):
    client, failures, before = Client(), [], asyncio.all_tasks()
    async with reply_to(client, failures=failures) as reply:
        reply.add(delta(1))
        await eventually(lambda: client.num_pending)
    assert asyncio.all_tasks() == before
    assert failures == []
