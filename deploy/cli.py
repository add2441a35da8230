"""The command line `baton`."""

import logging
import signal
import sys
from collections.abc import Mapping
from types import FrameType

import click

from deploy.lazy_group import LazyCommand, LazyGroup

_HELP = """Disaggregated prefill/decode serving for large language models.

\b
First steps:
  baton demo                 start, ask, show where the time went, stop
  baton up                   start a cluster on this machine
  baton chat                 talk to it
  baton generate "Once upon a time" --raw --max-tokens 50
  baton down                 stop it

`baton COMMAND --help` tells more about each command.
"""

COMMANDS: Mapping[str, LazyCommand] = {
    "up": LazyCommand("deploy.commands.up:up", "Start a cluster and wait until it serves."),
    "down": LazyCommand("deploy.commands.down:down", "Stop a cluster; nothing of it is left."),
    "attach": LazyCommand("deploy.commands.attach:attach", "Make a cluster known that was started elsewhere."),
    "status": LazyCommand("deploy.commands.status:status", "Show the router and every worker."),
    "top": LazyCommand("deploy.commands.top:top", "Watch a cluster live."),
    "restart": LazyCommand("deploy.commands.restart:restart", "Replace workers one after the other; streams go on."),
    "scale": LazyCommand("deploy.commands.scale:scale", "Add workers, or let some leave; streams go on."),
    "config": LazyCommand("deploy.commands.config:config", "Check a cluster file, or print an example."),
    "generate": LazyCommand("deploy.commands.generate:generate", "Stream one answer to standard output."),
    "chat": LazyCommand("deploy.commands.chat:chat", "Talk to the model."),
    "demo": LazyCommand("deploy.commands.demo:demo", "Start, ask one question, explain its time, stop."),
}


def make_cli(more_commands: Mapping[str, LazyCommand] | None = None) -> click.Group:
    """The command line, with the commands of packages that stand above this one."""
    return LazyGroup("baton", {**COMMANDS, **(more_commands or {})}, help_text=_HELP)


def run(cli: click.Group) -> None:
    """Runs a command line: exit code 0 for success, 1 for failure, 2 for wrong usage."""
    signal.signal(signal.SIGTERM, _exit)  # so that an interrupted command still cleans up
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    cli(prog_name="baton")


def _exit(signal_number: int, frame: FrameType | None) -> None:
    sys.exit(128 + signal_number)


def main() -> None:
    """Entry point."""
    run(make_cli())
