"""`baton verify` against a live cluster: it finds nothing wrong there, and tells when there is."""

import asyncio

import pytest
import torch

from bench.verify.command import worker_places
from bench.verify.ledger import check_ledgers
from bench.verify.report import MIXED, Outcome, Report
from bench.verify.verification import Settings, Target, verify_answers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


class _Silent:
    def begin(self, text: str, num_steps: int = 0) -> None:
        """Says nothing."""

    def advance(self) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def report(cluster, model_dir) -> Report:
    torch.set_num_threads(1)  # two would fight with the workers for their cores
    info, answers = verify_answers(Target(cluster.address, model_dir), Settings(max_tokens=8), _Silent())
    return Report(info.model, info.dtype, answers, asyncio.run(check_ledgers(worker_places(cluster.status))))


def test_a_cluster_in_float32_is_identical(report: Report) -> None:
    assert report.outcome is not Outcome.WRONG, report.verdict
    assert report.is_good, report.verdict
    assert report.num_near_ties <= 1  # float32 leaves no more than one in some hundred tokens


def test_every_answer_was_compared_with_both(report: Report) -> None:
    assert len(report.answers) > 40
    assert {tuple(answer.comparisons) for answer in report.answers} == {(MIXED, "transformers float32")}
    assert sum(answer.num_tokens for answer in report.answers) > 250


def test_answers_came_over_a_handoff_first_and_from_the_prefix_cache_then(report: Report) -> None:
    long = [
        answer for answer in report.answers if len(answer.case.token_ids) > 16 and answer.case.sampling.max_tokens > 1
    ]
    first = [answer.got for answer in long if not answer.is_repeat]
    again = [answer.got for answer in long if answer.is_repeat]
    assert {got.path for got in first} == {"disaggregated"}
    assert {got.num_cached_tokens for got in first} == {0}
    assert all(got.num_cached_tokens >= 16 for got in again)
