"""The command line `baton`, with the commands of this package."""

from collections.abc import Mapping

from deploy.cli import make_cli, run
from deploy.lazy_group import LazyCommand

COMMANDS: Mapping[str, LazyCommand] = {
    "bench": LazyCommand("bench.command:bench", "Measure a running cluster under load."),
    "drill": LazyCommand("bench.drill.command:drill", "Hurt a cluster while it works, and check what must hold."),
    "verify": LazyCommand("bench.verify.command:verify", "Compare a cluster's answers with those of transformers."),
}


def main() -> None:
    """Entry point."""
    run(make_cli(COMMANDS))
