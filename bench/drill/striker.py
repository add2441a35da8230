"""Carries out strikes: waits for a request in the right phase, holds it there, and signals the victim."""

import asyncio
import signal
import time

from baton.v1 import fault_pb2
from bench.drill.cluster import DrillCluster
from bench.drill.drill import RESTART_TIMEOUT_S
from bench.drill.injector import WorkerHit, injected
from bench.drill.roster import Life, may_strike
from bench.drill.strikes import Strike, Struck, choose_victim

MAX_HOLD_S = 5.0
SETTLE_S = 1.0
_HIT_TIMEOUT_S = 20.0
_MAX_TRIES = 3


class Striker:
    """Strikes with one signal. With `resume_after_s`, a frozen victim goes on after so long; else it never does."""

    def __init__(self, cluster: DrillCluster, number: signal.Signals, resume_after_s: float | None = None) -> None:
        self._cluster = cluster
        self._number = number
        self._resume_after_s = resume_after_s
        self._resuming: set[asyncio.Task[None]] = set()

    async def strike(self, strike: Strike) -> Struck | None:
        """Waits until the cluster can bear it, then strikes. None if no request came to the phase in a minute.

        Raises DrillFailed if the cluster does not come back from earlier strikes.
        """
        for _ in range(_MAX_TRIES):
            await self._cluster.wait_for(
                lambda: may_strike(self._workers_up, strike.victim_role, SETTLE_S, time.monotonic()),
                RESTART_TIMEOUT_S,
                f"two {strike.victim_role} workers up",
            )
            struck = await self._attempt(strike)
            if struck is not None:
                return struck
        return None

    async def close(self) -> None:
        """Lets every frozen victim go on at once that was to go on later."""
        for task in self._resuming:
            task.cancel()
        await asyncio.gather(*self._resuming, return_exceptions=True)

    @property
    def _workers_up(self) -> list[Life]:
        return self._cluster.roster.workers_up

    async def _attempt(self, strike: Strike) -> Struck | None:
        phase = strike.phase
        hold = fault_pb2.HoldFault(
            point=phase.point,
            num_skipped=strike.num_skipped,
            max_hits=1,
            max_hold_s=MAX_HOLD_S if phase.can_be_held else 0.0,
        )
        places = [life for life in self._workers_up if life.role == phase.role]
        async with injected(places, fault_pb2.InjectRequest(hold=hold)) as injection:
            hit = await injection.first_hit(_HIT_TIMEOUT_S)
            return self._signal(strike, hit) if hit is not None else None

    def _signal(self, strike: Strike, found: WorkerHit) -> Struck | None:
        reporter, hit = found
        victim = choose_victim(strike, reporter, hit.peer, {life.name: life for life in self._workers_up})
        if victim is None or not self._cluster.processes.send(victim, self._number):
            return None
        at_s = time.monotonic()
        self._cluster.roster.mark_struck(victim)
        if self._resume_after_s is not None:
            task = asyncio.create_task(self._resume(victim, self._resume_after_s), name=f"resume {victim.name}")
            self._resuming.add(task)
            task.add_done_callback(self._resuming.discard)
        return Struck(strike, victim.name, victim.pid, hit.request_id, at_s)

    async def _resume(self, victim: Life, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
        finally:
            self._cluster.processes.send(victim, signal.SIGCONT)
            self._cluster.roster.mark_resumed(victim)
