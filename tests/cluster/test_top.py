"""The live view of a real cluster, once."""

import threading

import pytest
from click.testing import CliRunner

from deploy.commands.top import top

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def test_it_shows_who_is_up_and_what_they_do(cluster):
    def ask():
        with cluster.client() as client:
            client.generate("Here is a long story:", max_tokens=60, ignore_eos=True).read()

    asking = threading.Thread(target=ask)
    asking.start()
    address = cluster.status.router.report.metrics_address
    shown = CliRunner().invoke(top, ["--once", "--interval", "2", "--metrics", address])
    asking.join()
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.output.splitlines()]
    assert {row[0]: row[2] for row in rows if row and row[0].endswith("-0")} == {"prefill-0": "up", "decode-0": "up"}
    assert "tokens/s" in shown.output


def test_a_router_that_is_not_there_is_told():
    shown = CliRunner().invoke(top, ["--once", "--metrics", "127.0.0.1:9"])
    assert shown.exit_code == 1
    assert "127.0.0.1:9 cannot be read" in shown.output
