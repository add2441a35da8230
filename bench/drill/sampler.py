"""Samples the memory of every process of a cluster while something else goes on."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.drill.cluster import DrillCluster
from bench.drill.memory import MemoryCurve, curves
from bench.drill.processes import Processes, controller_lives


class MemorySampler:
    """Memory of router, controller and workers, in all their lives."""

    def __init__(self, cluster: DrillCluster) -> None:
        self._cluster = cluster
        self._processes = Processes()
        self._began_at_s = time.monotonic()
        self._samples: list[tuple[float, str, int, int]] = []

    @property
    def curves(self) -> list[MemoryCurve]:
        """One for each process so far; seconds count from the making of this object."""
        return curves(self._samples)

    async def sample(self) -> dict[tuple[str, int], int]:
        """Memory of every process now, in bytes, by name and process id; also kept."""
        controllers = await asyncio.to_thread(controller_lives, self._cluster.record)
        lives = [*self._cluster.roster.current.values(), *controllers]
        self._processes.note(lives)
        now_s = time.monotonic() - self._began_at_s
        found = self._processes.memory(lives)
        self._samples += [(now_s, name, pid, size) for name, pid, size in found]
        return {(name, pid): size for name, pid, size in found}

    @asynccontextmanager
    async def every(self, interval_s: float) -> AsyncIterator[None]:
        """Samples at this interval for the time of the block."""

        async def run() -> None:
            while True:
                await self.sample()
                await asyncio.sleep(interval_s)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(run(), name="sample memory")
            try:
                yield
            finally:
                task.cancel()
