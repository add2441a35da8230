"""One try of a request with one choice of workers: reserve, prefill, first token, decode, end."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from baton.errors import BatonError
from baton.v1 import request_pb2, worker_pb2
from router.membership import Member
from router.outcome import Outcome
from router.validation import PromptRequest
from router.worker_calls import WorkerCall, WorkerCalls

# A failed handoff shows on both workers' streams; so long the other one may take to tell the cause.
FIRST_CAUSE_PATIENCE_S = 0.5
# What one worker says when the other one has given up.
CONSEQUENCES = frozenset({"PUSH_ENDED", "TICKET_UNKNOWN", "TICKET_CLOSED", "LINK_LOST"})

Tokens = AsyncGenerator[list[int], None]
_Read = asyncio.Task[tuple[str, Any]]


class Attempt:
    """Yields new token ids and fills in the outcome. The calls it opens are ended by who owns `calls`."""

    def __init__(
        self, prompt: PromptRequest, outcome: Outcome, calls: WorkerCalls, on_prefilled: Callable[[], None]
    ) -> None:
        """`on_prefilled` is called when the prompt is computed."""
        self._prompt = prompt
        self._outcome = outcome
        self._calls = calls
        self._on_prefilled = on_prefilled

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
                    self._on_prefilled()
                    self._outcome.decode_cached_tokens = local.num_cached_tokens
                    self._outcome.note_first_token(local.queue_s, local.prefill_s)
                yield list(message.token_ids)

    async def _delivered(self, prefill_call: WorkerCall, decode_call: WorkerCall) -> Tokens:
        """Token 0 of the prefill worker, then those of the decode worker, once it has the KV."""
        prefilled = asyncio.create_task(prefill_call.read("first_token"), name="first token")
        pushed = asyncio.create_task(_read_after(prefilled, prefill_call, "pushed"), name="pushed")
        committed = asyncio.create_task(decode_call.read("committed"), name="committed")
        reads = {prefilled, pushed, committed}
        try:
            first = await _result(prefilled, reads)
            self._note_first_token(first)
            yield [first.token_id]
            if first.token_id in self._prompt.sampling.stop_token_ids:
                self._finish_with(first.token_id)
                return
            await _result(committed, reads)
            self._outcome.note_committed()
            async with aclosing(self._messages(decode_call)) as messages:
                async for message in messages:
                    yield list(message.token_ids)
            # The prefill worker's account of the transfer is welcome, but the answer is whole without it.
            await asyncio.wait({pushed}, timeout=FIRST_CAUSE_PATIENCE_S)
            if pushed.done() and _failure(pushed) is None:
                self._outcome.note_pushed(pushed.result()[1])
        finally:
            await _end(reads)

    async def _messages(self, call: WorkerCall) -> AsyncGenerator[worker_pb2.DecodeTokens, None]:
        """The decode worker's token messages; its end goes into the outcome."""
        while True:
            event, message = await call.read("tokens", "finished")
            if event == "finished":
                self._outcome.finish(
                    message.reason, message.stop_token_id if message.HasField("stop_token_id") else None
                )
                return
            self._outcome.note_tokens(len(message.token_ids))
            yield message

    def _note_first_token(self, first: worker_pb2.PrefillFirstToken) -> None:
        self._on_prefilled()
        self._outcome.prefill_cached_tokens = first.num_cached_tokens
        self._outcome.note_first_token(first.queue_s, first.prefill_s)
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


async def _read_after(read: _Read, call: WorkerCall, event: str) -> tuple[str, Any]:
    """The message that follows the one of `read`, or its failure."""
    await asyncio.wait({read})
    read.result()
    found: tuple[str, Any] = await call.read(event)
    return found


async def _result(read: _Read, reads: set[_Read]) -> Any:
    """The message that `read` brings. Raises the first cause as soon as any of `reads` has failed."""
    while not read.done() and not _failures(reads):
        await asyncio.wait({task for task in reads if not task.done()}, return_when=asyncio.FIRST_COMPLETED)
    if read.done() and _failure(read) is None:
        _, message = read.result()
        return message
    raise await _first_cause(reads)


async def _first_cause(reads: set[_Read]) -> BaseException:
    """The failure that the others follow from, if it shows in time."""
    if all(_is_consequence(failure) for failure in _failures(reads)):
        await asyncio.wait(reads, timeout=FIRST_CAUSE_PATIENCE_S)
    failures = _failures(reads)
    return next((failure for failure in failures if not _is_consequence(failure)), failures[0])


def _is_consequence(failure: BaseException) -> bool:
    return isinstance(failure, BatonError) and failure.reason in CONSEQUENCES


def _failures(reads: set[_Read]) -> list[BaseException]:
    return [failure for read in reads if (failure := _failure(read)) is not None]


def _failure(read: _Read) -> BaseException | None:
    return read.exception() if read.done() and not read.cancelled() else None


async def _end(reads: set[_Read]) -> None:
    for read in reads:
        read.cancel()
    await asyncio.wait(reads)
    _failures(reads)  # marks them as seen
