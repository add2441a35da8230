"""A real worker's figures, as Prometheus gets them."""

import pytest
from prometheus_client import CollectorRegistry

from baton.metric_table import WORKER_METRICS
from engine.block_pool import Ledger
from engine.engine import EngineLoad
from engine.sampling_params import SamplingParams
from engine.step_plan import ScheduledSequence, StepPlan, StepResult
from worker.worker_metrics import MeteredRunner, WorkerCollector, worker_instruments
from worker.worker_service import LandingCounts

INFO = ("decode-0", "decode", "00aa", "float32", "16", "40")
LOAD = EngineLoad(
    ledger=Ledger(total=40, free=20, cached=10, owned=8, in_flight=2),
    num_sequences=6,
    num_running=3,
    num_waiting=2,
    num_reserved=1,
    num_queued_tokens=77,
    num_repaired_blocks=0,
    num_prefilled_tokens=500,
)


def scheduled(start: int, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(f"s{start}", start, (1,) * num_tokens, (0,), sample=True, sampling=SamplingParams())


@pytest.fixture
def instruments():
    return worker_instruments()


@pytest.fixture
def ran(instruments):
    """Runs a step of such parts, as (start, tokens) each; returns a reader of samples."""

    class Runner:
        def run(self, plan, on_layer):
            return StepResult({})

    runner = MeteredRunner(Runner(), instruments)

    def run(*parts):
        runner.run(StepPlan(tuple(scheduled(*part) for part in parts)), lambda layer: None)
        return instruments.registry.get_sample_value

    return run


@pytest.mark.parametrize(
    ("parts", "phase", "prefilled", "decoded"),
    [
        ([(0, 10)], "prefill", 10, 0),
        ([(0, 1)], "prefill", 1, 0),
        ([(16, 10), (0, 6)], "prefill", 16, 0),
        ([(5, 1), (9, 1)], "decode", 0, 2),
        ([(5, 1), (0, 30)], "mixed", 30, 1),
    ],
)
def test_a_step_is_counted_by_what_is_in_it(ran, parts, phase, prefilled, decoded):
    value = ran(*parts)
    assert value("baton_engine_step_seconds_count", {"phase": phase}) == 1
    assert value("baton_engine_tokens_total", {"phase": "prefill"}) == prefilled
    assert value("baton_engine_tokens_total", {"phase": "decode"}) == decoded
    assert value("baton_decode_batch_size_count") == int(decoded > 0)


def test_the_figures_of_a_moment_are_asked_for_at_each_scrape():
    loads = [LOAD]
    registry = CollectorRegistry()
    registry.register(WorkerCollector(INFO, lambda: loads[-1], lambda: LandingCounts(4, 5, 6)))
    value = registry.get_sample_value
    states = ("free", "cached", "owned", "in_flight")
    assert [value("baton_kv_cache_blocks", {"state": state}) for state in states] == [20, 10, 8, 2]
    assert value("baton_kv_cache_usage_ratio") == 0.25
    assert [value("baton_sequences", {"state": s}) for s in ("running", "waiting", "reserved")] == [3, 2, 1]
    assert value("baton_queued_prompt_tokens") == 77
    assert (value("baton_open_tickets"), value("baton_stale_kv_writes_total")) == (4, 5)
    assert (value("baton_kv_quarantined_blocks"), value("baton_ledger_repaired_blocks_total")) == (6, 0)
    labels = dict(zip(("worker", "role", "epoch", "dtype", "block_size", "num_blocks"), INFO, strict=True))
    assert value("baton_worker_info", labels) == 1


def test_every_metric_of_the_table_is_told(instruments):
    instruments.registry.register(WorkerCollector(INFO, lambda: LOAD, lambda: LandingCounts(0, 0, 0)))
    told = {family.name for family in instruments.registry.collect()}
    assert told == {metric.name.removesuffix("_total") for metric in WORKER_METRICS}
