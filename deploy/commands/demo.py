"""`baton demo`."""

import os
from pathlib import Path

import click
from rich.console import Console

from baton.client import Client
from deploy.cluster_record import RecordStore
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import cluster_spec, dtype_option, model_option
from deploy.commands.up import start_with_view
from deploy.lifecycle import stop_cluster
from deploy.timeline_view import print_timeline

_QUESTION = "What is the capital of France?"


@click.command()
@model_option
@dtype_option
@told_in_one_line
def demo(*, model: Path | None, dtype: str) -> None:
    """Start a cluster, ask one question, show where its time went, and stop the cluster.

    One router, one prefill and one decode worker, under a name of their own: a cluster that runs already is
    not touched. Nothing is left behind.
    """
    store = RecordStore()
    record = start_with_view(cluster_spec(model, name=f"demo-{os.getpid()}", dtype=dtype))
    try:
        _ask(record.router_address)
    finally:
        stop_cluster(record, store, grace_s=2.0)
    click.echo("The cluster is down, none of its processes is left.")


def _ask(address: str) -> None:
    click.secho(f"> {_QUESTION}", bold=True)
    with Client(address) as client:
        messages = [{"role": "user", "content": _QUESTION}]
        with client.generate(messages, max_tokens=64, temperature=0.0) as stream:
            for chunk in stream:
                click.echo(chunk.text, nl=False)
    click.echo("\n")
    if stream.timeline is not None:
        print_timeline(stream.timeline, Console())
    click.echo()
