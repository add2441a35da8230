"""Shows where one request's time went."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from baton.v1 import request_pb2

_BAR_WIDTH = 20
# The parts of the time to first token, in their order: field of the timeline, and what happens meanwhile.
_PARTS = (
    ("queue_s", "queue", "router tokenizes, chooses workers"),
    ("reserve_s", "reserve", "decode worker reserves KV blocks"),
    ("dispatch_s", "dispatch", "router to prefill worker and back"),
    ("prefill_queue_s", "prefill queue", "prefill worker is busy"),
    ("prefill_s", "prefill", "it computes, KV flows meanwhile"),
)
_PATHS = {
    request_pb2.PATH_DISAGGREGATED: "disaggregated",
    request_pb2.PATH_LOCAL_PREFILL: "local prefill",
    request_pb2.PATH_UNSPECIFIED: "unknown path",
}


def print_timeline(timeline: request_pb2.Timeline, console: Console) -> None:
    """Prints the parts of the time to first token as bars on one scale, then the way taken and the transfer."""
    console.print(_parts_table(timeline))
    for label, text in _facts(timeline):
        console.print(f"  {label:<9} {text}", highlight=False, soft_wrap=True, markup=False)


def _facts(timeline: request_pb2.Timeline) -> Iterator[tuple[str, str]]:
    is_disaggregated = timeline.path == request_pb2.PATH_DISAGGREGATED
    workers = f"{timeline.prefill_worker} → {timeline.decode_worker}" if is_disaggregated else timeline.decode_worker
    yield "path", f"{_PATHS[timeline.path]}, {workers}"
    if timeline.path_reason:
        yield "because", timeline.path_reason
    if is_disaggregated:
        yield (
            "KV",
            f"{timeline.kv_bytes} bytes by {timeline.transport} in {_ms(timeline.transfer_s)}, "
            f"{_ms(timeline.transfer_tail_s)} of it after prefill",
        )
    decode_s = max(timeline.e2e_s - timeline.ttft_s, 0.0)
    first_step = f", first step {_ms(timeline.first_decode_step_s)}" if timeline.first_decode_step_s else ""
    yield "decode", f"{_ms(decode_s)} after token 0{first_step}; whole request {_ms(timeline.e2e_s)}"


def _parts_table(timeline: request_pb2.Timeline) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(width=_BAR_WIDTH)
    table.add_column(style="dim", no_wrap=True)
    start_s = 0.0
    for field, label, explanation in _PARTS:
        duration_s: float = getattr(timeline, field)
        bar = _bar(start_s, duration_s, timeline.ttft_s)
        table.add_row(f"  {label}", _ms(duration_s), f"[cyan]{bar}[/]", explanation)
        start_s += duration_s
    table.add_row("  [bold]TTFT[/]", f"[bold]{_ms(timeline.ttft_s)}[/]", "", f"the parts sum to {_ms(start_s)}")
    return table


def _bar(start_s: float, duration_s: float, whole_s: float) -> str:
    if whole_s <= 0:
        return ""
    begin = min(round(start_s / whole_s * _BAR_WIDTH), _BAR_WIDTH - 1)
    end = min(round((start_s + duration_s) / whole_s * _BAR_WIDTH), _BAR_WIDTH)
    return " " * begin + ("█" * (end - begin) or "▏")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
