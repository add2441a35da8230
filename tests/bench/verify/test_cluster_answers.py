"""Requests to a real server, and what is kept of its answers."""

import pytest

from baton.aio_client import AsyncClient
from bench.verify.cases import Case, seeded
from bench.verify.cluster_answers import CONCURRENCY, ClusterAnswer, ask_cluster
from bench.verify.comparison import Answer

REFUSED_TOKEN, DYING_TOKEN = 901, 902


def _case(first_token: int, num_tokens: int = 3) -> Case:
    sampling = seeded(5, num_tokens, [7, 9], top_k=4)
    return Case("token ids", [first_token, 1], (first_token, 1), sampling, own_stop_ids=(9,))


async def _ask(inference, cases: list[Case], salt: str = "salt") -> list[ClusterAnswer]:
    done: list[None] = []
    async with AsyncClient(inference.address) as client:
        answers = await ask_cluster(client, cases, salt, timeout_s=30.0, on_done=lambda: done.append(None))
    assert len(done) == len(cases)
    return answers


async def test_answers_come_in_the_order_of_the_cases(inference) -> None:
    answers = await _ask(inference, [_case(1, 3), _case(2, 5), _case(3, 1)])
    assert [a.answer for a in answers] == [Answer(tuple(range(count)), "length") for count in (3, 5, 1)]
    assert {a.usage for a in answers} == {(2, 3), (2, 5), (2, 1)}
    assert {a.path for a in answers} == {"disaggregated"}
    assert inference.most_under_way <= CONCURRENCY


async def test_a_case_keeps_its_own_part_of_the_prefix_cache(inference) -> None:
    cases = [_case(1), _case(2)]
    await _ask(inference, cases)
    await _ask(inference, cases)
    salts = [(r.token_ids.ids[0], r.cache_salt) for r in inference.requests]
    assert sorted(salts) == [(1, "salt-0"), (1, "salt-0"), (2, "salt-1"), (2, "salt-1")]


@pytest.mark.parametrize(("token", "told"), [(REFUSED_TOKEN, "QUEUE_FULL"), (DYING_TOKEN, "gone")])
async def test_a_failure_is_told_and_the_others_go_on(inference, token: int, told: str) -> None:
    failed, answered = await _ask(inference, [_case(token), _case(1)])
    assert failed.answer is None
    assert told in failed.failure
    assert answered.answer is not None
