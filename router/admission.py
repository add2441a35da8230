"""The router's queue: requests wait here until workers have room for them."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from baton.errors import BatonError, FailedPrecondition, ResourceExhausted, Unavailable
from kv_transfer.fingerprint import mismatch
from router.forecast import Forecast
from router.membership import Assignment, Member, Membership
from router.policy import Claim, Decision, Refusal, choose
from router.waiting_line import Waiter, WaitingLine
from router.worker_view import WorkerView

# A worker that restarts is back within seconds. Those who wait together share this patience: none waits for
# those before it to lose theirs.
NO_WORKERS_PATIENCE_S = 1.0
# Some things change without news: a circuit closes, patience ends, one who held up the others has left.
LOOK_INTERVAL_S = 0.1
MIN_RETRY_AFTER_S, DEFAULT_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 1.0, 60.0
_ANY_REQUEST = Claim(num_prompt_tokens=1, max_tokens=2, num_room_tokens=2)


class Placement:
    """A place on workers, counted there until it is released.

    If their circuits are half-open it is the trial, until it has proved something or is released.
    """

    def __init__(
        self, membership: Membership, claim: Claim, decision: Decision, on_release: Callable[[], None]
    ) -> None:
        self._membership = membership
        self._on_release = on_release
        self.decision = decision
        self.prefill = membership.member(decision.prefill) if decision.prefill else None
        self.decode = membership.member(decision.decode) if decision.decode else None
        self.prefilling = Assignment(claim.num_prompt_tokens, 0)
        self.workers = tuple(name for name in (decision.prefill, decision.decode) if name is not None)
        self._circuits = (*self.workers, self.workers)
        for key in self._circuits:
            membership.breaker.note_sent(key)
        self._taken: list[tuple[Member, Assignment]] = []
        if self.prefill is not None:
            self._take(self.prefill, self.prefilling)
        if self.decode is not None:
            assignment = self.prefilling if self.prefill is None else Assignment(0, 0)
            assignment.blocks = self.decode.view().blocks_for(claim.num_prompt_tokens + 1)
            self._take(self.decode, assignment)

    def _take(self, member: Member, assignment: Assignment) -> None:
        self._membership.take(member, assignment)
        self._taken.append((member, assignment))

    def release(self) -> None:
        """Gives it back. May be called again."""
        taken, self._taken = self._taken, []
        if not taken:
            return
        self._on_release()
        for member, assignment in taken:
            self._membership.give_back(member, assignment)
        for key in self._circuits:
            self._membership.breaker.note_neither(key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


@dataclass(eq=False, slots=True, kw_only=True)
class _Request(Waiter):
    """One that waits since `since_s`, without workers for `patience_s`. Its answer is worth nothing after
    `deadline_at_s`; None: it is told by nobody.
    """

    claim: Claim
    since_s: float
    patience_s: float
    deadline_at_s: float | None
    result: asyncio.Future[Placement]


class AdmissionQueue:
    """At most `max_waiting` new requests wait; later ones are refused at once. `WaitingLine` has the order.

    All methods belong to the event loop. `close` at the end.
    """

    def __init__(
        self,
        membership: Membership,
        max_waiting: int,
        forecast: Forecast,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._max_waiting = max_waiting
        self._forecast = forecast
        self._clock = clock
        self._line: WaitingLine[_Request] = WaitingLine()
        self._lacking_since_s: float | None = None  # since when there have been no workers for anybody
        self._lack: Refusal | None = None  # what they wait for then
        self._granting: asyncio.Task[None] | None = None  # runs while somebody waits

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._line)

    def check_room(self) -> None:
        """Raises ResourceExhausted if a new request could not wait here."""
        if len(self._line) >= self._max_waiting:
            raise ResourceExhausted(
                f"{len(self._line)} requests wait already, the limit is {self._max_waiting}; try again later",
                reason="QUEUE_FULL",
                retry_after_s=self._retry_after_s(),
            )

    async def admit(self, claim: Claim, *, priority: int, deadline_at: float) -> Placement:
        """Waits for a place; the caller has the deadline, which is `deadline_at` of the clock.

        Raises ResourceExhausted when the queue is full or the answer would come after the deadline, Unavailable
        without workers for a second, FailedPrecondition if no prefill worker fits any decode worker.
        """
        self.check_room()
        request = self._request(claim, priority, NO_WORKERS_PATIENCE_S, deadline_at)
        if (refusal := self._hopeless(request, self._line.num_before(priority))) is not None:
            raise refusal
        return await self._wait(request)

    async def readmit(self, claim: Claim, *, priority: int, patience_s: float, after_news: bool) -> Placement:
        """As `admit`, for a request that has lost its place: it stands before new ones, and is not refused for a full
        queue or a late end. `after_news`: waits until the picture of the workers changes first.

        Raises Unavailable after `patience_s` seconds without workers.
        """
        if after_news:
            await self._membership.wait_for_change()
        return await self._wait(self._request(claim, priority, patience_s, deadline_at=None))

    async def close(self) -> None:
        """Ends granting; to be called when nobody waits any more."""
        if self._granting is not None:
            self._granting.cancel()
            await asyncio.wait({self._granting})

    def _request(self, claim: Claim, priority: int, patience_s: float, deadline_at: float | None) -> _Request:
        """A new one has a deadline, one that had a place before has not."""
        return _Request(
            priority=priority,
            is_new=deadline_at is not None,
            claim=claim,
            since_s=self._clock(),
            patience_s=patience_s,
            deadline_at_s=deadline_at,
            result=asyncio.get_running_loop().create_future(),
        )

    async def _wait(self, request: _Request) -> Placement:
        if not self._line:
            self._lacking_since_s = None
        self._line.add(request)
        result = request.result
        try:
            self._grant(arrived=request)
            if self._line and (self._granting is None or self._granting.done()):
                self._granting = asyncio.create_task(self._keep_granting(), name="grant places")
            return await result
        except asyncio.CancelledError:
            if result.done() and not result.cancelled() and result.exception() is None:
                result.result().release()
            raise
        finally:
            self._line.remove(request)

    async def _keep_granting(self) -> None:
        try:
            while self._line:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_INTERVAL_S):
                        await self._membership.wait_for_change()
                self._grant()
        except Exception as error:
            # The root of this task: whoever waits must not wait for ever.
            for request in self._line.waiters():
                self._settle(request, error)
            raise

    def _grant(self, arrived: _Request | None = None) -> None:
        """Gives places to as many as have room now, refuses those that wait for nothing."""
        self._note_lack()
        while self._grant_next(arrived):
            pass
        self._refuse_the_impatient()

    def _grant_next(self, arrived: _Request | None) -> bool:
        """Serves the next in line that has room. False: nobody does."""
        views, blocked_pairs = self._membership.views(), self._membership.blocked_pairs()
        num_waiting, placement = len(self._line), None

        def place(request: _Request) -> bool:
            nonlocal placement
            choice = choose(request.claim, views, blocked_pairs)
            if not isinstance(choice, Decision) or request.result.done():  # cancelled, and about to leave
                return False
            if request is not arrived and (refusal := self._hopeless(request, 0)) is not None:
                self._settle(request, refusal)
                return False
            placement = Placement(self._membership, request.claim, choice, self._note_release)
            return True

        request = self._line.take_next(place)
        if request is not None and placement is not None:
            now_s = self._clock()
            self._forecast.note_grant(now_s, 0.0 if request is arrived else now_s - request.since_s)
            self._settle(request, placement)
        return len(self._line) < num_waiting

    def _note_release(self) -> None:
        self._forecast.note_release(self._clock())

    def _settle(self, request: _Request, result: Placement | Exception) -> None:
        self._line.remove(request)
        if request.result.done():
            return
        if isinstance(result, Placement):
            request.result.set_result(result)
        else:
            request.result.set_exception(result)

    def _hopeless(self, request: _Request, num_ahead: int) -> ResourceExhausted | None:
        """The refusal of one whose answer would come too late. An idle cluster is always worth a try."""
        deadline_at_s, max_tokens = request.deadline_at_s, request.claim.max_tokens
        if deadline_at_s is None or not any(view.sent_sequences for view in self._membership.views()):
            return None
        now_s = self._clock()
        needed_s = self._forecast.seconds_needed(now_s, max_tokens, num_ahead)
        if now_s + needed_s <= deadline_at_s:
            return None
        return ResourceExhausted(
            f"the answer would take about {needed_s:.1f} s with {len(self._line)} requests waiting, and the deadline "
            f"is in {deadline_at_s - now_s:.1f} s; try again later or allow more time",
            reason="DEADLINE_UNREACHABLE",
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> float:
        wait_s = self._forecast.wait_s(self._clock(), len(self._line)) or DEFAULT_RETRY_AFTER_S
        return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _note_lack(self) -> None:
        choice = choose(_ANY_REQUEST, self._membership.views(), self._membership.blocked_pairs())
        self._lack = None if isinstance(choice, Decision) or choice is Refusal.NO_ROOM else choice
        if self._lack is None:
            self._lacking_since_s = None
        elif self._lacking_since_s is None:
            self._lacking_since_s = self._clock()

    def _refuse_the_impatient(self) -> None:
        if self._lack is None or self._lacking_since_s is None:
            return
        now_s = self._clock()
        for request in self._line.waiters():
            since_s = self._lacking_since_s if request.is_new else max(request.since_s, self._lacking_since_s)
            if now_s >= since_s + request.patience_s:
                self._settle(request, self._lack_error(self._lack))

    def _lack_error(self, lack: Refusal) -> BatonError:
        ready = [view for view in self._membership.views() if view.is_ready]
        if lack is Refusal.MISMATCH:
            return FailedPrecondition(
                f"{lack.value}: {_difference(ready)}; start them with the same model and dtype",
                reason="FINGERPRINT_MISMATCH",
            )
        names = ", ".join(sorted(view.name for view in ready)) or "none"
        return Unavailable(
            f"{lack.value}; ready workers: {names}", reason="NO_WORKERS", retry_after_s=DEFAULT_RETRY_AFTER_S
        )


def _difference(views: list[WorkerView]) -> str:
    """What keeps the first two of these apart."""
    pairs = ((p, d) for p in views if p.can_prefill for d in views if d.can_decode)
    found = (f"{p.name} and {d.name}: {text}" for p, d in pairs if (text := mismatch(p.fingerprint, d.fingerprint)))
    return next(found, "they have just changed")
