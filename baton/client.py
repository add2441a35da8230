"""The client for programs without an event loop."""

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
from baton.channel import sync_channel
from baton.errors import from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc


class Stream(Answer):
    """One answer while it is generated: iterate over its chunks, or `read()` it to the end.

    Leaving its `with` block before the end cancels the request, as does dropping it. Raises BatonError;
    after `cancel()`, Cancelled.
    """

    def __init__(self, call: Any, request_id: str) -> None:
        super().__init__(request_id)
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while True:
            chunk = self.fold(self._receive())
            if chunk is not None:
                return chunk

    def read(self) -> str:
        """Waits for the end and returns the whole text."""
        for _ in self:
            pass
        return self.text

    def cancel(self) -> None:
        """Ends the request and frees what it holds; without effect after the end."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _receive(self) -> inference_pb2.GenerateResponse:
        try:
            response: inference_pb2.GenerateResponse = next(self._call)
        except StopIteration:
            self.check_finished()
            raise
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        if response.HasField("prompt_info"):  # the first one, so this does not wait
            self.request_id = request_id_of(self._call.initial_metadata()) or self.request_id
        return response


class Client:
    """A cluster, seen from outside. May be shared by threads; one Stream belongs to one.

    `address` is the router's host:port. `timeout_s` bounds each answer unless the request says otherwise.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._channel = sync_channel(address, credentials=credentials)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Sends a prompt: text, token ids, or messages of a conversation as {"role": ..., "content": ...}.

        Options: see GenerateOptions. Raises InvalidRequest at once for what cannot be sent; other errors come
        while reading.
        """
        request = build_request(prompt, options)
        timeout_s = options.get("timeout_s")
        call = self._stub.Generate(request, timeout=self._timeout_s if timeout_s is None else timeout_s)
        return Stream(call, request.request_id)

    def abort(self, request_id: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> int:
        """Ends all running requests of this id, whoever sent them to this router; returns how many there were.

        Their streams end with Cancelled. Raises BatonError, InvalidRequest for an empty id.
        """
        try:
            response: inference_pb2.AbortResponse = self._stub.Abort(build_abort(request_id), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return response.num_aborted

    def model_info(self, *, timeout_s: float = MODEL_INFO_TIMEOUT_S) -> inference_pb2.GetModelInfoResponse:
        """What the cluster serves, with its limits. Raises BatonError."""
        try:
            info: inference_pb2.GetModelInfoResponse = self._stub.GetModelInfo(
                inference_pb2.GetModelInfoRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return info

    def close(self) -> None:
        """Closes the connection; streams that are still open end with Cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
