"""The engine: one thread that steps while there is work, and the lock under which others hand it work."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.block_pool import Ledger
from engine.ledger_audit import Repair
from engine.runner import OnLayer
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step_plan import SequenceOutput, StepPlan, StepResult

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # how long the idle thread sleeps before it looks again; work wakes it at once
AUDIT_INTERVAL_S = 1.0  # between two audits of the ledger while the engine is busy
THOROUGH_AUDIT_INTERVAL_S = 60.0  # between two that look at every block, which is done when the engine is idle


class SequenceSink(Protocol):
    """Hears of one sequence, on the engine's thread. Must not block."""

    wants_layers: bool

    def on_started(self, num_cached_tokens: int) -> None:
        """The first step with the sequence begins; so many of its tokens came from the prefix cache."""
        ...

    def on_layer(self, layer: int, start: int, end: int) -> None:
        """KV of tokens [start, end) of this layer is in the blocks. Only called if `wants_layers`."""
        ...

    def on_output(self, output: SequenceOutput) -> None:
        """New tokens, perhaps the last."""
        ...

    def on_failure(self, message: str) -> None:
        """The step with the sequence failed: it is gone."""
        ...

    def on_handed_back(self) -> None:
        """KV blocks ran out and others went first: it is gone, and may go on elsewhere from the tokens it has."""
        ...


class StepRunner(Protocol):
    """What executes plans."""

    def run(self, plan: StepPlan, on_layer: OnLayer) -> StepResult:
        """See `engine.runner.Runner.run`."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How loaded the engine is at one moment."""

    ledger: Ledger
    num_sequences: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_queued_tokens: int
    num_repaired_blocks: int  # since the start; more than 0 is a bug
    num_prefilled_tokens: int  # prompt tokens since the start, those of the step under way included


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the engine's thread does next."""

    plan: StepPlan | None
    handed_back: list[SequenceSink]
    repair: Repair | None

    def __bool__(self) -> bool:
        return self.plan is not None or bool(self.handed_back) or self.repair is not None


