"""`baton up`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from deploy.cluster_file import read_cluster_file
from deploy.cluster_record import ClusterRecord, RecordStore
from deploy.cluster_spec import DEFAULT_CLUSTER_NAME, DEVICES, NODE_HOST, ClusterSpec
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import (
    cluster_spec,
    dtype_option,
    grace_option,
    model_option,
    name_option,
    spec_settings,
)
from deploy.commands.settling import wait_until_settled
from deploy.core_assignment import assign_cores
from deploy.errors import ClusterError
from deploy.lifecycle import attach_cluster, available_cores, change_cluster, cluster_spec_of, start_cluster
from deploy.process_logging import LOG_FORMATS
from deploy.startup_view import StartupView


def _use_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """The file's values become the defaults of the options, which are read after it."""
    del parameter
    if path is not None:
        try:
            context.default_map = read_cluster_file(path).options()
        except ClusterError as error:
            raise click.ClickException(str(error)) from error
    return path


@click.command()
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    is_eager=True,
    callback=_use_file,
    help="A cluster file; options given beside it win. A cluster that runs already becomes what it says.",
)
@click.option("--prefill", type=click.IntRange(min=0), help="Prefill workers. [default: 1, or 0 with --mixed]")
@click.option("--decode", type=click.IntRange(min=0), help="Decode workers. [default: 1, or 0 with --mixed]")
@click.option("--mixed", type=click.IntRange(min=0), default=0, help="Workers that do both. [default: 0]")
@model_option
@dtype_option
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True, help="What to compute on.")
@click.option("--port", type=int, default=0, help="The router's port. [default: any free one]")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help=f"What servers bind. '{NODE_HOST}': the address of the Ray node where each runs, for several machines; "
    "whoever reaches it can use it.",
)
@click.option(
    "--max-waiting", type=click.IntRange(min=0), default=1024, show_default=True, help="Requests that may wait."
)
@click.option(
    "--recovery-patience-s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="How long a request that has lost its workers waits for others.",
)
@click.option("--metrics-port", type=int, default=0, help="The router's /metrics. [default: any free one]")
@click.option("--slo-ttft-s", type=click.FloatRange(min=0), default=0.0, help="Target for TTFT. [default: none]")
@click.option("--slo-tpot-s", type=click.FloatRange(min=0), default=0.0, help="Target for TPOT. [default: none]")
@click.option("--cores", type=click.IntRange(min=1), default=1, show_default=True, help="CPU cores per worker.")
@click.option("--kv-memory-mb", type=click.IntRange(min=0), default=0, help="KV cache per worker. [default: auto]")
@click.option("--ray-address", default="", metavar="HOST:PORT", help="Join this Ray cluster instead of starting one.")
@click.option(
    "--role-label",
    default="",
    metavar="KEY",
    help="Run members only on Ray nodes with this label: KEY=router, prefill, decode or mixed.",
)
@click.option(
    "--log-format", type=click.Choice(LOG_FORMATS), default="text", show_default=True, help="Of all processes."
)
@click.option("--allow-faults", is_flag=True, help="Let whoever reaches the workers break them. For drills only.")
@grace_option
@name_option
@told_in_one_line
def up(file: Path | None, model: Path | None, ray_address: str, grace: float, **options: Any) -> None:
    """Start a cluster and wait until it serves.

    Without options: one router, one prefill and one decode worker on this machine, each worker pinned to one
    CPU core. The cluster stays when the command ends; `baton down` stops it.

    \b
    Examples:
      baton up
      baton up --prefill 2 --decode 3
      baton up --mixed 2                       prefill and decode in the same workers
      baton up --model ~/models/Qwen3-0.6B --dtype float32
      baton up -f cluster.yaml                 see `baton config example`
      baton up --ray-address HEAD:6379 --host node --role-label baton-role    on several machines
    """
    spec = cluster_spec(model, **spec_settings(ray_address=ray_address, **options))
    running = _running(spec.name, ray_address) if file is not None else None
    if running is not None:
        _change(running, spec, grace)
    record = running or start_with_view(spec, ray_address)
    option = "" if spec.name == DEFAULT_CLUSTER_NAME else f" --name {spec.name}"
    click.echo(f"{spec.model_name} is ready at {record.router_address}")
    click.echo(f'Try: baton chat{option} | baton generate{option} "Hello" | baton status{option}')
    click.echo(f"Stop it with: baton down{option}")


def _running(name: str, ray_address: str) -> ClusterRecord | None:
    """The cluster of this name, also if it was started from another machine."""
    store = RecordStore()
    if name in store.names():
        return store.load(name)
    return attach_cluster(name, ray_address, store) if ray_address else None


def _change(record: ClusterRecord, spec: ClusterSpec, grace_s: float) -> None:
    running = cluster_spec_of(record)
    wanted = replace(spec, router_port=spec.router_port or running.router_port)
    if wanted == running:
        click.echo("nothing to change", err=True)
        return
    change_cluster(record, wanted, grace_s)
    wait_until_settled(record)


def start_with_view(spec: ClusterSpec, ray_address: str = "") -> ClusterRecord:
    """Starts a cluster and shows on standard error how it comes up. Raises ClusterError."""
    with StartupView(Console(stderr=True)) as view:
        cores = available_cores()
        if spec.pin_cores and assign_cores(spec.num_workers, spec.cores_per_worker, cores).is_shared:
            view.show_warning(
                f"{spec.num_workers} workers with {spec.cores_per_worker} cores each share "
                f"{len(cores)} cores and will slow each other down"
            )
        view.show_step(f"Starting cluster {spec.name!r}")
        return start_cluster(spec, RecordStore(), ray_address=ray_address, on_status=view.show_status)
