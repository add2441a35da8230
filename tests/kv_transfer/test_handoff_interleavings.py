"""A router, a prefill worker and a decode worker whose messages come late, doubled, in any order or not at all.

Either worker may die and be replaced, either call may end, a worker may drain, at any point. That no block has two
owners or is freed twice, that only one's own live blocks are read and written, that a refused write changes nothing,
and that only whole KV of the right prompt is decoded, is asserted by the toys, wherever it might go wrong.
"""

from dataclasses import replace

import pytest
from decode_toy import DecodeCall
from handoff_world import Request, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefill_toy import PrefillCall

from decode_worker.handoff_machine import Event as DecodeEvent
from decode_worker.handoff_machine import State as DecodeState
from prefill_worker.handoff_machine import Event as PrefillEvent
from prefill_worker.handoff_machine import State as PrefillState

GONE = RuntimeError("gone")
DECODE_ENDS = [DecodeEvent.CALL_ENDED, DecodeEvent.HANDED_BACK, DecodeEvent.PUSH_LOST, DecodeEvent.SEQUENCE_LOST]
PREFILL_ENDS = [PrefillEvent.CALL_ENDED, PrefillEvent.HANDED_BACK, PrefillEvent.PUSH_LOST, PrefillEvent.SEQUENCE_LOST]


class Interleavings(RuleBasedStateMachine):
    """Everything that may happen, in any order; `go_on` is the way of things when nothing goes wrong."""

    requests: Bundle[Request] = Bundle("requests")

    @initialize()
    def begin(self) -> None:
        self.world = World()

    @property
    def live_decodes(self) -> list[DecodeCall]:
        return [call for call in self.world.decode_calls if call.machine.state is not DecodeState.ENDED]

    @property
    def live_prefills(self) -> list[PrefillCall]:
        return [call for call in self.world.prefill_calls if call.machine.state is not PrefillState.ENDED]

    def is_leaving(self, call: DecodeCall | PrefillCall) -> bool:
        return call.machine.state in (DecodeState.DRAINING, PrefillState.STOPPING)

    @rule(target=requests, num_cached_tokens=st.sampled_from([0, 2]))
    def ask(self, num_cached_tokens: int) -> Request:
        return self.world.start(num_cached_tokens)

    @rule(num_steps=st.integers(1, 12), is_lazy=st.booleans())
    def go_on(self, num_steps: int, is_lazy: bool) -> None:
        for _ in range(num_steps):
            self.world.step(is_lazy=is_lazy)

    @rule(request=requests, has_right_prompt=st.sampled_from([True, True, True, False]))
    def prefill(self, request: Request, has_right_prompt: bool) -> None:
        """At times a second one with the ticket, or one of another prompt."""
        is_open = request.decode.is_reserved and request.decode.worker is self.world.decode
        if is_open and len(request.prefills) < 2:
            self.world.start_prefill(request, request.prompt if has_right_prompt else 0)

    @rule(request=requests)
    def prefill_locally(self, request: Request) -> None:
        if request.decode.worker is self.world.decode and request.decode.machine.state is DecodeState.ACCEPTED:
            request.decode.admit(is_local=True)

    @precondition(lambda self: self.world.network.to_decode)
    @rule(data=st.data(), keeps_copy=st.booleans())
    def reaches_decode(self, data: st.DataObject, keeps_copy: bool) -> None:
        """Any message, in any order, any number of times."""
        messages = self.world.network.to_decode
        index = data.draw(st.integers(0, len(messages) - 1))
        self.world.decode.receive(messages[index] if keeps_copy else messages.pop(index))

    @precondition(lambda self: self.world.network.to_prefill)
    @rule(data=st.data(), keeps_copy=st.booleans())
    def reaches_prefill(self, data: st.DataObject, keeps_copy: bool) -> None:
        messages = self.world.network.to_prefill
        index = data.draw(st.integers(0, len(messages) - 1))
        self.world.prefill.receive(messages[index] if keeps_copy else messages.pop(index))

    @precondition(lambda self: self.world.network.to_decode)
    @rule(data=st.data(), sender_believes=st.booleans())
    def is_lost(self, data: st.DataObject, sender_believes: bool) -> None:
        """On its way to the decode worker; a frame perhaps with an answer that says it has arrived."""
        messages = self.world.network.to_decode
        lost = messages.pop(data.draw(st.integers(0, len(messages) - 1)))
        call = self.world.prefill.calls.get(lost.push)
        if sender_believes and lost.header is not None and call is not None:
            call.acknowledge(lost.header.frame_number)

    @precondition(lambda self: self.world.network.to_prefill)
    @rule(data=st.data())
    def answer_is_lost(self, data: st.DataObject) -> None:
        messages = self.world.network.to_prefill
        messages.pop(data.draw(st.integers(0, len(messages) - 1)))

    @precondition(lambda self: any(message.header for message in self.world.network.to_decode))
    @rule(data=st.data(), what=st.sampled_from(["payload", "ticket", "number"]))
    def is_damaged(self, data: st.DataObject, what: str) -> None:
        """A frame arrives as another one's, or with other content; the checksum is of what it was."""
        messages = self.world.network.to_decode
        index = data.draw(st.sampled_from([i for i, message in enumerate(messages) if message.header]))
        message = messages[index]
        assert message.header is not None
        if what == "payload":
            messages[index] = replace(message, cells=dict.fromkeys(message.cells, (0, 0, 0)))
        elif what == "number":
            messages[index] = replace(message, header=replace(message.header, frame_number=3))
        else:
            ticket = data.draw(st.sampled_from([request.decode.ticket for request in self.world.requests]))
            messages[index] = replace(message, ticket=ticket, header=replace(message.header, ticket_id=ticket))

    @precondition(lambda self: self.world.decode.writes)
    @rule(data=st.data())
    def lands(self, data: st.DataObject) -> None:
        self.world.decode.land(data.draw(st.sampled_from(self.world.decode.writes)))

    @precondition(lambda self: any(call.reads for call in self.world.prefill_calls))
    @rule(data=st.data())
    def is_read(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from([call for call in self.world.prefill_calls if call.reads]))
        call.end_read(data.draw(st.sampled_from(call.reads)))

    @precondition(lambda self: any(call.can_sample for call in self.world.prefill_calls))
    @rule(data=st.data())
    def samples(self, data: st.DataObject) -> None:
        """Also before the last KV has left."""
        call = data.draw(st.sampled_from([call for call in self.world.prefill_calls if call.can_sample]))
        call.handle(PrefillEvent.FIRST_TOKEN)

    @precondition(lambda self: self.live_decodes)
    @rule(data=st.data(), event=st.sampled_from(DECODE_ENDS))
    def ends_on_decode(self, data: st.DataObject, event: DecodeEvent) -> None:
        data.draw(st.sampled_from(self.live_decodes)).handle(event, GONE)

    @precondition(lambda self: self.live_prefills)
    @rule(data=st.data(), event=st.sampled_from(PREFILL_ENDS))
    def ends_on_prefill(self, data: st.DataObject, event: PrefillEvent) -> None:
        data.draw(st.sampled_from(self.live_prefills)).handle(event, GONE)

    @precondition(lambda self: any(self.is_leaving(call) for call in self.live_decodes + self.live_prefills))
    @rule()
    def patience_ends(self) -> None:
        """Of all that wait for the end of writes and reads."""
        for decode_call in filter(self.is_leaving, self.live_decodes):
            decode_call.handle(DecodeEvent.DRAIN_TIMED_OUT)
        for prefill_call in filter(self.is_leaving, self.live_prefills):
            prefill_call.handle(PrefillEvent.STOP_TIMED_OUT)

    @rule(which=st.sampled_from(["decode", "prefill"]))
    def dies(self, which: str) -> None:
        """Messages to and from the dead are still under way; what comes back has another epoch."""
        getattr(self.world, f"restart_{which}")()

    @rule()
    def comes_to_rest(self) -> None:
        """Whatever was before: all calls end, and nothing is held."""
        self.world.end_everything()
        self.world.check_nothing_is_held()

    @invariant()
    def only_who_holds_them_has_blocks(self) -> None:
        assert self.world.decode.pool.num_owned == 2 * sum(call.holds for call in self.world.decode_calls)
        assert self.world.prefill.pool.num_owned == 2 * sum(call.holds for call in self.world.prefill_calls)

    def teardown(self) -> None:
        self.world.end_everything()
        self.world.check_nothing_is_held()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=150, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("num_cached_tokens", [0, 2])
