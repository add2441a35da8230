"""A real server on loopback whose answers and pace the tests decide."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from baton.channel import bind, server
from baton.error_interceptor import ErrorInterceptor
from baton.errors import ResourceExhausted, Unavailable
from baton.v1 import inference_pb2, inference_pb2_grpc, request_pb2

REFUSED_TOKEN, DYING_TOKEN, SHORT_TOKEN = 901, 902, 903


class InferenceServer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with the tokens asked for, in pieces of two; the first token of the prompt may ask for trouble.

    `hold` is awaited before each answer, while the request counts as under way.
    """

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.address = ""
        self.num_under_way = 0
        self.most_under_way = 0
        self.hold: Callable = _at_once

    async def Generate(self, request, context):  # noqa: N802 - the name in the .proto
        self.requests.append(request)
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            await self.hold()
            async for response in self._answer(request):
                yield response
        finally:
            self.num_under_way -= 1

    async def GetModelInfo(self, request, context):  # noqa: N802 - the name in the .proto
        return inference_pb2.GetModelInfoResponse(
            model="tiny", context_window_tokens=64, vocab_size=100, eos_token_ids=[7]
        )

    async def _answer(self, request):
        first_token = request.token_ids.ids[0]
        num_tokens = request.stopping.max_tokens
        if first_token == REFUSED_TOKEN:
            raise ResourceExhausted("the queue is full", reason="QUEUE_FULL")
        if first_token == SHORT_TOKEN:
            num_tokens -= 1
        yield inference_pb2.GenerateResponse(prompt_info=inference_pb2.PromptInfo(num_prompt_tokens=1))
        for start in range(0, num_tokens, 2):
            yield inference_pb2.GenerateResponse(token_ids=range(start, min(start + 2, num_tokens)))
            if first_token == DYING_TOKEN:
                raise Unavailable("decode-0: gone")
        timeline = request_pb2.Timeline(
            path=request_pb2.PATH_DISAGGREGATED, transfer_s=0.5, transfer_tail_s=0.125, kv_bytes=1000
        )
        usage = request_pb2.Usage(prompt_tokens=len(request.token_ids.ids), completion_tokens=num_tokens)
        yield inference_pb2.GenerateResponse(
            finish=inference_pb2.Finish(reason=request_pb2.FINISH_REASON_LENGTH, usage=usage, timeline=timeline)
        )


async def _at_once() -> None:
    pass


@pytest.fixture
async def inference() -> AsyncIterator[InferenceServer]:
    """A running InferenceServer."""
    servicer = InferenceServer()
    running = server([ErrorInterceptor()])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, running)
    servicer.address = f"127.0.0.1:{bind(running, 0)}"
    await running.start()
    yield servicer
    await asyncio.wait_for(running.stop(grace=0), 10)
