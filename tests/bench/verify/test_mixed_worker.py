"""A real mixed worker in this process, against answers that are known."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from baton.errors import Unavailable
from baton.v1 import inference_pb2
from bench.verify import mixed_worker
from bench.verify.cases import Case, greedy
from bench.verify.comparison import Answer, Divergence
from bench.verify.mixed_worker import MixedComparison, MixedWorker
from deploy.errors import ClusterError
from engine.model_store import model_fingerprint

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAPITAL = (504, 3575, 282, 4649, 314)  # "The capital of France is"
TRUE = (7042, 30, 198, 198, 504, 2988, 314, 42)  # by transformers, greedy, float32
ANSWER = Answer(TRUE, "length")
CASE = Case("text", list(CAPITAL), CAPITAL, greedy(len(TRUE)))
TIMEOUT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(model_dir: Path) -> AsyncIterator[MixedWorker]:
    async with mixed_worker.start(model_dir, "float32", TIMEOUT_S, lambda _: None) as running:
        yield running


async def test_a_true_answer_is_the_same_cold_and_again(worker: MixedWorker) -> None:
    for _ in range(2):
        assert await worker.compare(CASE, ANSWER, "salt") == MixedComparison()


@pytest.mark.parametrize("index", range(len(TRUE)))
async def test_a_wrong_token_is_found_and_the_rest_compared_after_it(worker: MixedWorker, index: int) -> None:
    wrong = Answer((*TRUE[:index], 9, *TRUE[index + 1 :]), "length")
    found = await worker.compare(CASE, wrong, "salt")
    assert found.divergences[0] == Divergence(index, TRUE[index])
    assert found.problem == ""
    assert [d.index for d in found.divergences] == sorted({d.index for d in found.divergences})


async def test_after_a_divergence_it_goes_on_from_the_answers_token(worker: MixedWorker) -> None:
    """` the` instead of ` Paris`: what the worker itself says after it is then no difference."""
    forked = (*CAPITAL, 260)
    rest_case = Case("text", list(forked), forked, greedy(4))
    rest: list[int] = []
    while len(rest) < 4:
        found = await worker.compare(rest_case, Answer((*rest, *[9] * (4 - len(rest))), "length"), "other")
        rest.append(found.divergences[0].other_token_id)
    answer = Answer((260, *rest), "length")
    found = await worker.compare(replace(CASE, sampling=greedy(5)), answer, "salt")
    assert found == MixedComparison((Divergence(0, 7042),))


@pytest.mark.parametrize(
    "answer",
    [Answer(TRUE[:-1], "length"), Answer(TRUE[:-1], "stop", TRUE[-2]), Answer(TRUE, "stop", 42)],
)
async def test_an_end_that_differs_is_a_problem(worker: MixedWorker, answer: Answer) -> None:
    found = await worker.compare(CASE, answer, "salt")
    assert found.divergences == ()
    assert "after 8 tokens with length" in found.problem


async def test_stop_tokens_end_its_answers_too(worker: MixedWorker) -> None:
    case = replace(CASE, sampling=greedy(8, [198]))
    assert await worker.compare(case, Answer(TRUE[:3], "stop", 198), "salt") == MixedComparison()
    assert "stop (token 198)" in (await worker.compare(case, ANSWER, "salt")).problem


async def test_another_model_or_type_is_refused(worker: MixedWorker, model_dir: Path) -> None:
    fingerprint = model_fingerprint(model_dir)
    await worker.check(inference_pb2.GetModelInfoResponse(model_fingerprint=fingerprint, dtype="float32"))
    for model, dtype in ((fingerprint, "bfloat16"), ("ab12", "float32")):
        with pytest.raises(ClusterError, match=dtype):
            await worker.check(inference_pb2.GetModelInfoResponse(model_fingerprint=model, dtype=dtype))


async def test_one_that_is_not_there_is_an_error() -> None:
    async with mixed_worker.connect("127.0.0.1:1", TIMEOUT_S) as nobody:
        with pytest.raises(Unavailable):
            await nobody.compare(CASE, ANSWER, "salt")
