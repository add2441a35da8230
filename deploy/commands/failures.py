"""Expected failures as one line on standard error and exit code 1."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

from baton.errors import BatonError
from deploy.cluster_spec import ClusterSpecError
from deploy.errors import ClusterError
from engine.model_store import ModelUnavailableError

P = ParamSpec("P")
R = TypeVar("R")


def told_in_one_line(command: Callable[P, R]) -> Callable[P, R]:
    """Decorates a command: errors that a user can do something about come without a traceback."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except ClusterSpecError as error:
            raise click.UsageError(str(error)) from error
        except (BatonError, ClusterError, ModelUnavailableError) as error:
            raise click.ClickException(str(error)) from error

    return wrapper
