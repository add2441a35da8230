"""The members of a cluster through all their lives, as the drill sees them. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from deploy.cluster_status import ClusterStatus, MemberStatus

ROUTER_ROLE = "router"


@dataclass(frozen=True, slots=True)
class Life:
    """One process that is, or was, a member of the cluster. `up_since_s` is None while it does not serve."""

    name: str
    role: str
    pid: int
    address: str = ""
    epoch: str = ""
    up_since_s: float | None = None

    @property
    def is_up(self) -> bool:
        """Whether it serves."""
        return self.up_since_s is not None

    def is_settled(self, settle_s: float, now_s: float) -> bool:
        """Whether it has served for so long."""
        return self.up_since_s is not None and now_s - self.up_since_s >= settle_s


class Roster:
    """Takes what the controller says, and what the drill has done that the controller does not know yet."""

    def __init__(self) -> None:
        self.current: dict[str, Life] = {}  # by name
        self.num_lost = 0  # lives that have ended
        self.lost_unstruck: list[str] = []  # those of them that the drill has not struck, and why the controller says
        self._num_workers = 0
        self._struck: set[tuple[str, int]] = set()

    @property
    def workers_up(self) -> list[Life]:
        """Workers that serve now."""
        return [life for life in self.current.values() if life.role != ROUTER_ROLE and life.is_up]

    @property
    def is_at_full_strength(self) -> bool:
        """Every worker of the cluster serves."""
        return 0 < self._num_workers == len(self.workers_up)

    def update(self, status: ClusterStatus, now_s: float) -> None:
        """Takes what the controller says now."""
        self._num_workers = len(status.workers)
        for member in status.members:
            life = self.current.get(member.name)
            if life is not None and life.pid != member.report.pid:
                self._note_lost(life, member)
        self.current = {m.name: self._life(m, now_s) for m in status.members if m.report.pid}

    def mark_struck(self, life: Life) -> None:
        """This life does not serve any more, though the controller may not have noticed."""
        self._struck.add((life.name, life.pid))
        self.current[life.name] = replace(life, up_since_s=None)

    def mark_resumed(self, life: Life) -> None:
        """A life that was struck may serve again, if the controller says so."""
        self._struck.discard((life.name, life.pid))

    def _note_lost(self, life: Life, member: MemberStatus) -> None:
        self.num_lost += 1
        if (life.name, life.pid) not in self._struck:
            self.lost_unstruck.append(f"{life.name} (pid {life.pid}): {member.report.detail or 'no reason given'}")

    def _life(self, member: MemberStatus, now_s: float) -> Life:
        report, before = member.report, self.current.get(member.name)
        life = Life(member.name, member.role, report.pid, report.address, report.epoch)
        if not report.state.is_up or (life.name, life.pid) in self._struck:
            return life
        is_same = before is not None and before.pid == life.pid and before.is_up
        return replace(life, up_since_s=before.up_since_s if before is not None and is_same else now_s)


def may_strike(workers_up: Iterable[Life], victim_role: str, settle_s: float, now_s: float) -> bool:
    """Whether the cluster can lose any worker of that role: one more of it and one of the other have settled."""
    settled = Counter(life.role for life in workers_up if life.is_settled(settle_s, now_s))
    return settled[victim_role] >= 2 and min(settled["prefill"], settled["decode"]) >= 1
