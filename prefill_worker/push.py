"""One push of KV from this worker into a decode worker: open, send while the prefill runs, commit."""

import asyncio
import contextlib
from typing import TypeAlias

import grpc

from baton.errors import BatonError, FailedPrecondition, Unavailable, from_peer_error
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, worker_pb2
from kv_transfer.errors import KvTransferError, TransferTimeout
from kv_transfer.fingerprint import mismatch
from kv_transfer.frame import prompt_hash
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.sender import PushLimits, PushSender, PushTarget, TransferSummary
from prefill_worker.peers import Peers
from worker.conversion import fingerprint_from, fingerprint_message, transfer_error
from worker.fault_points import NO_FAULTS, FaultPoints
from worker.host import WorkerHost

OPEN_TIMEOUT_S = 5.0
DELIVERY_TIMEOUT_S = 30.0  # from the end of prefill; most was already on its way
COMMIT_TIMEOUT_S = 30.0

_Response = kv_transfer_pb2.PushResponse
_Call: TypeAlias = "grpc.aio.StreamStreamCall[kv_transfer_pb2.PushRequest, _Response]"


class Push:
    """To be opened with `open_push`; unless it was committed, to be ended with `stop`.

    `answer` is the decode worker's: done when it has committed, failed with what has ended the push before. All
    errors say that they come from the transfer to `peer`, so that nobody takes this worker for the sick one.
    """

    def __init__(self, sender: PushSender, call: _Call, peer: str) -> None:
        self.sender = sender
        self._call = call
        self._peer = peer
        self._delivery_limit: asyncio.Timeout | None = None
        self.answer: asyncio.Task[None] = asyncio.create_task(self._committed(), name="answer to a push")
        self.answer.add_done_callback(_mark_seen)

    async def delivered(self) -> TransferSummary:
        """Waits until all KV is in place at the decode worker; nothing reads the blocks then. Raises what failed.

        From `limit_delivery` on the wait has a limit, before it has none.
        """
        try:
            async with asyncio.timeout(None) as self._delivery_limit:
                return await self.sender.finish()
        except KvTransferError as error:
            raise self._placed(transfer_error(error)) from error
        except TimeoutError as error:
            raise self._placed(Unavailable(f"did not take all KV within {DELIVERY_TIMEOUT_S} s")) from error
        finally:
            self._delivery_limit = None

    def limit_delivery(self) -> None:
        """All KV is computed: it must arrive soon."""
        if self._delivery_limit is not None:
            self._delivery_limit.reschedule(asyncio.get_running_loop().time() + DELIVERY_TIMEOUT_S)

    async def commit(self, summary: TransferSummary, token_ids: list[int], first_token_id: int) -> None:
        """Asks the decode worker to commit what it has, and waits for its answer. Raises what it refuses."""
        commit = kv_transfer_pb2.PushCommit(
            num_frames=summary.num_frames,
            kv_bytes=summary.kv_bytes,
            digest=summary.digest,
            prompt_hash=prompt_hash(token_ids),
            first_token_id=first_token_id,
        )
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                # If the decode worker has ended the push, the answer tells why.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._call.write(kv_transfer_pb2.PushRequest(commit=commit))
                await asyncio.shield(self.answer)
        except TimeoutError as error:
            raise self._placed(Unavailable(f"did not commit within {COMMIT_TIMEOUT_S} s")) from error

    def stop(self) -> bool:
        """Ends the push at once. True: nothing reads the blocks any more. Or else `stopped` waits for that."""
        self.answer.cancel()
        self._call.cancel()
        return self.sender.stop()

    async def stopped(self) -> bool:
        """Waits until nothing reads the blocks and nothing is being sent. False: after some seconds, it still is."""
        try:
            await self.sender.abort()
        except TransferTimeout:
            return False
        return True

    async def _committed(self) -> None:
        try:
            await _read(self._call, "committed")
        except grpc.aio.AioRpcError as error:
            raise self._placed(from_peer_error(error)) from error
        except BatonError as error:
            raise self._placed(error) from error

    def _placed(self, error: BatonError) -> BatonError:
        return error.at(stage="transfer", worker=self._peer)


async def open_push(
    host: WorkerHost, peers: Peers, ticket: worker_pb2.Ticket, request_id: str = "", faults: FaultPoints = NO_FAULTS
) -> Push:
    """Opens the ticket's landing zone. Raises a typed error if the pair does not fit or the peer refuses."""
    difference = mismatch(host.fingerprint, fingerprint_from(ticket.fingerprint))
    if difference is not None:
        raise FailedPrecondition(f"cannot push to {ticket.worker}: {difference}", reason="FINGERPRINT_MISMATCH")
    endpoint = next((e for e in ticket.endpoints if e.transport == GrpcTransport.kind), None)
    if endpoint is None:
        offered = ", ".join(e.transport for e in ticket.endpoints) or "none"
        raise FailedPrecondition(f"no transport in common with {ticket.worker}: grpc here, {offered} there")
    channel = peers.channel(endpoint.address)
    call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).Push()  # type: ignore[no-untyped-call]
    opening = kv_transfer_pb2.PushOpen(
        ticket_id=ticket.id,
        epoch=ticket.epoch,
        fingerprint=fingerprint_message(host.fingerprint),
        transport=endpoint.transport,
        sender=host.config.name,
    )
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await call.write(kv_transfer_pb2.PushRequest(open=opening))
            opened = (await _read(call, "opened")).opened
    except (grpc.aio.AioRpcError, TimeoutError, BatonError) as error:
        call.cancel()
        raise _opening_error(error, ticket.worker) from error
    except asyncio.CancelledError:
        call.cancel()
        raise
    target = PushTarget(ticket.id, ticket.epoch, range(ticket.num_cached_tokens, ticket.num_prompt_tokens))
    limits = PushLimits(credit_bytes=opened.credit_bytes)
    link = faults.link(peers.link(endpoint.address), request_id, ticket.worker)
    try:
        return Push(PushSender(link, host.kv_pool, target, limits), call, ticket.worker)
    except ValueError as error:
        call.cancel()
        refused = FailedPrecondition(f"the credit is too small: {error}")
        raise refused.at(stage="transfer", worker=ticket.worker) from error


def _opening_error(error: Exception, worker: str) -> BatonError:
    if isinstance(error, grpc.aio.AioRpcError):
        error = from_peer_error(error)
    elif not isinstance(error, BatonError):
        error = Unavailable(f"the push was not opened within {OPEN_TIMEOUT_S} s")
    return error.at(stage="transfer", worker=worker)


async def _read(call: _Call, event: str) -> _Response:
    """The next message, which must be of this kind; the status as an AioRpcError if the call has ended."""
    response = await call.read()
    if response is grpc.aio.EOF:
        raise Unavailable(f"the push ended before {event}: {await call.code()} {await call.details()}")
    assert isinstance(response, kv_transfer_pb2.PushResponse)
    if response.WhichOneof("event") != event:
        raise Unavailable(f"expected {event} of the decode worker, got {response.WhichOneof('event')}")
    return response


def _mark_seen(answer: asyncio.Task[None]) -> None:
    """Or asyncio complains if nobody asks for it any more."""
    if not answer.cancelled():
        answer.exception()
