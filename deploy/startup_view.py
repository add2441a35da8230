"""Shows how a cluster comes up: a live table on a terminal, lines elsewhere. On standard error."""

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deploy.cluster_status import ClusterStatus, MemberState, MemberStatus

STATE_STYLES = {
    MemberState.STARTING: "yellow",
    MemberState.WAITING: "yellow",
    MemberState.READY: "green",
    MemberState.UNHEALTHY: "red",
    MemberState.FAILED: "red",
    MemberState.RESTARTING: "red",
}


class StartupView:
    """Used as a context around a start; `show_step` and `show_status` tell it what happens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, refresh_per_second=8)
        self._shown: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show_step(self, text: str) -> None:
        """Something is under way that has no table yet."""
        if self._console.is_terminal:
            self._live.update(Spinner("dots", text))
        else:
            self._console.print(text, highlight=False, soft_wrap=True)

    def show_warning(self, text: str) -> None:
        """Something that the user should know; it stays on the screen."""
        self._console.print(f"warning: {text}", style="yellow", highlight=False, soft_wrap=True)

    def show_status(self, status: ClusterStatus) -> None:
        """The state of every actor now."""
        if self._console.is_terminal:
            heading = Spinner("dots", f"Starting {status.model_name}")
            self._live.update(Group(heading, _table(status)))
            return
        for member in status.members:
            line = _line(member)
            if self._shown.get(member.name) != line:
                self._shown[member.name] = line
                self._console.print(f"{member.name}: {line}", highlight=False, soft_wrap=True)


def _table(status: ClusterStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    for member in status.members:
        state = member.report.state
        table.add_row(f"  {member.name}", Text(_line(member), style=STATE_STYLES[state]))
    return table


def _line(member: MemberStatus) -> str:
    report = member.report
    if report.state is MemberState.STARTING and report.detail:
        return report.detail
    return f"{report.state.value}: {report.detail}" if report.detail else report.state.value
