"""A click group whose commands are imported when they are run, so that `--help` is quick."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command by its place, module:attribute, with the line that `--help` shows for it."""

    place: str
    summary: str


class LazyGroup(click.Group):
    """Shows its commands in the given order."""

    def __init__(self, name: str, commands: Mapping[str, LazyCommand], *, help_text: str) -> None:
        super().__init__(name, help=help_text, context_settings={"help_option_names": ["-h", "--help"]})
        self._lazy_commands = dict(commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(self._lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command."""
        if cmd_name not in self._lazy_commands:
            return None
        module, _, attribute = self._lazy_commands[cmd_name].place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self._lazy_commands.items()])
