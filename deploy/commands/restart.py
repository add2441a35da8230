"""`baton restart`."""

import time
from collections.abc import Sequence

import click

from deploy.cluster_record import ClusterRecord, RecordStore
from deploy.cluster_status import ClusterStatus, MemberStatus
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import grace_option, name_option
from deploy.errors import ClusterError
from deploy.lifecycle import cluster_status, replace_worker

START_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.5


@click.command()
@click.argument("workers", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="All workers, one after the other.")
@grace_option
@name_option
@told_in_one_line
def restart(*, workers: tuple[str, ...], is_all: bool, grace: float, name: str) -> None:
    """Replace WORKERS by new processes, one after the other.

    A worker that leaves gets no new requests. Those it has end within the grace, or go on with other workers: their
    clients see a pause and no error, as long as there is another worker of its role.

    \b
    Examples:
      baton restart decode-0
      baton restart --all --grace 5
    """
    record = RecordStore().load(name)
    status = cluster_status(record)
    for worker in _wanted(status, workers, is_all=is_all):
        began_at_s = time.monotonic()
        click.echo(f"{worker}: leaving ...", err=True)
        replace_worker(record, worker, grace)
        click.echo(f"{worker}: has left, a new one starts ...", err=True)
        member = _wait_until_ready(record, worker)
        click.echo(f"{worker} runs again, process {member.report.pid}, after {time.monotonic() - began_at_s:.0f} s")


def _wanted(status: ClusterStatus, names: Sequence[str], *, is_all: bool) -> list[str]:
    known = [worker.name for worker in status.workers]
    if is_all == bool(names):
        raise ClusterError(f"name the workers to restart, or give --all; there are {', '.join(known)}")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ClusterError(f"there is no worker {unknown[0]!r}; there are {', '.join(known)}")
    return known if is_all else list(names)


def _wait_until_ready(record: ClusterRecord, name: str) -> MemberStatus:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        worker = next(w for w in cluster_status(record).workers if w.name == name)
        if worker.is_ready:
            return worker
        if time.monotonic() > deadline_s:
            raise ClusterError(f"{name} is not ready after {START_TIMEOUT_S:.0f} s: {worker.report.detail}")
        time.sleep(_POLL_INTERVAL_S)
