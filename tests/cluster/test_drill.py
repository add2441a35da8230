"""A short drill: workers are killed in every phase of a request, KV messages spoiled, requests cancelled."""

import functools

import pytest
from rich.console import Console

from bench.drill.cancel_scenario import CancelOptions, run_cancels
from bench.drill.message_scenario import MessageOptions, run_messages
from bench.drill.questions import QuestionShape
from bench.drill.runner import Scenario, run_drill
from bench.drill.screen import Screen
from bench.drill.strike_scenario import StrikeOptions, run_strikes
from bench.drill.strikes import ROLES, Phase, Strike
from deploy.cluster_spec import ClusterSpec

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SHAPE = QuestionShape((40, 400), (16, 48))


def _each_phase_once(seed: int) -> list[Strike]:
    return [Strike(phase, ROLES[index % 2], num_skipped=1) for index, phase in enumerate(Phase)]


def _scenario(name: str, run, options, shape: QuestionShape = SHAPE) -> Scenario:
    return Scenario(name, functools.partial(run, options=options), 5, shape)


@pytest.fixture(scope="module")
def found(model_dir):
    """What each scenario has found, by name."""
    spec = ClusterSpec(
        model_dir=str(model_dir),
        model_name="smollm2",
        name="test-drill",
        num_prefill=2,
        num_decode=2,
        dtype="float32",
        kv_memory_bytes=256 << 20,
        allow_faults=True,
    )
    scenarios = [
        _scenario("messages", run_messages, MessageOptions(80, duplicate=0.03), QuestionShape((40, 150), (16, 24))),
        _scenario("cancel", run_cancels, CancelOptions(60, num_probes=3)),
        _scenario("kill", run_strikes, StrikeOptions("kill", _each_phase_once)),
    ]
    return dict(run_drill(spec, scenarios, Screen(Console(stderr=True)), seed=1, num_streams=6))


@pytest.mark.parametrize("scenario", ["kill", "messages", "cancel", "shutdown"])
def test_nothing_is_wrong_stuck_or_lost(found, scenario):
    assert found[scenario].violations == ()


def test_each_phase_was_struck(found):
    numbers = found["kill"].numbers
    assert [strike["phase"] for strike in numbers["strikes"]] == [phase.value for phase in Phase]
    assert numbers["num_recovered"] > 0
    assert numbers["aftermath"]["num_lost"] == len(Phase)


def test_messages_were_hit_and_their_requests_recovered(found):
    numbers = found["messages"].numbers
    assert "duplicate" in numbers["messages_hit"]
    assert len(numbers["messages_hit"]) >= 2
    assert numbers["num_recovered"] > 0
    assert numbers["num_requests_hit_not_recovered"] == 0


def test_requests_were_cancelled_before_and_after_their_first_token(found):
    numbers = found["cancel"].numbers
    assert 0 < numbers["num_cancelled_before_first_token"] < numbers["streams"]["cancelled"]
