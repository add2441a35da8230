"""The command line `baton`, with the commands of this package."""

from collections.abc import Mapping

from deploy.cli import make_cli, run
from deploy.lazy_group import LazyCommand

COMMANDS: Mapping[str, LazyCommand] = {
    "bench": LazyCommand("bench.command:bench", "Measure a running cluster under load."),
}


def main() -> None:
    """Entry point."""
    run(make_cli(COMMANDS))
