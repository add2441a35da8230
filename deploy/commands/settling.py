"""Waits until a changed cluster is as it was asked to be."""

import time

import click

from deploy.cluster_record import ClusterRecord
from deploy.cluster_status import ClusterStatus
from deploy.errors import ClusterError
from deploy.lifecycle import cluster_status

SETTLE_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.5


def wait_until_settled(record: ClusterRecord) -> ClusterStatus:
    """Tells on standard error what it waits for. Raises ClusterError after minutes."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    told = ""
    while True:
        status = cluster_status(record)
        if status.is_settled:
            return status
        if (text := _unsettled(status)) != told:
            told = text
            click.echo(text, err=True)
        if time.monotonic() > deadline_s:
            raise ClusterError(f"not done after {SETTLE_TIMEOUT_S:.0f} s: {told}")
        time.sleep(_POLL_INTERVAL_S)


def _unsettled(status: ClusterStatus) -> str:
    waiting = [f"{m.name} {m.report.state.value} {m.report.detail}".strip() for m in status.members if not m.is_ready]
    return "; ".join(waiting + [f"{name} leaving" for name in status.pending])
