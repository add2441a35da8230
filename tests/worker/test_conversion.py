"""Messages become domain objects and back, and refusals typed errors with the right status."""

import pytest

from baton.errors import (
    Aborted,
    BatonError,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    ResourceExhausted,
    Unavailable,
)
from baton.v1 import request_pb2, worker_pb2
from engine.admission import DuplicateSequence, NeverFits, QueueFull
from engine.block_pool import OutOfBlocks
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason
from kv_transfer.errors import (
    ERRORS_BY_REASON,
    ChecksumMismatch,
    DuplicateFrame,
    FingerprintMismatch,
    KvTransferError,
    LinkLost,
    TransferAborted,
    TransferTimeout,
)
from kv_transfer.fingerprint import Fingerprint
from worker.conversion import (
    FINISH_REASONS,
    REFUSALS,
    check_token_ids,
    fingerprint_from,
    fingerprint_message,
    refusal,
    sampling_params,
    transfer_error,
)


class TestSamplingParams:
    def test_zero_is_a_value_and_not_the_default(self) -> None:
        sampling = request_pb2.SamplingParams(temperature=0, top_k=0, top_p=1, seed=0)
        assert sampling_params(sampling) == SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1)

    def test_unset_is_the_documented_default(self) -> None:
        assert sampling_params(request_pb2.SamplingParams()) == SamplingParams(temperature=1.0, top_k=0, top_p=1.0)

    def test_all_fields(self) -> None:
        sampling = request_pb2.SamplingParams(temperature=0.5, top_k=40, top_p=0.75, seed=2**64 - 1)
        stopping = request_pb2.StoppingCriteria(max_tokens=9, stop_token_ids=[2, 0, 2], ignore_eos=True)
        assert sampling_params(sampling, stopping) == SamplingParams(0.5, 40, 0.75, 2**64 - 1, 9, frozenset([0, 2]))


class TestFingerprint:
    def test_there_and_back(self) -> None:
        fingerprint = Fingerprint(1, "0123abcd", "bfloat16", 30, 3, 64)
        message = fingerprint_message(fingerprint)
        assert fingerprint_from(worker_pb2.Fingerprint.FromString(message.SerializeToString())) == fingerprint

    def test_every_field_of_the_message_is_filled(self) -> None:
        filled = {field.name for field, _ in fingerprint_message(Fingerprint(1, "m", "float32", 2, 3, 4)).ListFields()}
        assert filled == set(worker_pb2.Fingerprint.DESCRIPTOR.fields_by_name)


class TestErrors:
    @pytest.mark.parametrize("error", [NeverFits("no"), DuplicateSequence("no")], ids=repr)
    def test_what_never_fits_is_the_callers_fault(self, error: Exception) -> None:
        assert isinstance(error, REFUSALS)
        assert isinstance(refusal(error), InvalidRequest)
        assert refusal(error).retry_after_s is None

    @pytest.mark.parametrize("error", [QueueFull("full"), OutOfBlocks("full")], ids=repr)
    def test_what_may_fit_later_says_when_to_retry(self, error: Exception) -> None:
        assert isinstance(error, REFUSALS)
        typed = refusal(error)
        assert isinstance(typed, ResourceExhausted)
        assert typed.message == "full"
        assert typed.retry_after_s is not None
        assert typed.retry_after_s > 0

    @pytest.mark.parametrize("kind", ERRORS_BY_REASON.values(), ids=lambda kind: kind.__name__)
    def test_every_transfer_error_keeps_its_reason(self, kind: type[KvTransferError]) -> None:
        typed = transfer_error(kind("what happened"))
        assert isinstance(typed, BatonError)
        assert typed.message == "what happened"
        assert typed.reason == kind.reason.upper()

    @pytest.mark.parametrize(
        ("error", "typed"),
        [
            (FingerprintMismatch(), FailedPrecondition),
            (LinkLost(), Unavailable),
            (TransferTimeout(), DeadlineExceeded),
            (ChecksumMismatch(), DataLoss),
            (TransferAborted(), Aborted),
            (DuplicateFrame(), InternalError),  # no peer of ours sends one
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    def test_statuses(self, error: KvTransferError, typed: type[BatonError]) -> None:
        assert type(transfer_error(error)) is typed

    def test_every_reason_to_end_has_a_message(self) -> None:
        assert set(FINISH_REASONS) == set(FinishReason)
        assert request_pb2.FINISH_REASON_UNSPECIFIED not in FINISH_REASONS.values()


class TestTokenIds:
    def test_the_first_that_is_too_large_is_named(self) -> None:
        with pytest.raises(InvalidRequest, match=r"token_ids\[1\] is 50, the vocabulary has 50"):
            check_token_ids([49, 50, 2**32 - 1], 50)

    @pytest.mark.parametrize("token_ids", [[], [0], [49, 0, 49]])
    def test_the_vocabulary_is_allowed(self, token_ids: list[int]) -> None:
        check_token_ids(token_ids, 50)
