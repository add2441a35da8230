"""How the memory of processes develops. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Memory of one process over time: (seconds, bytes) in order of time."""

    name: str
    pid: int
    samples: tuple[tuple[float, int], ...]

    @property
    def duration_s(self) -> float:
        """From the first sample to the last."""
        return self.samples[-1][0] - self.samples[0][0]

    @property
    def later_half(self) -> "MemoryCurve":
        """What was sampled in the second half of that time: a process fills its caches first."""
        middle_s = self.samples[0][0] + self.duration_s / 2
        return MemoryCurve(self.name, self.pid, tuple(s for s in self.samples if s[0] >= middle_s))

    @property
    def growth_bytes(self) -> int:
        """From the first sample to the last."""
        return self.samples[-1][1] - self.samples[0][1]

    @property
    def growth_mib_per_min(self) -> float:
        """Slope of the line with the least squared errors; 0 with fewer than two moments."""
        count = len(self.samples)
        mean_s = sum(time_s for time_s, _ in self.samples) / count
        mean_bytes = sum(size for _, size in self.samples) / count
        spread = sum((time_s - mean_s) ** 2 for time_s, _ in self.samples)
        if spread == 0:
            return 0.0
        joint = sum((time_s - mean_s) * (size - mean_bytes) for time_s, size in self.samples)
        return joint / spread * 60 / MIB

    def sparkline(self, width: int) -> str:
        """The curve as a line of text, each character the mean of its share of the samples, lowest to highest."""
        sizes = [size for _, size in self.samples]
        width = min(width, len(sizes))
        edges = [i * len(sizes) // width for i in range(width + 1)]
        means = [sum(sizes[a:b]) / (b - a) for a, b in pairwise(edges)]
        low, high = min(means), max(means)
        scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
        return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def curves(samples: Sequence[tuple[float, str, int, int]]) -> list[MemoryCurve]:
    """One curve for each process of samples (seconds, name, pid, bytes), in the order in which they appear."""
    found: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for time_s, name, pid, size in samples:
        found.setdefault((name, pid), []).append((time_s, size))
    return [MemoryCurve(name, pid, tuple(points)) for (name, pid), points in found.items()]
