"""However a request ends, nothing of it is left on any worker."""

import signal
import subprocess
import sys

import pytest

from baton.errors import DeadlineExceeded

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

ENDLESS = {"max_tokens": 4000, "temperature": 0.0, "ignore_eos": True}
CLIENT = """
import sys
from baton.client import Client
with Client(sys.argv[1]) as client, client.generate("1, 2, 3,", max_tokens=4000, ignore_eos=True) as stream:
    for chunk in stream:
        print(chunk.text, flush=True)
"""


def _first_chunk(stream):
    return next(iter(stream))


def test_the_cluster_is_three_processes(cluster):
    assert len({member.report.pid for member in cluster.status.members}) == 3


def test_a_finished_request_leaves_only_cache(cluster, prompt_of):
    with cluster.client() as client, client.generate(prompt_of(1, 100), max_tokens=8) as stream:
        stream.read()
    cluster.wait_until_clean()


def test_a_stream_cancelled_after_tokens(cluster, prompt_of):
    with cluster.client() as client, client.generate(prompt_of(2, 100), **ENDLESS) as stream:
        _first_chunk(stream)
        stream.cancel()
    cluster.wait_until_clean()


@pytest.mark.parametrize("attempt", range(3))
def test_a_stream_cancelled_before_its_first_token(cluster, prompt_of, attempt):
    with cluster.client() as client:
        client.generate(prompt_of(20 + attempt, 2000), **ENDLESS).cancel()
    cluster.wait_until_clean()


def test_a_client_killed_in_mid_stream(cluster):
    command = [sys.executable, "-c", CLIENT, cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline()
        client.send_signal(signal.SIGKILL)
    cluster.wait_until_clean()


def test_a_deadline_that_expires_in_mid_decode(cluster, prompt_of):
    with (
        cluster.client() as client,
        client.generate(prompt_of(3, 50), timeout_s=1.5, **ENDLESS) as stream,
        pytest.raises(DeadlineExceeded),
    ):
        stream.read()
    assert stream.token_ids  # it had begun
    cluster.wait_until_clean()


def test_a_deadline_that_expires_in_mid_prefill(cluster, prompt_of):
    with (
        cluster.client() as client,
        client.generate(prompt_of(4, 2000), timeout_s=0.4, **ENDLESS) as stream,
        pytest.raises(DeadlineExceeded),
    ):
        stream.read()
    cluster.wait_until_clean()


def test_the_next_request_is_served_by_the_same_processes(cluster, prompt_of):
    with (
        cluster.client() as client,
        client.generate("The capital of France is", max_tokens=2, temperature=0.0) as stream,
    ):
        stream.read()
    assert stream.text == " Paris."
