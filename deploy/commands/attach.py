"""`baton attach`."""

import click

from deploy.cluster_record import RecordStore
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import name_option
from deploy.errors import ClusterError
from deploy.lifecycle import attach_cluster


@click.command()
@click.option("--ray-address", required=True, metavar="HOST:PORT", help="The Ray it runs on.")
@name_option
@told_in_one_line
def attach(*, ray_address: str, name: str) -> None:
    """Make a cluster known here that was started from another machine.

    Then `baton status`, `baton chat`, `baton scale` and the rest work with it from here too.

    \b
    Examples:
      baton attach --ray-address HEAD:6379
    """
    record = attach_cluster(name, ray_address, RecordStore())
    if record is None:
        raise ClusterError(f"there is no cluster {name!r} on the Ray at {ray_address}")
    click.echo(f"cluster {name!r} serves at {record.router_address}")
