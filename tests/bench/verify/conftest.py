"""The model by transformers alone, loaded once."""

from pathlib import Path

import pytest
import torch

from bench.verify.reference import Reference, ReferenceTokenizer


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    torch.set_num_threads(1)  # the machine may have other things to do
    return Reference(model_dir, "float32")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> ReferenceTokenizer:
    return ReferenceTokenizer(model_dir)
