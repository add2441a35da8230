"""The whole of `make bench` with one sample of each number: that it works, not what it measures."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_all_bars_are_measured_and_the_exit_code_follows_them(tmp_path, model_dir):
    file = tmp_path / "bars.json"
    command = [sys.executable, "-m", "bench.bars", "--repeats", "1", "--json", str(file)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=550)
    written = json.loads(file.read_text())
    assert len(written["bars"]) == 5
    assert all(bar["measured"] > 0 for bar in written["bars"])
    assert finished.returncode == (0 if all(bar["is_met"] for bar in written["bars"]) else 1)
    assert finished.stdout.count("met") + finished.stdout.count("missed") >= 5
