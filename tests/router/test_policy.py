import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.fingerprint import Fingerprint
from router.policy import Decision, Refusal, choose
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


def chosen(choice):
    assert isinstance(choice, Decision), choice
    return choice.prefill, choice.decode


def test_an_idle_pair_serves():
    assert chosen(choose(10, 5, [worker("p0", "prefill"), worker("d0", "decode")])) == ("p0", "d0")


def test_the_reason_names_the_loads():
    busy = worker("d0", "decode", load_sequences=2, load_free_blocks=5)
    choice = choose(10, 5, [worker("p0", "prefill", load_queued_tokens=7), busy])
    assert "7 tokens" in choice.reason
    assert "2/4" in choice.reason


def test_the_least_queued_prefill_and_the_least_loaded_decode_are_picked():
    workers = [
        worker("p0", "prefill", load_queued_tokens=20),
        worker("p1", "prefill", load_queued_tokens=10),
        worker("d0", "decode", load_sequences=2),
        worker("d1", "decode", load_sequences=1),
    ]
    assert chosen(choose(10, 5, workers)) == ("p1", "d1")


def test_what_was_just_sent_counts_before_the_worker_reports_it():
    workers = [
        worker("p0", "prefill", sent_prompt_tokens=20),
        worker("p1", "prefill"),
        worker("d0", "decode", sent_sequences=1),
        worker("d1", "decode"),
    ]
    assert chosen(choose(10, 5, workers)) == ("p1", "d1")


def test_batches_are_compared_by_share_and_then_free_blocks_by_share():
    small = worker("d0", "decode", load_sequences=1, max_batch_sequences=2)
    large = worker("d1", "decode", load_sequences=3, max_batch_sequences=8)
    assert chosen(choose(10, 5, [worker("p0", "prefill"), small, large])) == ("p0", "d1")
    fuller = worker("d0", "decode", load_free_blocks=4)
    emptier = worker("d1", "decode", num_blocks=4, load_free_blocks=4)
    assert chosen(choose(10, 5, [worker("p0", "prefill"), fuller, emptier])) == ("p0", "d1")


def test_ties_go_to_the_first_name_in_whatever_order_they_come():
    workers = [worker(n, r) for n, r in (("p1", "prefill"), ("d1", "decode"), ("p0", "prefill"), ("d0", "decode"))]
    assert chosen(choose(10, 5, workers)) == ("p0", "d0")


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
    assert choose(10, 5, workers) is refusal


def test_a_prefill_worker_takes_up_to_two_steps_of_tokens():
    pair = [worker("p0", "prefill", load_queued_tokens=63), worker("d0", "decode")]
    assert chosen(choose(10, 5, pair)) == ("p0", "d0")


def test_the_prompt_and_one_token_must_have_blocks():
    pair = [worker("p0", "prefill"), worker("d0", "decode", load_free_blocks=2)]
    assert chosen(choose(31, 5, pair)) == ("p0", "d0")  # 32 tokens: two blocks
    assert choose(32, 5, pair) is Refusal.NO_ROOM  # 33: three


def test_a_block_is_kept_for_what_runs_but_an_idle_worker_can_be_filled():
    """Who needs exactly the whole pool is served, once it is idle."""
    prefill = worker("p0", "prefill")
    assert chosen(choose(127, 2, [prefill, worker("d0", "decode")])) == ("p0", "d0")
    running = worker("d0", "decode", load_sequences=1, load_free_blocks=2)
    assert choose(31, 5, [prefill, running]) is Refusal.NO_ROOM
    assert chosen(choose(15, 5, [prefill, running])) == ("p0", "d0")


def test_pairs_are_made_within_a_fingerprint():
    workers = [
        worker("p0", "prefill"),
        worker("p1", "prefill", fingerprint=OTHER, load_queued_tokens=9),
        worker("d0", "decode", fingerprint=OTHER),
    ]
    assert chosen(choose(10, 5, workers)) == ("p1", "d0")


def test_a_full_fingerprint_does_not_stand_in_the_way_of_another():
    workers = [
        worker("p0", "prefill", load_queued_tokens=64),
        worker("d0", "decode"),
        worker("p1", "prefill", fingerprint=OTHER),
        worker("d1", "decode", fingerprint=OTHER, load_sequences=1),
    ]
    assert chosen(choose(10, 5, workers)) == ("p1", "d1")


def test_one_token_is_the_prefill_workers_alone():
    """The decode worker need not be used."""
    pair = [worker("p0", "prefill"), worker("d0", "decode", load_sequences=4)]
    assert chosen(choose(10, 1, pair)) == ("p0", None)
    assert chosen(choose(10, 1, pair[:1])) == ("p0", None)
    assert choose(10, 1, [worker("p0", "prefill", load_queued_tokens=64)]) is Refusal.NO_ROOM
    assert choose(10, 1, pair[1:]) is Refusal.NO_PAIR


