"""`baton status`."""

import asyncio
import dataclasses
import json

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.cluster_record import RecordStore
from deploy.cluster_status import ClusterStatus, MemberStatus
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import name_option
from deploy.lifecycle import cluster_status
from deploy.startup_view import STATE_STYLES
from deploy.worker_probe import WorkerLoad, probe_workers

_PIPE_WIDTH = 160
_COLUMNS = ("name", "role", "state", "pid", "address", "KV blocks free", "running", "waiting", "reserved", "restarts")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@name_option
@told_in_one_line
def status(*, as_json: bool, name: str) -> None:
    """Show the router and every worker: state, KV blocks, queues.

    The exit code is 0 if all of the cluster serves, otherwise 1.
    """
    cluster = cluster_status(RecordStore().load(name))
    probed = asyncio.run(probe_workers([worker.report.address for worker in cluster.workers]))
    loads = {worker.name: load for worker, load in zip(cluster.workers, probed, strict=True)}
    if as_json:
        click.echo(json.dumps(_as_json(cluster, loads), indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        console.print(f"{cluster.model_name}, cluster {cluster.name!r}", highlight=False)
        console.print(_as_table(cluster, loads))
        if metrics := cluster.router.report.metrics_address:
            console.print(f"metrics: http://{metrics}/metrics, of all: http://{metrics}/sd/prometheus", highlight=False)
    if not cluster.is_ready:
        raise SystemExit(1)


def _as_table(cluster: ClusterStatus, loads: dict[str, WorkerLoad | None]) -> Table:
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for member in cluster.members:
        report = member.report
        state = f"{report.state.value}: {report.detail}" if report.detail else report.state.value
        load = loads.get(member.name)
        table.add_row(
            member.name,
            member.role,
            Text(state, style=STATE_STYLES[report.state]),
            str(report.pid or ""),
            report.address,
            f"{load.free_blocks}/{load.total_blocks}" if load else "",
            str(load.num_running) if load else "",
            str(load.num_waiting) if load else "",
            str(load.num_reserved) if load else "",
            str(member.num_restarts),
        )
    return table


def _as_json(cluster: ClusterStatus, loads: dict[str, WorkerLoad | None]) -> dict[str, object]:
    workers = []
    for worker in cluster.workers:
        load = loads[worker.name]
        workers.append({**_member(worker), "load": dataclasses.asdict(load) if load else None})
    return {
        "name": cluster.name,
        "model": cluster.model_name,
        "is_ready": cluster.is_ready,
        "router": _member(cluster.router),
        "workers": workers,
    }


def _member(member: MemberStatus) -> dict[str, object]:
    return {
        "name": member.name,
        "role": member.role,
        "state": member.report.state.name.lower(),
        "detail": member.report.detail,
        "pid": member.report.pid,
        "address": member.report.address,
        "metrics_address": member.report.metrics_address,
        "epoch": member.report.epoch,
        "num_restarts": member.num_restarts,
    }
