"""`baton up`."""

from pathlib import Path

import click
from rich.console import Console

from deploy.cluster_record import ClusterRecord, RecordStore
from deploy.cluster_spec import DEFAULT_CLUSTER_NAME, DEVICES, NODE_HOST, ClusterSpec
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import cluster_spec, dtype_option, model_option, name_option
from deploy.core_assignment import assign_cores
from deploy.lifecycle import available_cores, start_cluster
from deploy.startup_view import StartupView


@click.command()
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
@click.option("--cores", type=click.IntRange(min=1), default=1, show_default=True, help="CPU cores per worker.")
@click.option("--kv-memory-mb", type=click.IntRange(min=0), default=0, help="KV cache per worker. [default: auto]")
@click.option("--ray-address", default="", metavar="HOST:PORT", help="Join this Ray cluster instead of starting one.")
@click.option(
    "--role-label",
    default="",
    metavar="KEY",
    help="Run members only on Ray nodes with this label: KEY=router, prefill, decode or mixed.",
)
@click.option("--allow-faults", is_flag=True, help="Let whoever reaches the workers break them. For drills only.")
@name_option
@told_in_one_line
def up(  # noqa: PLR0913 - one for each option
    *,
    prefill: int | None,
    decode: int | None,
    mixed: int,
    model: Path | None,
    dtype: str,
    device: str,
    port: int,
    host: str,
    cores: int,
    kv_memory_mb: int,
    ray_address: str,
    role_label: str,
    allow_faults: bool,
    name: str,
) -> None:
    """Start a cluster and wait until it serves.

    Without options: one router, one prefill and one decode worker on this machine, each worker pinned to one
    CPU core. The cluster stays when the command ends; `baton down` stops it.

    \b
    Examples:
      baton up
      baton up --prefill 2 --decode 3
      baton up --mixed 2                       prefill and decode in the same workers
      baton up --model ~/models/Qwen3-0.6B --dtype float32
      baton up --ray-address HEAD:6379 --host node --role-label baton-role    on several machines
    """
    default = 0 if mixed else 1
    spec = cluster_spec(
        model,
        num_prefill=default if prefill is None else prefill,
        num_decode=default if decode is None else decode,
        num_mixed=mixed,
        router_port=port,
        cores_per_worker=cores,
        kv_memory_bytes=kv_memory_mb << 20,
        pin_cores=not ray_address,
        dtype=dtype,
        device=device,
        host=host,
        role_label=role_label,
        name=name,
        allow_faults=allow_faults,
    )
    record = start_with_view(spec, ray_address)
    option = "" if name == DEFAULT_CLUSTER_NAME else f" --name {name}"
    click.echo(f"{spec.model_name} is ready at {record.router_address}")
    click.echo(f'Try: baton chat{option} | baton generate{option} "Hello" | baton status{option}')
    click.echo(f"Stop it with: baton down{option}")


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
