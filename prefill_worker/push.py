"""One push of KV from this worker into a decode worker: open, send while the prefill runs, commit."""

import asyncio
from dataclasses import dataclass

import grpc

from baton.errors import BatonError, FailedPrecondition, Unavailable, from_peer_error
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, worker_pb2
from kv_transfer.errors import KvTransferError
from kv_transfer.fingerprint import mismatch
from kv_transfer.frame import prompt_hash
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.sender import PushLimits, PushSender, PushTarget, TransferSummary
from prefill_worker.peers import Peers
from worker.conversion import fingerprint_from, fingerprint_message, transfer_error
from worker.host import WorkerHost

OPEN_TIMEOUT_S = 5.0
FINISH_TIMEOUT_S = 30.0  # from the end of prefill; everything before it was already on its way


@dataclass(frozen=True, slots=True)
class Pushed:
    """A committed push. Times of the event loop's clock, in seconds."""

    summary: TransferSummary
    committed_at: float


class Push:
    """To be opened with `open_push`, and ended with `commit` or `abort`."""

    def __init__(
        self, sender: PushSender, call: "grpc.aio.StreamStreamCall[kv_transfer_pb2.PushRequest, _Response]"
    ) -> None:
        self.sender = sender
        self._call = call

    async def commit(self, token_ids: list[int], first_token_id: int) -> Pushed:
        """Waits until all KV has arrived, then commits. Raises what the transfer or the decode worker refused."""
        try:
            async with asyncio.timeout(FINISH_TIMEOUT_S):
                summary = await self.sender.finish(FINISH_TIMEOUT_S)
                commit = kv_transfer_pb2.PushCommit(
                    num_frames=summary.num_frames,
                    kv_bytes=summary.kv_bytes,
                    digest=summary.digest,
                    prompt_hash=prompt_hash(token_ids),
                    first_token_id=first_token_id,
                )
                await self._call.write(kv_transfer_pb2.PushRequest(commit=commit))
                await _read(self._call, "committed")
        except KvTransferError as error:
            raise transfer_error(error) from error
        except grpc.aio.AioRpcError as error:
            raise from_peer_error(error) from error
        except asyncio.InvalidStateError as error:  # what grpc.aio says to a write after the peer ended the call
            raise Unavailable(f"the push has ended: {await self._call.code()} {await self._call.details()}") from error
        except TimeoutError as error:
            raise Unavailable(f"the decode worker did not commit within {FINISH_TIMEOUT_S} s") from error
        committed_at = asyncio.get_running_loop().time()
        await self._call.done_writing()
        return Pushed(summary, committed_at)

    async def abort(self) -> None:
        """Ends the push; returns when nothing reads the blocks any more. Harmless after a commit."""
        self._call.cancel()
        await self.sender.abort()


_Response = kv_transfer_pb2.PushResponse


async def open_push(host: WorkerHost, peers: Peers, ticket: worker_pb2.Ticket) -> Push:
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
    target = PushTarget(ticket.id, ticket.epoch, range(ticket.num_cached_tokens, ticket.num_prompt_tokens))
    limits = PushLimits(credit_bytes=opened.credit_bytes)
    try:
        return Push(PushSender(peers.link(endpoint.address), host.kv_pool, target, limits), call)
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


async def _read(
    call: "grpc.aio.StreamStreamCall[kv_transfer_pb2.PushRequest, _Response]", event: str
) -> kv_transfer_pb2.PushResponse:
    """The next message, which must be of this kind; the status as an AioRpcError if the call has ended."""
    response = await call.read()
    if response is grpc.aio.EOF:
        raise Unavailable(f"the push ended before {event}: {await call.code()} {await call.details()}")
    assert isinstance(response, kv_transfer_pb2.PushResponse)
    if response.WhichOneof("event") != event:
        raise Unavailable(f"expected {event} of the decode worker, got {response.WhichOneof('event')}")
    return response
