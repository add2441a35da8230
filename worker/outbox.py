"""What one streaming call is to send, whoever has it to say."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages in order, and then one end. Belongs to the event loop; the call alone iterates over it."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._is_ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._sent = asyncio.Event()
        self._sent.set()

    def put(self, message: T) -> None:
        """Adds a message. After the end it is for nobody, and dropped."""
        if not self._is_ended:
            self._messages.append(message)
            self._sent.clear()
            self._news.set()

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream after the messages before, with the error if there is one. The first end counts."""
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._news.set()

    async def sent(self) -> None:
        """Waits until the call has sent all messages; the wait is bounded by the call."""
        await self._sent.wait()

    def __aiter__(self) -> "Outbox[T]":
        """Itself."""
        return self

    async def __anext__(self) -> T:
        """The next message, when it is there; the one before has been sent."""
        while not self._messages:
            self._sent.set()
            if self._is_ended:
                raise self._error or StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._messages.popleft()
