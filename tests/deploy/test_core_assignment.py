"""Workers get cores of their own, spread over the machine, or share them evenly."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.core_assignment import assign_cores


def test_workers_are_spread_over_the_machine() -> None:
    assignment = assign_cores(2, 1, range(8))
    assert assignment.cores == ((0,), (4,))
    assert not assignment.is_shared


def test_cores_of_one_worker_are_neighbours() -> None:
    assert assign_cores(3, 2, range(7)).cores == ((0, 1), (2, 3), (4, 5))


def test_only_available_cores_are_used() -> None:
    assert assign_cores(2, 1, [3, 5]).cores == ((3,), (5,))


def test_too_many_workers_wrap_around() -> None:
    assignment = assign_cores(3, 1, [0, 1])
    assert assignment.cores == ((0,), (1,), (0,))
    assert assignment.is_shared


def test_worker_is_not_wider_than_the_machine() -> None:
    assert assign_cores(1, 16, [0, 1]).cores == ((0, 1),)


def test_no_core_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="no CPU core"):
        assign_cores(1, 1, [])


@given(st.integers(0, 20), st.integers(1, 6), st.sets(st.integers(0, 63), min_size=1, max_size=16))
def test_every_worker_has_its_width_and_no_core_bears_much_more(
    num_workers: int, cores_per_worker: int, available: set[int]
) -> None:
    assignment = assign_cores(num_workers, cores_per_worker, sorted(available))
    width = min(cores_per_worker, len(available))
    assert len(assignment.cores) == num_workers
    assert all(len(set(cores)) == width for cores in assignment.cores)
    load = Counter(dict.fromkeys(available, 0))
    load.update(core for cores in assignment.cores for core in cores)
    assert load.keys() == available
    assert max(load.values()) - min(load.values()) <= 1
    assert assignment.is_shared == (num_workers * width > len(available))
