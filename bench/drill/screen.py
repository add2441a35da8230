"""Shows a drill while it runs, and what it has found."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn
from rich.table import Table
from rich.text import Text

from bench.drill.result import Findings, TableData

PIPE_WIDTH = 160
_MAX_VIOLATIONS_SHOWN = 25
_ETA_WINDOW_S = 600.0


class Stage:
    """One part of a drill on the screen: a bar with the time that is left, and a word on how it stands."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, steps: float = 1) -> None:
        """So many steps more are done."""
        self._progress.advance(self._task, steps)

    def say(self, status: str) -> None:
        """How it stands."""
        self._progress.update(self._task, status=status)

    def line(self, text: str, style: str = "") -> None:
        """Something that stays on the screen."""
        self._progress.console.print(Text(text, style=style), soft_wrap=True)


class Screen:
    """The person's side of a drill. Without a terminal, only what stays is written."""

    def __init__(self, console: Console) -> None:
        self._console = console
        if not console.is_terminal:
            console.width = PIPE_WIDTH

    @contextmanager
    def stage(self, title: str, num_steps: float) -> Iterator[Stage]:
        """A part of the drill that takes so many steps."""
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeLeftColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[status]}"),
        )
        console, is_terminal = self._console, self._console.is_terminal
        with Progress(
            *columns, console=console, disable=not is_terminal, transient=True, speed_estimate_period=_ETA_WINDOW_S
        ) as progress:
            stage = Stage(progress, progress.add_task(title, total=num_steps, status=""))
            if not is_terminal:
                stage.line(f"{title} ...")
            yield stage

    def show(self, name: str, findings: Findings) -> None:
        """What a scenario has found."""
        verdict = Text("FAILED", "bold red") if findings.violations else Text("passed", "bold green")
        self._console.print(Text(f"\n{name}: ", "bold").append_text(verdict))
        label_width = max((len(label) for label, _ in findings.facts), default=0)
        for label, text in findings.facts:
            self._console.print(Text(f"  {label:<{label_width}}  {text}"), soft_wrap=True)
        for data in findings.tables:
            self._console.print(_table(data))
        self._show_violations(findings.violations)

    def _show_violations(self, violations: Sequence[str]) -> None:
        for violation in violations[:_MAX_VIOLATIONS_SHOWN]:
            self._console.print(Text(f"  ✗ {violation}", "red"), soft_wrap=True)
        if (num_more := len(violations) - _MAX_VIOLATIONS_SHOWN) > 0:
            self._console.print(Text(f"  ✗ and {num_more} more, see --json", "red"))


def _table(data: TableData) -> Table:
    table = Table(box=None, pad_edge=True, header_style="bold")
    for index, column in enumerate(data.columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in data.rows:
        table.add_row(*map(Text, row))
    return table
