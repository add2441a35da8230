from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.waiting_line import ADMISSION_WINDOW, MAX_BYPASSES, Waiter, WaitingLine


def waiter(priority=0, is_new=True):
    return Waiter(priority=priority, is_new=is_new)


@pytest.fixture
def line():
    return WaitingLine()


def joined(line, *waiters):
    for each in waiters:
        line.add(each)
    return waiters


def in_order(line):
    """All of them, when everybody fits."""
    order = []
    while line:
        order.append(line.take_next(lambda _: True))
    return order


def test_the_order_is_priority_then_who_had_a_place_then_arrival(line):
    low, new, newer, urgent = joined(line, waiter(5), waiter(0), waiter(0), waiter(-1))
    low_again, again = joined(line, waiter(5, is_new=False), waiter(0, is_new=False))
    order = [urgent, again, new, newer, low_again, low]
    assert line.waiters() == line.window() == order
    assert in_order(line) == order


def test_who_had_a_place_is_no_earlier_than_its_equals(line):
    first, second = joined(line, waiter(is_new=False), waiter(is_new=False))
    assert in_order(line) == [first, second]


def test_the_first_that_fits_is_taken_and_nobody_if_none_does(line):
    _, second, third = joined(line, waiter(), waiter(), waiter())
    assert line.take_next(lambda _: False) is None
    assert line.take_next(lambda w: w is not line.window()[0]) is second
    assert second not in line
    assert third in line
    assert len(line) == 2


def test_an_empty_line_has_nobody_to_take(line):
    assert line.take_next(lambda _: True) is None
    assert line.window() == []


def test_only_the_first_few_are_looked_at(line):
    waiters = joined(line, *(waiter(p % 3) for p in range(1000)))
    looked_at = []
    assert line.take_next(lambda w: looked_at.append(w)) is None
    assert looked_at == sorted(waiters, key=lambda w: (w.priority, w.arrival))[:ADMISSION_WINDOW]


def test_a_new_one_stands_behind_those_not_less_important(line):
    joined(line, waiter(9), waiter(0), waiter(1), waiter(1, is_new=False), waiter(2))
    assert [line.num_before(p) for p in (-1, 0, 1, 2, 8, 9)] == [0, 1, 3, 4, 4, 5]


def test_who_leaves_is_not_there_and_may_leave_again(line):
    first, second = joined(line, waiter(), waiter())
    line.remove(first)
    line.remove(first)
    assert first not in line
    assert second in line
    assert (len(line), line.waiters(), line.window()) == (1, [second], [second])


def test_who_has_never_come_may_leave(line):
    joined(line, waiter())
    line.remove(waiter())
    assert len(line) == 1


@pytest.mark.parametrize("others", [0, 1])
def test_a_large_one_is_passed_so_often_and_then_holds_up_those_behind_it(line, others):
    (large,) = joined(line, waiter(0))
    for _ in range(MAX_BYPASSES):
        (small,) = joined(line, waiter(others))
        assert line.take_next(lambda w: w is not large) is small
    (small,) = joined(line, waiter(others))
    assert line.take_next(lambda w: w is not large) is None
    assert in_order(line) == [large, small]


def test_a_large_one_that_came_late_is_passed_no_more_often(line):
    """By those that came before it and stand behind it."""
    early = joined(line, *(waiter(5) for _ in range(MAX_BYPASSES + 1)))
    (large,) = joined(line, waiter(0))
    for each in early[:-1]:
        assert line.take_next(lambda w: w is not large) is each
    assert line.take_next(lambda w: w is not large) is None
    assert in_order(line) == [large, early[-1]]


def test_a_lowly_one_has_its_turn_among_the_important(line):
    (low,) = joined(line, waiter(9))
    order = []
    while low in line:
        joined(line, waiter(0), waiter(0))
        order.append(line.take_next(lambda _: True))
    assert len(order) == MAX_BYPASSES + 1


def test_a_crowd_of_lowly_ones_does_not_stand_in_the_way_of_the_important(line):
    """Of MAX_BYPASSES + 1 places one is theirs."""
    crowd = joined(line, *(waiter(9) for _ in range(100)))
    important = joined(line, *(waiter(0) for _ in range(100)))
    order = in_order(line)
    served = order[: 3 * (MAX_BYPASSES + 1)]
    assert [w for w in served if w.priority == 9] == list(crowd[:3])
    assert [w for w in order if w.priority == 0] == list(important)


