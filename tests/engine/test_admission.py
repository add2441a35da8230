"""What can never be served is refused at once, with both numbers; what needs exactly all there is, is not."""

import pytest

from engine.admission import NeverFits, check_admissible, num_kv_tokens
from engine.block_pool import BlockPool
from engine.sampling_params import SamplingParams
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence


def _check(num_prompt: int, max_tokens: int, *, window: int = 256, hold: bool = False) -> None:
    config = SchedulerConfig(max_step_tokens=64, max_batch_sequences=4, context_window_tokens=window)
    seq = Sequence("a", [7] * num_prompt, num_prompt, SamplingParams(max_tokens=max_tokens), hold_after_prefill=hold)
    check_admissible(seq, config, BlockPool(num_blocks=8, block_size=16))


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(127, 1), (128, 1), (127, 2), (100, 29), (1, 128)])
def test_the_whole_pool_may_be_used(num_prompt: int, max_tokens: int) -> None:
    _check(num_prompt, max_tokens)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(129, 1), (128, 2), (100, 30), (100, 100)])
def test_more_than_the_pool_is_refused(num_prompt: int, max_tokens: int) -> None:
    num_tokens = num_prompt + max_tokens - 1
    with pytest.raises(NeverFits, match=rf"{num_tokens} tokens need \d+ KV blocks, the pool has 8 \(128 tokens\)"):
        _check(num_prompt, max_tokens)


def test_to_hold_after_prefill_only_the_prompt_counts() -> None:
    _check(128, 100, hold=True)
    with pytest.raises(NeverFits, match="129 tokens need 9 KV blocks"):
        _check(129, 1, hold=True)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(62, 2), (63, 1)])
def test_the_whole_context_window_may_be_used(num_prompt: int, max_tokens: int) -> None:
    _check(num_prompt, max_tokens, window=64)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(62, 3), (63, 2), (64, 1), (65, 1)])
def test_more_than_the_context_window_is_refused(num_prompt: int, max_tokens: int) -> None:
    with pytest.raises(NeverFits, match=rf"prompt of {num_prompt} tokens and {max_tokens} .*window is 64"):
        _check(num_prompt, max_tokens, window=64)


def test_to_hold_after_prefill_one_token_must_fit_the_window() -> None:
    _check(63, 50, window=64, hold=True)
    with pytest.raises(NeverFits):
        _check(64, 1, window=64, hold=True)


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        _check(0, 1)
    with pytest.raises(ValueError, match="max_tokens 0"):
        _check(1, 0)


def test_kv_of_the_last_token_is_not_counted() -> None:
    assert num_kv_tokens(Sequence("a", [7] * 5, 5, SamplingParams(max_tokens=3))) == 7
    assert num_kv_tokens(Sequence("a", [7] * 5, 5, SamplingParams(max_tokens=3), hold_after_prefill=True)) == 5


@pytest.mark.parametrize(
    "limits",
    [
        {"max_step_tokens": 3},
        {"max_batch_sequences": 0},
        {"max_prefill_chunk_tokens": 0},
        {"admission_window": 0},
        {"age_turn_steps": 0},
        {"watermark_blocks": -1},
        {"max_waiting": -1},
    ],
)
def test_limits_under_which_work_stands_still_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_"):
        SchedulerConfig(**({"max_step_tokens": 4, "max_batch_sequences": 4, "context_window_tokens": 64} | limits))