def test_mixed_workers_serve_alone_what_no_pair_can_take():
    mixed = worker("a0", "mixed")
    pair = [worker("p0", "prefill"), worker("d0", "decode")]
    assert chosen(choose(10, 5, [mixed, *pair])) == ("p0", "d0")
    assert chosen(choose(10, 5, [mixed])) == (None, "a0")
    assert chosen(choose(10, 5, [mixed, pair[0]])) == (None, "a0")
    assert chosen(choose(10, 5, [mixed, pair[0], worker("d0", "decode", fingerprint=OTHER)])) == (None, "a0")
    assert chosen(choose(10, 5, [mixed, pair[0], worker("d0", "decode", load_sequences=4)])) == (None, "a0")
    assert choose(10, 5, [worker("a0", "mixed", load_queued_tokens=64)]) is Refusal.NO_ROOM


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
PROMPTS = st.integers(1, 200)


def can_start(view, num_prompt_tokens):
    """Written anew from what a worker refuses: its batch, its blocks, the block it keeps for those that run."""
    num_blocks = -(-(num_prompt_tokens + 1) // 16)
    is_busy = max(view.load_sequences, view.sent_sequences) > 0
    free = min(view.load_free_blocks, view.num_blocks - view.sent_blocks)
    return (
        view.is_ready
        and max(view.load_sequences, view.sent_sequences) < view.max_batch_sequences
        and num_blocks + is_busy <= free
    )


def can_queue(view):
    return view.is_ready and max(view.load_queued_tokens, view.sent_prompt_tokens) < 64


@settings(max_examples=150, deadline=None)
@given(PROMPTS, st.integers(1, 4), CLUSTERS)
def test_only_ready_workers_with_room_are_picked(num_prompt_tokens, max_tokens, cluster):
    choice = choose(num_prompt_tokens, max_tokens, cluster)
    if isinstance(choice, Refusal):
        return
    by_name = {view.name: view for view in cluster}
    if choice.prefill is not None:
        assert by_name[choice.prefill].can_prefill
        assert can_queue(by_name[choice.prefill])
    if choice.decode is not None:
        assert by_name[choice.decode].can_decode
        assert can_start(by_name[choice.decode], num_prompt_tokens)
    if choice.prefill is None:
        assert by_name[choice.decode].can_prefill
    if choice.decode is None:
        assert max_tokens == 1


@settings(max_examples=150, deadline=None)
@given(PROMPTS, st.integers(1, 4), CLUSTERS, st.randoms())
def test_equal_snapshots_give_equal_decisions(num_prompt_tokens, max_tokens, cluster, random):
    shuffled = random.sample(cluster, len(cluster))
    assert choose(num_prompt_tokens, max_tokens, shuffled) == choose(num_prompt_tokens, max_tokens, cluster)


@settings(max_examples=150, deadline=None)
@given(PROMPTS, CLUSTERS)
def test_pairs_fit_and_are_the_least_loaded(num_prompt_tokens, cluster):
    choice = choose(num_prompt_tokens, 2, cluster)
    if isinstance(choice, Refusal) or choice.prefill is None:
        return
    by_name = {view.name: view for view in cluster}
    prefill, decode = by_name[choice.prefill], by_name[choice.decode]
    assert prefill.fingerprint == decode.fingerprint
    rivals = [v for v in cluster if v.fingerprint == decode.fingerprint and v.can_prefill != v.can_decode]
    assert prefill.num_queued_tokens == min(v.num_queued_tokens for v in rivals if v.can_prefill and can_queue(v))
    startable = [v for v in rivals if v.can_decode and can_start(v, num_prompt_tokens)]
    shares = [v.num_sequences / v.max_batch_sequences for v in startable]
    assert decode.num_sequences / decode.max_batch_sequences == min(shares)


@settings(max_examples=150, deadline=None)
@given(PROMPTS, CLUSTERS)
def test_nobody_is_refused_whom_somebody_could_serve(num_prompt_tokens, cluster):
    if not isinstance(choose(num_prompt_tokens, 2, cluster), Refusal):
        return
    queueing = [v for v in cluster if v.can_prefill and can_queue(v)]
    starting = [v for v in cluster if v.can_decode and can_start(v, num_prompt_tokens)]
    assert not [v for v in queueing if v in starting]
    prefills = {v.fingerprint for v in queueing if not v.can_decode}
    assert not prefills & {v.fingerprint for v in starting if not v.can_prefill}


def test_equal_workers_take_turns():
    prefills = [worker("p0", "prefill", num_ever_sent=5), worker("p1", "prefill", num_ever_sent=4)]
    decodes = [worker("d0", "decode", num_ever_sent=3), worker("d1", "decode", num_ever_sent=2)]
    decision = choose(10, 10, [*prefills, *decodes])
    assert (decision.prefill, decision.decode) == ("p1", "d1")