def test_when_all_goes_well_all_are_served(num_cached_tokens: int) -> None:
    """Three at once, of which two find room: the third is refused, and nothing is held in the end."""
    world = World()
    requests = [world.start(num_cached_tokens) for _ in range(3)]
    while world.step():
        pass
    assert [request.decode.router.ends for request in requests] == [["finished"], ["finished"], ["failed"]]
    assert [request.decode.has_run for request in requests] == [True, True, False]
    assert [request.prefills[0].router.ends for request in requests[:2]] == [["pushed"]] * 2
    world.check_nothing_is_held()


def test_a_lost_answer_to_a_frame_that_has_arrived_does_no_harm() -> None:
    """The frame is sent again, and refused as delivered before, which counts as its answer."""
    world = World()
    request = world.start(0)
    while not world.decode.writes:
        world.step()
    frame = world.decode.writes[0].message
    world.decode.land(world.decode.writes[0])
    world.network.to_prefill.pop()
    world.network.to_decode.append(frame)
    while world.step():
        pass
    assert request.decode.router.ends == ["finished"]
    assert world.decode.zones.stale_writes == 1


def test_a_prefill_of_another_prompt_is_never_decoded() -> None:
    world = World()
    request = world.start(0)
    while not request.decode.is_reserved:
        world.step()
    world.start_prefill(request, prompt=99)
    while world.step():
        pass
    assert not request.decode.has_run
    assert request.decode.router.ends == ["failed"]
    assert request.prefills[0].machine.state is PrefillState.ENDED
    world.check_nothing_is_held()


def test_nothing_reaches_the_life_after() -> None:
    """All messages to a dead worker reach the one that takes its place, which is at work for others."""
    world = World()
    world.start(0)
    while not world.decode.writes:
        world.step()
    late = [*world.network.to_decode, *(write.message for write in world.decode.writes)]
    world.restart_decode()
    other = world.start(0)
    while not other.decode.is_reserved:
        world.step()
    for message in late:
        world.decode.receive(message)
    assert not world.decode.writes
    while world.step():
        pass
    assert other.decode.router.ends == ["finished"]
