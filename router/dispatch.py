"""One request on its way through the cluster: reserve, prefill, first token, decode, end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

from baton.errors import BatonError, ResourceExhausted, Unavailable
from baton.v1 import request_pb2
from router.admission import AdmissionQueue
from router.membership import Assignment, Member, Membership
from router.outcome import Outcome
from router.policy import Decision
from router.validation import PromptRequest
from router.worker_calls import WorkerCall, WorkerCalls

# A failed handoff shows on both workers' streams; so long the other one may take to name the cause.
FIRST_CAUSE_PATIENCE_S = 0.5

_Tokens = AsyncGenerator[list[int], None]


class Dispatcher:
    """Sends requests to workers."""

    def __init__(self, membership: Membership, queue: AdmissionQueue, local_prefill_max_tokens: int) -> None:
        """A decode worker prefills by itself what it lacks of a prompt, if that is not longer than this."""
        self._membership = membership
        self._queue = queue
        self._local_prefill_max_tokens = local_prefill_max_tokens

    async def run(self, prompt: PromptRequest, outcome: Outcome, deadline_at: float) -> _Tokens:
        """Yields new token ids until the answer ends, and fills in `outcome`.

        `deadline_at` of `time.monotonic`, in seconds, bounds every call; the caller bounds the wait in the
        queue. Ending the iteration early cancels the calls, and so releases what they hold on the workers.
        """
        while True:
            decision = await self._queue.admit(len(prompt.token_ids), prompt.sampling.max_tokens)
            outcome.note_assigned(decision.reason)
            attempt = _Attempt(prompt, outcome)
            try:
                async with WorkerCalls(prompt, deadline_at) as calls:
                    with self._counted(attempt, decision) as (prefill, decode):
                        async for tokens in self._tokens(attempt, calls, prefill, decode):
                            yield tokens
                return
            except ResourceExhausted:
                if attempt.has_begun:
                    raise
                # The snapshot was stale. Nothing was computed: the request waits for news and asks again.
                await self._queue.wait_for_room()

    def _tokens(
        self, attempt: "_Attempt", calls: WorkerCalls, prefill: Member | None, decode: Member | None
    ) -> _Tokens:
        if decode is None:
            assert prefill is not None
            return attempt.prefill_only(calls, prefill)
        if prefill is None:
            return attempt.decode_alone(calls.decode(decode, None), decode)
        return attempt.pair(calls, prefill, decode, self._local_prefill_max_tokens)

    def _counted(self, attempt: "_Attempt", decision: Decision) -> "_Counted":
        return _Counted(self._membership, attempt, self._member(decision.prefill), self._member(decision.decode))

    def _member(self, name: str | None) -> Member | None:
        member = None if name is None else self._membership.member(name)
        if name is not None and member is None:
            raise Unavailable(f"{name} left while the request was on its way to it")
        return member


class _Counted(ExitStack):
    """Counts a request on its workers: as prompt tokens until token 0, as a sequence and blocks to the end."""

    def __init__(
        self, membership: Membership, attempt: "_Attempt", prefill: Member | None, decode: Member | None
    ) -> None:
        super().__init__()
        self._members = (prefill, decode)
        num_tokens = len(attempt.prompt.token_ids)
        self.push(attempt.prefilling)
        computing = decode if prefill is None else prefill
        if computing is not None:
            attempt.prefilling.enter_context(membership.assign(computing, Assignment(num_tokens, 0)))
        if decode is not None and decode.info is not None:
            num_blocks = -(-(num_tokens + 1) // decode.info.block_size_tokens)
            self.enter_context(membership.assign(decode, Assignment(0, num_blocks)))

    def __enter__(self) -> tuple[Member | None, Member | None]:  # type: ignore[override]
        return self._members


class _Attempt:
    """One try with one choice of workers. `has_begun`: something was computed or held for it."""

    def __init__(self, prompt: PromptRequest, outcome: Outcome) -> None:
        self.prompt = prompt
        self.outcome = outcome
        self.prefilling = ExitStack()
        self.has_begun = False

    async def prefill_only(self, calls: WorkerCalls, prefill: Member) -> _Tokens:
        """One token is asked for: the prefill worker's."""
        self._take_path(request_pb2.PATH_LOCAL_PREFILL, prefill, prefill)
        token_id = await self._first_token(calls.prefill(prefill, None))
        yield [token_id]
        self._finish_with(token_id)

    async def decode_alone(self, call: WorkerCall, decode: Member) -> _Tokens:
        """The decode worker prefills by itself."""
        _, reserved = await call.read("reserved")
        self.outcome.note_reserved(reserved)
        async for tokens in self._generated_alone(call, decode):
            yield tokens

    async def pair(self, calls: WorkerCalls, prefill: Member, decode: Member, local_max_tokens: int) -> _Tokens:
        """Blocks first, then the prefill; the decode worker may find that it needs no help."""
        decode_call = calls.decode(decode, local_max_tokens)
        _, reserved = await decode_call.read("reserved")
        self.has_begun = True
        self.outcome.note_reserved(reserved)
        if not reserved.HasField("ticket"):
            self.outcome.timeline.path_reason = "the decode worker holds nearly all of the prompt already"
            async for tokens in self._generated_alone(decode_call, decode):
                yield tokens
            return
        self._take_path(request_pb2.PATH_DISAGGREGATED, prefill, decode)
        prefill_call = calls.prefill(prefill, reserved.ticket)
        async for tokens in self._delivered(prefill_call, decode_call):
            yield tokens

    async def _generated_alone(self, call: WorkerCall, decode: Member) -> _Tokens:
        self._take_path(request_pb2.PATH_LOCAL_PREFILL, decode, decode)
        is_first = True
        async for message in self._messages(call):
            if is_first:
                self.has_begun, is_first = True, False
                self.prefilling.close()
                self.outcome.note_first_token(message.local_prefill.queue_s, message.local_prefill.prefill_s)
            yield list(message.token_ids)

    async def _delivered(self, prefill_call: WorkerCall, decode_call: WorkerCall) -> _Tokens:
        token_id = await self._first_token(prefill_call)
        yield [token_id]
        if token_id in self.prompt.sampling.stop_token_ids:
            self._finish_with(token_id)
            return
        pushed = asyncio.create_task(prefill_call.read("pushed"), name="pushed")
        try:
            async for message in self._messages(decode_call):
                yield list(message.token_ids)
            self.outcome.note_pushed((await pushed)[1])
        except BatonError as error:
            raise await _first_cause(error, pushed) from error
        finally:
            pushed.cancel()
            await asyncio.wait({pushed})

    async def _first_token(self, call: WorkerCall) -> int:
        _, first = await call.read("first_token")
        self.has_begun = True
        self.prefilling.close()
        self.outcome.prefill_cached_tokens = first.num_cached_tokens
        self.outcome.note_first_token(first.queue_s, first.prefill_s)
        self.outcome.num_tokens += 1
        token_id: int = first.token_id
        return token_id

    async def _messages(self, call: WorkerCall) -> AsyncGenerator[Any, None]:
        """The decode worker's token messages; its end goes into the outcome."""
        while True:
            event, message = await call.read("tokens", "committed", "finished")
            if event == "committed":
                self.outcome.note_committed()
            elif event == "tokens":
                self.outcome.note_tokens(len(message.token_ids))
                yield message
            else:
                stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
                self.outcome.finish(message.reason, stop_token_id)
                return

    def _take_path(self, path: request_pb2.Path, prefill: Member, decode: Member) -> None:
        timeline = self.outcome.timeline
        timeline.path, timeline.prefill_worker, timeline.decode_worker = path, prefill.name, decode.name

    def _finish_with(self, token_id: int) -> None:
        """Token 0 is the last one."""
        if token_id in self.prompt.sampling.stop_token_ids:
            self.outcome.finish(request_pb2.FINISH_REASON_STOP, token_id)
        else:
            self.outcome.finish(request_pb2.FINISH_REASON_LENGTH, None)


async def _first_cause(error: BatonError, pushed: "asyncio.Task[Any]") -> BatonError:
    """The prefill worker's error if it has one: what the decode worker saw is then its consequence."""
    done, _ = await asyncio.wait({pushed}, timeout=FIRST_CAUSE_PATIENCE_S)
    cause = pushed.exception() if done and not pushed.cancelled() else None
    return cause if isinstance(cause, BatonError) else error
