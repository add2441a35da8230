"""One verification from the first question to the last comparison."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.aio_client import AsyncClient
from baton.v1 import inference_pb2
from bench.verify import mixed_worker
from bench.verify.cases import Case, make_cases
from bench.verify.cluster_answers import ClusterAnswer, ask_cluster
from bench.verify.comparison import (
    Answer,
    Comparison,
    Difference,
    ending_problem,
    judge_divergences,
    judge_tokens,
    worst_of,
)
from bench.verify.mixed_worker import MixedComparison, MixedWorker
from bench.verify.reference import Reference, ReferenceTokenizer
from bench.verify.report import MIXED, CheckedAnswer, transformers_name
from bench.verify.rounding import relative_tolerance
from bench.verify.token_choice import TokenChoice
from deploy.errors import ClusterError
from engine.model_store import model_fingerprint
from engine.sampler import uniform

_Key = tuple[int, Answer]  # number of a case and an answer to it


@dataclass(frozen=True, slots=True)
class Target:
    """What to verify: `address` of the router, the model's directory, and a mixed worker's address, empty for none."""

    address: str
    model_dir: Path
    mixed_address: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """`max_tokens` bounds each answer, `timeout_s` the time for it."""

    max_tokens: int = 32
    timeout_s: float = 600.0


class Progress(Protocol):
    """Hears how far it is."""

    def begin(self, text: str, num_steps: int = 0) -> None:
        """A phase begins; of so many steps, 0 if that is not known."""
        ...

    def advance(self) -> None:
        """A step of it is done."""
        ...


@dataclass(frozen=True, slots=True)
class Answers:
    """What was asked, what came the first and the second time, and how it compares with the mixed worker's."""

    info: inference_pb2.GetModelInfoResponse
    cases: Sequence[Case]
    rounds: tuple[Sequence[ClusterAnswer], Sequence[ClusterAnswer]]
    mixed: Mapping[_Key, MixedComparison]


def verify_answers(
    target: Target, settings: Settings, progress: Progress
) -> tuple[inference_pb2.GetModelInfoResponse, list[CheckedAnswer]]:
    """Asks everything twice and compares. Raises BatonError, ClusterError if that cannot be done.

    One model is in memory at a time: the mixed worker's, then transformers' in the cluster's type and in float32.
    """
    progress.begin("reading the model")
    tokenizer = ReferenceTokenizer(target.model_dir)
    answers = asyncio.run(_gather(target, tokenizer, settings, progress))
    comparisons = compare_with_transformers(target.model_dir, answers, progress)
    checked = [
        CheckedAnswer(
            case,
            is_repeat,
            got,
            own_problem(case, got, answers.info.vocab_size, tokenizer.decode),
            comparisons.get((i, got.answer), {}) if got.answer else {},
        )
        for i, case in enumerate(answers.cases)
        for is_repeat, got in zip((False, True), (asked[i] for asked in answers.rounds), strict=True)
    ]
    return answers.info, checked


def own_problem(case: Case, got: ClusterAnswer, vocab_size: int, decode: Callable[[Sequence[int]], str]) -> str:
    """What is wrong with an answer whatever another would say, or nothing. `decode` gives the text of token ids."""
    if got.answer is None:
        return got.failure
    token_ids, counts = got.answer.token_ids, (len(case.token_ids), len(got.answer.token_ids))
    if not _is_in_vocabulary(got.answer, vocab_size):
        return f"token {max(token_ids)} is not in the vocabulary of {vocab_size}"
    if problem := ending_problem(got.answer, case.sampling):
        return problem
    if got.usage != counts:
        return (
            f"it counts {got.usage[0]} prompt and {got.usage[1]} generated tokens: there are {counts[0]}, {counts[1]}"
        )
    text = decode(token_ids if got.answer.stop_token_id is None else token_ids[:-1])
    return "" if got.text == text else f"its text is {got.text!r}, that of its tokens {text!r}"


