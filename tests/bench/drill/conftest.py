"""Builders of what drills collect."""

import pytest

from bench.drill.answers import Asked


@pytest.fixture
def asked():
    """One request of question 0 from second 0 to 10, with three right tokens at 1, 2 and 9 s unless told otherwise."""

    def make(**fields):
        known = {
            "request_id": "r-1",
            "question": 0,
            "started_at_s": 0.0,
            "ended_at_s": 10.0,
            "token_ids": (5, 6, 7),
            "token_times_s": (1.0, 2.0, 9.0),
        }
        return Asked(**{**known, **fields})

    return make
