"""Links that lose, damage, repeat and slow KV messages on purpose, for drills and tests."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.errors import KvTransferError, TransferTimeout
from kv_transfer.frame import Buffer
from kv_transfer.transport import Link

OnFault = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MessageFaults:
    """How messages go wrong: probabilities in [0, 1], drawn from `seed`.

    A message is lost (`drop`), damaged (`corrupt`) or sent twice (`duplicate`), at most one of these; whatever
    happens to it, it may also be late by `delay_s` seconds. `bytes_per_s` is what a link carries, 0 without limit.
    Raises ValueError.
    """

    seed: int = 0
    drop: float = 0.0
    corrupt: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("drop", "corrupt", "duplicate", "delay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a probability is from 0 to 1")
        if self.drop + self.corrupt + self.duplicate > 1:
            raise ValueError("drop, corrupt and duplicate are more than 1 together: only one happens to a message")
        for name in ("delay_s", "bytes_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one message. `what` is drop, corrupt, duplicate or nothing.

    `place` in [0, 1) is where the damage is, `flip` from 1 to 255 the bits that change there.
    """

    what: str
    delay_s: float
    place: float
    flip: int


class FaultDice:
    """Draws the fate of one message after the other: the same seed, the same fates. Pure."""

    def __init__(self, faults: MessageFaults) -> None:
        self._faults = faults
        self._random = random.Random(faults.seed)

    def roll(self) -> Fate:
        """The next message's fate."""
        faults, draw = self._faults, self._random.random
        # As many draws for each message, whatever they decide: then one probability does not shift the others' luck.
        kind, late, place, flip = draw(), draw(), draw(), 1 + int(255 * draw())
        return Fate(self._what(kind), faults.delay_s if late < faults.delay else 0.0, place, flip)

    def _what(self, kind: float) -> str:
        for name in ("drop", "corrupt", "duplicate"):
            kind -= getattr(self._faults, name)
            if kind < 0:
                return name
        return ""


class SlowLine:
    """A line of `bytes_per_s` that carries one message after the other: a token bucket without burst. Pure."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def arrival_s(self, num_bytes: int, now_s: float) -> float:
        """When the last byte of a message that is sent now is there."""
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
        return self._free_at_s


class LinkFaults:
    """One set of faults in place: its dice, and a line to each peer."""

    def __init__(self, faults: MessageFaults) -> None:
        self._faults = faults
        self._dice = FaultDice(faults)
        self._lines: dict[str, SlowLine] = {}

    def over(self, link: Link, peer: str, on_fault: OnFault) -> "FaultyLink":
        """`link` to `peer` with these faults. `on_fault` hears of each: drop, corrupt, duplicate, delay."""
        line = None
        if self._faults.bytes_per_s:
            line = self._lines.setdefault(peer, SlowLine(self._faults.bytes_per_s))
        return FaultyLink(link, self._dice, line, on_fault)


class FaultyLink:
    """A Link that does to each message what the dice say, and hands on what is left of it."""

    def __init__(self, link: Link, dice: FaultDice, line: SlowLine | None, on_fault: OnFault) -> None:
        self._link = link
        self._dice = dice
        self._line = line
        self._on_fault = on_fault

    async def send(self, header: bytes, payload: Buffer, timeout_s: float) -> None:
        """See Link.send. Returns for a lost message as if it had arrived: the receiver must find out."""
        deadline_s = time.monotonic() + timeout_s
        fate = self._dice.roll()
        if fate.what:
            self._on_fault(fate.what)
        if fate.delay_s:
            self._on_fault("delay")
        await self._wait(fate.delay_s, len(header) + len(payload), timeout_s)
        if fate.what == "drop":
            return
        if fate.what == "corrupt":
            payload = damaged(payload, fate)
        await self._link.send(header, payload, deadline_s - time.monotonic())
        if fate.what == "duplicate":
            with contextlib.suppress(KvTransferError):  # its refusal is what the receiver owes us
                await self._link.send(header, payload, deadline_s - time.monotonic())

    async def close(self) -> None:
        """See Link.close."""
        await self._link.close()

    async def _wait(self, delay_s: float, num_bytes: int, timeout_s: float) -> None:
        now_s = time.monotonic()
        late_s = delay_s if self._line is None else delay_s + self._line.arrival_s(num_bytes, now_s) - now_s
        if late_s >= timeout_s:
            await asyncio.sleep(timeout_s)
            raise TransferTimeout(f"a faulty link would take {late_s:.1f} s for a message, allowed are {timeout_s} s")
        await asyncio.sleep(late_s)


def damaged(payload: Buffer, fate: Fate) -> bytes:
    """A copy of the payload with one byte changed."""
    changed = bytearray(payload)
    changed[int(fate.place * len(changed))] ^= fate.flip
    return bytes(changed)
