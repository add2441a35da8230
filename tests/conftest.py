"""What all tests share: the default model, compiled kernels, a pair of real workers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import settings

from engine.model_store import resolve_model

# How long an example takes says something about the machine and what else runs on it, not about the code.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model (SmolLM2-135M-Instruct) as a directory; converted on the first run of a machine."""
    return resolve_model(None)


@pytest.fixture(scope="session")
def kernel_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the native kernels are built, once for all tests."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Awaitable[None]]:
    """Waits until a condition holds; fails after a while with the condition's last value."""

    async def wait(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        deadline_at = asyncio.get_running_loop().time() + timeout_s
        while not (value := condition()):
            assert asyncio.get_running_loop().time() < deadline_at, f"still {value!r} after {timeout_s} s"
            await asyncio.sleep(0.005)

    return wait


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hosts(model_dir: Path, kernel_cache_dir: Path) -> AsyncIterator[dict[str, Any]]:
    """A prefill and a decode worker's `WorkerHost`, with their engines running, by role."""
    from worker_rig import load_host, stop_host  # noqa: PLC0415 - torch, only for tests that need it

    loaded = {role: await load_host(role, model_dir, kernel_cache_dir) for role in ("prefill", "decode")}
    yield loaded
    for host in loaded.values():
        await stop_host(host)


@pytest_asyncio.fixture(loop_scope="session")
async def workers(hosts: dict[str, Any], eventually: Callable[..., Awaitable[None]]) -> AsyncIterator[tuple[Any, Any]]:
    """Servers of a prefill and a decode worker, with empty prefix caches. Nothing may be held in the end."""
    from worker_rig import Worker  # noqa: PLC0415 - as above

    prefill, decode = (Worker(hosts[role]) for role in ("prefill", "decode"))
    await prefill.start()
    await decode.start()
    try:
        yield prefill, decode
        await eventually(lambda: prefill.is_clean and decode.is_clean)
    finally:
        await prefill.stop()
        await decode.stop()
