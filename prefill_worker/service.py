"""PrefillService: runs one prompt, gives out token 0 and pushes the KV."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.errors import BatonError, InvalidRequest
from baton.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.handoff import Handoff
from prefill_worker.handoff_machine import Event
from prefill_worker.peers import Peers
from prefill_worker.push import open_push
from worker.cleanup import Stragglers, finish
from worker.conversion import check_token_ids
from worker.draining import Draining
from worker.fault_points import NO_FAULTS, FaultPoint, FaultPoints
from worker.host import WorkerHost

_Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(worker_pb2_grpc.PrefillServiceServicer):
    """Serves one host's engine. What a call holds is released when the call ends, however it ends.

    To be ended with `close_all`.
    """

    def __init__(self, host: WorkerHost, peers: Peers, draining: Draining, faults: FaultPoints = NO_FAULTS) -> None:
        self._host = host
        self._peers = peers
        self._draining = draining
        self._faults = faults
        self._stragglers = Stragglers()

    async def Prefill(  # noqa: N802 - the proto's name
        self, request: worker_pb2.PrefillRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        """See the proto."""
        request_id, peer = request.request_id, request.ticket.worker
        try:
            self._check(request)
            handoff = Handoff(
                self._host,
                request,
                self._stragglers,
                lambda: self._faults.note(FaultPoint.PREFILLING, request_id, peer),
            )
            with self._draining.call(handoff.hand_back):
                work = asyncio.create_task(self._work(request, handoff), name=f"prefill {request_id}")
                try:
                    async for response in handoff.outbox:
                        yield response
                finally:
                    # Releases everything before anything else happens; the rest is housekeeping.
                    handoff.end_call()
                    work.cancel()
                    await finish(asyncio.wait({work}))
        except BatonError as error:
            raise error.at(stage="prefill", worker=self._host.config.name) from error

    async def close_all(self) -> None:
        """Waits for reads of the blocks of ended calls no longer: the process ends."""
        await self._stragglers.close()

    async def _work(self, request: worker_pb2.PrefillRequest, handoff: Handoff) -> None:
        """Opens the push, lets the prompt be computed, and commits the push when all of it has arrived."""
        request_id, peer = request.request_id, request.ticket.worker
        push, summary = None, None
        try:
            if request.HasField("ticket"):
                push = await open_push(self._host, self._peers, request.ticket, request_id, self._faults)
            handoff.open(push)
            await self._faults.reach(FaultPoint.QUEUED, request_id, peer)
            handoff.handle(Event.ADMITTED)
            if push is not None:
                summary = await push.delivered()
                await self._faults.reach(FaultPoint.PUSHED, request_id, peer)
            handoff.acknowledge_kv(summary)
            await handoff.may_commit.wait()
            if push is None or summary is None:
                handoff.handle(Event.COMMITTED)
            else:
                await push.commit(summary, list(request.token_ids), handoff.first_token_id)
        except Exception as error:  # noqa: BLE001 - the root of the task; the call raises it
            handoff.handle(Event.PUSH_LOST, error)

    def _check(self, request: worker_pb2.PrefillRequest) -> None:
        check_token_ids(list(request.token_ids), self._host.vocab_size)
        num_tokens = len(request.token_ids)
        if num_tokens == 0:
            raise InvalidRequest("token_ids must not be empty")
        if request.HasField("ticket") and request.ticket.num_prompt_tokens != num_tokens:
            raise InvalidRequest(f"the ticket is for {request.ticket.num_prompt_tokens} tokens, {num_tokens} were sent")
