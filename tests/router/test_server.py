import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.channel import PortUnavailableError
from baton.errors import Cancelled, InvalidRequest, ResourceExhausted, Unavailable
from router import membership as membership_module
from router.server import SERVICE_NAME, RouterServer, RouterSpec

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(membership_module, "RECONNECT_DELAY_S", 0.02)


def addresses(*workers):
    return [worker.address for worker in workers]


def sent(router):
    """Requests counted on each worker, by name."""
    return {view.name: view.sent_sequences for view in router._membership.views()}


class Health:
    """The router's health, as a probe sees it."""

    def __init__(self, client):
        self._stub = health_pb2_grpc.HealthStub(client._channel)

    async def check(self, service=SERVICE_NAME):
        return (await self._stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status

    async def becomes(self, status):
        call = self._stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=10)
        async for response in call:
            if response.status == status:
                call.cancel()
                return
        raise AssertionError("the watch ended")


async def test_alive_is_not_ready(start_router):
    router, client = await start_router()
    health = Health(client)
    assert await health.check("") == SERVING
    assert await health.check() == NOT_SERVING
    assert not router.ready


async def test_ready_with_a_pair_and_not_without(start_router, pair):
    """No pair, not ready; nothing needs a restart afterwards."""
    router, client = await start_router(pair[0])
    health = Health(client)
    assert await health.check() == NOT_SERVING
    await router.set_workers(addresses(*pair))
    await health.becomes(SERVING)
    assert router.ready
    pair[1].report(is_ready=False)
    await health.becomes(NOT_SERVING)
    pair[1].report(is_ready=True)
    await health.becomes(SERVING)
    await router.set_workers(addresses(pair[1]))
    await health.becomes(NOT_SERVING)


async def test_busy_is_ready(start_router, pair, eventually):
    router, _ = await start_router(*pair)
    pair[1].report(num_running=32, num_free_blocks=0)
    await eventually(lambda: router._membership.member("decode-0").view().num_free_blocks == 0)
    assert router.ready


async def test_half_a_pair_with_work_is_not_ready(start_router, pair, eventually):
    router, _ = await start_router(pair[0])
    pair[0].report(num_running=1)
    await eventually(lambda: router._membership.member("prefill-0").view().num_sequences == 1)
    assert not router.ready


async def test_a_mixed_worker_alone_is_ready(start_router, start_worker):
    router, client = await start_router(await start_worker("mixed-0", "mixed"))
    assert router.ready
    stream = client.generate([1], max_tokens=2)
    await stream.read()
    assert stream.token_ids == [100, 101]


async def test_without_workers_a_request_is_unavailable_within_a_second_or_so(start_router):
    _, client = await start_router()
    async with asyncio.timeout(2):
        results = await asyncio.gather(
            *(client.generate([1], max_tokens=2).read() for _ in range(5)), return_exceptions=True
        )
    assert [type(result) for result in results] == [Unavailable] * 5


async def test_a_worker_in_another_life_serves_the_next_requests(start_router, pair, start_worker, eventually):
    """At the same address and then at another one."""
    prefill, decode = pair
    router, client = await start_router(prefill, decode)
    await client.generate([1], max_tokens=2).read()
    await decode.server.stop(grace=0)
    await eventually(lambda: not router.ready)
    again = await start_worker("decode-0", "decode", port=decode.port, epoch="e2")
    await eventually(lambda: router.ready)
    for _ in range(5):
        await client.generate([1], max_tokens=2).read()
    assert len(again.decode_requests) == 5
    moved = await start_worker("decode-0", "decode", epoch="e3")
    await router.set_workers(addresses(prefill, moved))
    await eventually(lambda: router.ready)
    await client.generate([1], max_tokens=2).read()
    assert len(moved.decode_requests) == 1


