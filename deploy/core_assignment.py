"""Which CPU cores each worker is pinned to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreAssignment:
    """Cores by worker, in order; `is_shared` if some core belongs to several workers."""

    cores: tuple[tuple[int, ...], ...]
    is_shared: bool


def assign_cores(num_workers: int, cores_per_worker: int, available_cores: Sequence[int]) -> CoreAssignment:
    """Gives each worker neighbouring cores, and spreads the workers over all available ones.

    With too few cores workers share them, no core having more than one worker more than another. A worker
    never gets more cores than there are.
    """
    num_cores = len(available_cores)
    if not num_cores:
        raise ValueError("no CPU core is available to this process")
    width = min(cores_per_worker, num_cores)
    is_shared = num_workers * width > num_cores
    stride = width if is_shared else num_cores // max(num_workers, 1)
    cores = tuple(
        tuple(available_cores[(worker * stride + offset) % num_cores] for offset in range(width))
        for worker in range(num_workers)
    )
    return CoreAssignment(cores, is_shared)