def compare_with_transformers(
    model_dir: Path, answers: Answers, progress: Progress
) -> dict[_Key, dict[str, Comparison]]:
    """Every distinct answer against the mixed worker and against transformers, by name."""
    keys = list(answers.mixed)
    comparisons: dict[_Key, dict[str, Comparison]] = {key: {} for key in keys}
    mixed: dict[_Key, list[tuple[Difference, ...]]] = {key: [] for key in keys}
    for dtype in dict.fromkeys((answers.info.dtype, "float32")):
        progress.begin(f"transformers in {dtype}", len(keys))
        reference = Reference(model_dir, dtype)
        for key in keys:
            case, answer = answers.cases[key[0]], key[1]
            choices, tolerances = choices_of(reference, case, answer, answers.info.dtype)
            judged = judge_tokens(answer.token_ids, choices, tolerances)
            comparisons[key][transformers_name(dtype)] = Comparison(judged)
            divergences = answers.mixed[key].divergences
            mixed[key].append(judge_divergences(answer.token_ids, divergences, choices, tolerances))
            progress.advance()
        del reference  # before the next is loaded
    return {
        key: {MIXED: Comparison(worst_of(mixed[key]), answers.mixed[key].problem), **comparisons[key]} for key in keys
    }


def choices_of(reference: Reference, case: Case, answer: Answer, dtype: str) -> tuple[list[TokenChoice], list[float]]:
    """What the reference chooses at each token of the answer, and which error of a logit rounding explains there.

    `dtype` is the type in which the answer was computed.
    """
    sampling, num_prompt_tokens = case.sampling, len(case.token_ids)
    relative = relative_tolerance(dtype, reference.dtype, reference.depth)
    choices: list[TokenChoice] = []
    tolerances: list[float] = []
    for i, logits in enumerate(reference.rows(case.token_ids, answer.token_ids)):
        choices.append(TokenChoice(logits, sampling, uniform(sampling.seed, num_prompt_tokens + i)))
        tolerances.append(relative * float(logits.std()))
    return choices, tolerances


async def _gather(target: Target, tokenizer: ReferenceTokenizer, settings: Settings, progress: Progress) -> Answers:
    # New in each run: what earlier ones left in the prefix caches is not found.
    salt = f"verify-{secrets.token_hex(8)}"
    async with AsyncClient(target.address) as client:
        info = await client.model_info()
        await _check_model(target.model_dir, info)
        cases = _fitting(make_cases(tokenizer, info.eos_token_ids, settings.max_tokens), info)
        rounds = []
        for text in ("asking the cluster", "asking again, for prefix hits"):
            progress.begin(text, len(cases))
            rounds.append(
                await ask_cluster(client, cases, salt, timeout_s=settings.timeout_s, on_done=progress.advance)
            )
    cold, again = rounds
    # A dict, as an ordered set: answers that came twice are compared once.
    distinct = dict.fromkeys(
        (i, got.answer)
        for asked in rounds
        for i, got in enumerate(asked)
        if got.answer is not None and got.answer.token_ids and _is_in_vocabulary(got.answer, info.vocab_size)
    )
    mixed: dict[_Key, MixedComparison] = {}
    progress.begin("starting a mixed worker" if not target.mixed_address else "asking the cluster's mixed worker")
    async with _mixed(target, info.dtype, settings) as worker:
        await worker.check(info)
        progress.begin("asking the mixed worker", len(distinct))
        for i, answer in distinct:
            mixed[i, answer] = await worker.compare(cases[i], answer, f"{salt}-{i}")
            progress.advance()
    return Answers(info, cases, (cold, again), mixed)


def _mixed(target: Target, dtype: str, settings: Settings) -> AbstractAsyncContextManager[MixedWorker]:
    if target.mixed_address:
        return mixed_worker.connect(target.mixed_address, settings.timeout_s)
    return mixed_worker.start(target.model_dir, dtype, settings.timeout_s, lambda _: None)


async def _check_model(model_dir: Path, info: inference_pb2.GetModelInfoResponse) -> None:
    fingerprint = await asyncio.to_thread(model_fingerprint, model_dir)
    if fingerprint != info.model_fingerprint:
        raise ClusterError(
            f"{model_dir} is not the model that the cluster serves ({info.model}: fingerprint "
            f"{info.model_fingerprint}, not {fingerprint}): give its directory or .gguf file with --model"
        )


def _fitting(cases: Sequence[Case], info: inference_pb2.GetModelInfoResponse) -> list[Case]:
    return [case for case in cases if len(case.token_ids) + case.sampling.max_tokens <= info.context_window_tokens]


def _is_in_vocabulary(answer: Answer, vocab_size: int) -> bool:
    return all(token_id < vocab_size for token_id in answer.token_ids)
