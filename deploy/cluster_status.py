"""What actors report to the controller, and the controller to whoever asks."""

import socket
from dataclasses import dataclass, field
from enum import Enum


class MemberState(Enum):
    """Where one actor of the cluster stands."""

    STARTING = "starting"
    WAITING = "waiting for workers"  # a router that runs, but knows no pair of workers
    READY = "ready"
    UNHEALTHY = "unhealthy"  # answers, but says that it cannot serve
    FAILED = "failed"  # its start raised
    RESTARTING = "restarting"  # lost; a new one follows

    @property
    def is_up(self) -> bool:
        """Whether its server runs."""
        return self in (MemberState.WAITING, MemberState.READY)


@dataclass(frozen=True, slots=True)
class MemberReport:
    """An actor's answer to a heartbeat. `address`, `metrics_address` (host:port) and `epoch` are set once it is ready.

    `pid` is its process, on the machine that calls itself `hostname`.
    """

    state: MemberState
    detail: str = ""
    address: str = ""
    epoch: str = ""
    pid: int = 0
    metrics_address: str = ""
    hostname: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One actor as the controller sees it. `failures_in_a_row` counts since it last was ready for long."""

    name: str
    role: str
    report: MemberReport
    num_restarts: int = 0
    failures_in_a_row: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return self.report.state is MemberState.READY


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The whole cluster at one moment. `pending` are the workers that are still to leave or to be replaced."""

    name: str
    model_name: str
    router: MemberStatus
    workers: tuple[MemberStatus, ...]
    pending: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether the router and every worker serve."""
        return all(member.is_ready for member in self.members)

    @property
    def is_settled(self) -> bool:
        """Whether it serves and is as it was asked to be."""
        return self.is_ready and not self.pending

    @property
    def members(self) -> tuple[MemberStatus, ...]:
        """The router, then the workers."""
        return (self.router, *self.workers)
