"""One try of a request with one choice of workers: reserve, prefill, first token, decode, end."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from baton.v1 import request_pb2, worker_pb2
from router.first_cause import Reads
from router.membership import Member
from router.outcome import Outcome
from router.validation import PromptRequest
from router.worker_calls import WorkerCall, WorkerCalls

# The answer is whole without the prefill worker's account of the transfer; so long it is waited for.
ACCOUNT_PATIENCE_S = 0.5

Tokens = AsyncGenerator[list[int], None]


class Progress(Protocol):
    """Hears how far a try has come."""

    def on_prefilled(self) -> None:
        """The prompt is computed and its first token here."""
        ...

    def on_tokens(self, num_tokens: int) -> None:
        """The decode worker has brought tokens."""
        ...


class Attempt:
    """Yields new token ids and fills in the outcome. The calls it opens are ended by who owns `calls`."""

    def __init__(self, prompt: PromptRequest, outcome: Outcome, calls: WorkerCalls, progress: Progress) -> None:
        """`prompt` is the request's, or for a later try that with the tokens it has brought so far."""
        self._prompt = prompt
        self._outcome = outcome
        self._calls = calls
        self._progress = progress

    def run(self, prefill: Member | None, decode: Member | None, local_prefill_max_tokens: int) -> Tokens:
        """With both, or with one of them alone."""
        if decode is None:
            assert prefill is not None
            return self._prefill_only(prefill)
        if prefill is None:
            return self._decode_alone(decode)
        return self._pair(prefill, decode, local_prefill_max_tokens)

    async def _prefill_only(self, prefill: Member) -> Tokens:
        """One token is asked for: the prefill worker's."""
        self._take_path(request_pb2.PATH_LOCAL_PREFILL, prefill, prefill)
        _, first = await self._calls.prefill(prefill, None).read("first_token")
        self._note_first_token(first)
        yield [first.token_id]
        self._finish_with(first.token_id)

    async def _decode_alone(self, decode: Member) -> Tokens:
        """The decode worker prefills by itself."""
        call = self._calls.decode(decode, None)
        _, reserved = await call.read("reserved")
        self._outcome.note_reserved(reserved)
        async with aclosing(self._generated_alone(call, decode)) as generated:
            async for tokens in generated:
                yield tokens

    async def _pair(self, prefill: Member, decode: Member, local_prefill_max_tokens: int) -> Tokens:
        """Blocks first, then the prefill; the decode worker may find that it needs no help."""
        decode_call = self._calls.decode(decode, local_prefill_max_tokens)
        _, reserved = await decode_call.read("reserved")
        self._outcome.note_reserved(reserved)
        if reserved.HasField("ticket"):
            self._take_path(request_pb2.PATH_DISAGGREGATED, prefill, decode)
            generated = self._delivered(self._calls.prefill(prefill, reserved.ticket), decode_call)
        else:
            self._outcome.timeline.path_reason = "the decode worker holds nearly all of the prompt already"
            generated = self._generated_alone(decode_call, decode)
        async with aclosing(generated):
            async for tokens in generated:
                yield tokens

    async def _generated_alone(self, call: WorkerCall, decode: Member) -> Tokens:
        self._take_path(request_pb2.PATH_LOCAL_PREFILL, decode, decode)
        is_first = True
        async with aclosing(self._messages(call)) as messages:
            async for message in messages:
                if is_first:
                    is_first = False
                    local = message.local_prefill
                    self._progress.on_prefilled()
                    self._outcome.note_prefilled(local.queue_s, local.prefill_s, local.num_cached_tokens, is_local=True)
                yield self._noted(message)

    async def _delivered(self, prefill_call: WorkerCall, decode_call: WorkerCall) -> Tokens:
        """Token 0 of the prefill worker, then those of the decode worker, once it has the KV."""
        async with Reads() as reads:
            prefilled = reads.start(prefill_call.read("first_token"))
            pushed = reads.start_after(prefilled, lambda: prefill_call.read("pushed"))
            committed = reads.start(decode_call.read("committed"))
            try:
                first = await reads.result(prefilled)
                self._note_first_token(first)
                yield [first.token_id]
                if first.token_id in self._prompt.sampling.stop_token_ids:
                    self._finish_with(first.token_id)
                    return
                await reads.result(committed)
                self._outcome.note_committed()
                async with aclosing(self._messages(decode_call)) as messages:
                    async for message in messages:
                        yield self._noted(message)
                await reads.wait(pushed, ACCOUNT_PATIENCE_S)
            finally:
                account = reads.brought(pushed)
                if account is not None:
                    self._outcome.note_pushed(account)

    async def _messages(self, call: WorkerCall) -> AsyncGenerator[worker_pb2.DecodeTokens, None]:
        """The decode worker's token messages; its end goes into the outcome."""
        while True:
            event, message = await call.read("tokens", "finished")
            if event == "finished":
                self._outcome.finish(
                    message.reason, message.stop_token_id if message.HasField("stop_token_id") else None
                )
                return
            yield message

    def _noted(self, message: worker_pb2.DecodeTokens) -> list[int]:
        num_tokens = len(message.token_ids)
        self._outcome.note_tokens(num_tokens)
        self._progress.on_tokens(num_tokens)
        return list(message.token_ids)

    def _note_first_token(self, first: worker_pb2.PrefillFirstToken) -> None:
        self._progress.on_prefilled()
        self._outcome.note_prefilled(first.queue_s, first.prefill_s, first.num_cached_tokens, is_local=False)
        self._outcome.num_tokens += 1

    def _take_path(self, path: request_pb2.Path, prefill: Member, decode: Member) -> None:
        timeline = self._outcome.timeline
        timeline.path, timeline.prefill_worker, timeline.decode_worker = path, prefill.name, decode.name

    def _finish_with(self, token_id: int) -> None:
        """Token 0 is the last one."""
        if token_id in self._prompt.sampling.stop_token_ids:
            self._outcome.finish(request_pb2.FINISH_REASON_STOP, token_id)
        else:
            self._outcome.finish(request_pb2.FINISH_REASON_LENGTH, None)
