"""A connection to Ray, and the controller in it. Import it when Ray's environment is set: Ray reads it only then."""

import contextlib
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from deploy import member_actors
from deploy.cluster_spec import ClusterSpec
from deploy.cluster_status import ClusterStatus
from deploy.controller import Controller, controller_name
from deploy.errors import ClusterError

_CONNECT_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 10.0
_SHUTDOWN_MARGIN_S = 15.0
_EXIT_TIMEOUT_S = 15.0
_RETRY_INTERVAL_S = 0.1


@contextlib.contextmanager
def ray_session(address: str) -> Iterator[None]:
    """Connects to the Ray at host:port. Raises ClusterError if there is none, or if Ray fails meanwhile."""
    _check_listens(address)
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, namespace=member_actors.NAMESPACE, log_to_driver=False, logging_level="ERROR")
        _handle_sigterm(sigterm_handler)
        yield
    except (RayError, ConnectionError, TimeoutError) as error:
        raise ClusterError(f"Ray at {address} fails: {error}") from error
    finally:
        ray.shutdown()
        _handle_sigterm(sigterm_handler)


def _handle_sigterm(handler: Any) -> None:
    # Ray replaces the handler when it starts, and when it ends SIGTERM kills at once: nothing would be cleaned up.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _check_listens(address: str) -> None:
    # Ray would try for minutes and say nothing.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except ValueError:
        raise ClusterError(f"{address!r} is not the address of a Ray cluster: use host:port") from None
    except OSError as error:
        raise ClusterError(f"no Ray answers at {address} ({error}): is it running there?") from error


def create_controller(spec: ClusterSpec, available_cores: Sequence[int]) -> None:
    """Creates the controller, which outlives this session; it begins at once to create the rest."""
    _create_controller(spec, available_cores, secrets.token_hex(4), grace_s=0.0)


def replace_controller(spec: ClusterSpec, available_cores: Sequence[int], grace_s: float) -> None:
    """Another controller takes over what runs and makes the cluster what `spec` says.

    Workers that must leave give their requests `grace_s` seconds. Raises ClusterError if there is no controller.
    """
    controller = _known_controller(spec.name)
    _, incarnation = ray.get(controller.description.remote(), timeout=_STATUS_TIMEOUT_S)
    ray.kill(controller, no_restart=True)
    deadline_s = time.monotonic() + _EXIT_TIMEOUT_S
    while True:
        try:
            return _create_controller(spec, available_cores, incarnation, grace_s)
        except ValueError as error:  # the name is taken until the old one is gone
            if time.monotonic() > deadline_s:
                raise ClusterError(f"the old controller does not end: {error}") from error
            time.sleep(_RETRY_INTERVAL_S)


def controller_spec(cluster: str) -> ClusterSpec:
    """What a cluster is to be. Raises ClusterError if it has no controller."""
    spec: ClusterSpec
    spec, _ = ray.get(_known_controller(cluster).description.remote(), timeout=_STATUS_TIMEOUT_S)
    return spec


def _create_controller(spec: ClusterSpec, available_cores: Sequence[int], incarnation: str, grace_s: float) -> None:
    options = {
        "name": controller_name(spec.name),
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 100,
    }
    ray.remote(Controller).options(**options).remote(spec, available_cores, incarnation, grace_s)


def has_controller(cluster: str) -> bool:
    """Whether there is a cluster of this name."""
    return _controller(cluster) is not None


def controller_status(cluster: str) -> ClusterStatus:
    """What the controller of a cluster says. Raises ClusterError if there is none."""
    status: ClusterStatus = ray.get(_known_controller(cluster).status.remote(), timeout=_STATUS_TIMEOUT_S)
    return status


def replace_worker(cluster: str, worker: str, grace_s: float) -> None:
    """Lets a worker leave and starts another; returns when it has left. Raises ClusterError."""
    controller = _known_controller(cluster)
    try:
        ray.get(controller.replace_worker.remote(worker, grace_s), timeout=grace_s + _SHUTDOWN_MARGIN_S)
    except RayTaskError as error:
        if isinstance(error.cause, ValueError):
            raise ClusterError(str(error.cause)) from error
        raise


def shut_down(cluster: str, grace_s: float) -> None:
    """Ends all actors of a cluster, with `grace_s` seconds for running requests. Nothing happens without one.

    Raises ClusterError if a process of it on this machine is left.
    """
    controller = _controller(cluster)
    if controller is None:  # it never came to life, or is gone already
        member_actors.sweep(cluster)
        return
    members = _processes_here(ray.get(controller.status.remote(), timeout=_STATUS_TIMEOUT_S))
    ray.get(controller.shutdown.remote(grace_s), timeout=2 * grace_s + _SHUTDOWN_MARGIN_S)
    ray.kill(controller, no_restart=True)
    member_actors.sweep(cluster)
    _, survivors = psutil.wait_procs(members, timeout=_EXIT_TIMEOUT_S)  # Ray ends them after it has said so
    if survivors:
        raise ClusterError(f"processes {[process.pid for process in survivors]} do not end: end them by hand")


def _processes_here(status: ClusterStatus) -> list[psutil.Process]:
    processes = []
    for report in (member.report for member in status.members):
        if report.pid and report.hostname == socket.gethostname():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(report.pid))
    return processes


def _known_controller(cluster: str) -> Any:
    controller = _controller(cluster)
    if controller is None:
        raise ClusterError(
            f"Ray runs, but not the controller of cluster {cluster!r}: run `baton down --name {cluster}`"
        )
    return controller


def _controller(cluster: str) -> Any:
    try:
        return ray.get_actor(controller_name(cluster), member_actors.NAMESPACE)
    except ValueError:
        return None
