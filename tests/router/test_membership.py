import asyncio

import pytest

from baton.v1 import worker_pb2, worker_pb2_grpc
from kv_transfer.fingerprint import Fingerprint
from router import membership as membership_module
from router.membership import Assignment


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(membership_module, "RECONNECT_DELAY_S", 0.02)


async def test_a_worker_is_known_with_identity_and_load(follow, membership, start_worker):
    worker = await start_worker("d0", "decode", num_blocks=10, block_size_tokens=32)
    worker.report(num_free_blocks=7, num_running=1, num_waiting=2, num_reserved=3, num_queued_tokens=40)
    await follow(worker)
    (view,) = membership.views()
    assert (view.name, view.can_prefill, view.can_decode, view.is_ready) == ("d0", False, True, True)
    assert view.fingerprint == Fingerprint(1, "m", "float32", 2, 1, 8)
    assert (view.num_blocks, view.block_size_tokens, view.load_free_blocks) == (10, 32, 7)
    assert (view.load_sequences, view.load_queued_tokens) == (6, 40)
    assert [info.epoch for info in membership.infos()] == ["e1"]


@pytest.mark.parametrize(
    ("role", "can"), [("prefill", (True, False)), ("decode", (False, True)), ("mixed", (True, True))]
)
async def test_roles(follow, membership, start_worker, role, can):
    await follow(await start_worker("w", role))
    (view,) = membership.views()
    assert (view.can_prefill, view.can_decode) == can


async def test_load_is_followed(follow, membership, pair, eventually):
    await follow(*pair)
    pair[1].report(num_running=5, is_ready=False)
    await eventually(lambda: {v.name: v.load_sequences for v in membership.views()} == {"prefill-0": 0, "decode-0": 5})
    assert {v.name: v.is_ready for v in membership.views()} == {"prefill-0": True, "decode-0": False}


async def test_news_wake_all_who_wait(follow, membership, pair):
    await follow(*pair)
    waiters = [asyncio.create_task(membership.wait_for_change()) for _ in range(3)]
    await asyncio.sleep(0)  # lets them begin to wait
    pair[0].report(num_running=1)
    async with asyncio.timeout(5):
        await asyncio.gather(*waiters)


async def test_what_is_sent_counts_while_it_lasts(follow, membership, pair, assigned):
    await follow(*pair)
    member = membership.member("decode-0")

    def sent():
        view = member.view()
        return view.sent_sequences, view.sent_prompt_tokens, view.sent_blocks

    async with assigned(member, Assignment(20, 2)) as first, assigned(member, Assignment(20, 2)):
        assert sent() == (2, 40, 4)
        membership.note_prefilled(first)
        assert sent() == (2, 20, 4)
    assert sent() == (0, 0, 0)


async def test_an_unreachable_worker_is_unknown_until_it_is_there(membership, start_worker, eventually):
    gone = await start_worker("d0", "decode")
    await gone.server.stop(grace=0)
    await membership.set_workers([gone.address])
    await membership.wait_for_change()
    assert membership.views() == []
    await start_worker("d0", "decode", port=gone.port)
    await eventually(lambda: membership.views())


async def test_another_life_at_the_same_address_is_learned(follow, membership, start_worker, eventually):
    worker = await start_worker("d0", "decode", epoch="e1", num_blocks=10)
    await follow(worker)
    await worker.server.stop(grace=0)
    await eventually(lambda: not membership.views())
    await start_worker("d0", "decode", port=worker.port, epoch="e2", num_blocks=20)
    await eventually(lambda: membership.views())
    assert [(info.epoch, info.num_blocks) for info in membership.infos()] == [("e2", 20)]


async def test_load_of_another_life_than_the_identity_is_not_believed(follow, membership, start_worker, eventually):
    """The process was replaced between the two questions."""
    worker = await start_worker("d0", "decode", epoch="e1")
    worker.report(epoch="e2")
    await membership.set_workers([worker.address])
    await eventually(lambda: worker.num_subscriptions >= 2)
    assert membership.views() == []
    worker.info.epoch = "e2"
    await eventually(lambda: membership.views())


async def test_a_name_at_another_address_is_another_worker(follow, membership, start_worker):
    first = await start_worker("d0", "decode", epoch="e1")
    second = await start_worker("d0", "decode", epoch="e2")
    await follow(first)
    before = membership.member("d0")
    await membership.set_workers([second.address])
    assert membership.member("d0") is not before
    assert membership.views() == []
    await follow(second)
    assert [info.epoch for info in membership.infos()] == ["e2"]


async def test_a_silent_worker_is_unknown_until_it_speaks_again(monkeypatch, follow, membership, pair, eventually):
    prefill, decode = pair
    monkeypatch.setattr(membership_module, "SILENCE_LIMIT_S", 0.3)
    await follow(prefill, decode)
    decode.is_silent = prefill.is_silent = True
    await eventually(lambda: not membership.views())
    assert membership.infos() == []
    decode.is_silent = False
    decode.report()
    await eventually(lambda: [v.name for v in membership.views()] == ["decode-0"])


async def test_requests_go_on_to_a_worker_that_left(follow, membership, pair, messages, assigned, eventually):
    """A drained worker leaves the table first and finishes what it has."""
    finish = asyncio.Event()

    async def wait(request):
        yield messages.reserved()
        await finish.wait()
        yield messages.finished()

    pair[1].decode = wait
    await follow(*pair)
    member = membership.member("decode-0")
    async with assigned(member, Assignment(3, 1)):
        call = worker_pb2_grpc.DecodeServiceStub(member.channel).Decode(worker_pb2.DecodeRequest(), timeout=10)
        await call.read()
        await membership.set_workers([])
        assert membership.member("decode-0") is None
        finish.set()
        assert (await call.read()).HasField("finished")
    await eventually(lambda: member.channel.get_state().name == "SHUTDOWN")


async def test_a_worker_that_left_without_requests_is_let_go_of(follow, membership, pair, eventually):
    await follow(*pair)
    member = membership.member("decode-0")
    await membership.set_workers([pair[0].address])
    assert member.channel.get_state().name == "SHUTDOWN"
    assert [v.name for v in membership.views()] == ["prefill-0"]


async def test_closing_ends_what_is_open(follow, membership, pair, assigned):
    await follow(*pair)
    member = membership.member("decode-0")
    async with assigned(member, Assignment(3, 1)):
        await membership.close()
        assert member.channel.get_state().name == "SHUTDOWN"
    assert membership.views() == []
