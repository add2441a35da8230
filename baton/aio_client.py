"""The client for programs with an asyncio event loop."""

import asyncio
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from baton.answer import (
    ABORT_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    MODEL_INFO_TIMEOUT_S,
    Answer,
    Chunk,
    GenerateOptions,
    Prompt,
    build_abort,
    build_request,
    request_id_of,
)
from baton.channel import channel
from baton.errors import Cancelled, from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc


class AsyncStream(Answer):
    """One answer while it is generated: iterate over its chunks, or `await read()` it to the end.

    Leaving its `async with` block before the end cancels the request, as does dropping it. Raises BatonError;
    after `cancel()`, Cancelled.
    """

    def __init__(self, call: Any, request_id: str) -> None:
        super().__init__(request_id)
        self._call = call
        self._responses = aiter(call)
        self._is_cancelled = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            chunk = self.fold(await self._receive())
            if chunk is not None:
                return chunk

    async def read(self) -> str:
        """Waits for the end and returns the whole text."""
        async for _ in self:
            pass
        return self.text

    def cancel(self) -> None:
        """Ends the request and frees what it holds; without effect after the end."""
        self._is_cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _receive(self) -> inference_pb2.GenerateResponse:
        try:
            response: inference_pb2.GenerateResponse = await anext(self._responses)
        except StopAsyncIteration:
            self.check_finished()
            raise
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_cancelled and not (task and task.cancelling()):
                raise Cancelled("the request was cancelled by its client") from None
            raise  # it is the task that was cancelled, and its call with it
        if response.HasField("prompt_info"):  # the first one, so this does not wait
            self.request_id = request_id_of(await self._call.initial_metadata()) or self.request_id
        return response


class AsyncClient:
    """A cluster, seen from outside. To be made in the event loop that uses it.

    `address` is the router's host:port. `timeout_s` bounds each answer unless the request says otherwise.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._channel = channel(address, credentials=credentials)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Sends a prompt: text, token ids, or messages of a conversation as {"role": ..., "content": ...}.

        Options: see GenerateOptions. Raises InvalidRequest at once for what cannot be sent; other errors come
        while reading.
        """
        request = build_request(prompt, options)
        timeout_s = options.get("timeout_s")
        call = self._stub.Generate(request, timeout=self._timeout_s if timeout_s is None else timeout_s)
        return AsyncStream(call, request.request_id)

    async def abort(self, request_id: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> int:
        """Ends all running requests of this id, whoever sent them to this router; returns how many there were.

        Their streams end with Cancelled. Raises BatonError, InvalidRequest for an empty id.
        """
        try:
            response: inference_pb2.AbortResponse = await self._stub.Abort(build_abort(request_id), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return response.num_aborted

    async def model_info(self, *, timeout_s: float = MODEL_INFO_TIMEOUT_S) -> inference_pb2.GetModelInfoResponse:
        """What the cluster serves, with its limits. Raises BatonError."""
        try:
            info: inference_pb2.GetModelInfoResponse = await self._stub.GetModelInfo(
                inference_pb2.GetModelInfoRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return info

    async def close(self) -> None:
        """Closes the connection; streams that are still open end with Cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
