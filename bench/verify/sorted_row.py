"""One position's logits as sampling sees them, exactly and with errors in them. Pure."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.sampling_params import SamplingParams

Logits = npt.NDArray[np.float64]


class SortedRow:
    """Logits [vocab] from the largest to the smallest, of equals the lower id first, and their running weights.

    A weight is exp((logit - largest) / temperature); ranks count from 0.
    """

    def __init__(self, logits: Logits, sampling: SamplingParams) -> None:
        self.order = np.argsort(-logits, kind="stable")
        self._falling = logits[self.order]
        self._negated = -self._falling  # rising, for searchsorted
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._weights = np.exp((self._falling - self._falling[0]) / sampling.temperature)
        self._sums = np.concatenate(([0.0], np.cumsum(self._weights)))  # of the first n weights
        self._top_k = min(sampling.top_k, len(logits)) if sampling.top_k > 0 else len(logits)

    def choose(self, number: float) -> int:
        """The token drawn by inversion of the cumulative distribution of what top-k and then top-p keep."""
        cumulative = self._sums[1 : self._top_k + 1]
        starts = self._sums[: self._top_k] / cumulative[-1]
        # Kept are those that start below top_p: the fewest that reach it. Without top_p, all.
        num_kept = max(int((starts < self._top_p).sum()), 1) if self._top_p < 1 else self._top_k
        kept = cumulative[:num_kept]
        rank = int(np.searchsorted(kept, number * kept[-1], side="right"))
        return int(self.order[min(rank, num_kept - 1)])

    def may_choose(self, logit: float, number: float, error: float) -> bool:
        """Whether a token of this logit may be drawn if every logit is wrong by up to `error`.

        With such errors tokens within 2 error of each other may change places, weights change by up to
        exp(2 error / temperature) against each other, and so does what top-k and top-p keep. The bounds below take
        the worst of each, so a False is certain, and a True may be too kind.
        """
        most_kept, least_kept = self._kept(error)
        ratio = _ratio(error, self._temperature)
        surely_ahead = self._num_above(logit + 2 * error)
        if surely_ahead >= most_kept:
            return False
        perhaps_ahead = self._num_from(logit - 2 * error)  # itself included
        before = self._sums[surely_ahead]
        begins_from = _share(before, (self._sums[most_kept] - before) * ratio)
        until = self._sums[min(perhaps_ahead, most_kept)]
        ends_by = _share(until, max(self._sums[least_kept] - until, 0.0) / ratio)
        return begins_from <= number and (number < ends_by or ends_by == 1.0)

    def _kept(self, error: float) -> tuple[int, int]:
        """How many of the first tokens top-k and top-p keep, at most and at least."""
        most_k, least_k = self._kept_by_top_k(error)
        if self._top_p >= 1:
            return most_k, least_k
        ratio = _ratio(error, self._temperature)
        most_mass, least_mass = self._sums[most_k], self._sums[least_k]

        def may_be_kept(rank: int) -> bool:
            before = self._sums[self._num_above(self._falling[rank] + 2 * error)]
            return _share(before, (most_mass - before) * ratio) < self._top_p

        def must_be_kept(rank: int) -> bool:
            until = self._sums[self._num_from(self._falling[rank] - 2 * error)]
            own = self._weights[rank]
            return _share(until - own, (max(least_mass - until, 0.0) + own) / ratio) < self._top_p

        return _first_not(may_be_kept, most_k), _first_not(must_be_kept, least_k)

    def _kept_by_top_k(self, error: float) -> tuple[int, int]:
        if self._top_k == len(self._falling):
            return self._top_k, self._top_k
        most = self._num_from(self._falling[self._top_k - 1] - 2 * error)
        return most, self._num_above(self._falling[self._top_k] + 2 * error)

    def _num_above(self, logit: float) -> int:
        return int(np.searchsorted(self._negated, -logit, side="left"))

    def _num_from(self, logit: float) -> int:
        return int(np.searchsorted(self._negated, -logit, side="right"))


def _ratio(error: float, temperature: float) -> float:
    """How much the weights of two tokens may change against each other; finite."""
    return math.exp(min(2 * error / temperature, 700.0))


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest > 0 else 0.0


def _first_not(holds: Callable[[int], bool], num_ranks: int) -> int:
    """The first rank below `num_ranks` at which what holds for low ranks no longer does; by bisection."""
    low, high = 0, num_ranks
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low
