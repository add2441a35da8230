"""Summaries of samples. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """`count` samples in four numbers, of their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value below which `percent` (0 to 100) of the samples lie, interpolated linearly between neighbours.

    Definition 7 of Hyndman and Fan (1996), as numpy.percentile has it. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("no samples: a percentile needs at least one")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; it must be from 0 to 100")
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def median(samples: Sequence[float]) -> float:
    """The middle. Raises ValueError without samples."""
    return percentile(samples, 50)


def summarize(samples: Sequence[float]) -> Summary | None:
    """Mean and percentiles, or None without samples."""
    if not samples:
        return None
    p50, p90, p99 = (percentile(samples, percent) for percent in (50, 90, 99))
    return Summary(len(samples), sum(samples) / len(samples), p50, p90, p99)
