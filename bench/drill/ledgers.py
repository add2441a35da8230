"""What a worker's ledger must say when nothing is going on. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class QuietCheck:
    """Whether all ledgers became clean once there was no work: after `seconds`, or not at all.

    `problems` are those of the last look.
    """

    seconds: float
    problems: tuple[str, ...]

    def violations(self, limit_s: float) -> list[str]:
        """What is not as it must be, in words."""
        if self.problems:
            return [f"after {self.seconds:.1f} s of quiet: {problem}" for problem in self.problems]
        if self.seconds > limit_s:
            return [f"the ledgers were clean only after {self.seconds:.1f} s of quiet, allowed are {limit_s:.1f} s"]
        return []


def ledger_problems(ledgers: Mapping[str, worker_pb2.GetLedgerResponse | None]) -> tuple[str, ...]:
    """What is held or lost though nothing is going on, for each worker by name; None: it did not answer."""
    return tuple(f"{name}: {problem}" for name, ledger in ledgers.items() for problem in _problems(ledger))


def _problems(ledger: worker_pb2.GetLedgerResponse | None) -> list[str]:
    if ledger is None:
        return ["no ledger: it does not answer"]
    held = {
        "owned blocks": ledger.owned_blocks,
        "blocks in flight": ledger.in_flight_blocks,
        "sequences": ledger.num_sequences,
        "open tickets": ledger.num_open_tickets,
        "repaired blocks": ledger.repaired_blocks,
        "quarantined blocks": ledger.quarantined_blocks,
    }
    problems = [f"{count} {what}" for what, count in held.items() if count]
    unheld = ledger.free_blocks + ledger.cached_blocks
    if unheld != ledger.total_blocks:
        problems.append(f"{unheld} free and cached of {ledger.total_blocks} blocks")
    return problems
