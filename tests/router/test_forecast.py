"""The forecast by itself, and a simulation of what it is for: goodput under overload."""

import heapq
import itertools
import math
from dataclasses import dataclass, field
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.forecast import FORGET_AFTER_S, MARGIN, Forecast
from router.waiting_line import Waiter, WaitingLine


@pytest.fixture
def forecast():
    return Forecast()


def steady(forecast, *, from_s=0.0, to_s=10.0, num_streams=4, tpot_s=0.1, ttft_s=0.5, num_tokens=20):
    """So many streams at this pace all the time, each end making place for one who has waited for it."""
    end_every_s = num_tokens * tpot_s / num_streams
    for i in range(num_streams):
        forecast.note_grant(from_s, 0.0)
        forecast.note_first_token(from_s + i * 1e-6, ttft_s)
    next_end_at_s, now_s = from_s + end_every_s, from_s
    while now_s < to_s - tpot_s:
        now_s += tpot_s
        for _ in range(num_streams):
            forecast.note_tokens(now_s, tpot_s, 1)
        while now_s >= next_end_at_s:
            forecast.note_end(now_s, num_tokens)
            forecast.note_release(now_s)
            forecast.note_grant(now_s, 100.0)
            forecast.note_first_token(now_s, ttft_s)
            next_end_at_s += end_every_s
    return now_s


def test_nothing_is_needed_as_long_as_nothing_is_known(forecast):
    assert forecast.seconds_needed(5.0, 1000, 50) == 0.0
    assert forecast.wait_s(5.0, 50) == 0.0


def test_a_steady_load_is_told_as_it_is(forecast):
    """The one who asks comes in addition, and slows all of them a little."""
    now_s = steady(forecast)
    service_s = 0.5 + 20 * 0.1
    assert service_s * MARGIN <= forecast.seconds_needed(now_s, 1000, 0) <= 1.1 * service_s * MARGIN
    assert forecast.wait_s(now_s, 6) == pytest.approx(6 * 20 * 0.1 / 4, rel=0.1)
    ahead_s = forecast.seconds_needed(now_s, 1000, 6) - forecast.seconds_needed(now_s, 1000, 0)
    assert ahead_s == pytest.approx(MARGIN * forecast.wait_s(now_s, 6))


def test_nobody_needs_more_tokens_than_it_asks_for(forecast):
    now_s = steady(forecast)
    at_most_s = [forecast.seconds_needed(now_s, n, 0) for n in (1, 5, 10, 20, 1000)]
    assert at_most_s == sorted(at_most_s)
    assert at_most_s[0] < MARGIN * (0.5 + 2 * 0.1)
    assert at_most_s[-1] < 1.1 * at_most_s[-2]


def test_before_any_answer_has_ended_nobody_is_taken_for_long(forecast):
    """Who asks for a thousand tokens rarely gets as many: an almost idle cluster must not turn it away."""
    forecast.note_grant(0.0, 0.0)
    forecast.note_first_token(0.5, 0.5)
    for i in range(100):
        forecast.note_tokens(0.5 + 0.1 * i, 0.1, 1)
    assert forecast.seconds_needed(10.5, 1000, 0) == pytest.approx(MARGIN * 0.5)


def test_the_pace_of_the_line_is_that_of_grants_while_somebody_waits(forecast):
    forecast.note_grant(0.0, 0.0)
    forecast.note_grant(8.0, 0.0)  # nobody waited: there was room all the time
    assert forecast.wait_s(8.0, 1) == 0.0
    forecast.note_grant(9.0, 0.25)  # somebody came to a full cluster, long after the last grant
    assert forecast.wait_s(9.0, 1) == pytest.approx(0.25)


def test_one_with_a_place_counts_before_its_tokens_come(forecast):
    """Else a burst would be let in as a whole, each one judged by the pace of those before it."""
    now_s = steady(forecast)
    needed_s = [forecast.seconds_needed(now_s, 20, 0)]
    for _ in range(4):
        forecast.note_grant(now_s, 0.0)
        needed_s.append(forecast.seconds_needed(now_s, 20, 0))
    assert needed_s == sorted(set(needed_s))
    for _ in range(4):
        forecast.note_release(now_s)
    assert forecast.seconds_needed(now_s, 20, 0) < needed_s[1]


def test_answers_that_are_cut_off_are_not_taken_for_short(forecast):
    """If all who hold out end short, and the long ones by their deadline, answers are as long as both together."""
    now_s = 0.0
    for _ in range(50):
        for num_tokens, is_whole in ((5, True), (45, False)):
            forecast.note_grant(now_s, 0.0)
            forecast.note_first_token(now_s, 0.0)
            forecast.note_tokens(now_s + 0.1, 0.1 * (num_tokens - 1), num_tokens - 1)
            if is_whole:
                forecast.note_end(now_s + 0.1, num_tokens)
            forecast.note_release(now_s + 0.1)
        now_s += 0.2
    assert forecast.seconds_needed(now_s, 1000, 0) > MARGIN * 20 * 0.1


