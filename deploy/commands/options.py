"""Options that several commands share, and the cluster they mean."""

from pathlib import Path
from typing import Any

import click

from deploy.cluster_record import RecordStore
from deploy.cluster_spec import DEFAULT_CLUSTER_NAME, DTYPES, ClusterSpec
from deploy.errors import ClusterError
from engine.model_store import DEFAULT_MODEL_NAME, resolve_model

name_option = click.option(
    "--name", default=DEFAULT_CLUSTER_NAME, show_default=True, help="Which cluster, if there are several."
)
address_option = click.option(
    "--address",
    envvar="BATON_ADDRESS",
    show_envvar=True,
    metavar="HOST:PORT",
    help="The router, if it was not started here with `baton up`.",
)
model_option = click.option(
    "--model",
    type=click.Path(path_type=Path),
    help=f"A model directory or a .gguf file. [default: {DEFAULT_MODEL_NAME}]",
)
dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="What to compute in."
)
max_tokens_option = click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Longest answer."
)
seed_option = click.option("--seed", type=click.IntRange(min=0), help="For the same random choices again.")

grace_option = click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the requests of a worker that leaves may go on where they are.",
)


def router_address(name: str, address: str | None) -> str:
    """The router meant by --name and --address. Raises ClusterError."""
    if address:
        return address
    record = RecordStore().load(name)
    if not record.router_address:
        raise ClusterError(f"cluster {name!r} is still starting: wait until `baton up` is done")
    return record.router_address


def cluster_spec(model: Path | None, **settings: object) -> ClusterSpec:
    """The spec of a cluster that serves `model`, converted if need be. Raises ModelUnavailableError, ClusterError."""
    names = {"model_dir": "", "model_name": DEFAULT_MODEL_NAME if model is None else model.stem}
    ClusterSpec(**names, **settings)  # type: ignore[arg-type]  # what is wrong is told before a long conversion
    names["model_dir"] = str(resolve_model(model, on_progress=lambda text: click.echo(text, err=True)))
    return ClusterSpec(**names, **settings)  # type: ignore[arg-type]


def spec_settings(
    *, prefill: int | None, decode: int | None, mixed: int, ray_address: str, **options: Any
) -> dict[str, Any]:
    """Settings of `ClusterSpec`, but for the model, from options of `baton up`.

    Workers that do both stand for the others, unless these are asked for too.
    """
    default = 0 if mixed else 1
    return {
        "num_prefill": default if prefill is None else prefill,
        "num_decode": default if decode is None else decode,
        "num_mixed": mixed,
        "router_port": options.pop("port"),
        "cores_per_worker": options.pop("cores"),
        "kv_memory_bytes": options.pop("kv_memory_mb") << 20,
        "pin_cores": not ray_address,
        **options,
    }
