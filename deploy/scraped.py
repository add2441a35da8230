"""What two looks at a process's metrics tell: levels, rates, and quantiles of what happened in between. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of a process at one moment, of any monotonic clock, in seconds."""

    at_s: float
    samples: Mapping[tuple[str, Labels], float]

    @classmethod
    def parsed(cls, at_s: float, text: str) -> "Scrape":
        """From the text that /metrics gives."""
        families = text_string_to_metric_families(text)
        return cls(at_s, {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples})

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name with these labels, whatever others they have; 0 if there is none."""
        wanted = set(labels.items())
        return sum(value for (n, have), value in self.samples.items() if n == name and wanted <= have)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Samples of this name by the value of one label."""
        found: dict[str, float] = {}
        for (n, labels), value in self.samples.items():
            if n == name and (key := dict(labels).get(label)) is not None:
                found[key] = found.get(key, 0.0) + value
        return found


@dataclass(frozen=True, slots=True)
class Change:
    """From one scrape of a process to a later one. A process that was replaced in between begins at 0."""

    before: Scrape
    after: Scrape

    def rate(self, name: str, **labels: str) -> float:
        """How much a counter has grown per second."""
        return self._growth(name, **labels) / max(self.after.at_s - self.before.at_s, 1e-9)

    def mean(self, name: str, **labels: str) -> float | None:
        """Mean of a histogram's observations in between; None if there was none."""
        count = self._growth(f"{name}_count", **labels)
        return self._growth(f"{name}_sum", **labels) / count if count else None

    def quantile(self, q: float, name: str) -> float | None:
        """An estimate from a histogram's buckets, linear within each as Prometheus has it; None without observations.

        What lies above the last bound counts as that bound.
        """
        bounds = sorted((float(le), le) for le in self.after.by(f"{name}_bucket", "le"))
        counts = [(bound, self._growth(f"{name}_bucket", le=le)) for bound, le in bounds]
        if not counts or not counts[-1][1]:
            return None
        rank, low, below = q * counts[-1][1], 0.0, 0.0
        for bound, count in counts:
            if count >= rank:
                return low if bound == float("inf") else low + (bound - low) * (rank - below) / max(count - below, 1e-9)
            low, below = bound, count
        return low

    def _growth(self, name: str, **labels: str) -> float:
        before, after = (scrape.total(name, **labels) for scrape in (self.before, self.after))
        return after - before if after >= before else after


def bar(share: float, width: int) -> str:
    """A share from 0 to 1 as a line of blocks."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def seconds(value: float | None) -> str:
    """For people: ms below a second."""
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
