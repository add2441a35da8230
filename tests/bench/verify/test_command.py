"""The command as users run it, and which workers it looks at."""

import asyncio
import sys

import pytest

from bench.verify.command import mixed_worker_address, worker_places
from bench.verify.ledger import WorkerPlace
from deploy.cluster_status import ClusterStatus, MemberReport, MemberState, MemberStatus


async def _baton(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from bench.cli import main; main()",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 110)
    return process.returncode, output.decode(), errors.decode()


async def test_help_teaches() -> None:
    code, output, _ = await _baton("verify", "--help")
    assert code == 0
    for word in ("near-tie", "ledger", "--model", "exit code is 1", "baton verify --json"):
        assert word in " ".join(output.split())


async def test_no_cluster_is_told_in_one_line() -> None:
    code, _, errors = await _baton("verify", "--address", "127.0.0.1:1")
    assert code == 1
    last = errors.splitlines()[-1]
    assert last.startswith("Error: ")
    assert "Traceback" not in errors


async def test_a_cluster_with_another_model_is_not_judged(inference) -> None:
    code, output, errors = await _baton("verify", "--address", inference.address)
    assert (code, output) == (1, "")
    assert "is not the model that the cluster serves (tiny" in errors
    assert "with --model" in errors
    assert inference.requests == []


def _member(name: str, state: MemberState = MemberState.READY, address: str = "127.0.0.1:7", detail: str = ""):
    role = name.partition("-")[0]
    return MemberStatus(name, role, MemberReport(state, detail, address), 0, 0)


def _status(*workers: MemberStatus) -> ClusterStatus:
    return ClusterStatus("test", "tiny", _member("router"), workers)


PAIR = (_member("prefill-0"), _member("decode-0"))


@pytest.mark.parametrize(
    ("workers", "address"),
    [
        (PAIR, ""),
        ((_member("mixed-0"),), ""),
        ((_member("mixed-0"), _member("decode-0")), ""),
        ((*PAIR, _member("mixed-0", address="127.0.0.1:9")), "127.0.0.1:9"),
        ((*PAIR, _member("mixed-0", MemberState.STARTING)), ""),
    ],
)
def test_a_mixed_worker_serves_as_reference_only_beside_a_pair(workers, address: str) -> None:
    assert mixed_worker_address(_status(*workers)) == address


def test_a_worker_that_is_not_up_has_no_place() -> None:
    lost = _member("decode-1", MemberState.RESTARTING, "", "it was killed")
    assert worker_places(_status(*PAIR, lost)) == [
        WorkerPlace("prefill-0", "127.0.0.1:7", "ready"),
        WorkerPlace("decode-0", "127.0.0.1:7", "ready"),
        WorkerPlace("decode-1", "", "restarting it was killed"),
    ]
