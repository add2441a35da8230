"""Blocks run out, sequences are handed back and go on in another one: no token is lost, doubled or different."""

from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool, OutOfBlocks
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence
from engine.step_plan import SequenceOutput, StepResult

BLOCK_SIZE = 2
STOP_TOKEN = 9


def _next_token(token_ids: list[int]) -> int:
    """The pretend model: a function of all tokens and their order."""
    return sum((i + 1) * (t + 3) for i, t in enumerate(token_ids)) % 11


def _alone(prompt: list[int], max_tokens: int) -> list[int]:
    """What the request must get, whoever else is there."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_tokens and token_ids[len(prompt) :][-1:] != [STOP_TOKEN]:
        token_ids.append(_next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass
class Request:
    """As a router keeps it: what is handed back is entered anew with the tokens it has."""

    prompt: list[int]
    max_tokens: int
    priority: int
    comes_from_elsewhere: bool
    tokens: list[int] = field(default_factory=list)
    num_entries: int = 0
    is_finished: bool = False

    def sequence(self, sequence_id: str) -> Sequence:
        token_ids = self.prompt + self.tokens
        sampling = SamplingParams(max_tokens=self.max_tokens - len(self.tokens), stop_token_ids=frozenset([STOP_TOKEN]))
        return Sequence(sequence_id, token_ids, len(token_ids), sampling, priority=self.priority)


class Cluster:
    """One scheduler and the requests that want to be served by it."""

    def __init__(self, requests: list[Request], num_blocks: int, max_batch: int) -> None:
        limits = SchedulerConfig(max_step_tokens=8, max_batch_sequences=max_batch, context_window_tokens=64)
        self.scheduler = Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE), "model")
        self.outside = list(requests)
        self.inside: dict[str, tuple[Request, Sequence]] = {}
        self.num_ids = 0

    def enter_all(self) -> None:
        for request in list(self.outside):
            sequence = request.sequence(str(self.num_ids))
            try:
                if request.comes_from_elsewhere:
                    self.scheduler.reserve(sequence)
                else:
                    self.scheduler.add(sequence)
            except OutOfBlocks:
                continue
            self.num_ids += 1
            request.num_entries += 1
            self.outside.remove(request)
            self.inside[sequence.sequence_id] = request, sequence
            if request.comes_from_elsewhere:
                self._take(self.scheduler.activate(sequence.sequence_id, _next_token(sequence.token_ids)))

    def step(self) -> int:
        """Returns how many were handed back."""
        plan = self.scheduler.schedule()
        handed_back = [self.inside.pop(i)[0] for i in self.scheduler.take_handed_back()]
        self.outside += handed_back
        if plan is not None:
            sampled = {r.sequence_id: _next_token(self.inside[r.sequence_id][1].token_ids) for r in plan.sequences}
            for output in self.scheduler.commit(plan, StepResult(sampled)).outputs:
                self._take(output)
        return len(handed_back)

    def _take(self, output: SequenceOutput) -> None:
        request, _ = self.inside[output.sequence_id]
        request.tokens += output.token_ids
        if output.finish_reason is not None:
            request.is_finished = True
            del self.inside[output.sequence_id]


@settings(max_examples=200)
@given(
    requests=st.lists(
        st.builds(
            Request,
            prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6),
            max_tokens=st.integers(2, 10),
            priority=st.integers(0, 2),
            comes_from_elsewhere=st.booleans(),
        ),
        min_size=2,
        max_size=6,
    ),
    num_blocks=st.integers(8, 10),  # 8 are what the largest request needs alone
    max_batch=st.integers(1, 4),
)
def test_every_request_gets_the_tokens_it_would_get_alone(
    requests: list[Request], num_blocks: int, max_batch: int
) -> None:
    cluster = Cluster(requests, num_blocks, max_batch)
    num_handed_back = 0
    for _ in range(2000):
        cluster.enter_all()
        num_handed_back += cluster.step()
        if not cluster.inside and not cluster.outside:
            break
    event(f"handed back {min(num_handed_back, 3)} times or more")
    for request in requests:
        assert request.is_finished
        assert request.tokens == _alone(request.prompt, request.max_tokens)
    assert sum(request.num_entries for request in requests) == len(requests) + num_handed_back
    ledger = cluster.scheduler.ledger()
    assert (ledger.owned, ledger.in_flight, ledger.free + ledger.cached) == (0, 0, num_blocks)
    assert cluster.scheduler.audit(thorough=True).num_blocks == 0


def test_a_pool_too_small_for_all_does_hand_back() -> None:
    """Without it the property above would show little."""
    prompts = [prompt for prompt in ([i, i + 1] for i in range(50)) if len(_alone(prompt, 10)) == 10][:3]
    requests = [Request(prompt, 10, 0, comes_from_elsewhere=False) for prompt in prompts]
    cluster = Cluster(requests, num_blocks=10, max_batch=4)
    num_handed_back = 0
    while cluster.inside or cluster.outside:
        cluster.enter_all()
        num_handed_back += cluster.step()
    assert num_handed_back > 0
    assert requests[0].num_entries == 1, "the oldest stays"
    assert [r.tokens for r in requests] == [_alone(prompt, 10) for prompt in prompts]
