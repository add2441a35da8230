"""When a request would end, judged by how others fare. Pure; times of any monotonic clock, in seconds."""

import math

MEMORY_S = 5.0  # what was so long ago weighs 1/e of what is now
PACE_MEMORY_S = 1.0  # steps are many and follow the load at once
LENGTH_MEMORY_S = 20.0  # answers end one by one
FORGET_AFTER_S = 10.0  # an estimate without news is none: it must not shut the door for ever
# How much of a decode step grows with its rows. Weights are read once for all of them, so most of it does not; a guess
# this rough is enough to see a burst coming before its first tokens show it.
ROWS_SHARE_OF_STEP = 0.3
# Forecasts are means: so much more time is asked for, that most of those who get a place make it.
MARGIN = 1.1


class _Sums:
    """Exponentially decaying sums of several figures, noted together."""

    def __init__(self, num_figures: int, memory_s: float) -> None:
        self._sums = [0.0] * num_figures
        self._memory_s = memory_s
        self._noted_at_s = -math.inf

    def note(self, now_s: float, *figures: float) -> None:
        keep = math.exp((self._noted_at_s - now_s) / self._memory_s)
        self._sums = [total * keep + figure for total, figure in zip(self._sums, figures, strict=True)]
        self._noted_at_s = now_s

    def at(self, now_s: float) -> list[float]:
        """The sums as of now."""
        keep = math.exp((self._noted_at_s - now_s) / self._memory_s)
        return [total * keep for total in self._sums]

    def ratio(self, now_s: float, forget_after_s: float = FORGET_AFTER_S) -> float | None:
        """The first figure over the last one; None without news for so long."""
        if self._sums[-1] <= 0.0 or now_s - self._noted_at_s > forget_after_s:
            return None
        return self._sums[0] / self._sums[-1]


class Forecast:
    """Estimates from the grants, first tokens, tokens and ends that one router sees."""

    def __init__(self) -> None:
        self._interval = _Sums(2, MEMORY_S)  # seconds between grants while others waited, grants
        self._ttft = _Sums(2, MEMORY_S)  # seconds from the grant to the first token, first tokens
        self._pace = _Sums(3, PACE_MEMORY_S)  # seconds of streams, requests in flight times tokens, tokens
        self._tokens = _Sums(1, LENGTH_MEMORY_S)
        self._ends = _Sums(3, LENGTH_MEMORY_S)  # tokens of whole answers, whole answers, places given back
        self._granted_at_s = -math.inf
        self._released_at_s = -math.inf
        self._num_in_flight = 0

    def note_grant(self, now_s: float, waited_s: float) -> None:
        """A request got a place, after so long. Only the pace while others wait tells how fast the line moves."""
        self._num_in_flight += 1
        if waited_s > 0.0:
            self._interval.note(now_s, min(now_s - self._granted_at_s, waited_s), 1.0)
        self._granted_at_s = now_s

    def note_release(self, now_s: float) -> None:
        """A place was given back, after a whole answer or not."""
        self._num_in_flight -= 1
        self._ends.note(now_s, 0.0, 0.0, 1.0)
        self._released_at_s = now_s

    def note_first_token(self, now_s: float, seconds_since_grant: float) -> None:
        """A first token came."""
        self._ttft.note(now_s, seconds_since_grant, 1.0)
        self._tokens.note(now_s, 1.0)

    def note_tokens(self, now_s: float, seconds: float, num_tokens: int) -> None:
        """A stream brought tokens, so long after its message before."""
        self._pace.note(now_s, seconds, float(self._num_in_flight * num_tokens), float(num_tokens))
        self._tokens.note(now_s, float(num_tokens))

    def note_end(self, now_s: float, num_tokens: int) -> None:
        """An answer is whole: so long it is."""
        self._ends.note(now_s, float(num_tokens), 1.0, 0.0)

    def wait_s(self, now_s: float, num_grants: int) -> float:
        """How long so many grants take while others wait; 0 if nothing is known."""
        interval_s = self._interval.ratio(now_s, math.inf)
        if interval_s is None or now_s - self._granted_at_s > max(FORGET_AFTER_S, 4 * interval_s):
            return 0.0
        return num_grants * interval_s

    def seconds_needed(self, now_s: float, max_tokens: int, num_ahead: int) -> float:
        """From now to the end of an answer that is as long as answers are of late, behind so many others, with a
        margin; what is not known counts 0.
        """
        num_tokens = min(max_tokens, self._answer_tokens(now_s))
        service_s = (self._ttft.ratio(now_s) or 0.0) + num_tokens * self._tpot_s(now_s)
        return MARGIN * (self.wait_s(now_s, num_ahead) + service_s)

    def _tpot_s(self, now_s: float) -> float:
        """Seconds per token with one more in flight. Those that have a place but no tokens yet are no surprise."""
        _, in_flight, num_tokens = self._pace.at(now_s)
        tpot_s = self._pace.ratio(now_s)
        if tpot_s is None:
            return 0.0
        growth = (self._num_in_flight + 1) * num_tokens / max(in_flight, num_tokens)
        return tpot_s * (1.0 - ROWS_SHARE_OF_STEP + ROWS_SHARE_OF_STEP * growth)

    def _answer_tokens(self, now_s: float) -> float:
        """How long answers are. The short ones end while others are cut off by their deadlines, so the share of those
        in all tokens counts too: else all would be taken for short, and too many let in.
        """
        if now_s - self._released_at_s > FORGET_AFTER_S:
            return 0.0
        whole_tokens, num_whole, num_released = self._ends.at(now_s)
        (all_tokens,) = self._tokens.at(now_s)
        cut_share = max(1.0 - num_whole / num_released, 0.0)
        return (whole_tokens + cut_share * all_tokens) / max(num_whole, 1.0)
