"""A bar: a ratio the project holds itself to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.statistics import median


class BarsFailed(Exception):
    """A bar could not be measured; the message says what happened."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One ratio, `measured` against `needed`: at least that, or at most if `is_limit`. `detail` has both sides."""

    name: str
    measured: float
    needed: float
    detail: str
    is_limit: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the ratio is good enough."""
        return self.measured <= self.needed if self.is_limit else self.measured >= self.needed


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of one side through the median of the other. Raises BarsFailed for a denominator of 0."""
    below = median(denominator)
    if below == 0:
        raise BarsFailed(f"half of the {len(denominator)} samples compared with are 0: nothing was measured")
    return median(numerator) / below
