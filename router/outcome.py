"""What is known of one request: its end, its counts, where its time went."""

import time
from dataclasses import dataclass, field

from baton.errors import BatonError, cut
from baton.v1 import request_pb2, worker_pb2

MAX_REASON_BYTES = 200


@dataclass(slots=True)
class Outcome:
    """Filled in while a request runs; complete when its last token was given out.

    `arrived_at` of `time.monotonic`, in seconds.
    """

    arrived_at: float
    reason: request_pb2.FinishReason = request_pb2.FINISH_REASON_UNSPECIFIED
    stop_token_id: int | None = None
    stop_text: str | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    timeline: request_pb2.Timeline = field(default_factory=request_pb2.Timeline)
    committed_at: float | None = None
    recoveries: list[BatonError] = field(default_factory=list)

    def since_arrival_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.arrived_at

    def note_assigned(self, reason: str) -> None:
        """Workers were chosen. What tries before this one took, if they brought nothing, was waiting."""
        self.timeline.path_reason = reason
        self.committed_at = None
        if self.num_tokens == 0:
            self.timeline.queue_s = self.since_arrival_s()

    def note_reserved(self, reserved: worker_pb2.DecodeReserved) -> None:
        """The decode worker holds blocks."""
        if self.num_tokens == 0:
            self.timeline.reserve_s = self.since_arrival_s() - self.timeline.queue_s
            self.decode_cached_tokens = reserved.num_cached_tokens

    def note_prefilled(self, queue_s: float, prefill_s: float, num_cached_tokens: int, *, is_local: bool) -> None:
        """The first token of a try is here, after so much time on the worker that computed it.

        Only the request's very first one makes the TTFT; the rest of that is the way there and back. A worker that
        prefills by itself begins before its reservation is known here: what overlaps is cut off.
        """
        if self.num_tokens > 0:
            return
        if is_local:
            self.decode_cached_tokens = num_cached_tokens
        else:
            self.prefill_cached_tokens = num_cached_tokens
        timeline = self.timeline
        timeline.ttft_s = self.since_arrival_s()
        left_s = max(timeline.ttft_s - timeline.queue_s - timeline.reserve_s, 0.0)
        timeline.prefill_s = min(prefill_s, left_s)
        timeline.prefill_queue_s = min(queue_s, left_s - timeline.prefill_s)
        timeline.dispatch_s = left_s - timeline.prefill_s - timeline.prefill_queue_s

    def note_committed(self) -> None:
        """The decode worker has the KV."""
        self.committed_at = time.monotonic()

    def note_tokens(self, num_tokens: int) -> None:
        """Tokens of the decode worker are here."""
        if self.committed_at is not None and self.timeline.first_decode_step_s == 0:
            self.timeline.first_decode_step_s = time.monotonic() - self.committed_at
        self.num_tokens += num_tokens

    def note_pushed(self, pushed: worker_pb2.PrefillPushed) -> None:
        """The prefill worker tells of the transfer."""
        timeline = self.timeline
        timeline.kv_bytes += pushed.kv_bytes
        timeline.transport = pushed.transport
        timeline.transfer_s, timeline.transfer_tail_s = pushed.transfer_s, pushed.transfer_tail_s

    def note_recovery(self, error: BatonError) -> None:
        """Other workers must go on, because of `error`."""
        self.recoveries.append(error)
        self.timeline.num_recoveries += 1
        self.timeline.recovery_reason = cut(f"{error.reason}: {error.message}", MAX_REASON_BYTES)

    def finish(self, reason: request_pb2.FinishReason, stop_token_id: int | None) -> None:
        """The answer has ended."""
        self.reason, self.stop_token_id = reason, stop_token_id

    def finish_at(self, stop_text: str, num_surplus_tokens: int = 0) -> None:
        """A stop string has ended the answer; the surplus tokens, made after it, are not part of it."""
        self.finish(request_pb2.FINISH_REASON_STOP, None)
        self.stop_text = stop_text
        self.num_tokens -= num_surplus_tokens
