"""`baton down`."""

import click

from deploy.cluster_record import RecordStore
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import name_option
from deploy.lifecycle import stop_cluster


@click.command()
@name_option
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long running requests may go on.",
)
@told_in_one_line
def down(name: str, grace: float) -> None:
    """Stop a cluster; nothing of it is left.

    The Ray that `baton up` started ends with it, and only that: other Ray clusters on this machine live on.
    """
    store = RecordStore()
    stop_cluster(store.load(name), store, grace_s=grace)
    click.echo(f"cluster {name!r} is down, none of its processes is left")
