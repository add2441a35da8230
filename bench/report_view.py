"""Shows the report of a load for people."""

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.report import LoadReport
from bench.statistics import Summary

# Field of the report, its label, and what it is.
_CLIENT_ROWS = (
    ("ttft_s", "TTFT", "until the first token"),
    ("tpot_s", "TPOT", "mean of later tokens"),
    ("itl_s", "ITL", "gap between two tokens"),
    ("e2e_s", "E2E", "whole request"),
)
_TTFT_ROWS = (
    ("queue_s", "queue", "router picks workers"),
    ("reserve_s", "reserve", "decode reserves blocks"),
    ("dispatch_s", "dispatch", "to prefill and back"),
    ("prefill_queue_s", "prefill queue", "prefill worker is busy"),
    ("prefill_s", "prefill", "first step to token 0"),
)
_TRANSFER_ROWS = (
    ("transfer_s", "transfer", "first KV byte to commit"),
    ("transfer_tail_s", "exposed tail", "of it, after prefill"),
    ("first_decode_step_s", "first decode step", "commit to token 1"),
)


def print_report(report: LoadReport, console: Console) -> None:
    """Prints what was reached, then latencies in milliseconds."""
    for label, text, style in _facts(report):
        console.print(Text(f"{label:<12}").append(text, style=style), soft_wrap=True)
    if not report.num_completed:
        return
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms", no_wrap=True)
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right", min_width=7, no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    _add_section(table, "", report.client, _CLIENT_ROWS)
    _add_section(table, "parts of TTFT", report.server, _TTFT_ROWS)
    _add_section(table, "KV transfer", report.server, _TRANSFER_ROWS)
    console.print(table)


def _facts(report: LoadReport) -> Iterator[tuple[str, str, str]]:
    completed = f"{report.num_completed} of {report.num_requests} requests in {report.duration_s:.2f} s"
    yield "completed", completed, "green" if not report.failures else "yellow"
    for reason, count in sorted(report.failures.items()):
        yield "failed", f"{count} with {reason}: {report.failure_messages[reason]}", "red"
    rates = f"{report.output_tokens_per_s:.1f} output tokens/s, {report.requests_per_s:.2f} requests/s"
    yield "throughput", rates, "bold"
    if report.paths:
        yield "path", ", ".join(f"{count} {path.replace('_', ' ')}" for path, count in report.paths.items()), ""
    if report.exposed_share is not None:
        moved_mb, each_mb = report.kv_bytes / 1e6, report.server["kv_bytes"].mean / 1e6
        exposed = f"{report.exposed_share:.1%} of the transfer time exposed"
        yield "KV", f"{moved_mb:.1f} MB, {each_mb:.1f} MB a request, {exposed}", ""


def _add_section(
    table: Table, title: str, summaries: Mapping[str, Summary], rows: tuple[tuple[str, str, str], ...]
) -> None:
    present = [(summaries[field], label, about) for field, label, about in rows if field in summaries]
    if present and title:
        table.add_row("")
        table.add_row(f"[bold]{title}[/]")
    for summary, label, about in present:
        numbers = (summary.mean, summary.p50, summary.p90, summary.p99)
        table.add_row(f"  {label}", *(f"{seconds * 1e3:.1f}" for seconds in numbers), about)
