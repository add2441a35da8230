"""What the client saw of one request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.v1 import request_pb2


@dataclass(frozen=True, slots=True)
class Measurement:
    """One request. Times are of one monotonic clock, in seconds.

    `started_at_s` is when it was due: in an open loop a late client is not to make the server look faster.
    `token_times_s` has the arrival of each token. `failure` is a word for why it failed, empty if it did not,
    and `message` the whole story.
    """

    started_at_s: float
    ended_at_s: float
    token_times_s: tuple[float, ...] = ()
    timeline: request_pb2.Timeline | None = None
    failure: str = ""
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.token_times_s[0] - self.started_at_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, averaged over all after the first; None with fewer than two."""
        return time_per_token_s(self.token_times_s)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gap before each token but the first, 0 for tokens that came in one piece."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def e2e_s(self) -> float:
        """From beginning to end."""
        return self.ended_at_s - self.started_at_s


def time_per_token_s(token_times_s: Sequence[float]) -> float | None:
    """Mean time between tokens, or None with fewer than two."""
    if len(token_times_s) < 2:
        return None
    return (token_times_s[-1] - token_times_s[0]) / (len(token_times_s) - 1)


def batch_rate(streams_s: Sequence[Sequence[float]]) -> float:
    """Tokens per second of streams that decode together, from the arrival times of their tokens.

    Counts only while all of them run: after the last one's first token, until the first one's last. Raises
    ValueError if there is no such time.
    """
    begin_s = max(times_s[0] for times_s in streams_s)
    end_s = min(times_s[-1] for times_s in streams_s)
    if end_s <= begin_s:
        raise ValueError("the streams never ran all at the same time: generate more tokens")
    num_tokens = sum(1 for times_s in streams_s for time_s in times_s if begin_s < time_s <= end_s)
    return num_tokens / (end_s - begin_s)
