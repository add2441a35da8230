"""When the requests of an open loop arrive. Pure."""

import random


def poisson_arrivals(rate_per_s: float, num_requests: int, seed: int) -> list[float]:
    """Seconds from the start at which each request arrives: a Poisson process of that rate.

    The first comes at 0. The gaps are independent and exponential with mean 1 / rate; the same seed gives the
    same arrivals. Raises ValueError.
    """
    if rate_per_s <= 0 or num_requests < 0:
        raise ValueError(f"{num_requests} requests at {rate_per_s} per second: use a positive rate and 0 or more")
    generator = random.Random(seed)
    arrivals_s: list[float] = []
    now_s = 0.0
    for _ in range(num_requests):
        arrivals_s.append(now_s)
        now_s += generator.expovariate(rate_per_s)
    return arrivals_s
