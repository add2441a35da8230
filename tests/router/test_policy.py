import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.fingerprint import Fingerprint
from router.policy import Claim, Decision, Refusal, choose
from router.worker_view import WorkerView

FINGERPRINT = Fingerprint(1, "m", "float32", 30, 3, 64)
OTHER = dataclasses.replace(FINGERPRINT, kv_dtype="bfloat16")


def worker(name, role, **changes):
    """An idle worker with 8 blocks of 16 tokens, 4 sequences in a batch and 32 tokens in a step."""
    idle = WorkerView(
        name=name,
        can_prefill=role in ("prefill", "mixed"),
        can_decode=role in ("decode", "mixed"),
        is_ready=True,
        fingerprint=FINGERPRINT,
        block_size_tokens=16,
        num_blocks=8,
        max_batch_sequences=4,
        max_step_tokens=32,
        load_free_blocks=8,
        load_sequences=0,
        load_queued_tokens=0,
        sent_sequences=0,
        sent_prompt_tokens=0,
        sent_blocks=0,
        num_ever_sent=0,
    )
    return dataclasses.replace(idle, **changes)


def claim(num_prompt_tokens=10, max_tokens=5, headroom_tokens=1, avoid=()):
    """Of a prompt with room for `headroom_tokens` more."""
    return Claim(num_prompt_tokens, max_tokens, num_prompt_tokens + headroom_tokens, frozenset(avoid))


def chosen(choice):
    assert isinstance(choice, Decision), choice
    return choice.prefill, choice.decode


def test_an_idle_pair_serves():
    assert chosen(choose(claim(10, 5), [worker("p0", "prefill"), worker("d0", "decode")])) == ("p0", "d0")


def test_the_reason_names_the_loads():
    busy = worker("d0", "decode", load_sequences=2, load_free_blocks=5)
    choice = choose(claim(10, 5), [worker("p0", "prefill", load_queued_tokens=7), busy])
    assert "7 tokens" in choice.reason
    assert "2/4" in choice.reason


def test_the_least_queued_prefill_and_the_least_loaded_decode_are_picked():
    workers = [
        worker("p0", "prefill", load_queued_tokens=20),
        worker("p1", "prefill", load_queued_tokens=10),
        worker("d0", "decode", load_sequences=2),
        worker("d1", "decode", load_sequences=1),
    ]
    assert chosen(choose(claim(10, 5), workers)) == ("p1", "d1")


def test_what_was_just_sent_counts_before_the_worker_reports_it():
    workers = [
        worker("p0", "prefill", sent_prompt_tokens=20),
        worker("p1", "prefill"),
        worker("d0", "decode", sent_sequences=1),
        worker("d1", "decode"),
    ]
    assert chosen(choose(claim(10, 5), workers)) == ("p1", "d1")


def test_batches_are_compared_by_share_and_then_free_blocks_by_share():
    small = worker("d0", "decode", load_sequences=1, max_batch_sequences=2)
    large = worker("d1", "decode", load_sequences=3, max_batch_sequences=8)
    assert chosen(choose(claim(10, 5), [worker("p0", "prefill"), small, large])) == ("p0", "d1")
    fuller = worker("d0", "decode", load_free_blocks=4)
    emptier = worker("d1", "decode", num_blocks=4, load_free_blocks=4)
    assert chosen(choose(claim(10, 5), [worker("p0", "prefill"), fuller, emptier])) == ("p0", "d1")


def test_ties_go_to_the_first_name_in_whatever_order_they_come():
    workers = [worker(n, r) for n, r in (("p1", "prefill"), ("d1", "decode"), ("p0", "prefill"), ("d0", "decode"))]
    assert chosen(choose(claim(10, 5), workers)) == ("p0", "d0")


@pytest.mark.parametrize(
    ("workers", "refusal"),
    [
        ([], Refusal.NO_WORKERS),
        ([worker("p0", "prefill", is_ready=False), worker("d0", "decode", is_ready=False)], Refusal.NO_WORKERS),
        ([worker("p0", "prefill")], Refusal.NO_PAIR),
        ([worker("d0", "decode")], Refusal.NO_PAIR),
        ([worker("p0", "prefill"), worker("d0", "decode", is_ready=False)], Refusal.NO_PAIR),
        ([worker("p0", "prefill"), worker("d0", "decode", fingerprint=OTHER)], Refusal.MISMATCH),
        ([worker("p0", "prefill"), worker("d0", "decode", load_sequences=4)], Refusal.NO_ROOM),
        ([worker("p0", "prefill", load_queued_tokens=64), worker("d0", "decode")], Refusal.NO_ROOM),
        ([worker("p0", "prefill"), worker("d0", "decode", load_free_blocks=0)], Refusal.NO_ROOM),
        ([worker("m0", "mixed", load_sequences=4)], Refusal.NO_ROOM),
    ],
)
def test_refusals(workers, refusal):
    assert choose(claim(10, 5), workers) is refusal


