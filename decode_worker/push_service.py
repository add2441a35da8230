"""KvTransferService: prefill workers open and commit their pushes here."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.errors import Aborted, BatonError, FailedPrecondition, InvalidRequest
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from decode_worker.handoff import Handoff
from decode_worker.handoff_machine import Event
from decode_worker.handoffs import Handoffs
from kv_transfer.errors import KvTransferError
from kv_transfer.fingerprint import mismatch
from kv_transfer.landing import TransferClaim
from worker.conversion import fingerprint_from, transfer_error
from worker.host import WorkerHost

CREDIT_BYTES = 8 << 20

_Context = grpc.aio.ServicerContext[Any, Any]
_Requests = AsyncIterator[kv_transfer_pb2.PushRequest]


class PushServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Checks a push at its opening, verifies it at its commit; the call's end without a commit fails the handoff."""

    def __init__(self, host: WorkerHost, handoffs: Handoffs) -> None:
        self._host = host
        self._handoffs = handoffs

    async def Push(  # noqa: N802 - the proto's name
        self, request_iterator: _Requests, context: _Context
    ) -> AsyncIterator[kv_transfer_pb2.PushResponse]:
        """See the proto."""
        opening = (await _next(request_iterator, "open")).open
        # Who does not get the ticket does no harm to its owner; who gets it and fails ends the handoff.
        handoff = self._open(opening)
        try:
            try:
                self._check(opening)
                yield kv_transfer_pb2.PushResponse(opened=kv_transfer_pb2.PushOpened(credit_bytes=CREDIT_BYTES))
                request = await _next_unless_over(request_iterator, handoff)
                if request is not None:
                    self._commit(handoff, request.commit)
            except BatonError as error:
                handoff.handle(Event.PUSH_REFUSED, self._placed(error))
            refusal = handoff.push_over.result()
            if refusal is not None:
                raise self._placed(refusal) if isinstance(refusal, BatonError) else refusal
        finally:
            lost = Aborted(f"{opening.sender} ended the push before its commit", reason="PUSH_ENDED")
            handoff.handle(Event.PUSH_LOST, self._placed(lost))
        yield kv_transfer_pb2.PushResponse(committed=kv_transfer_pb2.PushCommitted())

    def _open(self, opening: kv_transfer_pb2.PushOpen) -> Handoff:
        try:
            handoff = self._handoffs.find(opening.ticket_id, opening.epoch)
            handoff.open_push(opening.sender)
        except KvTransferError as error:
            raise self._placed(transfer_error(error)) from error
        return handoff

    def _check(self, opening: kv_transfer_pb2.PushOpen) -> None:
        difference = mismatch(self._host.fingerprint, fingerprint_from(opening.fingerprint))
        if difference is not None:
            raise FailedPrecondition(f"{opening.sender} cannot push here: {difference}", reason="FINGERPRINT_MISMATCH")
        if opening.transport != "grpc":
            raise InvalidRequest(f"transport {opening.transport!r} is not offered; the ticket names grpc")

    def _commit(self, handoff: Handoff, commit: kv_transfer_pb2.PushCommit) -> None:
        claim = TransferClaim(commit.num_frames, commit.kv_bytes, commit.digest, commit.prompt_hash)
        try:
            handoff.commit(claim, commit.first_token_id)
        except KvTransferError as error:
            raise transfer_error(error) from error

    def _placed(self, error: BatonError) -> BatonError:
        return error.at(stage="transfer", worker=self._host.config.name)


async def _next(requests: _Requests, event: str) -> kv_transfer_pb2.PushRequest:
    """The next message, which must be of this kind."""
    async for request in requests:
        if request.WhichOneof("event") == event:
            return request
        raise InvalidRequest(f"expected {event}, got {request.WhichOneof('event')}")
    raise Aborted(f"the push ended before {event}", reason="PUSH_ENDED")


async def _next_unless_over(requests: _Requests, handoff: Handoff) -> kv_transfer_pb2.PushRequest | None:
    """The commit; None if the handoff has ended the push meanwhile."""
    reading = asyncio.create_task(_next(requests, "commit"), name="commit of a push")
    ends: set[asyncio.Future[Any]] = {reading, handoff.push_over}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return None if handoff.push_over.done() else reading.result()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
