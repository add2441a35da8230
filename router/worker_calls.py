"""The calls one request has open on workers."""

import asyncio
import time
from types import TracebackType
from typing import Any, Self

import grpc

from baton.errors import BatonError, DeadlineExceeded, Unavailable, from_peer_error
from baton.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from router.membership import Member
from router.validation import PromptRequest


class WorkerCall:
    """One open stream from a worker. Errors name the worker and the stage."""

    def __init__(self, call: Any, stage: str, worker: str) -> None:
        self._call = call
        self._stage = stage
        self._worker = worker
        self._loss: BatonError | None = None

    async def read(self, *events: str) -> Any:
        """The next message's event, as (name, message); its name must be among `events`.

        Raises the worker's status as a typed error, and Unavailable if the stream ends early.
        """
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._loss or from_peer_error(error).at(stage=self._stage, worker=self._worker) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._loss is None or (task is not None and task.cancelling()):
                raise
            raise self._loss from error
        if self._loss is not None:
            raise self._loss
        if response is grpc.aio.EOF:
            raise self._error(f"ended its stream before {' or '.join(events)}")
        event = response.WhichOneof("event")
        if event not in events:
            raise self._error(f"sent {event} instead of {' or '.join(events)}")
        return event, getattr(response, event)

    def cancel(self) -> None:
        """Ends the call, and with it whatever it holds on the worker."""
        self._call.cancel()

    def lose(self, error: BatonError) -> None:
        """Ends the call, as its worker does not speak any more: whoever reads it gets this error."""
        self._loss = self._loss or error.at(stage=self._stage, worker=self._worker)
        self._call.cancel()

    def _error(self, what: str) -> BatonError:
        return Unavailable(f"the worker {what}").at(stage=self._stage, worker=self._worker)


class WorkerCalls:
    """Opens a request's calls, with what remains of its time, and cancels them at the end of the context."""

    def __init__(self, prompt: PromptRequest, deadline_at: float) -> None:
        """`deadline_at` of `time.monotonic`, in seconds."""
        self._prompt = prompt
        self._deadline_at = deadline_at
        self._open: list[tuple[Member, WorkerCall]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member, call in self._open:
            member.calls.discard(call)
            call.cancel()
        self._open.clear()
        # Lets the cancellations leave before whatever comes next.
        await asyncio.sleep(0)

    def prefill(self, member: Member, ticket: worker_pb2.Ticket | None) -> WorkerCall:
        """Starts the prefill; its KV goes where the ticket says, or nowhere."""
        request = worker_pb2.PrefillRequest(
            request_id=self._prompt.request_id,
            token_ids=self._prompt.token_ids,
            sampling=self._sampling(),
            cache_salt=self._prompt.cache_salt,
            ticket=ticket,
            priority=self._prompt.priority,
        )
        stub = worker_pb2_grpc.PrefillServiceStub(member.channel)  # type: ignore[no-untyped-call]
        return self._keep(stub.Prefill(request, timeout=self._remaining_s()), "prefill", member)

    def decode(self, member: Member, local_prefill_max_tokens: int | None) -> WorkerCall:
        """Reserves, and then decodes. The worker prefills by itself what its cache lacks if that is not longer
        than this; None: in any case.
        """
        sampling = self._prompt.sampling
        request = worker_pb2.DecodeRequest(
            request_id=self._prompt.request_id,
            token_ids=self._prompt.token_ids,
            sampling=self._sampling(),
            stopping=request_pb2.StoppingCriteria(
                max_tokens=sampling.max_tokens, stop_token_ids=sorted(sampling.stop_token_ids)
            ),
            cache_salt=self._prompt.cache_salt,
            local_prefill_max_tokens=local_prefill_max_tokens or 0,
            prefill_locally=local_prefill_max_tokens is None,
            priority=self._prompt.priority,
        )
        stub = worker_pb2_grpc.DecodeServiceStub(member.channel)  # type: ignore[no-untyped-call]
        return self._keep(stub.Decode(request, timeout=self._remaining_s()), "decode", member)

    def _keep(self, call: Any, stage: str, member: Member) -> WorkerCall:
        kept = WorkerCall(call, stage, member.name)
        self._open.append((member, kept))
        member.calls.add(kept)
        return kept

    def _sampling(self) -> request_pb2.SamplingParams:
        sampling = self._prompt.sampling
        return request_pb2.SamplingParams(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed
        )

    def _remaining_s(self) -> float:
        remaining_s = self._deadline_at - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's time was over before a worker could take it")
        return remaining_s
