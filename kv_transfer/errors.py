"""What can go wrong while KV moves: one tree, each class with a short reason that programs can compare."""

from typing import ClassVar


class KvTransferError(Exception):
    """Base of the tree. `reason` is stable, lower case and travels over the wire; the text is for people."""

    reason: ClassVar[str] = "kv_transfer"


class MalformedFrame(KvTransferError):
    """The bytes are no frame of this version, or their sizes contradict each other or the KV layout."""

    reason = "malformed"


class TicketUnknown(KvTransferError):
    """No landing zone has this ticket."""

    reason = "ticket_unknown"


class TicketClosed(KvTransferError):
    """The ticket's landing zone is not, or no longer, open for what was asked."""

    reason = "ticket_closed"


class EpochMismatch(KvTransferError):
    """The message was meant for another life of this worker."""

    reason = "epoch_mismatch"


class FingerprintMismatch(KvTransferError):
    """The two sides serve different models or lay KV out differently."""

    reason = "fingerprint_mismatch"


class ChecksumMismatch(KvTransferError):
    """Bytes differ from what was sent; nothing of the frame was written."""

    reason = "checksum_mismatch"


class PromptMismatch(KvTransferError):
    """The KV belongs to another prompt."""

    reason = "prompt_mismatch"


class Incomplete(KvTransferError):
    """Frames, bytes or tokens are missing at the commit."""

    reason = "incomplete"


class OutOfRange(KvTransferError):
    """Layers, heads, tokens or blocks outside what was reserved."""

    reason = "out_of_range"


class DuplicateFrame(KvTransferError):
    """The frame, or part of what it covers, was delivered before."""

    reason = "duplicate"


class LinkLost(KvTransferError):
    """The peer cannot be reached or ended the connection."""

    reason = "link_lost"


class TransferTimeout(KvTransferError):
    """A deadline passed."""

    reason = "timeout"


class TransferAborted(KvTransferError):
    """This side gave the transfer up."""

    reason = "aborted"


_LEAVES: tuple[type[KvTransferError], ...] = (
    MalformedFrame,
    TicketUnknown,
    TicketClosed,
    EpochMismatch,
    FingerprintMismatch,
    ChecksumMismatch,
    PromptMismatch,
    Incomplete,
    OutOfRange,
    DuplicateFrame,
    LinkLost,
    TransferTimeout,
    TransferAborted,
)
ERRORS_BY_REASON: dict[str, type[KvTransferError]] = {error.reason: error for error in _LEAVES}