def test_a_prefill_worker_takes_up_to_two_steps_of_tokens():
    pair = [worker("p0", "prefill", load_queued_tokens=63), worker("d0", "decode")]
    assert chosen(choose(claim(10, 5), pair)) == ("p0", "d0")


def test_the_prompt_and_one_token_must_have_blocks():
    pair = [worker("p0", "prefill"), worker("d0", "decode", load_free_blocks=2)]
    assert chosen(choose(claim(31, 5), pair)) == ("p0", "d0")  # 32 tokens: two blocks
    assert choose(claim(32, 5), pair) is Refusal.NO_ROOM  # 33: three


def test_a_block_is_kept_for_what_runs_but_an_idle_worker_can_be_filled():
    """Who needs exactly the whole pool is served, once it is idle."""
    prefill = worker("p0", "prefill")
    assert chosen(choose(claim(127, 2), [prefill, worker("d0", "decode")])) == ("p0", "d0")
    running = worker("d0", "decode", load_sequences=1, load_free_blocks=2)
    assert choose(claim(31, 5), [prefill, running]) is Refusal.NO_ROOM
    assert chosen(choose(claim(15, 5), [prefill, running])) == ("p0", "d0")


def test_pairs_are_made_within_a_fingerprint():
    workers = [
        worker("p0", "prefill"),
        worker("p1", "prefill", fingerprint=OTHER, load_queued_tokens=9),
        worker("d0", "decode", fingerprint=OTHER),
    ]
    assert chosen(choose(claim(10, 5), workers)) == ("p1", "d0")


def test_a_full_fingerprint_does_not_stand_in_the_way_of_another():
    workers = [
        worker("p0", "prefill", load_queued_tokens=64),
        worker("d0", "decode"),
        worker("p1", "prefill", fingerprint=OTHER),
        worker("d1", "decode", fingerprint=OTHER, load_sequences=1),
    ]
    assert chosen(choose(claim(10, 5), workers)) == ("p1", "d1")


def test_one_token_is_the_prefill_workers_alone():
    """The decode worker need not be used."""
    pair = [worker("p0", "prefill"), worker("d0", "decode", load_sequences=4)]
    assert chosen(choose(claim(10, 1), pair)) == ("p0", None)
    assert chosen(choose(claim(10, 1), pair[:1])) == ("p0", None)
    assert choose(claim(10, 1), [worker("p0", "prefill", load_queued_tokens=64)]) is Refusal.NO_ROOM
    assert choose(claim(10, 1), pair[1:]) is Refusal.NO_PAIR


def test_room_is_asked_for_as_much_as_is_claimed():
    """A request that ran out of blocks asks for room to grow."""
    pair = [worker("p0", "prefill"), worker("d0", "decode", load_free_blocks=3)]
    assert chosen(choose(claim(31, 99, headroom_tokens=17), pair)) == ("p0", "d0")  # 48 tokens: three blocks
    assert choose(claim(31, 99, headroom_tokens=18), pair) is Refusal.NO_ROOM
    mixed = [worker("m0", "mixed", load_free_blocks=3)]
    assert choose(claim(31, 99, headroom_tokens=18), mixed) is Refusal.NO_ROOM


def test_workers_to_be_avoided_are_taken_only_if_there_is_no_other():
    workers = [
        worker("p0", "prefill"),
        worker("p1", "prefill", load_queued_tokens=50),
        worker("d0", "decode"),
        worker("d1", "decode", load_sequences=3),
    ]
    assert chosen(choose(claim(avoid=["p0", "d0"]), workers)) == ("p1", "d1")
    assert chosen(choose(claim(avoid=["p0", "d0"]), workers[:1] + workers[2:])) == ("p0", "d1")
    assert chosen(choose(claim(avoid=["p0", "d0"]), workers[:3])) == ("p1", "d0")
    assert chosen(choose(claim(avoid=["p0", "p1", "d0", "d1"]), workers)) == ("p0", "d0")
    assert chosen(choose(claim(max_tokens=1, avoid=["p0"]), workers)) == ("p1", None)


def test_a_full_worker_is_no_other():
    workers = [worker("p0", "prefill"), worker("d0", "decode"), worker("d1", "decode", load_sequences=4)]
    assert chosen(choose(claim(avoid=["d0"]), workers)) == ("p0", "d0")


def test_the_least_loaded_decode_is_passed_by_if_only_an_avoided_prefill_fits_it():
    workers = [
        worker("p0", "prefill"),
        worker("d0", "decode"),
        worker("p1", "prefill", fingerprint=OTHER),
        worker("d1", "decode", fingerprint=OTHER, load_sequences=3),
    ]
    assert chosen(choose(claim(avoid=["p0"]), workers)) == ("p1", "d1")


