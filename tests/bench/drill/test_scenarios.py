"""Whole scenarios against a scripted cluster: what they do, and that they find what is wrong."""

import asyncio
import functools
import io

import pytest
from rich.console import Console

from baton.aio_client import AsyncClient
from baton.v1 import fault_pb2, worker_pb2
from bench.drill import striker as striker_module
from bench.drill.cancel_scenario import CancelOptions, run_cancels
from bench.drill.drill import Drill, take_baseline
from bench.drill.errors import DrillFailed
from bench.drill.message_scenario import MessageOptions, run_messages
from bench.drill.questions import Question
from bench.drill.runner import Scenario, run_scenario
from bench.drill.sampler import MemorySampler
from bench.drill.screen import Screen
from bench.drill.soak_scenario import SoakOptions, run_soak
from bench.drill.strike_scenario import StrikeOptions, run_strikes
from bench.drill.strikes import Phase, Strike

QUESTIONS = [Question(number, (5 + number, 6), 4 + number, 0.0, 0) for number in range(3)]
DYING = 902


@pytest.fixture
async def drill(cluster, inference, monkeypatch):
    monkeypatch.setattr(striker_module, "SETTLE_S", 0.0)
    cluster.restarts = True
    async with AsyncClient(inference.address) as client:
        yield Drill(cluster.drilled, client, Screen(Console(file=io.StringIO())), "run", seed=1, num_streams=3)


async def run(drill, scenario, options, questions=QUESTIONS):
    async with asyncio.timeout(60):
        found, _ = await run_scenario(drill, Scenario("", functools.partial(scenario, options=options)), questions)
    return found


KILLS = StrikeOptions("kill", lambda seed: [Strike(Phase.QUEUED, "prefill", 0), Strike(Phase.PUSHED, "decode", 0)])


async def test_kills_of_workers_that_come_back_leave_nothing_to_complain_of(drill, cluster):
    cluster.hit_in_all(fault_pb2.Hit(request_id="r-1", peer="decode-1"))
    found = await run(drill, run_strikes, KILLS)
    assert found.violations == ()
    assert [strike["victim"] for strike in found.numbers["strikes"]][1] == "decode-1"
    assert found.numbers["streams"]["right"] > 0
    assert found.numbers["aftermath"]["num_lost"] == 2
    assert len(found.tables[0].rows) == 2


async def test_wrong_answers_during_kills_are_violations(drill, cluster, inference):
    cluster.hit_in_all(fault_pb2.Hit(request_id="r-1"))

    async def spoil():
        if any(worker.faults for worker in cluster.workers.values()):
            inference.requests[-1].token_ids.ids[0] = DYING

    inference.hold = spoil
    found = await run(drill, run_strikes, KILLS)
    assert any("UNAVAILABLE after 2 of" in violation for violation in found.violations)
    assert found.numbers["streams"]["failed"] > 0


async def test_blocks_that_are_left_are_violations(drill, cluster, monkeypatch):
    monkeypatch.setattr("bench.drill.drill._GIVE_UP_QUIET_S", 0.2)
    cluster.hit_in_all(fault_pb2.Hit())
    cluster.workers["decode-0"].ledger = worker_pb2.GetLedgerResponse(total_blocks=8, free_blocks=6, owned_blocks=2)
    found = await run(drill, run_strikes, KILLS)
    assert any("decode-0: 2 owned blocks" in violation for violation in found.violations)


async def test_a_worker_that_is_lost_without_a_strike_is_a_violation(drill, cluster):
    cluster.hit_in_all(fault_pb2.Hit())

    async def lose_one(drill, baseline):
        cluster.processes["decode-1"].kill()
        assert await cluster.drilled.holds_within(lambda: cluster.drilled.roster.num_lost == 1, 20.0)
        return await run_strikes(drill, baseline, KILLS)

    async with asyncio.timeout(60):
        found, can_go_on = await run_scenario(drill, Scenario("", lose_one), QUESTIONS)
    assert can_go_on
    assert [violation.split(" (")[0] for violation in found.violations] == ["lost though it was not struck: decode-1"]


