import os
import signal
import subprocess
import sys

import pytest

from bench.drill.processes import Processes
from bench.drill.roster import Life


@pytest.fixture
def child():
    """A process that sleeps, as one life."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield Life("decode-0", "decode", process.pid)
    process.kill()
    process.wait()


def test_a_signal_reaches_the_process_of_a_life(child):
    processes = Processes()
    processes.note([child])
    assert processes.alive() == [f"decode-0 (pid {child.pid})"]
    assert processes.alive(but=[child]) == []
    assert processes.send(child, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    assert processes.alive() == []
    assert not processes.send(child, signal.SIGKILL)


async def test_a_frozen_process_is_alive_and_a_zombie_is_not(child, eventually):
    processes = Processes()
    processes.note([child])
    assert processes.send(child, signal.SIGSTOP)
    assert processes.alive()
    assert processes.send(child, signal.SIGKILL)
    await eventually(lambda: processes.alive() == [])  # though its parent, this process, has not reaped it yet


def test_an_unknown_life_gets_no_signal():
    assert not Processes().send(Life("decode-0", "decode", os.getpid()), signal.SIGKILL)


def test_memory_is_that_of_the_living(child):
    processes = Processes()
    gone = Life("prefill-0", "prefill", 2**22 + 1)
    processes.note([child, gone])
    ((name, pid, size),) = processes.memory([child, gone])
    assert (name, pid) == ("decode-0", child.pid)
    assert size > 0


def test_memory_is_what_a_process_has_of_its_own_and_no_pages_of_files(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(64 << 20))
    code = (
        "import mmap, time; own = bytearray(b'x') * (32 << 20); f = open('weights', 'rb'); "
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(sum(m[::4096]), flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        with process.stdout as output:
            assert output.readline() == b"0\n"
        life = Life("decode-0", "decode", process.pid)
        processes = Processes()
        processes.note([life])
        ((_, _, size),) = processes.memory([life])
        assert 32 << 20 < size < 64 << 20
    finally:
        process.kill()
        process.wait()