def test_a_mixed_worker_goes_before_a_pair_with_one_to_be_avoided():
    workers = [worker("p0", "prefill"), worker("d0", "decode"), worker("m0", "mixed"), worker("m1", "mixed")]
    assert chosen(choose(claim(avoid=["p0", "m0"]), workers)) == (None, "m1")
    assert chosen(choose(claim(avoid=["m0", "m1"]), workers)) == ("p0", "d0")
    assert chosen(choose(claim(avoid=["p0", "m0", "m1"]), workers)) == ("p0", "d0")


def test_a_blocked_pair_is_not_made_but_its_workers_are_used():
    workers = [
        worker("p0", "prefill"),
        worker("p1", "prefill", load_queued_tokens=9),
        worker("d0", "decode"),
        worker("d1", "decode", load_sequences=1),
    ]
    assert chosen(choose(claim(), workers, frozenset({("p0", "d0")}))) == ("p1", "d0")
    assert chosen(choose(claim(), workers, frozenset({("p0", "d0"), ("p1", "d0")}))) == ("p0", "d1")


def test_blocked_pairs_and_full_workers_are_told_apart():
    pair = [worker("p0", "prefill"), worker("d0", "decode")]
    blocked = frozenset({("p0", "d0")})
    assert choose(claim(), pair, blocked) is Refusal.BLOCKED
    assert choose(claim(), pair, frozenset({("d0", "p0"), ("p0", "d9")})) == choose(claim(), pair)
    full = worker("d1", "decode", load_sequences=4)
    assert choose(claim(), [*pair, full], blocked) is Refusal.NO_ROOM  # (p0, d1) may be made when there is room
    other = worker("d1", "decode", fingerprint=OTHER)
    assert choose(claim(), [*pair, other], blocked) is Refusal.BLOCKED  # (p0, d1) never fits
    assert chosen(choose(claim(), [*pair, worker("m0", "mixed")], blocked)) == (None, "m0")


def test_mixed_workers_serve_alone_what_no_pair_can_take():
    mixed = worker("a0", "mixed")
    pair = [worker("p0", "prefill"), worker("d0", "decode")]
    assert chosen(choose(claim(10, 5), [mixed, *pair])) == ("p0", "d0")
    assert chosen(choose(claim(10, 5), [mixed])) == (None, "a0")
    assert chosen(choose(claim(10, 5), [mixed, pair[0]])) == (None, "a0")
    assert chosen(choose(claim(10, 5), [mixed, pair[0], worker("d0", "decode", fingerprint=OTHER)])) == (None, "a0")
    assert chosen(choose(claim(10, 5), [mixed, pair[0], worker("d0", "decode", load_sequences=4)])) == (None, "a0")
    assert choose(claim(10, 5), [worker("a0", "mixed", load_queued_tokens=64)]) is Refusal.NO_ROOM


@st.composite
def views(draw):
    num_blocks = draw(st.integers(1, 12))
    batch = draw(st.integers(1, 4))
    return {
        "role": draw(st.sampled_from(["prefill", "decode", "mixed"])),
        "is_ready": draw(st.booleans()),
        "fingerprint": draw(st.sampled_from([FINGERPRINT, OTHER])),
        "num_blocks": num_blocks,
        "max_batch_sequences": batch,
        "load_free_blocks": draw(st.integers(0, num_blocks)),
        "load_sequences": draw(st.integers(0, batch)),
        "load_queued_tokens": draw(st.integers(0, 70)),
        "sent_sequences": draw(st.integers(0, batch + 1)),
        "sent_prompt_tokens": draw(st.integers(0, 70)),
        "sent_blocks": draw(st.integers(0, num_blocks + 2)),
        "num_ever_sent": draw(st.integers(0, 3)),
    }


CLUSTERS = st.lists(views(), max_size=6).map(lambda made: [worker(f"w{i}", **view) for i, view in enumerate(made)])
NAMES = st.sampled_from([f"w{i}" for i in range(6)])
BLOCKED = st.frozensets(st.tuples(NAMES, NAMES), max_size=12)
CLAIMS = st.builds(claim, st.integers(1, 200), st.integers(1, 4), st.integers(1, 64), st.sets(NAMES, max_size=4))


