"""`baton scale`."""

import time
from dataclasses import replace

import click

from deploy.cluster_record import RecordStore
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import grace_option, name_option
from deploy.commands.settling import wait_until_settled
from deploy.errors import ClusterError
from deploy.lifecycle import change_cluster, cluster_spec_of


@click.command()
@click.option("--prefill", type=click.IntRange(min=0), help="Prefill workers. [default: as many as there are]")
@click.option("--decode", type=click.IntRange(min=0), help="Decode workers. [default: as many as there are]")
@click.option("--mixed", type=click.IntRange(min=0), help="Workers that do both. [default: as many as there are]")
@grace_option
@name_option
@told_in_one_line
def scale(*, prefill: int | None, decode: int | None, mixed: int | None, grace: float, name: str) -> None:
    """Add workers to a running cluster, or let some leave.

    The last of a role leave first. A worker that leaves gets no new requests; those it has end within the grace, or
    go on with other workers.

    \b
    Examples:
      baton scale --decode 3
      baton scale --prefill 2 --decode 1 --grace 5
    """
    if prefill is None and decode is None and mixed is None:
        raise ClusterError("say how many workers there are to be: --prefill, --decode or --mixed")
    record = RecordStore().load(name)
    began_at_s = time.monotonic()
    spec = cluster_spec_of(record)
    wanted = replace(
        spec,
        num_prefill=spec.num_prefill if prefill is None else prefill,
        num_decode=spec.num_decode if decode is None else decode,
        num_mixed=spec.num_mixed if mixed is None else mixed,
    )
    change_cluster(record, wanted, grace)
    status = wait_until_settled(record)
    workers = ", ".join(worker.name for worker in status.workers)
    click.echo(f"{len(status.workers)} workers serve after {time.monotonic() - began_at_s:.0f} s: {workers}")
