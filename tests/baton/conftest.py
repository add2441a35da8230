"""A real asyncio server on loopback with whatever service a test gives it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from baton.channel import bind, server
from baton.error_interceptor import ErrorInterceptor
from baton.errors import InvalidRequest, ModelNotFound, Unavailable
from baton.v1 import inference_pb2, inference_pb2_grpc, request_pb2

Serve = Callable[[Callable[[grpc.aio.Server], None]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server with the services that the given function adds to it; returns its address."""
    servers: list[grpc.aio.Server] = []

    async def start(add_services: Callable[[grpc.aio.Server], None]) -> str:
        started = server([ErrorInterceptor()])
        add_services(started)
        port = bind(started, 0)
        await started.start()
        servers.append(started)
        return f"127.0.0.1:{port}"

    yield start
    await asyncio.gather(*(started.stop(grace=0) for started in servers))


class ScriptedInference(inference_pb2_grpc.InferenceServiceServicer):
    """An InferenceService that answers by the prompt's text; everything else about it is real."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.aborted: list[str] = []
        self.is_waiting = asyncio.Event()
        self.was_cancelled = asyncio.Event()

    async def Generate(self, request, context):  # noqa: N802 - the name in the .proto
        self.requests.append(request)
        if request.text == "refuse":
            raise ModelNotFound("no model 'x'")
        await context.send_initial_metadata((("x-request-id", request.request_id or "made-by-router"),))
        yield inference_pb2.GenerateResponse(prompt_info=inference_pb2.PromptInfo(num_prompt_tokens=3))
        yield inference_pb2.GenerateResponse(text="Hel", token_ids=[1])
        if request.text == "fail":
            raise Unavailable("decode-0: gone", retry_after_s=0.5)
        if request.text == "wait":
            await self._wait()
        yield inference_pb2.GenerateResponse(text="lo", token_ids=[2, 3])
        if request.text != "cut":
            usage = request_pb2.Usage(prompt_tokens=3, completion_tokens=3)
            timeline = request_pb2.Timeline(decode_worker="decode-0", ttft_s=0.25)
            finish = inference_pb2.Finish(reason=request_pb2.FINISH_REASON_LENGTH, usage=usage, timeline=timeline)
            yield inference_pb2.GenerateResponse(finish=finish)

    async def Abort(self, request, context):  # noqa: N802 - the name in the .proto
        if not request.request_id:
            raise InvalidRequest("request_id is empty")
        self.aborted.append(request.request_id)
        return inference_pb2.AbortResponse(num_aborted=len(self.aborted))

    async def GetModelInfo(self, request, context):  # noqa: N802 - the name in the .proto
        return inference_pb2.GetModelInfoResponse(model="tiny", context_window_tokens=64)

    async def _wait(self):
        self.is_waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cancelled.set()


@pytest.fixture
async def inference(serve: Serve) -> tuple[ScriptedInference, str]:
    """The scripted service and its address."""
    servicer = ScriptedInference()
    address = await serve(lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server))
    return servicer, address
