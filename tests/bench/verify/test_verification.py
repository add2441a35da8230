"""A true answer passes, and every way of corrupting it is caught; judged by the real model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.v1 import inference_pb2
from bench.verify.cases import Case, greedy, seeded
from bench.verify.cluster_answers import ClusterAnswer
from bench.verify.comparison import Answer, Comparison, Divergence, judge_tokens
from bench.verify.mixed_worker import MixedComparison
from bench.verify.reference import Reference, ReferenceTokenizer
from bench.verify.report import MIXED
from bench.verify.verification import Answers, choices_of, compare_with_transformers, own_problem
from engine.sampler import sample

VOCAB_SIZE = 49152
EOS = 2
CAPITAL = "The capital of France is"
KNOWN = (7042, 30, 198, 198, 504, 2988, 314, 42)  # its greedy continuation by transformers in float32
NUM_TOKENS = 8

Corruption = Callable[[tuple[int, ...]], tuple[int, ...]]

CORRUPTIONS: dict[str, Corruption] = {
    "first token": lambda ids: (9, *ids[1:]),
    "middle token": lambda ids: (*ids[:4], 9, *ids[5:]),
    "last token": lambda ids: (*ids[:-1], 9),
    "first doubled": lambda ids: (ids[0], *ids[:-1]),
    "middle doubled": lambda ids: (*ids[:4], *ids[3:-1]),
    "one too many": lambda ids: (*ids, ids[-1]),
    "first missing": lambda ids: (*ids[1:], 9),
    "middle missing": lambda ids: (*ids[:4], *ids[5:], 9),
    "one too few": lambda ids: ids[:-1],
    "two changed about": lambda ids: (ids[0], ids[2], ids[1], *ids[3:]),
    "nothing": lambda ids: (),
    "another vocabulary": lambda ids: (*ids[:-1], VOCAB_SIZE),
}
SAMPLINGS = {
    "greedy": greedy(NUM_TOKENS, [EOS]),
    "seeded": seeded(11, NUM_TOKENS, [EOS]),
    "top-k": seeded(12, NUM_TOKENS, [EOS], top_k=40),
    "top-p": seeded(13, NUM_TOKENS, [EOS], top_p=0.95),
    "both": seeded(2**64 - 1, NUM_TOKENS, [EOS], top_k=20, top_p=0.9),
}


def _case(tokenizer: ReferenceTokenizer, sampling_name: str) -> Case:
    return Case("text", CAPITAL, tuple(tokenizer.encode(CAPITAL)), SAMPLINGS[sampling_name])


@pytest.fixture(scope="module")
def true_answers(reference: Reference, tokenizer: ReferenceTokenizer) -> dict[str, tuple[int, ...]]:
    """One token after the other from transformers' logits, chosen by the engine's sampler."""
    answers: dict[str, tuple[int, ...]] = {}
    for name, sampling in SAMPLINGS.items():
        prompt, answer = tokenizer.encode(CAPITAL), []
        while len(answer) < NUM_TOKENS:
            *_, row = reference.rows(prompt, [*answer, 0])
            answer += sample(torch.tensor(np.array([row])), [sampling], [len(prompt) + len(answer)])
        assert EOS not in answer
        answers[name] = tuple(answer)
    return answers


def _got(case: Case, token_ids: tuple[int, ...], decode, reason: str = "length") -> ClusterAnswer:
    text = decode([i for i in token_ids if i < VOCAB_SIZE])
    usage = (len(case.token_ids), len(token_ids))
    return ClusterAnswer(Answer(token_ids, reason), text=text, usage=usage, path="disaggregated")


def _is_wrong(case: Case, token_ids: tuple[int, ...], reference: Reference, tokenizer: ReferenceTokenizer) -> bool:
    got = _got(case, token_ids, tokenizer.decode)
    if own_problem(case, got, VOCAB_SIZE, tokenizer.decode):
        return True
    return Comparison(judge_tokens(token_ids, *choices_of(reference, case, got.answer, "float32"))).is_wrong


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_true_answer_is_right(true_answers, reference, tokenizer, name: str) -> None:
    case = _case(tokenizer, name)
    judged = judge_tokens(
        true_answers[name], *choices_of(reference, case, Answer(true_answers[name], "length"), "float32")
    )
    assert judged == ()
    assert not _is_wrong(case, true_answers[name], reference, tokenizer)


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("name", ["greedy", "seeded", "both"])
def test_a_corrupted_answer_is_wrong(true_answers, reference, tokenizer, name: str, corruption: str) -> None:
    corrupted = CORRUPTIONS[corruption](true_answers[name])
    assert corrupted != true_answers[name]
    assert _is_wrong(_case(tokenizer, name), corrupted, reference, tokenizer)


@pytest.mark.parametrize(
    "change",
    [{"seed": 14}, {"temperature": 1.5}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.3}],
    ids=lambda change: next(iter(change)),
)
def test_other_sampling_than_asked_for_is_wrong(true_answers, reference, tokenizer, change) -> None:
    case = _case(tokenizer, "seeded")
    assert _is_wrong(
        replace(case, sampling=replace(case.sampling, **change)), true_answers["seeded"], reference, tokenizer
    )


def test_positions_shifted_by_one_are_wrong(true_answers, reference, tokenizer) -> None:
    """As if a continuation on another worker counted from the wrong place: the same logits, other numbers."""
    case = _case(tokenizer, "seeded")
    prompt = list(case.token_ids)
    shifted: list[int] = []
    while len(shifted) < NUM_TOKENS:
        *_, row = reference.rows(prompt, [*shifted, 0])
        shifted += sample(torch.tensor(np.array([row])), [case.sampling], [len(prompt) + len(shifted) + 1])
    assert _is_wrong(case, tuple(shifted), reference, tokenizer)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"usage": (6, 8)}, "counts 6 prompt and 8 generated tokens: there are 5, 8"),
        ({"usage": (5, 7)}, "there are 5, 8"),
        ({"text": " Lyon"}, "its text is ' Lyon'"),
        ({"answer": Answer(KNOWN, "stop", 42)}, "it ended with length"),
        ({"answer": Answer(KNOWN[:7], "length")}, "ended after 7 of 8"),
        ({"answer": None, "failure": "UNAVAILABLE: decode-0 died"}, "decode-0 died"),
    ],
)
def test_what_an_answer_says_of_itself_is_checked(tokenizer, change, told: str) -> None:
    case = replace(_case(tokenizer, "greedy"), sampling=greedy(8, [EOS]))
    right = _got(case, KNOWN, tokenizer.decode)
    assert own_problem(case, right, VOCAB_SIZE, tokenizer.decode) == ""
    assert told in own_problem(case, replace(right, **change), VOCAB_SIZE, tokenizer.decode)


def test_a_stop_token_is_no_part_of_the_text(tokenizer) -> None:
    case = replace(_case(tokenizer, "greedy"), sampling=greedy(8, [198]))
    answer = Answer(KNOWN[:3], "stop", 198)
    got = ClusterAnswer(answer, text=" Paris.", usage=(5, 3))
    assert own_problem(case, got, VOCAB_SIZE, tokenizer.decode) == ""
    assert own_problem(case, replace(got, text=" Paris.\n"), VOCAB_SIZE, tokenizer.decode) != ""


class _Silent:
    def begin(self, text: str, num_steps: int = 0) -> None:
        """Says nothing."""

    def advance(self) -> None:
        """Says nothing."""


def _answers(case: Case, token_ids: tuple[int, ...], mixed: MixedComparison, decode, dtype: str) -> Answers:
    got = _got(case, token_ids, decode)
    info = inference_pb2.GetModelInfoResponse(dtype=dtype, vocab_size=VOCAB_SIZE)
    return Answers(info, [case], ([got], [got]), {(0, got.answer): mixed})


def test_comparisons_by_name(model_dir: Path, tokenizer: ReferenceTokenizer) -> None:
    """In bfloat16 against both types; the mixed worker's other token is judged by both too."""
    case = replace(_case(tokenizer, "greedy"), sampling=greedy(8, [EOS]))
    mixed = MixedComparison((Divergence(0, 9),), "ends early")
    answers = _answers(case, KNOWN, mixed, tokenizer.decode, "bfloat16")
    [comparisons] = compare_with_transformers(model_dir, answers, _Silent()).values()
    assert list(comparisons) == [MIXED, "transformers bfloat16", "transformers float32"]
    assert not comparisons["transformers float32"].differences
    assert not comparisons["transformers bfloat16"].is_wrong
    assert comparisons[MIXED].problem == "ends early"
    assert not comparisons[MIXED].differences[0].is_tie


def test_float32_is_compared_once(model_dir: Path, tokenizer: ReferenceTokenizer) -> None:
    case = replace(_case(tokenizer, "greedy"), sampling=greedy(8, [EOS]))
    answers = _answers(case, (*KNOWN[:7], 9), MixedComparison(), tokenizer.decode, "float32")
    [comparisons] = compare_with_transformers(model_dir, answers, _Silent()).values()
    assert list(comparisons) == [MIXED, "transformers float32"]
    assert comparisons["transformers float32"].is_wrong
    assert [d.index for d in comparisons["transformers float32"].differences] == [7]
    assert not comparisons[MIXED].is_wrong
