"""The command as far as it goes without a cluster."""

import pytest
from click.testing import CliRunner

from bench.drill.command import drill


def run(*arguments):
    return CliRunner().invoke(drill, arguments)


@pytest.mark.parametrize("name", ["kill", "freeze", "messages", "cancel", "soak", "overload"])
def test_every_scenario_explains_itself(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "--help" in result.output
    assert name in run("--help").output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prefill", "1", "kill"], "kill needs 2 workers of each role"),
        (["--decode", "1", "messages", "soak"], "soak needs 2 workers of each role"),
        (["messages", "--drop", "0.6", "--corrupt", "0.6"], "more than 1 together"),
        (["kill", "--phase", "tea-break"], "tea-break"),
        (["--model", "/nowhere/at/all", "messages"], "/nowhere/at/all"),
        (["swim"], "No such command"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_started(arguments, told):
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert told in result.output


def test_without_a_scenario_it_tells_which_there_are():
    assert "freeze" in run().output
