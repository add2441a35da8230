"""How many requests may be tried again: a sick cluster must not be buried under retries. Pure.

The retry budget of Twitter's Finagle (https://twitter.github.io/finagle/guide/Glossary.html): a token bucket that
each request fills a little and each retry empties by one.
"""


class RetryBudget:
    """A bucket of `capacity` retries, full at first. Times of any monotonic clock, in seconds.

    The capacity lets all streams of a worker that dies go on at once. After that a retry is earned by
    1 / `per_request` new requests, or by waiting 1 / `per_second` seconds.
    """

    def __init__(self, *, capacity: float = 256.0, per_request: float = 0.2, per_second: float = 5.0) -> None:
        self._capacity = capacity
        self._per_request = per_request
        self._per_second = per_second
        self._left = capacity
        self._seen_at_s: float | None = None

    def note_request(self, now_s: float) -> None:
        """A new request came."""
        self._refill(now_s)
        self._left = min(self._left + self._per_request, self._capacity)

    def take(self, now_s: float) -> bool:
        """Takes one retry. False: there is none left, let the request end."""
        self._refill(now_s)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _refill(self, now_s: float) -> None:
        if self._seen_at_s is not None:
            self._left = min(self._left + (now_s - self._seen_at_s) * self._per_second, self._capacity)
        self._seen_at_s = now_s
