"""The important first, of equals first come, first served; but nobody is overtaken more than so often."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.waiting_queue import WaitingQueue

_arrivals = count()


def _seq(sequence_id: str, priority: int = 0) -> Sequence:
    seq = Sequence(sequence_id, [1], 1, SamplingParams(), priority=priority)
    seq.arrival = next(_arrivals)
    return seq


def _ids(queue: WaitingQueue) -> str:
    return "".join(s.sequence_id for s in queue.first(99))


def _admit(queue: WaitingQueue, seq: Sequence) -> None:
    queue.remove(seq)
    queue.count_admission(seq)


def test_order_is_by_priority_and_of_equals_by_arrival() -> None:
    queue = WaitingQueue(max_bypasses=9)
    a, b, c, d = _seq("a", 1), _seq("b", -1), _seq("c", 1), _seq("d", -1)
    for seq in (a, b, c, d):
        queue.append(seq)
    assert _ids(queue) == "bdac"
    assert queue.first(2) == [b, d]
    queue.remove(b)
    assert queue.first(2) == [d, a]
    assert len(queue) == len(list(queue)) == 3


def test_one_that_was_overtaken_so_often_is_due_and_comes_first() -> None:
    queue = WaitingQueue(max_bypasses=2)
    low = _seq("l", 5)
    queue.append(low)
    for sequence_id in "abc":
        queue.append(_seq(sequence_id))
    for _ in range(2):
        assert not queue.is_due(low)
        _admit(queue, queue.first(1)[0])
    assert queue.is_due(low)
    assert _ids(queue) == "lc"
    assert queue.may_admit(low)
    assert not queue.may_admit(queue.first(2)[1])
    _admit(queue, low)
    assert not queue.is_due(low)
    assert queue.may_admit(queue.first(1)[0])
    assert not queue.is_due(queue.first(1)[0]), "an older one does not overtake"


def test_of_several_that_are_due_the_oldest_comes_first() -> None:
    queue = WaitingQueue(max_bypasses=1)
    for sequence_id, priority in (("a", 3), ("b", 2), ("c", 1)):
        queue.append(_seq(sequence_id, priority))
    last = _seq("d")
    queue.append(last)
    assert _ids(queue) == "dcba"
    _admit(queue, last)
    assert _ids(queue) == "abc"


def test_reservations_overtake_only_those_that_do_not_fit() -> None:
    queue = WaitingQueue(max_bypasses=1)
    large, other = _seq("large"), _seq("other")
    queue.append(large)
    queue.append(other)
    queue.mark_unfit(large)
    assert not queue.claims_blocks
    queue.count_reservation()
    assert queue.is_due(large)
    assert not queue.is_due(other)
    assert queue.claims_blocks
    queue.remove(large)
    assert not queue.claims_blocks


def test_one_that_is_due_but_fits_claims_no_blocks() -> None:
    queue = WaitingQueue(max_bypasses=0)
    seq = _seq("a")
    queue.append(seq)
    assert queue.is_due(seq)
    assert not queue.claims_blocks


def test_a_sequence_that_leaves_is_forgotten() -> None:
    queue = WaitingQueue(max_bypasses=1)
    large = _seq("large")
    queue.append(large)
    queue.mark_unfit(large)
    queue.count_reservation()
    queue.remove(large)
    queue.append(large)
    assert not queue.is_due(large)
    queue.count_reservation()
    assert not queue.is_due(large)


@pytest.mark.parametrize("max_bypasses", [0, 1, 3])
@given(st.lists(st.one_of(st.integers(-2, 2), st.none()), max_size=40))
def test_whoever_takes_the_first_overtakes_nobody_more_than_so_often(
    max_bypasses: int, events: list[int | None]
) -> None:
    """An event is an arrival with this priority, or the admission of the first."""
    queue = WaitingQueue(max_bypasses)
    num_overtaken: dict[str, int] = {}
    for i, priority in enumerate(events):
        if priority is not None:
            queue.append(_seq(str(i), priority))
            num_overtaken[str(i)] = 0
        elif len(queue):
            [first] = queue.first(1)
            _admit(queue, first)
            for seq in queue:
                num_overtaken[seq.sequence_id] += seq.arrival < first.arrival
    assert all(number <= max_bypasses for number in num_overtaken.values())
