"""Which worker is struck at which moment of a request's life. Pure."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from bench.drill.roster import Life

ROLES = ("prefill", "decode")
# Times that a phase is passed before the drill steps in, so that not always the first request is hit.
_MAX_SKIPPED = 4


class Phase(Enum):
    """A moment in the life of a request, in order; the value is its name for people."""

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    PUSHING = "mid-push"
    PUSHED = "pushed, not committed"
    FIRST_STEP = "first decode step"
    DECODING = "mid-decode"

    @property
    def role(self) -> str:
        """Role of the worker on which it happens."""
        return "decode" if self in (Phase.RESERVING, Phase.FIRST_STEP, Phase.DECODING) else "prefill"

    @property
    def point(self) -> str:
        """Name of its FaultPoint in fault.proto."""
        return f"FAULT_POINT_{self.name}"

    @property
    def can_be_held(self) -> bool:
        """Whether a request can be stopped there; else it is only noticed."""
        return self is not Phase.PREFILLING


@dataclass(frozen=True, slots=True)
class Strike:
    """What is to be done: once `num_skipped` requests have passed `phase`, strike a worker of `victim_role`."""

    phase: Phase
    victim_role: str
    num_skipped: int


@dataclass(frozen=True, slots=True)
class Struck:
    """What was done, at `at_s` of `time.monotonic`. `request_id` is the request that was in the phase."""

    strike: Strike
    victim: str
    pid: int
    request_id: str
    at_s: float


def plan_strikes(repeat: int, phases: Sequence[Phase], roles: Sequence[str], seed: int) -> list[Strike]:
    """Each phase with each victim's role, `repeat` times, in random order; the same for a seed.

    Roles take turns, so that one worker has time to come back while one of the other role is struck.
    """
    generator = random.Random(seed)
    planned = []
    for _ in range(repeat):
        orders = [generator.sample(phases, k=len(phases)) for _ in roles]
        for row in zip(*orders, strict=True):
            planned += [
                Strike(phase, role, _num_skipped(phase, generator)) for phase, role in zip(row, roles, strict=True)
            ]
    return planned


def choose_victim(strike: Strike, reporter: str, peer: str, workers_up: Mapping[str, Life]) -> Life | None:
    """The worker to be struck: who reported the request, or its peer, or if that is not known any of the role.

    None if none of them is up.
    """
    for name in (reporter, peer):
        life = workers_up.get(name)
        if life is not None and life.role == strike.victim_role:
            return life
    return _first_of_role(strike.victim_role, workers_up.values())


def _first_of_role(role: str, lives: Iterable[Life]) -> Life | None:
    return min((life for life in lives if life.role == role), key=lambda life: life.name, default=None)


def _num_skipped(phase: Phase, generator: random.Random) -> int:
    # In the middle: at least one message or token has passed before.
    first = 1 if phase in (Phase.PUSHING, Phase.DECODING) else 0
    return first + generator.randrange(_MAX_SKIPPED)