def can_start(view, claimed):
    """Written anew from what a worker refuses: its batch, its blocks, the block it keeps for those that run."""
    num_blocks = -(-claimed.num_room_tokens // 16)
    is_busy = max(view.load_sequences, view.sent_sequences) > 0
    free = min(view.load_free_blocks, view.num_blocks - view.sent_blocks)
    return (
        view.is_ready
        and max(view.load_sequences, view.sent_sequences) < view.max_batch_sequences
        and num_blocks + is_busy <= free
    )


def can_queue(view):
    return view.is_ready and max(view.load_queued_tokens, view.sent_prompt_tokens) < 64


def options(claimed, cluster, blocked):
    """All that may serve a request of more than one token, by trying every pair of workers."""
    pairs = [
        (p, d)
        for p in cluster
        for d in cluster
        if p.can_prefill and not p.can_decode and can_queue(p) and d.can_decode and not d.can_prefill
        if can_start(d, claimed) and p.fingerprint == d.fingerprint and (p.name, d.name) not in blocked
    ]
    mixed = [w for w in cluster if w.can_prefill and w.can_decode and can_queue(w) and can_start(w, claimed)]
    return pairs + [(None, w) for w in mixed]


def num_avoided(claimed, option):
    return sum(w.name in claimed.avoid for w in option if w is not None)


@settings(max_examples=200)
@given(CLAIMS.filter(lambda c: c.max_tokens > 1), CLUSTERS, BLOCKED)
def test_a_decision_is_one_of_all_that_may_serve_and_avoids_as_many_as_can_be(claimed, cluster, blocked):
    """Ready workers with room and equal fingerprints, no blocked pair; nobody is refused whom some could serve."""
    choice = choose(claimed, cluster, blocked)
    possible = options(claimed, cluster, blocked)
    if isinstance(choice, Refusal):
        assert not possible
        return
    by_name = {view.name: view for view in cluster}
    option = (by_name[choice.prefill] if choice.prefill else None, by_name[choice.decode])
    assert option in possible
    assert num_avoided(claimed, option) == min(num_avoided(claimed, other) for other in possible)


@settings(max_examples=150)
@given(CLAIMS.map(lambda c: dataclasses.replace(c, max_tokens=1)), CLUSTERS, BLOCKED)
def test_one_token_goes_to_any_prefill_worker_with_a_short_queue(claimed, cluster, blocked):
    if not any(v.is_ready and v.can_prefill for v in cluster):
        return
    choice = choose(claimed, cluster, blocked)
    possible = [v for v in cluster if v.can_prefill and can_queue(v)]
    if not possible:
        assert choice is Refusal.NO_ROOM
        return
    assert choice.decode is None
    taken = next(v for v in possible if v.name == choice.prefill)
    assert (taken.name in claimed.avoid) == all(v.name in claimed.avoid for v in possible)


@settings(max_examples=150)
@given(CLAIMS, CLUSTERS, BLOCKED, st.randoms())
def test_equal_snapshots_give_equal_decisions(claimed, cluster, blocked, random):
    shuffled = random.sample(cluster, len(cluster))
    assert choose(claimed, shuffled, blocked) == choose(claimed, cluster, blocked)


@settings(max_examples=150)
@given(CLAIMS, CLUSTERS, BLOCKED)
def test_blocked_is_said_exactly_when_all_pairs_that_fit_are_blocked(claimed, cluster, blocked):
    ready = [w for w in cluster if w.is_ready]
    if any(w.can_prefill and w.can_decode for w in ready) or claimed.max_tokens == 1:
        return
    prefills, decodes = [w for w in ready if w.can_prefill], [w for w in ready if w.can_decode]
    fitting = {(p.name, d.name) for p in prefills for d in decodes if p.fingerprint == d.fingerprint}
    assert (choose(claimed, cluster, blocked) is Refusal.BLOCKED) == (bool(fitting) and fitting <= blocked)


@settings(max_examples=150)
@given(CLAIMS.filter(lambda c: c.max_tokens > 1), CLUSTERS)
def test_pairs_are_the_least_loaded(claimed, cluster):
    claimed = dataclasses.replace(claimed, avoid=frozenset())
    choice = choose(claimed, cluster)
    if isinstance(choice, Refusal) or choice.prefill is None:
        return
    by_name = {view.name: view for view in cluster}
    prefill, decode = by_name[choice.prefill], by_name[choice.decode]
    rivals = [v for v in cluster if v.fingerprint == decode.fingerprint and v.can_prefill != v.can_decode]
    assert prefill.num_queued_tokens == min(v.num_queued_tokens for v in rivals if v.can_prefill and can_queue(v))
    startable = [v for v in rivals if v.can_decode and can_start(v, claimed)]
    shares = [v.num_sequences / v.max_batch_sequences for v in startable]
    assert decode.num_sequences / decode.max_batch_sequences == min(shares)


def test_equal_workers_take_turns():
    prefills = [worker("p0", "prefill", num_ever_sent=5), worker("p1", "prefill", num_ever_sent=4)]
    decodes = [worker("d0", "decode", num_ever_sent=3), worker("d1", "decode", num_ever_sent=2)]
    decision = choose(claim(10, 10), [*prefills, *decodes])
    assert (decision.prefill, decision.decode) == ("p1", "d1")
