"""What people see."""

import io
import math

from rich.console import Console

from baton.v1 import worker_pb2
from bench.verify.cases import Case, greedy, seeded
from bench.verify.cluster_answers import ClusterAnswer
from bench.verify.comparison import Answer, Comparison, Difference
from bench.verify.ledger import LedgerCheck
from bench.verify.report import MIXED, CheckedAnswer, Report
from bench.verify.view import print_report, progress_view

GOT = ClusterAnswer(Answer((10, 11), "length"), path="disaggregated")
AGAIN = ClusterAnswer(Answer((10, 11), "length"), path="local_prefill", num_cached_tokens=16, num_recoveries=1)
CLEAN = LedgerCheck("decode-0", worker_pb2.GetLedgerResponse(total_blocks=40, free_blocks=30, cached_blocks=10))
SAME = Comparison()
TIE = Comparison((Difference(1, 11, 40, 0.0123, 0.1),))
WRONG = Comparison((Difference(0, 10, 99, math.inf, 0.1),))
NAMES = (MIXED, "transformers bfloat16", "transformers float32")


def _checked(case: Case, got: ClusterAnswer, *comparisons: Comparison, problem: str = "") -> CheckedAnswer:
    return CheckedAnswer(case, got is AGAIN, got, problem, dict(zip(NAMES, comparisons, strict=False)))


def _shown(*answers: CheckedAnswer, ledgers=(CLEAN,)) -> list[str]:
    console = Console(file=io.StringIO(), width=240)
    print_report(Report("tiny", "bfloat16", answers, ledgers), console)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines() if line.strip()]


TEXT = Case("text", "x", (1, 2, 3), greedy(2))
CHAT = Case("chat", "x", (1,) * 30, seeded(7, 2))


def test_a_request_is_one_line() -> None:
    both = [_checked(TEXT, got, SAME, TIE, SAME) for got in (GOT, AGAIN)]
    lines = _shown(*both)
    assert "vs mixed worker vs transformers bfloat16 vs transformers float32" in lines[0]
    assert lines[1] == ("text greedy 3 2 disaggregated local prefill (16 cached, 1 recoveries) same 1 near-tie same")
    assert lines[2] == "The widest near-tie is 0.012 in logits; there, rounding explains up to 0.1."
    assert lines[-1] == "identical up to 2 near-ties (2 answers, 4 tokens); all ledgers clean"


def test_what_is_wrong_is_told_with_its_place() -> None:
    failed = ClusterAnswer(None, "UNAVAILABLE: gone")
    lines = _shown(
        _checked(CHAT, GOT, SAME, WRONG, SAME),
        _checked(CHAT, AGAIN, Comparison(problem="ends after 1 token"), SAME, SAME, problem="no token came"),
        _checked(TEXT, failed, problem="UNAVAILABLE: gone"),
        _checked(TEXT, failed, problem="UNAVAILABLE: gone"),
    )
    wrongs = [line for line in lines if line.startswith("WRONG ")]
    assert wrongs == [
        "WRONG chat, seed 7, asked first: token 0 is 10, transformers bfloat16 says 99: "
        "a logit would have to be inf wrong, rounding explains 0.1",
        "WRONG chat, seed 7, asked again: no token came",
        "WRONG chat, seed 7, asked again: mixed worker ends after 1 token",
        *["WRONG text, greedy, asked first: UNAVAILABLE: gone"] * 2,
    ]
    assert lines[1].endswith("WRONG WRONG same")
    assert lines[2] == "text greedy 3 0 FAILED FAILED - - -"
    assert lines[-1].startswith("WRONG: 4 of 4 answers")


def test_every_ledger_is_shown() -> None:
    broken = LedgerCheck("prefill-0", None, "does not answer")
    lines = _shown(_checked(TEXT, GOT, SAME), _checked(TEXT, AGAIN, SAME), ledgers=(CLEAN, broken))
    assert "decode-0 40 30 10 0 0 0 0 0 0 clean" in lines
    assert "prefill-0 does not answer" in lines
    assert lines[-1].endswith("ledger NOT CLEAN: prefill-0")


def test_progress_is_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    with progress_view(console) as progress:
        progress.begin("reading the model")
        progress.begin("asking the cluster", 3)
        progress.advance()
    assert console.file.getvalue().splitlines() == ["reading the model ...", "asking the cluster (3 answers) ..."]
