"""`baton top`."""

import json
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.cluster_record import RecordStore
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import name_option
from deploy.errors import ClusterError
from deploy.lifecycle import cluster_status
from deploy.scraped import Change, Scrape, bar, seconds

_TIMEOUT_S = 2.0
_BAR_WIDTH = 20
_PIPE_WIDTH = 140
_COLUMNS = ("worker", "role", "", "running", "waiting", "reserved", "KV blocks held", "step", "tokens/s")


@dataclass(frozen=True, slots=True)
class Target:
    """One process that has metrics."""

    address: str
    worker: str
    role: str


@click.command()
@click.option(
    "--interval", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--once", is_flag=True, help="One picture after one interval, then stop.")
@click.option("--metrics", "address", metavar="HOST:PORT", help="The router's metrics, if it was not started here.")
@name_option
@told_in_one_line
def top(*, interval: float, once: bool, address: str | None, name: str) -> None:
    """Watch a cluster live: pools, batches, KV blocks, latencies. Ctrl-C leaves.

    \b
    Examples:
      baton top
      baton top --once
      baton top --metrics 10.0.0.5:9900
    """
    metrics_address = address or cluster_status(RecordStore().load(name)).router.report.metrics_address
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    before = _look(metrics_address)
    if once:
        time.sleep(interval)
        console.print(picture(before, _look(metrics_address)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                after = _look(metrics_address)
                live.update(picture(before, after), refresh=True)
                before = after
        except KeyboardInterrupt:
            return


def picture(before: Mapping[Target, Scrape], after: Mapping[Target, Scrape]) -> Group:
    """All processes that were there both times."""
    changes = {target: Change(before[target], after[target]) for target in after if target in before}
    router = next((change for target, change in changes.items() if target.role == "router"), None)
    workers = {target: change for target, change in changes.items() if target.role != "router"}
    head = Text("the router does not answer", style="red") if router is None else _router(router)
    return Group(head, Text(), _workers(workers, router))


def _router(change: Change) -> Table:
    table = Table.grid(padding=(0, 3))
    ttft, itl = "baton_time_to_first_token_seconds", "baton_inter_token_latency_seconds"
    now = change.after
    num_running, num_waiting = now.total("baton_requests_running"), now.total("baton_requests_waiting")
    table.add_row(
        f"requests {num_running:.0f} running, {num_waiting:.0f} waiting",
        f"{change.rate('baton_requests_total', status='ok'):.1f} answers/s",
        f"{change.rate('baton_generation_tokens_total'):.0f} tokens/s",
    )
    table.add_row(
        f"TTFT p50 {seconds(change.quantile(0.5, ttft))}, p95 {seconds(change.quantile(0.95, ttft))}",
        f"between tokens p50 {seconds(change.quantile(0.5, itl))}, p95 {seconds(change.quantile(0.95, itl))}",
        f"KV {change.rate('baton_kv_transfer_bytes_total') / 1e6:.1f} MB/s",
    )
    table.add_row(
        f"recoveries {now.total('baton_recoveries_total'):.0f}",
        f"rejected {now.total('baton_rejections_total'):.0f}",
        f"circuits open {now.total('baton_circuits_open'):.0f}",
    )
    return table


def _workers(workers: Mapping[Target, Change], router: Change | None) -> Table:
    table = Table(*_COLUMNS, box=None)
    up = router.after.by("baton_worker_up", "worker") if router is not None else {}
    for target, change in sorted(workers.items(), key=lambda item: item[0].worker):
        now = change.after
        sequences = now.by("baton_sequences", "state")
        held = now.total("baton_kv_cache_usage_ratio")
        is_up = bool(up.get(target.worker))
        table.add_row(
            target.worker,
            target.role,
            Text("up" if is_up else "out", style="green" if is_up else "red"),
            *(f"{sequences.get(state, 0):.0f}" for state in ("running", "waiting", "reserved")),
            f"{bar(held, _BAR_WIDTH)} {held:4.0%}",
            seconds(change.mean("baton_engine_step_seconds")),
            f"{change.rate('baton_engine_tokens_total'):.0f}",
        )
    return table


def _look(metrics_address: str) -> dict[Target, Scrape]:
    """Every process that answers. Raises ClusterError if the router does not."""
    try:
        found = json.loads(_get(f"http://{metrics_address}/sd/prometheus"))
    except (OSError, ValueError) as error:
        raise ClusterError(f"the router's metrics at {metrics_address} cannot be read: {error}") from error
    targets = [Target(t["targets"][0], t["labels"]["worker"], t["labels"]["role"]) for t in found]
    with ThreadPoolExecutor(len(targets)) as threads:
        scrapes = threads.map(_scrape, targets)
        return {target: scrape for target, scrape in zip(targets, scrapes, strict=True) if scrape is not None}


def _scrape(target: Target) -> Scrape | None:
    try:
        text = _get(f"http://{target.address}/metrics")
    except OSError:
        return None
    return Scrape.parsed(time.monotonic(), text)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        return str(response.read().decode())