def test_who_has_its_turn_and_does_not_fit_holds_up_even_the_important(line):
    (low,) = joined(line, waiter(9))
    for _ in range(MAX_BYPASSES):
        joined(line, waiter(0))
        line.take_next(lambda _: True)
    (urgent,) = joined(line, waiter(-1))
    assert line.take_next(lambda w: w is urgent) is None
    line.remove(low)
    assert line.take_next(lambda w: w is urgent) is urgent


def test_the_turn_of_one_that_has_left_is_not_the_next_ones(line):
    """It counts anew who was first passed over."""
    low, next_low = joined(line, waiter(9), waiter(9))
    for _ in range(MAX_BYPASSES):
        joined(line, waiter(0))
        line.take_next(lambda _: True)
    line.remove(low)
    (urgent,) = joined(line, waiter(0))
    assert in_order(line) == [urgent, next_low]


ARRIVALS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3)
# Who comes, who fits (every eighth one by the same bit), and who leaves, if anybody.
TURNS = st.lists(st.tuples(ARRIVALS, st.integers(0, 255), st.none() | st.integers(0, 99)), max_size=60)


class Watched:
    """A line in which every waiter is told, when it comes, how many grants to others it will see at most.

    Of those that came before it, and itself, each is the first to have come for MAX_BYPASSES grants to others at
    most; and each of the former may be granted.
    """

    def __init__(self):
        self.line = WaitingLine()
        self.num_grants = 0
        self.bounds = {}

    def come(self, new):
        num_before = len(self.line)
        self.line.add(new)
        self.bounds[new] = self.num_grants + (num_before + 1) * MAX_BYPASSES + num_before

    def take(self, fits):
        taken = self.line.take_next(fits)
        if taken is not None:
            assert self.num_grants <= self.bounds.pop(taken)
            self.num_grants += 1
        return taken

    def leave(self, arrival):
        for gone in [w for w in self.line.waiters() if w.arrival == arrival]:
            self.line.remove(gone)
            del self.bounds[gone]


@settings(max_examples=100)
@given(TURNS)
def test_everybody_is_served_after_a_bounded_number_of_grants(turns):
    watched = Watched()
    for arrivals, mask, leaver in turns:
        for priority, is_new in arrivals:
            watched.come(waiter(priority, is_new))
        taken = watched.take(lambda w, mask=mask: mask >> w.arrival % 8 & 1)
        assert taken is None or mask >> taken.arrival % 8 & 1
        watched.leave(leaver)
        ranks = [w.rank for w in watched.line.waiters()]
        assert ranks == sorted(ranks)
        assert all(w.num_bypasses <= MAX_BYPASSES for w in watched.line.waiters())
    while watched.line:
        assert watched.take(lambda _: True) is not None
    assert not watched.bounds


@pytest.mark.parametrize("seed", range(20))
def test_no_stream_of_others_keeps_one_from_its_place(seed):
    """They come without end, as important as they like; all fit one time in two."""
    random, watched = Random(seed), Watched()
    num_before, num_each_turn = random.randrange(40), random.randrange(1, 4)
    for _ in range(num_before):
        watched.come(waiter(random.randrange(10), random.random() < 0.5))
    watched.come(ours := waiter(random.randrange(10)))
    num_turns = 0
    while ours in watched.line:
        for _ in range(num_each_turn):
            watched.come(waiter(random.randrange(10), random.random() < 0.5))
        watched.take(lambda _: random.random() < 0.5)
        num_turns += 1
        assert num_turns < 10_000


def test_the_bound_is_reached():
    """One that comes to others of its kind, of whom each waits for its turn while more important ones are served."""
    watched = Watched()
    for _ in range(5):
        watched.come(waiter(9))
    watched.come(last := waiter(9))
    while last in watched.line:
        watched.come(waiter(0))
        watched.take(lambda _: True)
    assert watched.num_grants - 1 == 6 * MAX_BYPASSES + 5
