"""Two toy workers, what a router asks of them, and what may happen next."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from decode_toy import DecodeCall, DecodeWorker
from handoff_toys import Network
from prefill_toy import PrefillCall, PrefillWorker

from decode_worker import handoff_machine as d
from prefill_worker import handoff_machine as p

NUM_BLOCKS = 4  # room for two calls


@dataclass(eq=False)
class Request:
    """A router's calls for one prompt. The second prefill is a router's mistake."""

    prompt: int
    decode: DecodeCall
    prefills: list[PrefillCall] = field(default_factory=list)


class World:
    """One worker of each role, either of which may be replaced at its address."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.network = Network()
        self.requests: list[Request] = []
        self.decode = DecodeWorker(self.network, f"epoch-{next(self._numbers)}", NUM_BLOCKS)
        self.prefill = PrefillWorker(self.network, NUM_BLOCKS)

    def start(self, num_cached_tokens: int) -> Request:
        """A router opens its call on the decode worker."""
        prompt = next(self._numbers)
        call = DecodeCall(self.decode, f"{prompt:032x}", prompt, num_cached_tokens)
        self.decode.calls[call.ticket] = call
        self.requests.append(Request(prompt, call))
        return self.requests[-1]

    def start_prefill(self, request: Request, prompt: int) -> None:
        """The router opens its call on the prefill worker, with the ticket."""
        call = PrefillCall(self.prefill, next(self._numbers), prompt, request.decode)
        self.prefill.calls[call.push] = call
        request.prefills.append(call)

    def restart_decode(self) -> None:
        """It dies with all it holds, and another takes its address."""
        self.decode = DecodeWorker(self.network, f"epoch-{next(self._numbers)}", NUM_BLOCKS)

    def restart_prefill(self) -> None:
        """It dies with all it holds, and another takes its address."""
        self.prefill = PrefillWorker(self.network, NUM_BLOCKS)

    @property
    def decode_calls(self) -> list[DecodeCall]:
        return list(self.decode.calls.values())

    @property
    def prefill_calls(self) -> list[PrefillCall]:
        return list(self.prefill.calls.values())

    def next_steps(self) -> Iterator[Callable[[], object]]:
        """What would happen next if all went well, the most urgent first."""
        yield from (lambda w=write: self.decode.land(w) for write in self.decode.writes)
        if self.network.to_decode:
            yield lambda: self.decode.receive(self.network.to_decode.pop(0))
        if self.network.to_prefill:
            yield lambda: self.prefill.receive(self.network.to_prefill.pop(0))
        for call in self.prefill_calls:
            yield from self._prefill_steps(call)
        for decode_call in self.decode_calls:
            yield from self._decode_steps(decode_call)
        for request in self.requests:
            is_live = request.decode.worker is self.decode and request.decode.machine.state is d.State.RESERVED
            if is_live and not request.prefills:
                yield lambda r=request: self.start_prefill(r, r.prompt)

    def _decode_steps(self, call: DecodeCall) -> Iterator[Callable[[], object]]:
        if call.machine.state is d.State.ACCEPTED:
            yield lambda: call.admit(is_local=False)
        if call.machine.state is d.State.RUNNING:
            yield lambda: call.handle(d.Event.FINISHED)

    def _prefill_steps(self, call: PrefillCall) -> Iterator[Callable[[], object]]:
        yield from (lambda r=read: call.end_read(r) for read in call.reads)
        if call.machine.state is p.State.QUEUED:
            yield lambda: call.handle(p.Event.ADMITTED)
        if call.can_compute:
            yield call.compute
        if call.can_read:
            yield call.begin_read
        if call.can_sample:
            yield lambda: call.handle(p.Event.FIRST_TOKEN)

    def step(self, *, is_lazy: bool = False) -> bool:
        """The most urgent thing happens, or the least urgent one; False if there is nothing left to do."""
        steps = list(self.next_steps())
        if steps:
            steps[-1 if is_lazy else 0]()
        return bool(steps)

    def end_everything(self) -> None:
        """All calls end, and what is being read or written comes to its end."""
        for decode_call in self.decode_calls:
            decode_call.handle(d.Event.CALL_ENDED)
        for prefill_call in self.prefill_calls:
            prefill_call.handle(p.Event.CALL_ENDED)
            for read in tuple(prefill_call.reads):
                prefill_call.end_read(read)
        for write in tuple(self.decode.writes):
            self.decode.land(write)

    def check_nothing_is_held(self) -> None:
        """After `end_everything`, whatever was before."""
        assert self.decode.pool.num_owned == self.prefill.pool.num_owned == 0
        assert self.decode.zones.num_open == 0
        assert all(self.decode.zones.state(call.ticket) is None for call in self.decode_calls)
        assert {call.machine.state for call in self.decode_calls} <= {d.State.ENDED}
        assert {call.machine.state for call in self.prefill_calls} <= {p.State.ENDED}
