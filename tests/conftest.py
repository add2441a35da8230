"""What all tests share: the default model."""

from pathlib import Path

import pytest

from engine.model_store import resolve_model


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model (SmolLM2-135M-Instruct) as a directory; converted on the first run of a machine."""
    return resolve_model(None)
