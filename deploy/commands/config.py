"""`baton config`."""

from pathlib import Path

import click
import yaml

from deploy.cluster_file import ClusterFile, read_cluster_file
from deploy.cluster_spec import ClusterSpec
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import spec_settings


@click.group()
def config() -> None:
    """Look after cluster files, which `baton up -f` makes true."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@told_in_one_line
def check(*, file: Path) -> None:
    """Check a cluster FILE and print all of it, with what it leaves to the defaults.

    \b
    Examples:
      baton config check cluster.yaml
    """
    cluster = read_cluster_file(file)
    options = cluster.options()
    del options["model"]
    ClusterSpec(model_dir="", model_name="", **spec_settings(**options))
    click.echo(as_yaml(cluster), nl=False)


@config.command()
def example() -> None:
    """Print a cluster file that says what `baton up` does without one.

    \b
    Examples:
      baton config example > cluster.yaml
    """
    click.echo(as_yaml(ClusterFile()), nl=False)


def as_yaml(cluster: ClusterFile) -> str:
    """The file's text."""
    return str(yaml.safe_dump(cluster.model_dump(), sort_keys=False))
