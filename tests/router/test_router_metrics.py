"""What is counted for each way a request can end, on a real router with scripted workers."""

import asyncio
import json
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import BatonError, Cancelled, DeadlineExceeded, InvalidRequest, ResourceExhausted, Unavailable
from baton.metrics import DISCOVERY_PATH
from router.router_metrics import PHASES, RouterMetrics, SloTargets, slo_verdict


async def get(address, path):
    def read():
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
            return response.read().decode()

    return await asyncio.to_thread(read)


@pytest.fixture
def scrape():
    """All samples of a router now, by name and the values of their labels."""

    async def read(router):
        families = text_string_to_metric_families(await get(router.metrics_address, "/metrics"))
        return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}

    return read


async def test_a_whole_answer_is_counted_once_with_its_parts(start_router, pair, scrape):
    router, client = await start_router(*pair)
    stream = client.generate("Hi", max_tokens=4)
    await stream.read()
    found = await scrape(router)
    timeline, usage = stream.timeline, stream.usage
    assert found["baton_requests_total", "ok"] == 1
    assert found["baton_request_success_total", "length"] == 1
    assert found["baton_requests_by_path_total", "disaggregated"] == 1
    assert found["baton_generation_tokens_total",] == usage.completion_tokens == 4
    assert found["baton_prompt_tokens_total",] == usage.prompt_tokens
    assert found["baton_requests_running",] == found["baton_requests_waiting",] == 0
    assert found["baton_time_to_first_token_seconds_sum",] == pytest.approx(timeline.ttft_s)
    assert found["baton_e2e_request_latency_seconds_sum",] == pytest.approx(timeline.e2e_s)
    parts = [found["baton_request_phase_seconds_sum", phase] for phase in PHASES]
    assert sum(parts) == pytest.approx(timeline.ttft_s)
    assert found["baton_inter_token_latency_seconds_count",] == 3
    assert found["baton_request_time_per_output_token_seconds_count",] == 1
    assert found["baton_kv_transfer_bytes_total", timeline.transport] == timeline.kv_bytes


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "ok"),
        (InvalidRequest("no"), "client_error"),
        (Unavailable("no"), "unavailable"),
        (DeadlineExceeded("no"), "deadline"),
        (Cancelled("no"), "cancelled"),
        (ResourceExhausted("no", reason="QUEUE_FULL"), "rejected"),
        (asyncio.CancelledError(), "cancelled"),
        (ValueError("a bug"), "error"),
    ],
)
async def test_every_end_is_counted_once(error, status, outcome_of_an_answer):
    metrics = RouterMetrics()
    metrics.note_arrival()
    metrics.note_end(outcome_of_an_answer, error)
    value = metrics.instruments.registry.get_sample_value
    counts = {s: value("baton_requests_total", {"status": s}) for s in ("ok", status)}
    assert counts == {"ok": float(error is None), status: 1.0}
    assert value("baton_requests_running") == 0
    assert value("baton_e2e_request_latency_seconds_count") == float(error is None)
    assert value("baton_time_to_first_token_seconds_count") == 1  # it had a first token, whatever came then
    assert {value("baton_request_phase_seconds_count", {"phase": phase}) for phase in PHASES} == {1}


async def test_ends_on_a_server_are_told_by_status(start_router, pair, messages, scrape):
    router, client = await start_router(*pair)
    with pytest.raises(InvalidRequest):
        await client.generate([1] * 10_000, max_tokens=2).read()
    hold = asyncio.Event()

    async def wait(request):
        yield messages.reserved()
        await hold.wait()

    pair[1].decode = wait
    stream = client.generate("Hi", max_tokens=2, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded):
        await stream.read()
    hold.set()
    found = await scrape(router)
    assert (found["baton_requests_total", "client_error"], found["baton_requests_total", "deadline"]) == (1, 1)
    assert found["baton_requests_total", "ok"] == found["baton_requests_running",] == 0


async def test_rejections_are_told_by_reason(start_router, pair, eventually, scrape):
    router, client = await start_router(*pair, max_waiting=0)
    pair[1].report(num_free_blocks=0)
    await eventually(lambda: router._membership.member("decode-0").view().num_free_blocks == 0)
    with pytest.raises(ResourceExhausted):
        await client.generate("Hi", max_tokens=2).read()
    found = await scrape(router)
    assert found["baton_rejections_total", "QUEUE_FULL"] == found["baton_requests_total", "rejected"] == 1


async def test_a_recovery_is_told_by_its_reason(outcome_of_an_answer):
    metrics = RouterMetrics()
    for reason in ("PREEMPTED", "PREEMPTED", "what a worker may say", "X" * 41):
        outcome_of_an_answer.note_recovery(BatonError("", reason=reason))
    metrics.note_arrival()
    metrics.note_end(outcome_of_an_answer, None)
    value = metrics.instruments.registry.get_sample_value
    assert value("baton_recoveries_total", {"reason": "PREEMPTED"}) == 2
    assert value("baton_recoveries_total", {"reason": "OTHER"}) == 2


def test_what_has_not_happened_yet_is_zero_and_not_unknown():
    """Or the first recoveries would be no increase, and no alert."""
    value = RouterMetrics().instruments.registry.get_sample_value
    assert value("baton_recoveries_total", {"reason": "CONNECTION_LOST"}) == 0
    assert value("baton_rejections_total", {"reason": "QUEUE_FULL"}) == 0


async def test_workers_are_up_as_long_as_requests_may_go_there(start_router, pair, eventually, scrape):
    router, _ = await start_router(*pair)
    found = await scrape(router)
    assert (found["baton_worker_up", "prefill-0"], found["baton_worker_up", "decode-0"]) == (1, 1)
    pair[0].report(is_ready=False)
    await eventually(lambda: not router._membership.member("prefill-0").view().is_ready)
    assert (await scrape(router))["baton_worker_up", "prefill-0"] == 0
    await router.set_workers([pair[1].address])
    assert ("baton_worker_up", "prefill-0") not in await scrape(router)


async def test_prometheus_finds_the_router_and_every_worker_with_metrics(start_router, pair):
    router, _ = await start_router(*pair)

    class Worker:
        name, role, address, metrics_address = "decode-9", "decode", "127.0.0.1:1", "127.0.0.1:2"

    await router.set_workers([pair[0].address, Worker])
    targets = json.loads(await get(router.metrics_address, DISCOVERY_PATH))
    assert {target["targets"][0]: target["labels"]["role"] for target in targets} == {
        router.metrics_address: "router",
        "127.0.0.1:2": "decode",
    }


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "verdict"),
    [(0.5, 0.05, "met"), (0.6, 0.05, "ttft_missed"), (0.5, 0.06, "tpot_missed"), (0.6, 0.06, "both_missed")],
)
def test_a_target_is_missed_by_what_is_above_it(ttft_s, tpot_s, verdict):
    assert slo_verdict(SloTargets(0.5, 0.05), ttft_s, tpot_s) == verdict
    assert slo_verdict(SloTargets(), ttft_s, tpot_s) == "met"


def test_without_targets_nothing_is_counted_against_them(outcome_of_an_answer):
    for targets, count in ((SloTargets(), 0), (SloTargets(ttft_s=10.0), 1)):
        metrics = RouterMetrics(targets)
        metrics.note_end(outcome_of_an_answer, None)
        assert metrics.instruments.registry.get_sample_value("baton_slo_requests_total", {"slo": "met"}) == count