def test_an_overload_is_forgotten_within_seconds_though_something_runs_on(forecast):
    """The pessimism trap: nobody is let in because it was slow, so nobody learns that it is not any more."""
    now_s = steady(forecast, num_streams=32, tpot_s=0.3, ttft_s=3.0)
    slow_s = forecast.seconds_needed(now_s, 20, 0)
    for _ in range(31):
        forecast.note_release(now_s)
    for _ in range(40):
        now_s += 0.1
        forecast.note_tokens(now_s, 0.1, 1)
    assert forecast.seconds_needed(now_s, 20, 0) < 0.7 * slow_s
    for _ in range(70):
        now_s += 0.1
        forecast.note_tokens(now_s, 0.1, 1)
    assert forecast.seconds_needed(now_s, 20, 0) < MARGIN * 1.1 * 20 * 0.1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["grant", "first", "tokens", "end", "release"]),
        st.floats(0.0, 3.0),  # seconds since the event before
        st.floats(0.0, 2.0),  # seconds that it tells of
        st.integers(1, 100),  # tokens
    ),
    max_size=60,
)


def told(forecast, events):
    """Tells it of one after another, and yields the time of each."""
    now_s, num_in_flight = 0.0, 0
    for kind, pause_s, seconds, num_tokens in events:
        now_s += pause_s
        if kind == "grant":
            num_in_flight += 1
            forecast.note_grant(now_s, seconds)
        elif kind == "first":
            forecast.note_first_token(now_s, seconds)
        elif kind == "tokens":
            forecast.note_tokens(now_s, seconds, num_tokens)
        elif kind == "end":
            forecast.note_end(now_s, num_tokens)
        elif num_in_flight:
            num_in_flight -= 1
            forecast.note_release(now_s)
        yield now_s


@settings(max_examples=200)
@given(EVENTS, st.integers(1, 4096), st.integers(0, 1000), st.floats(0.0, 100.0))
def test_whatever_happened_an_estimate_is_a_time_and_asking_changes_nothing(events, max_tokens, num_ahead, pause_s):
    asked, unasked = Forecast(), Forecast()
    for now_s in told(asked, events):
        assert 0.0 <= asked.seconds_needed(now_s, max_tokens, num_ahead) < math.inf
        asked.wait_s(now_s, num_ahead)
    later_s = [0.0, *told(unasked, events)][-1] + pause_s
    assert asked.seconds_needed(later_s, max_tokens, num_ahead) == unasked.seconds_needed(
        later_s, max_tokens, num_ahead
    )


@settings(max_examples=200)
@given(EVENTS, st.integers(1, 4096), st.integers(0, 1000))
def test_whatever_happened_it_is_forgotten(events, max_tokens, num_ahead):
    """What a place and an answer take within FORGET_AFTER_S; the pace of a line that moves slower, after four times
    its interval, which is 2 s at most here.
    """
    forecast = Forecast()
    later_s = [0.0, *told(forecast, events)][-1] + FORGET_AFTER_S + 0.01
    assert forecast.seconds_needed(later_s, max_tokens, num_ahead) == 0.0


@dataclass(frozen=True)
class Cluster:
    """Servers whose steps take `step_s`, `row_s` more for each row and `prefill_s` more for each new prompt.

    Each serves `batch` requests at once. Answers have `num_tokens` on average, from half of that to half more;
    a client gives up after `stretch` times what an average answer takes on an idle server. `knows_length`: it asks
    for just as many tokens, else for ten times the average.
    """

    step_s: float
    row_s: float
    batch: int
    num_servers: int = 1
    prefill_s: float = 0.005
    num_tokens: int = 40
    stretch: float = 2.5
    knows_length: bool = True

    @property
    def timeout_s(self):
        return self.stretch * (self.prefill_s + self.num_tokens * (self.step_s + self.row_s))

    @property
    def capacity_per_s(self):
        """Requests that full servers could serve."""
        request_s = self.prefill_s + self.num_tokens * (self.step_s / self.batch + self.row_s)
        return self.num_servers / request_s


CLUSTERS = {
    "waits for a place": Cluster(step_s=0.02, row_s=0.001, batch=16, stretch=3.0),
    "slows each other down": Cluster(step_s=0.010, row_s=0.001, batch=16),
    "lets in more than can be in time": Cluster(step_s=0.010, row_s=0.002, batch=16, stretch=3.0),
    "few": Cluster(step_s=0.02, row_s=0.005, batch=4, prefill_s=0.02, stretch=2.0),
    "two servers, unknown lengths": Cluster(step_s=0.02, row_s=0.002, batch=6, num_servers=2, knows_length=False),
}


@dataclass(eq=False, kw_only=True)
class Request(Waiter):
    arrived_at_s: float
    deadline_at_s: float
    num_tokens: int
    max_tokens: int
    is_refused: bool = False
    num_made: int = 0
    last_at_s: float = 0.0
    server: int | None = None


