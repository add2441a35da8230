"""What logits choose, and how wrong they would have to be to choose another token. Pure."""

import math
from functools import cached_property

import numpy as np

from bench.verify.sorted_row import Logits, SortedRow
from engine.sampling_params import SamplingParams

_NUM_BISECTIONS = 50


class TokenChoice:
    """The choice at one position: logits [vocab], the sampling, and the number in [0, 1) drawn for the position.

    Written from the documentation of the engine's sampler, not with its code: temperature, top-k and top-p in that
    order, then inversion of the cumulative distribution. Greedy takes the first of the largest.
    """

    def __init__(self, logits: Logits, sampling: SamplingParams, number: float) -> None:
        self._logits = logits
        self._sampling = sampling
        self._number = number
        self._is_broken = bool(np.isnan(logits).any()) or not math.isfinite(logits.max())

    @cached_property
    def token_id(self) -> int:
        """The token these logits choose; -1 if they are not numbers."""
        if self._is_broken:
            return -1
        return int(self._logits.argmax()) if self._is_greedy else self._row.choose(self._number)

    def error_needed(self, token_id: int) -> float:
        """The least E, in logits, for which errors of at most E in each logit can make `token_id` the choice.

        Greedy: half of what it lacks to the largest logit. Sampled: by bisection of `SortedRow.may_choose`, which
        rather allows too much. 0 for the choice itself; infinity for an id out of range and for broken logits.
        """
        if self._is_broken or not 0 <= token_id < len(self._logits):
            return math.inf
        if token_id == self.token_id:
            return 0.0
        logit, largest = float(self._logits[token_id]), float(self._logits.max())
        if self._is_greedy:
            return (largest - logit) / 2
        low, high = 0.0, largest - float(self._logits.min())  # with that, all tokens may change places
        if not math.isfinite(high) or not self._row.may_choose(logit, self._number, high):
            return math.inf
        for _ in range(_NUM_BISECTIONS):
            middle = (low + high) / 2
            if self._row.may_choose(logit, self._number, middle):
                high = middle
            else:
                low = middle
        return high

    @property
    def _is_greedy(self) -> bool:
        return self._sampling.temperature == 0

    @cached_property
    def _row(self) -> SortedRow:
        return SortedRow(self._logits, self._sampling)
