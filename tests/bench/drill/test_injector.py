import asyncio

import grpc
import pytest

from baton.channel import bind, server
from baton.error_interceptor import ErrorInterceptor
from baton.errors import InvalidRequest
from baton.v1 import fault_pb2, fault_pb2_grpc
from bench.drill.injector import injected
from bench.drill.roster import Life

REQUEST = fault_pb2.InjectRequest(hold=fault_pb2.HoldFault(point=fault_pb2.FAULT_POINT_QUEUED))


class Faults(fault_pb2_grpc.FaultServiceServicer):
    """Tells of the hits that a test puts into `hits`."""

    def __init__(self):
        self.hits = asyncio.Queue()
        self.num_in_place = 0
        self.refuses = False

    async def Inject(self, request, context):  # noqa: N802 - the name in the .proto
        if self.refuses:
            raise InvalidRequest("no such fault")
        self.num_in_place += 1
        try:
            yield fault_pb2.InjectResponse(in_place=fault_pb2.InPlace())
            while True:
                hit = await self.hits.get()
                yield fault_pb2.InjectResponse(hit=hit)
        finally:
            self.num_in_place -= 1


@pytest.fixture
async def workers():
    """Two workers with faults allowed, and one that is gone."""
    running, lives, services = [], [], []
    for index in range(2):
        service, started = Faults(), server([ErrorInterceptor()])
        fault_pb2_grpc.add_FaultServiceServicer_to_server(service, started)
        lives.append(Life(f"prefill-{index}", "prefill", index, f"127.0.0.1:{bind(started, 0)}"))
        await started.start()
        running.append(started)
        services.append(service)
    lives.append(Life("prefill-2", "prefill", 2, "127.0.0.1:1"))
    yield lives, services
    for started in running:
        await started.stop(grace=0)


async def test_the_fault_is_in_place_within_the_block_only(workers, eventually):
    lives, services = workers
    async with injected(lives, REQUEST) as injection:
        assert injection.placed_in == ["prefill-0", "prefill-1"]
        assert [service.num_in_place for service in services] == [1, 1]
    await eventually(lambda: [service.num_in_place for service in services] == [0, 0])


async def test_the_first_hit_of_any_worker_is_told_with_its_name(workers):
    lives, services = workers
    async with injected(lives, REQUEST) as injection:
        services[1].hits.put_nowait(fault_pb2.Hit(request_id="r-1", peer="decode-0"))
        worker, hit = await injection.first_hit(20.0)
        assert (worker, hit.request_id, hit.peer) == ("prefill-1", "r-1", "decode-0")


async def test_all_hits_are_kept(workers, eventually):
    lives, services = workers
    async with injected(lives, REQUEST) as injection:
        for number in range(5):
            services[number % 2].hits.put_nowait(fault_pb2.Hit(request_id=str(number)))
        await eventually(lambda: len(injection.hits) == 5)
    assert sorted(hit.request_id for _, hit in injection.hits) == list("01234")


async def test_no_hit_in_time_is_none(workers):
    lives, _ = workers
    async with injected(lives, REQUEST) as injection:
        assert await injection.first_hit(0.02) is None


async def test_a_worker_that_dies_meanwhile_ends_nothing(workers):
    lives, services = workers
    async with injected(lives, REQUEST) as injection:
        services[0].hits.put_nowait("no hit, so its call ends with an error")
        services[1].hits.put_nowait(fault_pb2.Hit(request_id="r-2"))
        assert (await injection.first_hit(20.0))[0] == "prefill-1"


async def test_a_fault_that_is_refused_is_an_error(workers, eventually):
    lives, services = workers
    services[1].refuses = True
    with pytest.raises(grpc.aio.AioRpcError, match="no such fault"):
        async with injected(lives, REQUEST):
            pass
    await eventually(lambda: services[0].num_in_place == 0)
