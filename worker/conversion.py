"""Messages to domain objects and back, for both roles."""

from baton.errors import BatonError, InvalidRequest, ResourceExhausted, class_of
from baton.v1 import request_pb2, worker_pb2
from engine.admission import DuplicateSequence, NeverFits, QueueFull
from engine.block_pool import OutOfBlocks
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason
from kv_transfer.errors import KvTransferError
from kv_transfer.fingerprint import Fingerprint
from kv_transfer.grpc_transport import status_of

FINISH_REASONS = {
    FinishReason.STOP: request_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: request_pb2.FINISH_REASON_LENGTH,
}
REFUSALS = (NeverFits, QueueFull, OutOfBlocks, DuplicateSequence)
RETRY_AFTER_S = 0.1


def sampling_params(
    sampling: request_pb2.SamplingParams, stopping: request_pb2.StoppingCriteria | None = None
) -> SamplingParams:
    """Sampling as the router filled it in. Without `stopping`, for one token, as the prefill role samples."""
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        seed=sampling.seed,
        max_tokens=1 if stopping is None else stopping.max_tokens,
        stop_token_ids=frozenset() if stopping is None else frozenset(stopping.stop_token_ids),
    )


def refusal(error: Exception) -> BatonError:
    """The engine's refusal of a sequence (one of `REFUSALS`) as a typed error."""
    if isinstance(error, NeverFits | DuplicateSequence):
        return InvalidRequest(str(error))
    return ResourceExhausted(str(error), retry_after_s=RETRY_AFTER_S)


def transfer_error(error: KvTransferError) -> BatonError:
    """A failed or refused transfer as a typed error, with the reason for programs."""
    return class_of(status_of(error))(str(error), reason=error.reason.upper())


def check_token_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequest, naming the first id outside [0, vocab_size): an embedding must never see it."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token in enumerate(token_ids) if token >= vocab_size)
        raise InvalidRequest(f"token_ids[{index}] is {token_ids[index]}, the vocabulary has {vocab_size} tokens")


def fingerprint_message(fingerprint: Fingerprint) -> worker_pb2.Fingerprint:
    """Domain to message."""
    return worker_pb2.Fingerprint(
        protocol_version=fingerprint.protocol_version,
        model=fingerprint.model,
        kv_dtype=fingerprint.kv_dtype,
        num_layers=fingerprint.num_layers,
        num_kv_heads=fingerprint.num_kv_heads,
        head_dim=fingerprint.head_dim,
    )


def fingerprint_from(message: worker_pb2.Fingerprint) -> Fingerprint:
    """Message to domain."""
    return Fingerprint(
        protocol_version=message.protocol_version,
        model=message.model,
        kv_dtype=message.kv_dtype,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
    )
