from bench.drill.roster import Life, Roster, may_strike
from deploy.cluster_status import ClusterStatus, MemberReport, MemberState, MemberStatus


def member(name, pid, state=MemberState.READY, detail=""):
    role = name.split("-")[0]
    return MemberStatus(name, role, MemberReport(state, detail, f"127.0.0.1:{pid}", f"e{pid}", pid), 0, 0)


def status(*workers):
    return ClusterStatus("drill", "tiny", member("router", 1), workers)


def up(name, since_s=0.0):
    return Life(name, name.split("-")[0], 1, up_since_s=since_s)


def test_a_worker_is_up_since_it_was_first_seen_so():
    roster = Roster()
    roster.update(status(member("prefill-0", 7, MemberState.STARTING)), 1.0)
    assert roster.workers_up == []
    assert not roster.is_at_full_strength
    roster.update(status(member("prefill-0", 7)), 2.0)
    roster.update(status(member("prefill-0", 7)), 3.0)
    (life,) = roster.workers_up
    assert (life.up_since_s, life.address, life.epoch) == (2.0, "127.0.0.1:7", "e7")
    assert roster.is_at_full_strength


def test_the_router_is_a_member_but_no_worker():
    roster = Roster()
    roster.update(status(member("decode-0", 7)), 1.0)
    assert set(roster.current) == {"router", "decode-0"}
    assert [life.name for life in roster.workers_up] == ["decode-0"]


def test_a_struck_worker_is_down_though_the_controller_has_not_noticed():
    roster = Roster()
    roster.update(status(member("decode-0", 7)), 1.0)
    roster.mark_struck(roster.current["decode-0"])
    assert roster.workers_up == []
    roster.update(status(member("decode-0", 7)), 2.0)
    assert roster.workers_up == []
    roster.update(status(member("decode-0", 8)), 3.0)
    (life,) = roster.workers_up
    assert (life.pid, life.up_since_s) == (8, 3.0)
    assert (roster.num_lost, roster.lost_unstruck) == (1, [])


def test_a_resumed_worker_may_be_up_again():
    roster = Roster()
    roster.update(status(member("decode-0", 7)), 1.0)
    life = roster.current["decode-0"]
    roster.mark_struck(life)
    roster.update(status(member("decode-0", 7, MemberState.UNHEALTHY)), 2.0)
    roster.mark_resumed(life)
    roster.update(status(member("decode-0", 7, MemberState.UNHEALTHY)), 3.0)
    assert roster.workers_up == []
    roster.update(status(member("decode-0", 7)), 4.0)
    assert [life.up_since_s for life in roster.workers_up] == [4.0]


def test_a_worker_without_a_process_is_not_at_full_strength():
    roster = Roster()
    roster.update(status(member("prefill-0", 7), member("decode-0", 0, MemberState.RESTARTING)), 1.0)
    assert not roster.is_at_full_strength
    assert "decode-0" not in roster.current


def test_a_strike_needs_one_more_of_the_role_and_one_of_the_other():
    pair = [up("prefill-0"), up("prefill-1"), up("decode-0")]
    assert may_strike(pair, "prefill", settle_s=1.0, now_s=5.0)
    assert not may_strike(pair, "decode", settle_s=1.0, now_s=5.0)
    assert not may_strike(pair[:2], "prefill", settle_s=1.0, now_s=5.0)


def test_workers_that_have_just_come_up_do_not_count():
    fresh = [up("prefill-0"), up("prefill-1", 4.5), up("decode-0")]
    assert not may_strike(fresh, "prefill", settle_s=1.0, now_s=5.0)
    assert may_strike(fresh, "prefill", settle_s=1.0, now_s=5.5)


def test_a_life_that_ends_without_a_strike_is_told_with_the_reason():
    roster = Roster()
    roster.update(status(member("prefill-0", 7), member("decode-0", 8)), 1.0)
    roster.update(status(member("prefill-0", 0, MemberState.RESTARTING, "no heartbeat"), member("decode-0", 9)), 2.0)
    roster.update(status(member("prefill-0", 10), member("decode-0", 9)), 3.0)
    assert roster.num_lost == 2
    assert roster.lost_unstruck == ["prefill-0 (pid 7): no heartbeat", "decode-0 (pid 8): no reason given"]
