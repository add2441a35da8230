from collections import Counter
from itertools import pairwise

import pytest

from baton.v1 import fault_pb2
from bench.drill.roster import Life
from bench.drill.strikes import ROLES, Phase, Strike, choose_victim, plan_strikes


def test_each_phase_and_role_is_struck_equally_often():
    plan = plan_strikes(10, list(Phase), ROLES, seed=1)
    counts = Counter((strike.phase, strike.victim_role) for strike in plan)
    assert set(counts.values()) == {10}
    assert len(plan) == 140


def test_roles_take_turns():
    plan = plan_strikes(3, list(Phase), ROLES, seed=1)
    assert all(a.victim_role != b.victim_role for a, b in pairwise(plan))


def test_a_seed_repeats_the_plan_and_another_one_does_not():
    assert plan_strikes(2, list(Phase), ROLES, seed=5) == plan_strikes(2, list(Phase), ROLES, seed=5)
    assert plan_strikes(2, list(Phase), ROLES, seed=5) != plan_strikes(2, list(Phase), ROLES, seed=6)


def test_in_the_middle_something_has_passed_before():
    plan = plan_strikes(50, [Phase.PUSHING, Phase.DECODING], ["decode"], seed=2)
    assert min(strike.num_skipped for strike in plan) == 1
    assert len({strike.num_skipped for strike in plan}) > 1


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_its_point_on_the_wire(phase):
    assert fault_pb2.HoldFault(point=phase.point).point == fault_pb2.FaultPoint.Value(phase.point)


def test_every_point_on_the_wire_is_a_phase():
    assert {phase.point for phase in Phase} == set(fault_pb2.FaultPoint.keys()) - {"FAULT_POINT_UNSPECIFIED"}


UP = {
    name: Life(name, name.split("-")[0], pid, up_since_s=0.0)
    for pid, name in enumerate(("prefill-0", "prefill-1", "decode-0", "decode-1"), start=10)
}


def choose(role, reporter, peer, workers_up=UP):
    life = choose_victim(Strike(Phase.QUEUED, role, 0), reporter, peer, workers_up)
    return life and life.name


class TestVictim:
    def test_it_is_who_reported(self):
        assert choose("prefill", "prefill-1", "decode-1") == "prefill-1"

    def test_or_its_peer(self):
        assert choose("decode", "prefill-1", "decode-1") == "decode-1"

    def test_or_any_of_the_role_if_the_peer_is_not_known(self):
        assert choose("prefill", "decode-1", "") == "prefill-0"

    def test_or_any_of_the_role_if_the_peer_is_down(self):
        others = {name: life for name, life in UP.items() if name != "decode-1"}
        assert choose("decode", "prefill-1", "decode-1", others) == "decode-0"

    def test_nobody_if_none_is_up(self):
        assert choose("decode", "prefill-0", "", {"prefill-0": UP["prefill-0"]}) is None
