"""What the tests of the computing half of the engine share: compiled kernels, the default model, a prompt."""

from pathlib import Path

import pytest
import tokenizers
import torch

from engine import native_kernels
from engine.model import LoadedModel, load_model
from engine.native_kernels import NativeKernels

TEXT = (
    "The harbour town wakes before the sun. Fishermen carry their nets down to the boats, bakers open their shutters, "
    "and the first ferry of the day blows its horn twice. By seven o'clock the market square is full: apples, cheese, "
    "fresh bread, and the smell of coffee. An old man sells maps of islands that nobody has visited for a hundred "
    "years, and children run between the stalls."
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Torch computes on one core, as in a worker, and so does not stumble over what else the machine does."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernels(kernel_cache_dir: Path) -> NativeKernels:
    """The native kernels; tests that need them are skipped where there is no C compiler."""
    loaded = native_kernels.load(kernel_cache_dir)
    if loaded is None:
        pytest.skip("no C compiler on this machine that builds the native kernels")
    return loaded


@pytest.fixture(scope="session")
def loaded_model(model_dir: Path, kernel_cache_dir: Path) -> tuple[LoadedModel, NativeKernels | None]:
    """The default model in float32 for blocks of 16 tokens, with the kernels where they can be built."""
    kernels = native_kernels.load(kernel_cache_dir)
    return load_model(model_dir, torch.float32, torch.device("cpu"), 16, kernels), kernels


@pytest.fixture(scope="session")
def text_ids(model_dir: Path) -> list[int]:
    """Token ids of some prose; the default model's greedy choice after any part of it is clear."""
    return tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(TEXT).ids
