"""KvTransferService: prefill workers open and commit their pushes here."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.errors import Aborted, BatonError, FailedPrecondition, InvalidRequest
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
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
        name = self._host.config.name
        opening = (await _next(request_iterator, "open")).open
        # Who does not get the ticket does no harm to its owner; who gets it and fails ends the handoff.
        self._begin(opening)
        try:
            self._check(opening)
            yield kv_transfer_pb2.PushResponse(opened=kv_transfer_pb2.PushOpened(credit_bytes=CREDIT_BYTES))
            commit = (await _next(request_iterator, "commit")).commit
            self._commit(opening.ticket_id, commit)
        except BatonError as error:
            placed = error.at(stage="transfer", worker=name)
            self._handoffs.fail(opening.ticket_id, placed)
            raise placed from error
        finally:
            lost = Aborted(f"{opening.sender} ended the push before its commit", reason="PUSH_ENDED")
            self._handoffs.fail(opening.ticket_id, lost.at(stage="transfer", worker=name))
        yield kv_transfer_pb2.PushResponse(committed=kv_transfer_pb2.PushCommitted())

    def _begin(self, opening: kv_transfer_pb2.PushOpen) -> None:
        try:
            self._handoffs.begin(opening.ticket_id, opening.epoch)
        except KvTransferError as error:
            raise transfer_error(error).at(stage="transfer", worker=self._host.config.name) from error

    def _check(self, opening: kv_transfer_pb2.PushOpen) -> None:
        difference = mismatch(self._host.fingerprint, fingerprint_from(opening.fingerprint))
        if difference is not None:
            raise FailedPrecondition(f"{opening.sender} cannot push here: {difference}", reason="FINGERPRINT_MISMATCH")
        if opening.transport != "grpc":
            raise InvalidRequest(f"transport {opening.transport!r} is not offered; the ticket names grpc")

    def _commit(self, ticket_id: str, commit: kv_transfer_pb2.PushCommit) -> None:
        claim = TransferClaim(commit.num_frames, commit.kv_bytes, commit.digest, commit.prompt_hash)
        try:
            self._handoffs.commit(ticket_id, claim, commit.first_token_id)
        except KvTransferError as error:
            raise transfer_error(error) from error


async def _next(requests: _Requests, event: str) -> kv_transfer_pb2.PushRequest:
    """The next message, which must be of this kind."""
    async for request in requests:
        if request.WhichOneof("event") == event:
            return request
        raise InvalidRequest(f"expected {event}, got {request.WhichOneof('event')}")
    raise Aborted(f"the push ended before {event}", reason="PUSH_ENDED")
