"""The engine's thread with the real scheduler, and a runner whose KV cache is a table of token ids."""

import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

import engine.engine
from engine.admission import DuplicateSequence, NeverFits, QueueFull, UnknownSequence
from engine.block_pool import BlockPool, Ledger, OutOfBlocks
from engine.engine import Engine, EngineLoad
from engine.ledger_audit import Repair
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import FinishReason, Sequence
from engine.step_plan import SequenceOutput, StepPlan, StepResult

BLOCK_SIZE = 4
NUM_LAYERS = 2
HANDED_BACK = "handed back"
TIMEOUT_S = 20.0
POISON = 666  # a step with it fails
SILENCE = 667  # a step with it brings no token for its sequence


def next_token(tokens: list[int]) -> int:
    """A token that depends on every token before it and on their order."""
    number = 7
    for token in tokens:
        number = (number * 31 + token) % 1_000_003
    return 1000 + number % 1000


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class TokenRunner:
    """Stores each token where its KV would be and computes the next one from what it finds in the blocks.

    So a block that is shared, freed or overwritten wrongly shows in the tokens. A step waits while `gate` is
    closed, and fails if it has the token POISON.
    """

    def __init__(self) -> None:
        self.stored: dict[tuple[int, int], int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.step_began = threading.Event()
        self.num_steps = 0

    def store(self, block_ids: list[int] | tuple[int, ...], start: int, tokens: list[int] | tuple[int, ...]) -> None:
        for t, token in enumerate(tokens, start):
            self.stored[block_ids[t // BLOCK_SIZE], t % BLOCK_SIZE] = token

    def run(self, plan: StepPlan, on_layer: Callable[[int], None]) -> StepResult:
        self.num_steps += 1
        self.step_began.set()
        assert self.gate.wait(TIMEOUT_S)
        for s in plan.sequences:
            if POISON in s.token_ids:
                raise FloatingPointError("a poisoned step")
            self.store(s.block_ids, s.start, s.token_ids)
        for layer in range(NUM_LAYERS):
            on_layer(layer)
        heard = [s for s in plan.sequences if SILENCE not in s.token_ids]
        return StepResult({s.sequence_id: self._next(s.block_ids, s.start + len(s.token_ids)) for s in heard})

    def _next(self, block_ids: tuple[int, ...], count: int) -> int:
        return next_token([self.stored[block_ids[t // BLOCK_SIZE], t % BLOCK_SIZE] for t in range(count)])


@dataclass
class Heard:
    """A sink that keeps what it hears, for another thread to wait for."""

    wants_layers: bool = False
    started: list[int] = field(default_factory=list)
    layers: list[tuple[int, int, int]] = field(default_factory=list)
    events: "queue.Queue[SequenceOutput | str]" = field(default_factory=queue.Queue)
    threads: set[str] = field(default_factory=set)

    def on_started(self, num_cached_tokens: int) -> None:
        self.started.append(num_cached_tokens)
        self.threads.add(threading.current_thread().name)

    def on_layer(self, layer: int, start: int, end: int) -> None:
        self.layers.append((layer, start, end))
        self.threads.add(threading.current_thread().name)

    def on_output(self, output: SequenceOutput) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.put(output)

    def on_failure(self, message: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.put(message)

    def on_handed_back(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.put(HANDED_BACK)

    def next(self) -> SequenceOutput:
        output = self.events.get(timeout=TIMEOUT_S)
        assert isinstance(output, SequenceOutput), output
        return output

    def failure(self) -> str:
        message = self.events.get(timeout=TIMEOUT_S)
        assert isinstance(message, str), message
        return message

    def answer(self) -> list[int]:
        """All tokens until the end."""
        tokens: list[int] = []
        while True:
            output = self.next()
            tokens += output.token_ids
            if output.finish_reason is not None:
                return tokens


class Rig:
    """An engine, its runner, and the count of changes reported."""

    def __init__(self, num_blocks: int = 64, **limits: int) -> None:
        defaults = {
            "max_step_tokens": 16,
            "max_batch_sequences": 8,
            "context_window_tokens": 200,
            "watermark_blocks": 0,
        }
        self.runner = TokenRunner()
        self.changes = queue.Queue[None]()
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        scheduler = Scheduler(SchedulerConfig(**(defaults | limits)), self.pool, "model")
        self.engine = Engine(self.runner, scheduler, lambda: self.changes.put(None))

    def settle(self) -> None:
        """Waits until nothing is owned any more: changes tell when to look again."""
        self.wait_until(lambda load: load.ledger.owned == load.num_sequences == 0)

    def wait_until(self, condition: Callable[[EngineLoad], bool]) -> None:
        while not condition(self.engine.load()):
            self.changes.get(timeout=TIMEOUT_S)

    def close(self) -> None:
        self.runner.gate.set()
        self.engine.stop(TIMEOUT_S)


@pytest.fixture
def new_rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs with started engines; at the end each must be clean."""
    rigs: list[Rig] = []

    def make(**limits: int) -> Rig:
        rig = Rig(**limits)
        rig.engine.start()
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()
        load = rig.engine.load()
        load.ledger.check()
        assert (load.ledger.owned, load.ledger.in_flight, load.num_sequences) == (0, 0, 0)
        assert not rig.engine._sinks
        assert not rig.engine._started


@pytest.fixture
def rig(new_rig: Callable[..., Rig]) -> Rig:
    return new_rig()


def _seq(name: str, prompt: list[int], max_tokens: int = 1, *, hold: bool = False, stop: int = -1) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset([stop]))
    return Sequence(name, list(prompt), len(prompt), sampling, hold_after_prefill=hold)


class TestAdd:
    def test_tokens_come_until_the_last(self, rig: Rig) -> None:
        sink, prompt = Heard(), list(range(37))
        rig.engine.add(_seq("a", prompt, 5), sink)
        outputs = [sink.next() for _ in range(5)]
        assert [t for o in outputs for t in o.token_ids] == continuation(prompt, 5)
        assert [o.finish_reason for o in outputs] == [None] * 4 + [FinishReason.LENGTH]
        assert sink.started == [0]
        assert sink.layers == []
        assert sink.threads == {"engine"}
        rig.settle()

    def test_a_stop_token_ends_it(self, rig: Rig) -> None:
        sink, expected = Heard(), continuation([5, 6], 3)
        rig.engine.add(_seq("a", [5, 6], 9, stop=expected[2]), sink)
        assert sink.answer() == expected

    def test_on_started_tells_what_the_prefix_cache_had(self, rig: Rig) -> None:
        first, second, prompt = Heard(), Heard(), list(range(18))
        rig.engine.add(_seq("1", prompt), first)
        first.answer()
        rig.engine.add(_seq("2", [*prompt[:13], 99, 98], 4), second)
        assert second.answer() == continuation([*prompt[:13], 99, 98], 4)
        assert (first.started, second.started) == ([0], [12])

    def test_refusals_leave_nothing_behind(self, new_rig: Callable[..., Rig]) -> None:
        rig = new_rig(num_blocks=8, max_waiting=1)
        rig.runner.gate.clear()
        running, waiting, refused = Heard(), Heard(), Heard()
        rig.engine.add(_seq("running", list(range(8)), 3), running)
        assert rig.runner.step_began.wait(TIMEOUT_S)
        rig.engine.add(_seq("waiting", [1]), waiting)
        before = rig.engine.load()
        for seq, error in (
            (_seq("full", [1]), QueueFull),
            (_seq("waiting", [1]), DuplicateSequence),
            (_seq("long", [1] * 300), NeverFits),
            (_seq("large", [1] * 40), NeverFits),
        ):
            with pytest.raises(error):
                rig.engine.add(seq, refused)
        assert rig.engine.load() == before
        rig.runner.gate.set()
        assert running.answer() == continuation(list(range(8)), 3)
        assert waiting.answer() == continuation([1], 1)
        assert refused.events.empty()


class TestHandBack:
    def test_the_younger_hears_it_after_all_its_tokens_and_can_go_on(self, new_rig: Callable[..., Rig]) -> None:
        """Two sequences that grow to 4 blocks each, in 6."""
        rig = new_rig(num_blocks=6)
        old, young, again = Heard(), Heard(), Heard()
        rig.runner.gate.clear()
        for sequence_id, sink in (("old", old), ("young", young)):
            rig.engine.add(_seq(sequence_id, [len(sequence_id)] * 6, 10), sink)
        rig.runner.gate.set()
        assert old.answer() == continuation([3] * 6, 10)
        tokens: list[int] = []
        while (event := young.events.get(timeout=TIMEOUT_S)) != HANDED_BACK:
            assert isinstance(event, SequenceOutput)
            tokens += event.token_ids
        assert 0 < len(tokens) < 10
        assert young.events.empty()
        assert young.threads == {"engine"}
        rig.settle()
        rig.engine.abort("young")
        prompt = [5] * 6 + tokens
        rig.engine.add(_seq("young", prompt, 10 - len(tokens)), again)
        assert tokens + again.answer() == continuation([5] * 6, 10)
        assert len(again.started) == 1


class TestLayers:
    def test_each_layer_covers_the_prompt_chunk_by_chunk(self, rig: Rig) -> None:
        sink, prompt = Heard(wants_layers=True), list(range(37))
        rig.engine.add(_seq("a", prompt, 1, hold=True), sink)
        assert sink.next() == SequenceOutput("a", tuple(continuation(prompt, 1)))
        chunks = [(0, 16), (16, 32), (32, 37)]
        assert sink.layers == [(layer, start, end) for start, end in chunks for layer in range(NUM_LAYERS)]
        rig.engine.abort("a")
        rig.settle()

    def test_a_cached_prefix_is_not_reported(self, rig: Rig) -> None:
        first, second = Heard(), Heard(wants_layers=True)
        rig.engine.add(_seq("1", list(range(10))), first)
        first.answer()
        rig.engine.add(_seq("2", list(range(10)), 1, hold=True), second)
        second.next()
        assert (second.started, second.layers) == ([8], [(0, 8, 10), (1, 8, 10)])
        rig.engine.abort("2")


class TestHold:
    def test_blocks_stay_until_aborted(self, rig: Rig) -> None:
        sink = Heard()
        rig.engine.add(_seq("a", list(range(9)), hold=True), sink)
        sink.next()
        assert rig.engine.load().ledger.owned == 3
        rig.engine.abort("a")
        assert rig.engine.load().ledger == Ledger(total=64, free=62, cached=2, owned=0)
        with pytest.raises(UnknownSequence):
            rig.engine.activate("a", 5)


class TestReserve:
    def test_kv_from_elsewhere_is_continued(self, rig: Rig) -> None:
        sink, prompt = Heard(), list(range(13))
        seq = _seq("a", prompt, 6)
        assert rig.engine.reserve(seq, sink) == 0
        load = rig.engine.load()
        assert (load.num_reserved, load.ledger.in_flight, load.ledger.owned) == (1, 4, 0)
        rig.runner.store(seq.block_ids, 0, prompt)
        first, *rest = continuation(prompt, 6)
        assert rig.engine.activate("a", first) == SequenceOutput("a", (first,))
        assert sink.answer() == rest

    def test_cached_tokens_are_held_already(self, rig: Rig) -> None:
        first, prompt = Heard(), list(range(13))
        rig.engine.add(_seq("1", prompt), first)
        first.answer()
        seq, sink = _seq("2", prompt, 3), Heard()
        assert rig.engine.reserve(seq, sink) == 12
        rig.runner.store(seq.block_ids, 12, prompt[12:])
        token, *rest = continuation(prompt, 3)
        rig.engine.activate("2", token)
        assert sink.answer() == rest

    def test_a_first_token_may_be_the_last(self, rig: Rig) -> None:
        sink = Heard()
        rig.engine.reserve(_seq("a", [1, 2], 1), sink)
        assert rig.engine.activate("a", 5).finish_reason is FinishReason.LENGTH
        assert sink.events.empty()
        with pytest.raises(UnknownSequence):
            rig.engine.activate("a", 5)

    def test_no_room_now(self, new_rig: Callable[..., Rig]) -> None:
        rig = new_rig(num_blocks=4)
        rig.engine.reserve(_seq("a", [1] * 8, 2), Heard())
        with pytest.raises(OutOfBlocks):
            rig.engine.reserve(_seq("b", [1] * 8, 2), Heard())
        assert rig.engine.load().num_sequences == 1
        rig.engine.abort("a")
        rig.engine.reserve(_seq("b", [1] * 8, 2), Heard())
        rig.engine.abort("b")


class TestAbort:
    def test_in_any_state_and_of_nobody(self, rig: Rig) -> None:
        rig.engine.abort("nobody")
        held = Heard()
        rig.engine.add(_seq("held", [1, 2, 3], hold=True), held)
        held.next()
        rig.engine.reserve(_seq("reserved", [4, 5, 6], 3), Heard())
        rig.engine.abort("held")
        rig.engine.abort("reserved")
        assert rig.engine.load().ledger.owned == 0

    def test_of_a_step_in_flight_frees_after_it_and_is_heard_of_no_more(self, rig: Rig) -> None:
        sink, other = Heard(), Heard()
        rig.runner.gate.clear()
        rig.engine.add(_seq("a", [1, 2, 3], 5), sink)
        assert rig.runner.step_began.wait(TIMEOUT_S)
        rig.engine.abort("a")
        load = rig.engine.load()
        assert (load.num_sequences, load.ledger.owned) == (0, 1)
        rig.runner.gate.set()
        rig.settle()
        rig.engine.add(_seq("b", [1, 2, 3], 2), other)
        assert other.answer() == continuation([1, 2, 3], 2)
        assert sink.events.empty()

    def test_of_a_waiting_one(self, rig: Rig) -> None:
        first, second = Heard(), Heard()
        rig.runner.gate.clear()
        rig.engine.add(_seq("1", [1]), first)
        assert rig.runner.step_began.wait(TIMEOUT_S)
        rig.engine.add(_seq("2", [2]), second)
        assert rig.engine.load().num_waiting == 1
        rig.engine.abort("2")
        assert rig.engine.load().num_waiting == 0
        rig.runner.gate.set()
        first.answer()
        assert second.events.empty()
        assert second.started == []


class TestFailure:
    def test_ends_the_sequences_of_the_step_and_no_others(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        poisoned, beside, other, after = Heard(), Heard(), Heard(), Heard()
        rig.runner.gate.clear()
        rig.engine.add(_seq("first", [1]), Heard())
        assert rig.runner.step_began.wait(TIMEOUT_S)
        rig.engine.reserve(_seq("other", [7, 8], 3), other)
        rig.engine.add(_seq("poisoned", [POISON, 2, 3], 5), poisoned)
        rig.engine.add(_seq("beside", [5, 6, 7], 5), beside)
        rig.runner.gate.set()
        assert poisoned.failure() == beside.failure() == "the step failed: FloatingPointError"
        assert "a poisoned step" in caplog.text
        rig.engine.add(_seq("after", [5, 6, 7, 8, 9], 5), after)
        assert after.answer() == continuation([5, 6, 7, 8, 9], 5)
        assert after.started == [0], "what a failed step computed is not in the prefix cache"
        assert other.events.empty()
        rig.engine.abort("other")
        assert poisoned.events.empty()

    def test_a_step_that_brings_too_few_tokens_ends_those_that_lack_one(
        self, rig: Rig, caplog: pytest.LogCaptureFixture
    ) -> None:
        silent, beside, after = Heard(), Heard(), Heard()
        rig.runner.gate.clear()
        rig.engine.add(_seq("first", [1]), Heard())
        assert rig.runner.step_began.wait(TIMEOUT_S)
        rig.engine.add(_seq("silent", [SILENCE, 2, 3, 4, 5], 5), silent)
        rig.engine.add(_seq("beside", [5, 6, 7], 5), beside)
        rig.runner.gate.set()
        assert "no token" in silent.failure()
        assert beside.answer() == continuation([5, 6, 7], 5)
        assert "no token for 1 of its sequences" in caplog.text
        rig.engine.add(_seq("after", [SILENCE - 1, 2, 3], 2), after)
        assert after.failure() == "the step failed: FloatingPointError", "the thread runs on"

    def test_of_an_aborted_sequence_is_not_heard_by_it(self, rig: Rig) -> None:
        sink = Heard()
        rig.runner.gate.clear()
        rig.engine.add(_seq("a", [POISON]), sink)
        assert rig.runner.step_began.wait(TIMEOUT_S)
        rig.engine.abort("a")
        rig.runner.gate.set()
        rig.settle()
        assert sink.events.empty()


class TestLoad:
    def test_counts_what_is_where(self, rig: Rig) -> None:
        assert rig.engine.load().ledger == Ledger(total=64, free=64, cached=0, owned=0, in_flight=0)
        rig.runner.gate.clear()
        sinks = [Heard(), Heard()]
        rig.engine.add(_seq("running", list(range(20))), sinks[0])
        assert rig.runner.step_began.wait(TIMEOUT_S)
        rig.engine.add(_seq("waiting", list(range(50, 57))), sinks[1])
        rig.engine.reserve(_seq("reserved", [3, 4, 5, 6], 2), Heard())
        load = rig.engine.load()
        assert (load.num_sequences, load.num_running, load.num_waiting, load.num_reserved) == (3, 1, 1, 1)
        assert load.num_queued_tokens == 27
        assert load.ledger == Ledger(total=64, free=57, cached=0, owned=5, in_flight=2)
        assert load.num_repaired_blocks == 0
        rig.runner.gate.set()
        for sink in sinks:
            sink.answer()
        rig.engine.abort("reserved")

    def test_every_change_is_reported(self, rig: Rig) -> None:
        def num_changes() -> int:
            count = rig.changes.qsize()
            for _ in range(count):
                rig.changes.get(timeout=TIMEOUT_S)
            return count

        rig.engine.reserve(_seq("a", [1], 5), Heard())
        assert num_changes() == 1
        rig.engine.abort("a")
        assert num_changes() == 1
        sink = Heard()
        rig.runner.gate.clear()
        rig.engine.add(_seq("b", [1]), sink)
        assert num_changes() == 1
        rig.runner.gate.set()
        sink.answer()
        rig.changes.get(timeout=TIMEOUT_S)

    def test_dropping_the_prefix_cache(self, rig: Rig) -> None:
        sink, again = Heard(), Heard()
        rig.engine.add(_seq("a", list(range(12))), sink)
        sink.answer()
        rig.settle()
        assert rig.engine.load().ledger.cached == 3
        assert rig.engine.drop_prefix_cache() == 3
        assert rig.engine.load().ledger == Ledger(total=64, free=64, cached=0, owned=0)
        rig.engine.add(_seq("b", list(range(12))), again)
        again.answer()
        assert again.started == [0]


class TestAudit:
    """What is told of a repair is told before the next step: a token that comes after it shows that it was."""

    @pytest.fixture(autouse=True)
    def only_when_idle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine.engine, "AUDIT_INTERVAL_S", 100 * TIMEOUT_S)

    def test_a_leak_is_put_right_once_the_engine_is_idle_and_told(
        self, rig: Rig, caplog: pytest.LogCaptureFixture
    ) -> None:
        with rig.engine._work:
            rig.pool.allocate(2)
        sink = Heard()
        rig.engine.add(_seq("a", [1, 2], 3), sink)
        assert sink.answer() == continuation([1, 2], 3)
        rig.wait_until(lambda load: load.num_repaired_blocks == 2)
        assert rig.engine.load().ledger == Ledger(total=64, free=63, cached=1, owned=0)
        rig.engine.add(_seq("b", [1, 2], 3), sink)
        assert sink.answer() == continuation([1, 2], 3)
        [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert "2 blocks were put right" in record.getMessage()
        assert "owned by nobody that exists" in record.getMessage()

    def test_what_a_waiting_sequence_needs_may_be_what_leaked(self, new_rig: Callable[..., Rig]) -> None:
        rig, sink = new_rig(num_blocks=4), Heard()
        with rig.engine._work:
            rig.pool.allocate(4)
        rig.engine.add(_seq("a", [1, 2], 3), sink)
        assert sink.answer() == continuation([1, 2], 3)
        assert rig.engine.load().num_repaired_blocks == 4

    def test_a_busy_engine_is_audited_now_and_then(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(engine.engine, "AUDIT_INTERVAL_S", 0.0)

        class StopsTheNextStep(Heard):
            def on_output(self, output: SequenceOutput) -> None:
                rig.runner.gate.clear()
                super().on_output(output)

        sink = StopsTheNextStep()
        rig.engine.add(_seq("a", [1, 2], 3), sink)
        sink.next()
        with rig.engine._work:
            rig.pool.allocate(2)
        rig.runner.gate.set()
        sink.next()
        rig.wait_until(lambda load: load.num_repaired_blocks == 2)
        assert rig.engine.load().num_running == 1
        rig.runner.gate.set()
        sink.next()
        assert "2 blocks were put right" in caplog.text

    def test_an_idle_engine_looks_at_every_block_now_and_then(
        self, new_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def disorder(rig: Rig) -> None:
            """One block is in the list twice, another not at all: the sum is right."""
            with rig.engine._work:
                rig.pool._free[0] = rig.pool._free[1]

        rig, sink = new_rig(), Heard()
        disorder(rig)
        monkeypatch.setattr(engine.engine, "THOROUGH_AUDIT_INTERVAL_S", 0.0)
        rig.engine.add(_seq("a", [1, 2], 3), sink)
        assert sink.answer() == continuation([1, 2], 3)
        rig.wait_until(lambda load: load.num_repaired_blocks == 2)
        monkeypatch.setattr(engine.engine, "THOROUGH_AUDIT_INTERVAL_S", 100 * TIMEOUT_S)
        disorder(rig)
        rig.engine.add(_seq("b", [1, 2], 3), sink)
        assert sink.answer() == continuation([1, 2], 3)
        assert rig.engine.load().num_repaired_blocks == 2

    def test_nothing_is_looked_at_while_nothing_changes(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        sink, calls = Heard(), queue.Queue[str]()
        scheduler = rig.engine._scheduler
        audit, schedule = scheduler.audit, scheduler.schedule

        def note_audit(*, thorough: bool) -> Repair:
            calls.put("audit")
            return audit(thorough=thorough)

        def note_schedule() -> StepPlan | None:
            calls.put("schedule")
            return schedule()

        monkeypatch.setattr(scheduler, "audit", note_audit)
        monkeypatch.setattr(scheduler, "schedule", note_schedule)
        rig.engine.add(_seq("a", [1, 2], 3), sink)
        sink.answer()
        while calls.get(timeout=TIMEOUT_S) != "audit":
            pass
        for _ in range(3):
            with rig.engine._work:
                rig.engine._work.notify_all()
            assert calls.get(timeout=TIMEOUT_S) == "schedule"


class TestThread:
    def test_stalled_while_a_step_takes_long(self, rig: Rig) -> None:
        sink = Heard()
        rig.runner.gate.clear()
        rig.engine.add(_seq("a", [1]), sink)
        assert rig.runner.step_began.wait(TIMEOUT_S)
        first = rig.engine.stalled_s()
        while (second := rig.engine.stalled_s()) <= first:
            pass
        assert 0 < first < second < TIMEOUT_S
        rig.runner.gate.set()
        sink.answer()
        rig.settle()
        while rig.engine.stalled_s() > 0:  # the thread is on its way from the last step to its rest
            pass

    def test_a_thread_that_does_not_run_is_stalled_for_ever(self) -> None:
        rig = Rig()
        assert rig.engine.stalled_s() == float("inf")
        rig.engine.start()
        assert rig.engine.stalled_s() < TIMEOUT_S
        rig.engine.stop(TIMEOUT_S)
        assert rig.engine.stalled_s() == float("inf")

    def test_stop_ends_after_the_step_in_flight_and_leaves_sequences(self) -> None:
        rig, sink = Rig(), Heard()
        rig.engine.start()
        rig.runner.gate.clear()
        rig.engine.add(_seq("a", [1], 100), sink)
        assert rig.runner.step_began.wait(TIMEOUT_S)
        rig.engine.stop(timeout_s=0.01)
        assert rig.engine.stalled_s() < float("inf"), "the step goes on"
        rig.runner.gate.set()
        rig.engine.stop(TIMEOUT_S)
        assert rig.runner.num_steps == 1
        assert list(sink.next().token_ids) == continuation([1], 1)
        assert rig.engine.load().num_running == 1

    def test_nothing_runs_while_nothing_is_to_do(self, rig: Rig) -> None:
        sink = Heard()
        rig.engine.add(_seq("a", [1, 2], 3), sink)
        sink.answer()
        rig.settle()
        assert rig.runner.num_steps == 3

    def test_many_threads_at_once(self, new_rig: Callable[..., Rig]) -> None:
        """Adds, handoffs, holds and aborts from eight threads in a pool too small for all: no token is wrong."""
        rig = new_rig(num_blocks=40)
        problems: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(25):
                    _one_request(rig, random.Random(100 * number + turn), f"{number}/{turn}")
            except BaseException as error:
                problems.append(error)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * TIMEOUT_S)
        assert not problems
        rig.settle()


def _one_request(rig: Rig, chance: random.Random, name: str) -> None:
    """Prompts share prefixes of different lengths; each request ends in one of several ways."""
    prompt = [*range(chance.choice([0, 3, 8, 16])), *(chance.randrange(50) for _ in range(chance.randint(1, 9)))]
    sink, count = Heard(), chance.randint(1, 6)
    match chance.choice(["add", "add", "reserve", "hold", "abort"]):
        case "add":
            rig.engine.add(_seq(name, prompt, count), sink)
            _check_answer(sink, continuation(prompt, count))
        case "hold":
            rig.engine.add(_seq(name, prompt, hold=True), sink)
            assert list(sink.next().token_ids) == continuation(prompt, 1)
            rig.engine.abort(name)
        case "abort":
            rig.engine.add(_seq(name, prompt, 50), sink)
            for _ in range(chance.randint(0, 2)):
                sink.events.get(timeout=TIMEOUT_S)
            rig.engine.abort(name)
        case "reserve":
            seq = _seq(name, prompt, count)
            try:
                num_cached = rig.engine.reserve(seq, sink)
            except OutOfBlocks:
                return
            rig.runner.store(seq.block_ids, num_cached, prompt[num_cached:])
            first, *rest = continuation(prompt, count)
            if rig.engine.activate(name, first).finish_reason is None:
                _check_answer(sink, rest)


def _check_answer(sink: Heard, expected: list[int]) -> None:
    """All of it comes, or the sequence is handed back before the end."""
    tokens: list[int] = []
    while tokens != expected and (event := sink.events.get(timeout=TIMEOUT_S)) != HANDED_BACK:
        assert isinstance(event, SequenceOutput), event
        tokens += event.token_ids
        assert tokens == expected[: len(tokens)]
