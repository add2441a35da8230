"""What all tests share: the default model, and compiled kernels."""

from pathlib import Path

import pytest

from engine.model_store import resolve_model


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model (SmolLM2-135M-Instruct) as a directory; converted on the first run of a machine."""
    return resolve_model(None)


@pytest.fixture(scope="session")
def kernel_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the native kernels are built, once for all tests."""
    return tmp_path_factory.mktemp("kernels")
