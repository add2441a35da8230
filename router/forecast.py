"""When a request would end, judged by how others fare. Pure; times of any monotonic clock, in seconds."""

import math

MEMORY_S = 5.0  # what was so long ago weighs 1/e of what is now
FORGET_AFTER_S = 10.0  # an estimate without news is none: it must not shut the door for ever
# Forecasts are means: this much more time is asked for, so that most of those who get a place make it.
MARGIN = 1.25


class _Mean:
    """An exponentially decaying mean of samples with weights."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        self._noted_at_s = -math.inf

    def note(self, now_s: float, value: float, weight: float = 1.0) -> None:
        keep = math.exp(-(now_s - self._noted_at_s) / MEMORY_S)
        self._sum = self._sum * keep + value
        self._weight = self._weight * keep + weight
        self._noted_at_s = now_s

    def at(self, now_s: float) -> float | None:
        """None without samples of late."""
        if now_s - self._noted_at_s > FORGET_AFTER_S or self._weight <= 0.0:
            return None
        return self._sum / self._weight


class Forecast:
    """Estimates from the grants, first tokens, tokens and ends that the router sees."""

    def __init__(self) -> None:
        self._grant_interval_s = _Mean()
        self._ttft_s = _Mean()
        self._tpot_s = _Mean()
        self._answer_tokens = _Mean()
        self._granted_at_s: float | None = None

    def note_grant(self, now_s: float, waiting_since_s: float | None) -> None:
        """A request got a place; None: it did not wait. Only the pace while others wait tells how the line moves."""
        if waiting_since_s is not None:
            since_s = waiting_since_s if self._granted_at_s is None else max(self._granted_at_s, waiting_since_s)
            self._grant_interval_s.note(now_s, now_s - since_s)
        self._granted_at_s = now_s

    def note_first_token(self, now_s: float, seconds_since_grant: float) -> None:
        """A first token came."""
        self._ttft_s.note(now_s, seconds_since_grant)

    def note_tokens(self, now_s: float, seconds: float, num_tokens: int) -> None:
        """A stream brought tokens, so long after its message before."""
        self._tpot_s.note(now_s, seconds, num_tokens)

    def note_end(self, now_s: float, num_tokens: int) -> None:
        """An answer is whole."""
        self._answer_tokens.note(now_s, num_tokens)

    def wait_s(self, now_s: float, num_ahead: int) -> float:
        """How long a place takes behind so many; 0 if nothing is known."""
        return num_ahead * (self._grant_interval_s.at(now_s) or 0.0)

    def service_s(self, now_s: float, max_tokens: int) -> float:
        """From a place to the end of an answer that is as long as answers are of late; 0 if nothing is known."""
        typical = self._answer_tokens.at(now_s)
        num_tokens = max_tokens if typical is None else min(max_tokens, typical)
        return (self._ttft_s.at(now_s) or 0.0) + num_tokens * (self._tpot_s.at(now_s) or 0.0)

    def seconds_to_end(self, now_s: float, max_tokens: int, num_ahead: int) -> float:
        """From now to the end of the answer."""
        return self.wait_s(now_s, num_ahead) + self.service_s(now_s, max_tokens)

    def seconds_needed(self, now_s: float, max_tokens: int, num_ahead: int) -> float:
        """The same with a margin."""
        return MARGIN * self.seconds_to_end(now_s, max_tokens, num_ahead)
