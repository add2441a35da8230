"""Shows a verification for people: how far it is, and what it found."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bench.verify.comparison import Comparison, Difference
from bench.verify.report import MIXED, CheckedAnswer, Outcome, Report, transformers_name

_LEDGER_COLUMNS = (
    ("total", "total_blocks"),
    ("free", "free_blocks"),
    ("cached", "cached_blocks"),
    ("owned", "owned_blocks"),
    ("in flight", "in_flight_blocks"),
    ("open tickets", "num_open_tickets"),
    ("stale writes", "stale_writes"),
    ("repaired", "repaired_blocks"),
    ("quarantined", "quarantined_blocks"),
)
_OUTCOME_STYLES = {Outcome.IDENTICAL: "bold green", Outcome.NEAR_TIES: "bold green", Outcome.WRONG: "bold red"}


class ProgressView:
    """See `bench.verify.verification.Progress`. A bar on a terminal, a line for each phase elsewhere."""

    def __init__(self, console: Console, bar: Progress) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task("", visible=False)

    def begin(self, text: str, num_steps: int = 0) -> None:
        """A phase begins; of so many steps, 0 if that is not known."""
        if not self._console.is_terminal:
            steps = f" ({num_steps} answers)" if num_steps else ""
            self._console.print(f"{text}{steps} ...", highlight=False, soft_wrap=True)
        self._bar.reset(self._task, description=text, total=num_steps or None, visible=True)

    def advance(self) -> None:
        """A step of it is done."""
        self._bar.advance(self._task)


@contextmanager
def progress_view(console: Console) -> Iterator[ProgressView]:
    """Shown as long as the context is open."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield ProgressView(console, bar)


def print_report(report: Report, console: Console) -> None:
    """Prints a line for each request, what is wrong, every ledger, and the verdict."""
    names = list(dict.fromkeys((MIXED, transformers_name(report.dtype), transformers_name("float32"))))
    console.print(_answers_table(report.answers, names))
    for checked in report.answers:
        for line in _wrongs(checked):
            console.print(Text(line, style="red"), soft_wrap=True)
    if (largest := _largest_tie(report.answers)) is not None:
        console.print(
            f"\nThe widest near-tie is {largest.error:.2g} in logits; there, rounding explains up to "
            f"{largest.tolerance:.2g}.",
            highlight=False,
            soft_wrap=True,
        )
    if report.ledgers:
        console.print()
        console.print(_ledger_table(report))
    console.print()
    style = _OUTCOME_STYLES[report.outcome] if report.is_good else "bold red"
    console.print(Text(report.verdict, style=style), soft_wrap=True)


def _answers_table(answers: Sequence[CheckedAnswer], names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("prompt", "sampling"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt tokens", "tokens"):
        table.add_column(name, justify="right")
    for name in ("path", "path when asked again"):
        table.add_column(name, no_wrap=True)
    for name in names:
        table.add_column(f"vs {name}")
    for first, second in zip(answers[::2], answers[1::2], strict=True):  # each request was asked twice
        case, both = first.case, (first, second)
        table.add_row(
            case.kind,
            case.how,
            str(len(case.token_ids)),
            "/".join(dict.fromkeys(str(checked.num_tokens) for checked in both)),
            _path(first),
            _path(second),
            *(_cell([checked.comparisons[name] for checked in both if name in checked.comparisons]) for name in names),
        )
    return table


def _path(checked: CheckedAnswer) -> Text:
    got = checked.got
    if got.failure:
        return Text("FAILED", style="red")
    notes = [f"{got.num_cached_tokens} cached"] if got.num_cached_tokens else []
    notes += [f"{got.num_recoveries} recoveries"] if got.num_recoveries else []
    return Text(got.path.replace("_", " ") + (f" ({', '.join(notes)})" if notes else ""))


def _cell(comparisons: Sequence[Comparison]) -> Text:
    if not comparisons:
        return Text("-", style="dim")
    if any(comparison.is_wrong for comparison in comparisons):
        return Text("WRONG", style="red")
    num_ties = max(len(comparison.tie_indices) for comparison in comparisons)
    if not num_ties:
        return Text("same", style="green")
    return Text(f"{num_ties} near-tie{'s' if num_ties > 1 else ''}", style="yellow")


def _wrongs(checked: CheckedAnswer) -> Iterator[str]:
    """One line for each thing that is wrong, with its first token."""
    case = checked.case
    place = f"WRONG  {case.kind}, {case.how}, {'asked again' if checked.is_repeat else 'asked first'}:"
    if checked.problem:
        yield f"{place} {checked.problem}"
    for name, comparison in checked.comparisons.items():
        if comparison.problem:
            yield f"{place} {name} {comparison.problem}"
        wrong = next((difference for difference in comparison.differences if not difference.is_tie), None)
        if wrong is not None:
            yield (
                f"{place} token {wrong.index} is {wrong.token_id}, {name} says {wrong.other_token_id}: "
                f"a logit would have to be {wrong.error:.2g} wrong, rounding explains {wrong.tolerance:.2g}"
            )


def _largest_tie(answers: Sequence[CheckedAnswer]) -> Difference | None:
    ties = (
        difference
        for checked in answers
        for comparison in checked.comparisons.values()
        for difference in comparison.differences
        if difference.is_tie
    )
    return max(ties, key=lambda difference: difference.excess, default=None)


def _ledger_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ledger of", no_wrap=True)
    for name, _ in _LEDGER_COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("")
    for check in report.ledgers or ():
        counts = [str(getattr(check.ledger, field)) if check.ledger else "" for _, field in _LEDGER_COLUMNS]
        verdict = Text(check.problem, style="red") if check.problem else Text("clean", style="green")
        table.add_row(check.worker, *counts, verdict)
    return table
