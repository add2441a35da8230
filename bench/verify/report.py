"""What a verification found, and the verdict. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from google.protobuf.json_format import MessageToDict

from bench.verify.cases import Case
from bench.verify.cluster_answers import ClusterAnswer
from bench.verify.comparison import Comparison, Difference
from bench.verify.ledger import LedgerCheck

MIXED = "mixed worker"


class Outcome(Enum):
    """All answers together."""

    IDENTICAL = "identical"
    NEAR_TIES = "near_ties"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """One answer. `problem` is what is wrong with it by itself, `comparisons` are by the other's name."""

    case: Case
    is_repeat: bool
    got: ClusterAnswer
    problem: str
    comparisons: Mapping[str, Comparison]

    @property
    def is_wrong(self) -> bool:
        """Whether it is not what was to come."""
        return bool(self.problem) or any(comparison.is_wrong for comparison in self.comparisons.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return len(self.got.answer.token_ids) if self.got.answer else 0


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `ledgers` is None if the workers are not known.

    `dtype` is the cluster's; near-ties are counted against the mixed worker and against transformers in that type.
    float32, where the cluster computes in another, only bounds what rounding may do.
    """

    model: str
    dtype: str
    answers: Sequence[CheckedAnswer]
    ledgers: Sequence[LedgerCheck] | None

    @property
    def outcome(self) -> Outcome:
        """Of the answers."""
        if self.num_wrong or not self.answers:
            return Outcome.WRONG
        return Outcome.NEAR_TIES if self.num_near_ties else Outcome.IDENTICAL

    @property
    def num_wrong(self) -> int:
        """Answers that are wrong, or that did not come."""
        return sum(answer.is_wrong for answer in self.answers)

    @property
    def num_near_ties(self) -> int:
        """Tokens in place of which others could stand as well."""
        return sum(len(self._ties(answer)) for answer in self.answers)

    @property
    def unclean(self) -> list[LedgerCheck]:
        """Workers whose ledger is not clean."""
        return [check for check in self.ledgers or () if check.problem]

    @property
    def is_good(self) -> bool:
        """Whether no answer is wrong and no ledger unclean."""
        return self.outcome is not Outcome.WRONG and not self.unclean

    @property
    def verdict(self) -> str:
        """In one line."""
        return f"{self._verdict_on_answers()}; {self._verdict_on_ledgers()}"

    def _ties(self, answer: CheckedAnswer) -> frozenset[int]:
        ours = (MIXED, transformers_name(self.dtype))
        comparisons = [answer.comparisons[name] for name in ours if name in answer.comparisons]
        return frozenset().union(*(comparison.tie_indices for comparison in comparisons))

    def _verdict_on_answers(self) -> str:
        num_tokens = sum(answer.num_tokens for answer in self.answers)
        match self.outcome:
            case Outcome.WRONG:
                return f"WRONG: {self.num_wrong} of {len(self.answers)} answers"
            case Outcome.NEAR_TIES:
                ties = f"{self.num_near_ties} near-tie{'s' if self.num_near_ties > 1 else ''}"
                return f"identical up to {ties} ({len(self.answers)} answers, {num_tokens} tokens)"
            case Outcome.IDENTICAL:
                return f"identical ({len(self.answers)} answers, {num_tokens} tokens)"

    def _verdict_on_ledgers(self) -> str:
        if self.ledgers is None:
            return "ledgers not read: with --address alone the workers are not known"
        if self.unclean:
            return f"ledger NOT CLEAN: {', '.join(check.worker for check in self.unclean)}"
        return "all ledgers clean"


def transformers_name(dtype: str) -> str:
    """What comparisons with transformers in this type are called."""
    return f"transformers {dtype}"


def report_json(report: Report) -> dict[str, Any]:
    """The report for programs. An error that nothing explains is null."""
    return {
        "model": report.model,
        "dtype": report.dtype,
        "outcome": report.outcome.value,
        "verdict": report.verdict,
        "is_good": report.is_good,
        "num_wrong": report.num_wrong,
        "num_near_ties": report.num_near_ties,
        "answers": [_answer_json(answer) for answer in report.answers],
        "ledgers": None if report.ledgers is None else [_ledger_json(check) for check in report.ledgers],
    }


def _answer_json(checked: CheckedAnswer) -> dict[str, Any]:
    case, got = checked.case, checked.got
    return {
        "prompt": case.kind,
        "sampling": case.how,
        "is_repeat": checked.is_repeat,
        "prompt_tokens": len(case.token_ids),
        "token_ids": list(got.answer.token_ids) if got.answer else [],
        "path": got.path,
        "cached_tokens": got.num_cached_tokens,
        "recoveries": got.num_recoveries,
        "is_wrong": checked.is_wrong,
        "problem": checked.problem,
        "comparisons": {name: _comparison_json(comparison) for name, comparison in checked.comparisons.items()},
    }


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "is_wrong": comparison.is_wrong,
        "problem": comparison.problem,
        "differences": [_difference_json(difference) for difference in comparison.differences],
    }


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        "index": difference.index,
        "token_id": difference.token_id,
        "other_token_id": difference.other_token_id,
        "error": difference.error if math.isfinite(difference.error) else None,
        "tolerance": difference.tolerance if math.isfinite(difference.tolerance) else None,
        "is_tie": difference.is_tie,
    }


def _ledger_json(check: LedgerCheck) -> dict[str, Any]:
    ledger = None
    if check.ledger is not None:
        ledger = MessageToDict(
            check.ledger, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    return {"worker": check.worker, "problem": check.problem, "ledger": ledger}
