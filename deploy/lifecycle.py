"""Starting, asking and ending a cluster, as the commands do it."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from deploy import local_ray
from deploy.cluster_record import ClusterRecord, RecordStore
from deploy.cluster_spec import ClusterSpec
from deploy.cluster_status import ClusterStatus
from deploy.errors import ClusterError

START_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.3
_MAX_FAILED_STARTS = 2
_SHUTDOWN_LIMIT_S = 40.0  # beyond the time for running requests


def start_cluster(
    spec: ClusterSpec,
    store: RecordStore,
    *,
    ray_address: str = "",
    on_status: Callable[[ClusterStatus], None] = lambda _: None,
) -> ClusterRecord:
    """Starts a cluster, in a Ray of its own unless `ray_address` names one, and waits until all of it serves.

    If that fails, or is interrupted, nothing is left of it. Raises ClusterError.
    """
    _forget_dead(spec.name, store)
    # Chosen here and not by the router, so that every later life of it has the address that clients know.
    spec = replace(spec, router_port=spec.router_port or local_ray.free_port())
    record = ClusterRecord(spec.name, ray_address)
    store.create(record)
    try:
        if not ray_address:
            record = _start_embedded_ray(record, store)
        with _session(record) as session:
            session.create_controller(spec, available_cores())
            status = _wait_until_ready(lambda: session.controller_status(spec.name), on_status)
        record = replace(record, router_address=status.router.report.address)
        store.save(record)
    except BaseException:
        with contextlib.suppress(ClusterError):  # what went wrong first is what the user must hear
            stop_cluster(store.load(spec.name), store, grace_s=0)
        raise
    return record


def attach_cluster(name: str, ray_address: str, store: RecordStore) -> ClusterRecord | None:
    """Takes up a cluster that was started elsewhere on the Ray at this address; None if there is none of that name.

    Raises ClusterError if this machine knows another one by this name, or no Ray answers.
    """
    record = ClusterRecord(name, ray_address)
    with _session(record) as session:
        if not session.has_controller(name):
            return None
        status: ClusterStatus = session.controller_status(name)
    if not status.router.report.address:
        raise ClusterError(f"cluster {name!r} is still starting: its router has no address yet")
    record = replace(record, router_address=status.router.report.address)
    store.create(record)
    return record


def stop_cluster(record: ClusterRecord, store: RecordStore, *, grace_s: float) -> None:
    """Ends a cluster, with `grace_s` seconds for running requests, and forgets it.

    Whatever state it is in, no process of it is left. Of a joined Ray only our actors end. Raises ClusterError.
    """
    if not record.is_embedded:
        try:
            with _session(record) as session:
                session.shut_down(record.name, grace_s)
        finally:
            store.remove(record.name)  # a Ray that is gone must not keep the name for ever
        return
    if _is_alive(record):
        _ask_to_shut_down(record, grace_s)
    local_ray.stop(Path(record.directory), record.session_id)
    store.remove(record.name)


def _ask_to_shut_down(record: ClusterRecord, grace_s: float) -> None:
    """Lets running requests end. This Ray ends in any case, so one that fails, or hangs, holds nothing up."""

    def ask() -> None:
        # A controller that is dead, or of another version, may fail in any way.
        with contextlib.suppress(Exception), _session(record) as session:
            session.shut_down(record.name, grace_s)

    # In a thread, as connecting to a Ray that hangs cannot be interrupted.
    asking = threading.Thread(target=ask, name="shut down", daemon=True)
    asking.start()
    asking.join(2 * grace_s + _SHUTDOWN_LIMIT_S)


def cluster_status(record: ClusterRecord) -> ClusterStatus:
    """What the controller says. Raises ClusterError."""
    if record.is_embedded and not _is_alive(record):
        raise ClusterError(f"cluster {record.name!r} has died: run `baton up --name {record.name}` again")
    with _session(record) as session:
        status: ClusterStatus = session.controller_status(record.name)
    return status


def replace_worker(record: ClusterRecord, worker: str, grace_s: float) -> None:
    """Lets a worker leave, with `grace_s` seconds for its requests, and starts another in its place.

    What still runs then goes on elsewhere. Returns when it has left. Raises ClusterError.
    """
    with _session(record) as session:
        session.replace_worker(record.name, worker, grace_s)


def cluster_spec_of(record: ClusterRecord) -> ClusterSpec:
    """What a running cluster is to be. Raises ClusterError."""
    with _session(record) as session:
        spec: ClusterSpec = session.controller_spec(record.name)
    return spec


def change_cluster(record: ClusterRecord, spec: ClusterSpec, grace_s: float) -> None:
    """Begins to make a running cluster what `spec` says: workers are added, leave, or are replaced one by one.

    Those that leave give their requests `grace_s` seconds; what still runs then goes on elsewhere. `cluster_status`
    tells when it is settled. Raises ClusterError if something changes that needs another cluster.
    """
    with _session(record) as session:
        if problem := spec.change_problem(session.controller_spec(record.name)):
            raise ClusterError(problem)
        session.replace_controller(spec, available_cores(), grace_s)


def available_cores() -> Sequence[int]:
    """Numbers of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def _session(record: ClusterRecord) -> Iterator[ModuleType]:
    if not record.ray_address:
        raise ClusterError(f"cluster {record.name!r} has no Ray yet")
    if record.is_embedded:
        os.environ.update(local_ray.environment())
    # Ray reads its environment when it is imported, and never again.
    from deploy import ray_session  # noqa: PLC0415

    with ray_session.ray_session(record.ray_address):
        yield ray_session


def _start_embedded_ray(record: ClusterRecord, store: RecordStore) -> ClusterRecord:
    # Saved before each step, so that an interrupted start can be cleaned up by whoever comes next.
    record = replace(record, directory=str(local_ray.new_directory()))
    store.save(record)
    starter = local_ray.begin_start(Path(record.directory))
    record = replace(record, session_id=starter.pid)
    store.save(record)
    record = replace(record, ray_address=local_ray.finish_start(Path(record.directory), starter))
    store.save(record)
    return record


def _wait_until_ready(ask: Callable[[], ClusterStatus], on_status: Callable[[ClusterStatus], None]) -> ClusterStatus:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        status = ask()
        on_status(status)
        if status.is_ready:
            return status
        for member in status.members:
            if member.failures_in_a_row >= _MAX_FAILED_STARTS:
                raise ClusterError(f"{member.name} does not start: {member.report.detail}")
        if time.monotonic() > deadline_s:
            raise ClusterError(f"the cluster is not ready after {START_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_INTERVAL_S)


def _is_alive(record: ClusterRecord) -> bool:
    return bool(local_ray.processes(Path(record.directory), record.session_id))


def _forget_dead(name: str, store: RecordStore) -> None:
    # After a reboot the record is there and the cluster is not.
    if name not in store.names():
        return
    record = store.load(name)
    if record.session_id and not _is_alive(record):
        stop_cluster(record, store, grace_s=0)
