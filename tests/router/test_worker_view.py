from kv_transfer.fingerprint import Fingerprint
from router.worker_view import WorkerView


def view(**changes):
    figures = {
        "load_free_blocks": 10,
        "load_sequences": 3,
        "load_queued_tokens": 50,
        "sent_sequences": 2,
        "sent_prompt_tokens": 40,
        "sent_blocks": 4,
        "num_ever_sent": 0,
    }
    return WorkerView(
        name="d0",
        can_prefill=False,
        can_decode=True,
        is_ready=True,
        fingerprint=Fingerprint(1, "m", "float32", 30, 3, 64),
        block_size_tokens=16,
        num_blocks=16,
        max_batch_sequences=8,
        max_step_tokens=512,
        **(figures | changes),
    )


def test_the_worse_of_what_is_told_and_what_was_sent_counts():
    assert (view().num_sequences, view().num_queued_tokens, view().num_free_blocks) == (3, 50, 10)
    ahead = view(sent_sequences=5, sent_prompt_tokens=60, sent_blocks=9)
    assert (ahead.num_sequences, ahead.num_queued_tokens, ahead.num_free_blocks) == (5, 60, 7)


def test_blocks_are_counted_up():
    assert [view().blocks_for(n) for n in (1, 15, 16, 17, 32, 33)] == [1, 1, 1, 2, 2, 3]
