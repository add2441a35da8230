"""First come, first served; one that does not fit is passed over only so often."""

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.waiting_queue import WaitingQueue


def _seq(sequence_id: str) -> Sequence:
    return Sequence(sequence_id, [1], 1, SamplingParams())


def test_order_is_first_come_with_preempted_ones_in_front() -> None:
    queue = WaitingQueue(max_bypasses=2)
    a, b, c = _seq("a"), _seq("b"), _seq("c")
    queue.append(a)
    queue.append(b)
    queue.push_front(c)
    assert [s.sequence_id for s in queue] == ["c", "a", "b"]
    assert queue.first(2) == [c, a]
    queue.remove(a)
    assert queue.first(5) == [c, b]
    assert len(queue) == 2


def test_a_sequence_is_due_after_so_many_bypasses() -> None:
    queue = WaitingQueue(max_bypasses=2)
    large, other = _seq("large"), _seq("other")
    queue.append(large)
    queue.append(other)
    assert not queue.mark_unfit(large)
    queue.count_bypass([large])
    assert not queue.mark_unfit(large)
    assert not queue.has_due
    queue.count_bypass()
    assert queue.mark_unfit(large)
    assert queue.has_due
    assert not queue.mark_unfit(other)


def test_a_sequence_that_leaves_is_forgotten() -> None:
    queue = WaitingQueue(max_bypasses=1)
    large = _seq("large")
    queue.append(large)
    queue.mark_unfit(large)
    queue.count_bypass()
    queue.remove(large)
    assert not queue.has_due
    queue.append(large)
    assert not queue.mark_unfit(large)