@pytest.fixture
async def one_prefill_two_decodes(start_worker):
    return [await start_worker(n, r) for n, r in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"))]


async def test_counters_are_zero_after_cancelled_invalid_and_normal_requests(
    start_router, one_prefill_two_decodes, eventually
):
    prefill, *decodes = workers = one_prefill_two_decodes
    router, client = await start_router(*workers)

    async def never(request):
        await asyncio.Event().wait()
        yield

    prefill.prefill = never
    cancelled = [client.generate([1], max_tokens=9) for _ in range(50)]
    reading = [asyncio.create_task(stream.read()) for stream in cancelled]
    await eventually(lambda: len(prefill.open_calls) > 20)
    for stream in cancelled:
        stream.cancel()
    results = await asyncio.gather(*reading, return_exceptions=True)
    assert {type(result) for result in results} == {Cancelled}
    invalid = [client.generate([5] * 2000, max_tokens=9).read() for _ in range(50)]
    results = await asyncio.gather(*invalid, return_exceptions=True)
    assert {type(result) for result in results} == {InvalidRequest}
    await eventually(lambda: not any(worker.open_calls for worker in workers))
    assert router.ready

    prefill.prefill = prefill.prefill_at_once
    streams = [client.generate([1], max_tokens=3) for _ in range(50)]
    await asyncio.gather(*(stream.read() for stream in streams))
    assert all(stream.token_ids == [100, 101, 102] for stream in streams)
    await eventually(lambda: sent(router) == {"p0": 0, "d0": 0, "d1": 0})

    finish = asyncio.Event()

    def wait_with(worker):
        async def decode(request):
            await finish.wait()
            async for response in worker.decode_at_once(request):
                yield response

        return decode

    for decode in decodes:
        decode.decode = wait_with(decode)
    streams = [client.generate([1], max_tokens=3) for _ in range(20)]
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    await eventually(lambda: sum(len(decode.open_calls) for decode in decodes) == 20)
    assert [len(decode.open_calls) for decode in decodes] == [10, 10]
    finish.set()
    await asyncio.gather(*reading)


async def test_a_sick_worker_is_left_out_and_comes_back(
    start_router, one_prefill_two_decodes, start_worker, eventually
):
    """While it is away no leg of a request goes to it."""
    prefill, first, second = one_prefill_two_decodes
    router, client = await start_router(prefill, first, second)
    await first.server.stop(grace=0)
    await eventually(lambda: len(router._membership.views()) == 2)
    for _ in range(3):
        await client.generate([1], max_tokens=2).read()
    assert len(second.decode_requests) == 3
    again = await start_worker("d0", "decode", port=first.port, epoch="e2")
    await eventually(lambda: len(router._membership.views()) == 3)
    await client.generate([1], max_tokens=2).read()
    assert len(again.decode_requests) == 1


async def test_a_full_queue_is_resource_exhausted(start_router, pair, eventually):
    router, client = await start_router(*pair, max_waiting=2)
    pair[1].report(num_free_blocks=0)
    await eventually(lambda: router._membership.member("decode-0").view().num_free_blocks == 0)
    streams = [client.generate([1], max_tokens=2) for _ in range(3)]
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    (refused,) = done
    assert isinstance(refused.exception(), ResourceExhausted)
    assert refused.exception().retry_after_s == 1.0
    pair[1].report(num_free_blocks=64)
    results = await asyncio.gather(*reading, return_exceptions=True)
    assert sum(isinstance(result, str) for result in results) == 2
    assert len(pair[1].decode_requests) == 2


async def test_requests_under_way_end_within_the_grace(model_dir, pair, eventually, start_router):
    router, client = await start_router(*pair)
    finish = asyncio.Event()

    async def slow(request):
        await finish.wait()
        async for response in pair[1].decode_at_once(request):
            yield response

    pair[1].decode = slow
    reading = asyncio.create_task(client.generate([1], max_tokens=2).read())
    await eventually(lambda: pair[1].open_calls)
    stopping = asyncio.create_task(router.stop(grace_s=5))
    await asyncio.sleep(0)  # lets it begin to stop
    finish.set()
    assert await reading
    await stopping


async def test_what_outlasts_the_grace_ends_as_unavailable(pair, eventually, start_router):
    """Not silently, and the workers are released."""
    router, client = await start_router(*pair)

    async def never(request):
        await asyncio.Event().wait()
        yield

    pair[1].decode = never
    reading = asyncio.create_task(client.generate([1], max_tokens=2).read())
    await eventually(lambda: pair[1].open_calls)
    await router.stop(grace_s=0.05)
    with pytest.raises(Unavailable):
        await reading
    await eventually(lambda: not pair[1].open_calls)


async def test_a_taken_port_is_an_error(start_router, model_dir):
    router, _ = await start_router()
    port = int(router.address.rpartition(":")[2])
    second = RouterServer()
    with pytest.raises(PortUnavailableError):
        await second.start(RouterSpec(str(model_dir), "tiny", port=port))