async def test_a_cluster_that_stays_down_ends_the_drill_with_what_was_found(drill, cluster, monkeypatch):
    monkeypatch.setattr(striker_module, "RESTART_TIMEOUT_S", 0.5)
    monkeypatch.setattr("bench.drill.drill.RESTART_TIMEOUT_S", 0.5)
    monkeypatch.setattr(cluster, "restarts", False)
    cluster.hit_in_all(fault_pb2.Hit())
    twice = StrikeOptions("kill", lambda seed: [Strike(Phase.QUEUED, "prefill", 0)] * 2)
    async with asyncio.timeout(60):
        scenario = Scenario("", functools.partial(run_strikes, options=twice))
        found, can_go_on = await run_scenario(drill, scenario, QUESTIONS)
    assert not can_go_on
    assert "given up after 1 strikes" in found.violations[0]
    assert "the drill cannot go on" in found.violations[1]
    assert len(found.numbers["strikes"]) == 1


async def test_an_undisturbed_cluster_that_does_not_repeat_its_answers_is_of_no_use(drill, inference):
    async def die():
        inference.requests[-1].token_ids.ids[0] = DYING

    inference.hold = die
    with pytest.raises(DrillFailed, match="undisturbed"):
        await take_baseline(drill, QUESTIONS)


async def test_messages_are_spoiled_in_prefill_workers_and_counted(drill, cluster):
    cluster.workers["prefill-0"].hits = [
        fault_pb2.Hit(request_id="run-3", what="drop"),
        fault_pb2.Hit(request_id="run-3", what="corrupt"),
        fault_pb2.Hit(request_id="run-4", what="duplicate"),
    ]
    found = await run(drill, run_messages, MessageOptions(num_requests=20, drop=0.1, corrupt=0.2, duplicate=0.3))
    assert found.violations == ()
    assert found.numbers["messages_hit"] == {"drop": 1, "corrupt": 1, "duplicate": 1}
    assert (found.numbers["num_requests_hit"], found.numbers["num_requests_hit_not_recovered"]) == (1, 1)
    assert found.numbers["streams"]["right"] == 20
    (fault,) = cluster.workers["prefill-1"].faults
    assert fault.kv_messages.drop == pytest.approx(0.1)
    assert cluster.workers["decode-0"].faults == []


async def test_messages_that_nobody_hit_prove_nothing(drill):
    found = await run(drill, run_messages, MessageOptions(num_requests=3))
    assert "no message was hit" in found.violations[0]


async def test_requests_are_cancelled_at_all_times(drill, inference):
    inference.hold = functools.partial(asyncio.sleep, 0.02)
    found = await run(drill, run_cancels, CancelOptions(num_requests=60, num_probes=0))
    assert found.violations == ()
    counts = found.numbers["streams"]
    assert counts["cancelled"] + counts["right"] == 60
    assert counts["cancelled"] > 20


async def test_workers_that_do_not_count_what_they_prefill_are_told(drill, monkeypatch):
    monkeypatch.setattr("bench.drill.prefill_probe._BEGIN_TIMEOUT_S", 0.01)
    found = await run(drill, run_cancels, CancelOptions(num_requests=1, num_probes=1))
    assert "do not count" in found.violations[0]


async def test_a_soak_has_strikes_cancels_and_memory(drill, cluster, inference):
    cluster.hit_in_all(fault_pb2.Hit())
    inference.hold = functools.partial(asyncio.sleep, 0.02)
    options = SoakOptions(minutes=2 / 60, cancel_share=0.5, strike_interval_s=0.6)
    found = await run(drill, run_soak, options)
    assert found.violations == ()
    assert found.numbers["num_strikes"] == 2
    assert found.numbers["streams"]["cancelled"] > 0
    assert {curve["name"] for curve in found.numbers["memory"]} >= {"prefill-0", "decode-0"}


async def test_memory_is_sampled_for_each_process(cluster):
    async with cluster.drilled.watched():
        await cluster.drilled.wait_for_full_strength(20.0)
        sampler = MemorySampler(cluster.drilled)
        found = await sampler.sample()
        await sampler.sample()
    assert {name for name, _ in found} == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert all(len(curve.samples) == 2 for curve in sampler.curves)
