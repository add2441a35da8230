"""Transformers against answers that are known, and its tokenizer against the router's."""

import numpy as np
import pytest

from bench.verify.cases import make_cases
from bench.verify.reference import Reference, ReferenceTokenizer
from engine.text_codec import TextCodec

# Greedy continuations in float32.
KNOWN = {
    "The capital of France is": [7042, 30, 198, 198, 504, 2988, 314, 42],
    "1, 2, 3, 4, 5,": [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28],
}


@pytest.mark.parametrize("text", KNOWN)
def test_each_row_chooses_the_next_token_of_a_known_answer(
    reference: Reference, tokenizer: ReferenceTokenizer, text: str
) -> None:
    rows = list(reference.rows(tokenizer.encode(text), KNOWN[text]))
    assert [int(row.argmax()) for row in rows] == KNOWN[text]
    assert {row.shape for row in rows} == {(49152,)}
    assert {row.dtype for row in rows} == {np.dtype("float64")}


def test_a_row_depends_on_the_tokens_before_it_alone(reference: Reference) -> None:
    prompt, answer = [504, 3575], [282, 4649, 314]
    rows = list(reference.rows(prompt, answer))
    other = list(reference.rows(prompt, [282, 7, 8]))
    assert np.allclose(rows[0], other[0], atol=1e-3)
    assert np.allclose(rows[1], other[1], atol=1e-3)
    assert not np.allclose(rows[2], other[2], atol=1e-1)
    [alone] = reference.rows([*prompt, *answer[:2]], [314])
    assert np.allclose(rows[2], alone, atol=1e-3)


def test_depth_is_the_models(reference: Reference) -> None:
    assert (reference.depth.num_layers, reference.depth.hidden_size) == (30, 576)


def test_tokenizer_equals_the_routers(tokenizer: ReferenceTokenizer, model_dir) -> None:
    codec = TextCodec.from_directory(model_dir)
    for case in make_cases(tokenizer, [2], 8):
        if isinstance(case.prompt, str):
            assert list(case.token_ids) == codec.encode(case.prompt)
        elif isinstance(case.prompt[0], dict):
            assert list(case.token_ids) == codec.encode_chat(case.prompt)
        detokenizer = codec.detokenizer()
        assert tokenizer.decode(case.token_ids) == detokenizer.push(case.token_ids) + detokenizer.finish()
