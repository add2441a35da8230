"""When an actor counts as lost, and how long to wait before it is started again. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential back-off: the delay grows with each failure in a row, and a long life wipes the slate."""

    initial_delay_s: float = 0.5
    growth: float = 2.0
    max_delay_s: float = 30.0
    stable_after_s: float = 10.0

    def failures_in_a_row(self, previous: int, uptime_s: float) -> int:
        """Counts one more failure, of an actor that was up for `uptime_s` seconds (0: never)."""
        return 1 if uptime_s >= self.stable_after_s else previous + 1

    def delay_s(self, failures_in_a_row: int) -> float:
        """Seconds to wait after this many failures in a row (1 or more)."""
        delay_s = self.initial_delay_s
        for _ in range(failures_in_a_row - 1):
            delay_s = min(delay_s * self.growth, self.max_delay_s)
        return min(delay_s, self.max_delay_s)


@dataclass(frozen=True, slots=True)
class HeartbeatPolicy:
    """How often an actor is asked how it is, and how patiently.

    While it starts it may be deaf for long (imports, weights): only `start_timeout_s` in all bounds that.
    Once up it is lost after `max_missed` heartbeats in a row without a good answer.
    """

    interval_s: float = 1.0
    start_interval_s: float = 0.25
    timeout_s: float = 2.0
    max_missed: int = 3
    start_timeout_s: float = 600.0

    def is_lost(self, num_missed: int) -> bool:
        """Whether this many missed heartbeats in a row mean that the actor is lost."""
        return num_missed >= self.max_missed
