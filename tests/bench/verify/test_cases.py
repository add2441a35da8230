"""The requests cover what they should, and go over the wire as they are judged."""

import pytest

from baton.answer import build_request
from bench.verify.cases import EDGE_LENGTHS, LONG_LENGTH, Case, greedy, make_cases, seeded
from bench.verify.reference import ReferenceTokenizer

EOS = [2]
MAX_TOKENS = 9


@pytest.fixture(scope="module")
def cases(tokenizer: ReferenceTokenizer) -> list[Case]:
    return make_cases(tokenizer, EOS, MAX_TOKENS)


def test_edges_of_blocks_are_asked_greedily_and_seeded_and_all_begin_differently(cases: list[Case]) -> None:
    by_ids = [case for case in cases if isinstance(case.prompt, list) and isinstance(case.prompt[0], int)]
    lengths = [len(case.token_ids) for case in by_ids]
    assert sorted(lengths) == sorted([*EDGE_LENGTHS, LONG_LENGTH] * 2)
    assert [case.sampling.temperature > 0 for case in by_ids] == [False, True] * 7
    assert len({case.token_ids[:3] for case in by_ids}) == 7


def test_every_kind_of_prompt_is_there(cases: list[Case]) -> None:
    kinds = {case.kind for case in cases}
    assert {
        "chat",
        "chat, emoji",
        "text",
        "text, one token",
        "text, unicode",
        "text, emoji",
        "text, stop token",
    } <= kinds
    seeds = [case.sampling.seed for case in cases if case.sampling.temperature > 0]
    assert len(set(seeds)) == len(seeds) > 10
    assert {case.sampling.max_tokens for case in cases} == {1, MAX_TOKENS}


def test_without_a_chat_template_there_are_no_chats(tokenizer: ReferenceTokenizer) -> None:
    class NoChat:
        encode = staticmethod(tokenizer.encode)

        def encode_chat(self, messages: object) -> None:
            return None

    kinds = {case.kind for case in make_cases(NoChat(), EOS, MAX_TOKENS)}
    assert not any(kind.startswith("chat") for kind in kinds)
    assert "text" in kinds


def test_the_request_carries_exactly_the_sampling_that_is_judged(cases: list[Case]) -> None:
    for case in cases:
        request, sampling = build_request(case.prompt, case.options), case.sampling
        sent = request.sampling
        assert (sent.temperature, sent.top_k, sent.top_p, sent.seed) == (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.seed,
        )
        stops = {*request.stopping.stop_token_ids, *([] if request.stopping.ignore_eos else EOS)}
        assert stops == sampling.stop_token_ids
        assert request.stopping.max_tokens == sampling.max_tokens


def test_how_is_told_in_few_words() -> None:
    assert Case("text", "x", (1,), greedy(3)).how == "greedy"
    assert Case("text", "x", (1,), seeded(7, 3, top_k=20, top_p=0.9)).how == "seed 7 k=20 p=0.9"