@dataclass
class Simulation:
    """Requests come by chance, at `load(now_s)` times the capacity; the queue is the router's, see `AdmissionQueue`:
    one whose answer would come too late is refused when it comes, or when it gets its place after all.
    """

    cluster: Cluster
    seed: int
    load: object
    until_s: float
    has_forecast: bool = True
    arrived: list = field(default_factory=list)
    whole_at_s: list = field(default_factory=list)

    def run(self):
        self.random, self.forecast, self.line = Random(self.seed), Forecast(), WaitingLine()
        self.running = [[] for _ in range(self.cluster.num_servers)]
        self.is_stepping = [False] * self.cluster.num_servers
        self.events, self.counter = [], itertools.count()
        self.at(0.0, self.arrive)
        while self.events:
            self.now_s, _, action, args = heapq.heappop(self.events)
            action(*args)
        return self

    def at(self, time_s, action, *args):
        heapq.heappush(self.events, (time_s, next(self.counter), action, args))

    def goodput_per_s(self, from_s):
        """Whole answers per second."""
        return sum(from_s <= t < self.until_s for t in self.whole_at_s) / (self.until_s - from_s)

    def arrive(self):
        if self.now_s >= self.until_s:
            return
        cluster = self.cluster
        self.at(self.now_s + self.random.expovariate(self.load(self.now_s) * cluster.capacity_per_s), self.arrive)
        num_tokens = round(cluster.num_tokens * self.random.uniform(0.5, 1.5))
        request = Request(
            priority=0,
            is_new=True,
            arrived_at_s=self.now_s,
            deadline_at_s=self.now_s + cluster.timeout_s,
            num_tokens=num_tokens,
            max_tokens=num_tokens if cluster.knows_length else 10 * cluster.num_tokens,
        )
        self.arrived.append(request)
        if self.is_hopeless(request, self.line.num_before(0)):
            request.is_refused = True
            return
        self.line.add(request)
        self.at(request.deadline_at_s, self.give_up, request)
        self.grant(request)

    def is_hopeless(self, request, num_ahead):
        if not self.has_forecast or not any(self.running):
            return False
        needed_s = self.forecast.seconds_needed(self.now_s, request.max_tokens, num_ahead)
        return self.now_s + needed_s > request.deadline_at_s

    def give_up(self, request):
        self.line.remove(request)
        if request.server is not None:
            self.release(request)
        self.grant()

    def grant(self, arrived=None):
        while self.line:
            server = min(range(len(self.running)), key=lambda i: len(self.running[i]))
            if len(self.running[server]) >= self.cluster.batch:
                return
            request = self.line.take_next(lambda _: True)
            if request is not arrived and self.is_hopeless(request, 0):
                request.is_refused = True
                continue
            self.forecast.note_grant(self.now_s, self.now_s - request.arrived_at_s)
            request.server, request.last_at_s = server, self.now_s
            self.running[server].append(request)
            if not self.is_stepping[server]:
                self.begin_step(server)

    def release(self, request):
        self.running[request.server].remove(request)
        request.server = None
        self.forecast.note_release(self.now_s)

    def begin_step(self, server):
        batch = list(self.running[server])
        self.is_stepping[server] = bool(batch)
        if batch:
            num_new = sum(request.num_made == 0 for request in batch)
            step_s = self.cluster.step_s + self.cluster.row_s * len(batch) + self.cluster.prefill_s * num_new
            self.at(self.now_s + step_s, self.end_step, server, batch)

    def end_step(self, server, batch):
        for request in batch:
            if request.server is not None:
                self.bring_token(request)
        self.begin_step(server)
        self.grant()

    def bring_token(self, request):
        seconds = self.now_s - request.last_at_s
        if request.num_made == 0:
            self.forecast.note_first_token(self.now_s, seconds)
        else:
            self.forecast.note_tokens(self.now_s, seconds, 1)
        request.num_made, request.last_at_s = request.num_made + 1, self.now_s
        if request.num_made == request.num_tokens:
            self.whole_at_s.append(self.now_s)
            self.forecast.note_end(self.now_s, request.num_made)
            self.release(request)


@pytest.mark.parametrize("name", CLUSTERS)
def test_goodput_holds_under_three_times_the_load(name):
    """More requests than can be served must not take the time of those that can."""

    def goodput_per_s(load, *, has_forecast=True):
        runs = [Simulation(CLUSTERS[name], seed, lambda _: load, 20.0, has_forecast).run() for seed in range(3)]
        return mean(run.goodput_per_s(from_s=5.0) for run in runs)

    full, overloaded = goodput_per_s(1.0), goodput_per_s(3.0)
    assert overloaded >= 0.8 * full
    assert overloaded >= 3 * goodput_per_s(3.0, has_forecast=False)


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("seed", range(2))
def test_when_an_overload_ends_requests_are_let_in_again(name, seed):
    cluster = CLUSTERS[name]
    run = Simulation(cluster, seed, lambda now_s: 4.0 if now_s < 10.0 else 0.2, 30.0).run()
    calm_from_s = 10.0 + 3.0 * cluster.timeout_s
    assert len([r for r in run.arrived if r.is_refused and r.arrived_at_s < 10.0]) > 10
    calm = [r for r in run.arrived if r.arrived_at_s >= calm_from_s]
    assert sum(r.is_refused for r in calm) <= 0.1 * len(calm)
    assert sum(r.num_made == r.num_tokens for r in calm) >= 0.8 * len(calm) > 0
