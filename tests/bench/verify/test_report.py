"""The verdict follows from the findings."""

import json
import math
from collections.abc import Sequence

import pytest

from baton.v1 import worker_pb2
from bench.verify.cases import Case, greedy
from bench.verify.cluster_answers import ClusterAnswer
from bench.verify.comparison import Answer, Comparison, Difference
from bench.verify.ledger import LedgerCheck
from bench.verify.report import MIXED, CheckedAnswer, Outcome, Report, report_json

CASE = Case("text", "x", (1,), greedy(3))
GOT = ClusterAnswer(Answer((10, 11, 12), "length"), path="disaggregated")
CLEAN = LedgerCheck("decode-0", worker_pb2.GetLedgerResponse(total_blocks=4, free_blocks=4))
LEAK = LedgerCheck("prefill-0", worker_pb2.GetLedgerResponse(total_blocks=4, free_blocks=3), "1 block is missing")
NAMES = (MIXED, "transformers bfloat16", "transformers float32")


def _tie(index: int) -> Comparison:
    return Comparison((Difference(index, 11, 40, 0.01, 0.1),))


WRONG = Comparison((Difference(1, 11, 40, math.inf, 0.1),))
SAME = Comparison()


def _checked(mixed=SAME, same_type=SAME, float32=SAME, *, problem: str = "", got: ClusterAnswer = GOT) -> CheckedAnswer:
    return CheckedAnswer(CASE, False, got, problem, dict(zip(NAMES, (mixed, same_type, float32), strict=True)))


def _report(*answers: CheckedAnswer, ledgers: Sequence[LedgerCheck] | None = (CLEAN,)) -> Report:
    return Report("tiny", "bfloat16", answers, ledgers)


def test_identical() -> None:
    report = _report(_checked(), _checked())
    assert (report.outcome, report.is_good) == (Outcome.IDENTICAL, True)
    assert report.verdict == "identical (2 answers, 6 tokens); all ledgers clean"


def test_a_tie_of_one_token_counts_once_and_float32_of_another_type_not() -> None:
    report = _report(_checked(_tie(1), _tie(1)), _checked(_tie(0), _tie(2)), _checked(float32=_tie(0)))
    assert (report.outcome, report.num_near_ties, report.is_good) == (Outcome.NEAR_TIES, 3, True)
    assert report.verdict.startswith("identical up to 3 near-ties (3 answers, 9 tokens)")
    assert _report(_checked(_tie(1))).verdict.startswith("identical up to 1 near-tie (")


FAILED = CheckedAnswer(CASE, True, ClusterAnswer(None, "UNAVAILABLE: gone"), "UNAVAILABLE: gone", {})


@pytest.mark.parametrize(
    "wrong",
    [
        _checked(WRONG),
        _checked(same_type=WRONG),
        _checked(float32=WRONG),
        _checked(problem="ended early"),
        _checked(Comparison(problem="ends early")),
        FAILED,
    ],
)
def test_one_wrong_answer_is_enough(wrong: CheckedAnswer) -> None:
    report = _report(_checked(), _checked(_tie(0)), wrong)
    assert (report.outcome, report.num_wrong, report.is_good) == (Outcome.WRONG, 1, False)
    assert report.verdict.startswith("WRONG: 1 of 3 answers")


def test_no_answers_are_not_a_success() -> None:
    assert not _report().is_good


def test_a_ledger_that_is_not_clean_is_bad_whatever_the_answers() -> None:
    report = _report(_checked(), ledgers=[CLEAN, LEAK])
    assert not report.is_good
    assert report.verdict == "identical (1 answers, 3 tokens); ledger NOT CLEAN: prefill-0"


def test_ledgers_that_cannot_be_read_are_said_so() -> None:
    report = _report(_checked(), ledgers=None)
    assert report.is_good
    assert "ledgers not read" in report.verdict


def test_json_is_strict_and_whole() -> None:
    report = _report(_checked(WRONG, _tie(2)), FAILED, ledgers=[LEAK, LedgerCheck("decode-1", None, "does not answer")])
    written = json.loads(json.dumps(report_json(report), allow_nan=False))
    assert (written["outcome"], written["is_good"], written["num_wrong"]) == ("wrong", False, 2)
    first, second = written["answers"]
    assert first["token_ids"] == [10, 11, 12]
    assert first["comparisons"][MIXED]["differences"] == [
        {"index": 1, "token_id": 11, "other_token_id": 40, "error": None, "tolerance": 0.1, "is_tie": False}
    ]
    assert (second["token_ids"], second["problem"]) == ([], "UNAVAILABLE: gone")
    assert written["ledgers"][0]["ledger"]["stale_writes"] in (0, "0")
    assert written["ledgers"][1] == {"worker": "decode-1", "problem": "does not answer", "ledger": None}
    assert report_json(_report(_checked(), ledgers=None))["ledgers"] is None
