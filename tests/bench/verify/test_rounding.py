"""The tolerance covers what transformers' own bfloat16 is off, and is not much wider."""

from itertools import pairwise

import numpy as np
import pytest

from bench.verify.reference import Reference, ReferenceTokenizer
from bench.verify.rounding import UNIT_ROUNDOFF, ModelDepth, relative_error, relative_tolerance

SMOLLM = ModelDepth(num_layers=30, hidden_size=576)


def test_known_values() -> None:
    # sqrt(8 * 30 / 3) times 2**-8, and times sqrt(1 + 576) * 2**-24.
    assert relative_error("bfloat16", SMOLLM) == pytest.approx(80**0.5 / 256, rel=1e-6)
    assert relative_error("float32", SMOLLM) == pytest.approx(80**0.5 * 577**0.5 / 2**24, rel=1e-6)


def test_of_equal_types_it_is_four_errors_and_of_an_exact_reference_less() -> None:
    equal = relative_tolerance("bfloat16", "bfloat16", SMOLLM)
    assert equal == pytest.approx(4 * relative_error("bfloat16", SMOLLM))
    assert relative_tolerance("bfloat16", "float32", SMOLLM) == pytest.approx(equal / 2**0.5, rel=1e-3)


def test_coarser_types_and_deeper_models_are_allowed_more() -> None:
    types = sorted(UNIT_ROUNDOFF, key=UNIT_ROUNDOFF.__getitem__)
    assert types == ["float32", "float16", "bfloat16"]
    assert all(relative_error(fine, SMOLLM) < relative_error(coarse, SMOLLM) for fine, coarse in pairwise(types))
    assert relative_error("float32", ModelDepth(60, 576)) > relative_error("float32", SMOLLM)


def test_transformers_own_rounding_is_of_that_size(
    model_dir, reference: Reference, tokenizer: ReferenceTokenizer
) -> None:
    text = tokenizer.encode(
        "The ferry leaves the old harbour at seven in the morning, before the market opens. 1, 2, 3"
    )
    prompt, answer = text[:2], text[2:]
    rounded = np.array(list(Reference(model_dir, "bfloat16").rows(prompt, answer)))
    exact = np.array(list(reference.rows(prompt, answer)))
    measured = (rounded - exact).std(axis=1) / exact.std(axis=1)
    assert 0.2 < np.median(measured) / relative_error("bfloat16", SMOLLM) < 1
    assert measured.max() < 3 * relative_error("bfloat16", SMOLLM)