class Engine:
    """Runs a scheduler's plans. All methods may be called from any thread and never wait for a step."""

    def __init__(self, runner: StepRunner, scheduler: Scheduler, on_change: Callable[[], None]) -> None:
        """`on_change` is called, on any thread, whenever the load may have changed. Must not block."""
        self._runner = runner
        self._scheduler = scheduler
        self._on_change = on_change
        self._work = threading.Condition()
        self._sinks: dict[str, SequenceSink] = {}
        self._started: set[str] = set()
        self._stopping = False
        self._step_began_at: float | None = None
        self._is_audited = True  # nothing has changed since the last audit
        self._audited_at = self._thoroughly_audited_at = time.monotonic()
        self._num_repaired_blocks = 0
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the step in flight; sequences are left where they are."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        self._thread.join(timeout_s)

    def add(self, sequence: Sequence, sink: SequenceSink) -> None:
        """Queues a sequence whose prompt is computed here. Raises `NeverFits` or `QueueFull`."""
        with self._work:
            self._scheduler.add(sequence)
            self._sinks[sequence.sequence_id] = sink
            self._note_change()
        self._on_change()

    def reserve(self, sequence: Sequence, sink: SequenceSink) -> int:
        """Reserves blocks for a sequence whose KV comes from elsewhere; returns the tokens already held here.

        Raises `NeverFits` or `OutOfBlocks`, and then nothing is held.
        """
        with self._work:
            num_cached_tokens = self._scheduler.reserve(sequence)
            self._sinks[sequence.sequence_id] = sink
            self._note_change()
        self._on_change()
        return num_cached_tokens

    def activate(self, sequence_id: str, first_token_id: int) -> SequenceOutput:
        """The reserved sequence's KV is there, and its next token known: it joins the running batch."""
        with self._work:
            output = self._scheduler.activate(sequence_id, first_token_id)
            if output.finish_reason is not None:
                self._forget(sequence_id)
            self._note_change()
        self._on_change()
        return output

    def abort(self, sequence_id: str) -> None:
        """Drops a sequence in any state; unknown ids are fine. Its blocks return after the step in flight."""
        with self._work:
            self._scheduler.abort(sequence_id)
            self._forget(sequence_id)
            self._note_change()
        self._on_change()

    def load(self) -> EngineLoad:
        """A consistent snapshot."""
        with self._work:
            scheduler = self._scheduler
            return EngineLoad(
                ledger=scheduler.ledger(),
                num_sequences=scheduler.num_sequences,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_reserved=scheduler.num_reserved,
                num_queued_tokens=scheduler.num_queued_tokens,
                num_repaired_blocks=self._num_repaired_blocks,
                num_prefilled_tokens=scheduler.num_prefilled_tokens,
            )

    def drop_prefix_cache(self) -> int:
        """Forgets what can be found in blocks, owned ones included; returns how many could be."""
        with self._work:
            self._note_change()
            return self._scheduler.drop_cache()

    def stalled_s(self) -> float:
        """Seconds the step in flight has taken so far; 0 between steps. A dead thread counts as stalled for ever."""
        if not self._thread.is_alive():
            return float("inf")
        began_at = self._step_began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

    def _loop(self) -> None:
        while turn := self._next_turn():
            self._tell(turn)
            if turn.plan is not None:
                self._step(turn.plan)

    def _next_turn(self) -> _Turn | None:
        """Waits until there is something to do; None when the engine stops."""
        with self._work:
            self._step_began_at = None
            while not self._stopping:
                if turn := self._take_turn():
                    self._step_began_at = None if turn.plan is None else time.monotonic()
                    return turn
                self._work.wait(IDLE_WAIT_S)
            return None

    def _take_turn(self) -> _Turn:
        repair = self._audit(thorough=False) if time.monotonic() - self._audited_at >= AUDIT_INTERVAL_S else None
        plan = self._scheduler.schedule()
        handed_back = self._forget_all(self._scheduler.take_handed_back())
        if plan is None and repair is None:
            is_long_ago = time.monotonic() - self._thoroughly_audited_at >= THOROUGH_AUDIT_INTERVAL_S
            repair = self._audit(thorough=is_long_ago)
        return _Turn(plan, handed_back, repair)

    def _audit(self, *, thorough: bool) -> Repair | None:
        """What was wrong with the ledger; nothing is looked at unless something has changed since the last time."""
        if self._is_audited:
            return None
        self._is_audited, self._audited_at = True, time.monotonic()
        if thorough:
            self._thoroughly_audited_at = self._audited_at
        repair = self._scheduler.audit(thorough=thorough)
        self._num_repaired_blocks += repair.num_blocks
        return repair if repair.num_blocks else None

    def _tell(self, turn: _Turn) -> None:
        if turn.repair is not None:
            logger.error("%d blocks were put right: %s", turn.repair.num_blocks, turn.repair.description)
        for sink in turn.handed_back:
            sink.on_handed_back()
        if turn.repair is not None or turn.handed_back:
            self._on_change()

    def _step(self, plan: StepPlan) -> None:
        self._announce(plan)
        try:
            result = self._runner.run(plan, self._layer_callback(plan))
        except Exception as error:
            # The root of the engine's task: a failed step ends its sequences, not the worker.
            logger.exception("a step of %d sequences failed", len(plan.sequences))
            self._fail(plan, f"the step failed: {type(error).__name__}")
            return
        self._deliver(plan, result)

    def _announce(self, plan: StepPlan) -> None:
        with self._work:  # or an abort in between would leave its id among the started ones
            new = [s for s in plan.sequences if s.sequence_id in self._sinks and s.sequence_id not in self._started]
            self._started.update(s.sequence_id for s in new)
            starts = [(self._sinks[s.sequence_id], s.start) for s in new]
        for sink, start in starts:
            sink.on_started(start)

    def _layer_callback(self, plan: StepPlan) -> OnLayer:
        listeners = [
            (sink, s.start, s.start + len(s.token_ids))
            for s in plan.sequences
            if (sink := self._sinks.get(s.sequence_id)) is not None and sink.wants_layers
        ]

        def on_layer(layer: int) -> None:
            for sink, start, end in listeners:
                sink.on_layer(layer, start, end)

        return on_layer

    def _deliver(self, plan: StepPlan, result: StepResult) -> None:
        with self._work:
            outcome = self._scheduler.commit(plan, result)
            sinks = [self._sinks.get(output.sequence_id) for output in outcome.outputs]
            for output in outcome.outputs:
                if output.finish_reason is not None:
                    self._forget(output.sequence_id)
            failed = self._forget_all(outcome.failed_ids)
            self._note_change()
        for output, sink in zip(outcome.outputs, sinks, strict=True):
            if sink is not None:
                sink.on_output(output)
        if outcome.failed_ids:
            logger.error("a step brought no token for %d of its sequences", len(outcome.failed_ids))
        for sink in failed:
            sink.on_failure("the step failed: it brought no token")
        self._on_change()

    def _fail(self, plan: StepPlan, message: str) -> None:
        with self._work:
            failed = self._forget_all(self._scheduler.fail(plan))
            self._note_change()
        for sink in failed:
            sink.on_failure(message)
        self._on_change()

    def _note_change(self) -> None:
        self._is_audited = False
        self._work.notify_all()

    def _forget_all(self, sequence_ids: list[str]) -> list[SequenceSink]:
        """Their sinks, which are to hear why."""
        sinks = [self._sinks[i] for i in sequence_ids if i in self._sinks]
        for sequence_id in sequence_ids:
            self._forget(sequence_id)
        return sinks

    def _forget(self, sequence_id: str) -> None:
        self._sinks.pop(sequence_id, None)
        self._started.discard(sequence_id)
