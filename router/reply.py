"""The way of an answer to a client that may read slowly, or not at all."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import grpc

from baton.errors import Cancelled, DeadlineExceeded
from baton.v1 import inference_pb2

# A client that takes no message for so long, in seconds, does not read.
CLIENT_STALL_LIMIT_S = 60.0
# Small enough for a slow line to take one within that time.
MAX_JOINED_TOKENS = 1024

Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class Reply:
    """Writes one answer's messages, one at a time, so that who adds them never waits for the client.

    gRPC takes a message as soon as the client's HTTP/2 window has room for all of it. What is added meanwhile is
    joined, to messages of MAX_JOINED_TOKENS tokens or little more: at most one answer's tokens wait here. gRPC
    permits no second write while one is pending, even if nobody waits for that one any more, and no write may be
    given up before the initial metadata was sent.
    """

    def __init__(self, write: Write, stall_limit_s: float, on_failure: Callable[[Exception], object]) -> None:
        """`on_failure` is told why writing has ended too early: DeadlineExceeded (CLIENT_STALLED) if no message
        was taken for `stall_limit_s` seconds, Cancelled (CLIENT_GONE) if the client went away.
        """
        self.num_tokens_sent = 0  # tokens of the messages that gRPC has: a client that reads on gets them
        self._write = write
        self._stall_limit_s = stall_limit_s
        self._on_failure = on_failure
        self._waiting: deque[inference_pb2.GenerateResponse] = deque()
        self._has_news = asyncio.Event()
        self._is_closed = False

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """Sends a message as soon as possible, by itself or as part of one that waits."""
        if self._waiting and len(self._waiting[-1].token_ids) < MAX_JOINED_TOKENS:
            last = self._waiting[-1]
            text = last.text + response.text
            last.MergeFrom(response)
            last.text = text
        else:
            self._waiting.append(response)
        self._has_news.set()

    async def flush(self) -> None:
        """Waits until gRPC has taken all messages; nothing may be added afterwards. Raises what writing failed with."""
        self._is_closed = True
        self._has_news.set()
        await self._writer

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write_all(), name="reply")
        self._writer.add_done_callback(self._tell_failure)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.cancel()
        await asyncio.wait({self._writer})

    async def _write_all(self) -> None:
        while self._waiting or not self._is_closed:
            if self._waiting:
                await self._write_next(self._waiting.popleft())
            else:
                self._has_news.clear()
                await self._has_news.wait()

    async def _write_next(self, response: inference_pb2.GenerateResponse) -> None:
        self.num_tokens_sent += len(response.token_ids)
        try:
            async with asyncio.timeout(self._stall_limit_s):
                await self._write(response)
        except TimeoutError:
            if response.HasField("finish"):
                return  # all is with gRPC, which keeps it until the client reads or leaves
            raise DeadlineExceeded(
                f"the client has taken no message for {self._stall_limit_s:g} s; read faster, or ask for less",
                reason="CLIENT_STALLED",
            ) from None
        except grpc.aio.BaseError as error:
            raise Cancelled("the client went away while the answer was written", reason="CLIENT_GONE") from error

    def _tell_failure(self, writer: asyncio.Task[None]) -> None:
        failure = None if writer.cancelled() else writer.exception()
        if isinstance(failure, Exception):
            self._on_failure(failure)
