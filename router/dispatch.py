"""One request on its way through the cluster: room for it, workers, and another try if they are full after all."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from baton.errors import ResourceExhausted, Unavailable
from router.admission import AdmissionQueue
from router.attempt import Attempt, Tokens
from router.membership import Assignment, Member, Membership
from router.outcome import Outcome
from router.policy import Decision
from router.validation import PromptRequest
from router.worker_calls import WorkerCalls


class Dispatcher:
    """Sends requests to workers."""

    def __init__(self, membership: Membership, queue: AdmissionQueue, local_prefill_max_tokens: int) -> None:
        """A decode worker prefills by itself what it lacks of a prompt, if that is not longer than this."""
        self._membership = membership
        self._queue = queue
        self._local_prefill_max_tokens = local_prefill_max_tokens

    async def run(self, prompt: PromptRequest, outcome: Outcome, deadline_at: float) -> Tokens:
        """Yields new token ids until the answer ends, and fills in `outcome`.

        `deadline_at` of `time.monotonic`, in seconds, bounds every call; the caller bounds the wait in the
        queue. Ending the iteration early cancels the calls, and so releases what they hold on the workers.
        """
        size = len(prompt.token_ids), prompt.sampling.max_tokens
        decision = await self._queue.admit(*size)
        while True:
            outcome.note_assigned(decision.reason)
            try:
                async with self._tokens(prompt, outcome, decision, deadline_at) as tokens:
                    async for token_ids in tokens:
                        yield token_ids
                return
            except ResourceExhausted:
                if outcome.num_tokens > 0:
                    raise
            # The snapshot was stale. Nothing was computed: the request waits for news and asks again.
            decision = await self._queue.readmit(*size)

    @asynccontextmanager
    async def _tokens(
        self, prompt: PromptRequest, outcome: Outcome, decision: Decision, deadline_at: float
    ) -> AsyncIterator[Tokens]:
        """The tokens that the chosen workers make. The request counts on them, and has its calls, while this lasts."""
        async with AsyncExitStack() as stack:
            num_tokens = len(prompt.token_ids)
            decode = prefill = None
            prefilling = Assignment(num_tokens, 0)
            if decision.prefill is not None:
                prefill = await self._assign(stack, decision.prefill, prefilling)
            if decision.decode is not None:
                assignment = prefilling if prefill is None else Assignment(0, 0)
                decode = await self._assign(stack, decision.decode, assignment)
                assignment.blocks = decode.view().blocks_for(num_tokens + 1)
            calls = await stack.enter_async_context(WorkerCalls(prompt, deadline_at))
            attempt = Attempt(prompt, outcome, calls, lambda: self._membership.note_prefilled(prefilling))
            tokens = attempt.run(prefill, decode, self._local_prefill_max_tokens)
            yield await stack.enter_async_context(aclosing(tokens))

    async def _assign(self, stack: AsyncExitStack, name: str, assignment: Assignment) -> Member:
        member = self._membership.member(name)
        if member is None or member.info is None:
            raise Unavailable(f"{name} left while the request was on its way to it")
        await stack.enter_async_context(self._membership.assign(member, assignment))
        return member
