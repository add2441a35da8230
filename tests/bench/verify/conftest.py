"""The model by transformers alone, loaded once."""

from pathlib import Path

import pytest

from bench.verify.reference import Reference, ReferenceTokenizer


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir, "float32")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> ReferenceTokenizer:
    return ReferenceTokenizer(model_dir)
