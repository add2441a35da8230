import pytest

from bench.measurement import Measurement, batch_rate, time_per_token_s


def test_latencies_of_one_request_by_hand():
    # Due at 10; tokens at 10.5, then two together at 10.7, the last at 11.1.
    seen = Measurement(started_at_s=10.0, ended_at_s=11.25, token_times_s=(10.5, 10.7, 10.7, 11.1))
    assert seen.ttft_s == pytest.approx(0.5)
    assert seen.tpot_s == pytest.approx(0.6 / 3)
    assert seen.itl_s == pytest.approx([0.2, 0.0, 0.4])
    assert seen.e2e_s == pytest.approx(1.25)


def test_what_never_came_has_no_latency():
    assert Measurement(1.0, 2.0).ttft_s is None
    assert Measurement(1.0, 2.0, (1.5,)).tpot_s is None
    assert Measurement(1.0, 2.0, (1.5,)).itl_s == []
    assert time_per_token_s([]) is None


def test_batch_rate_counts_only_while_all_streams_run():
    # All run from 2 (the second one's first token) until 5 (the first one's last). In (2, 5] the first brings
    # tokens at 3, 4, 5 and the second at 3.5, 5: five tokens in three seconds.
    first, second = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.5, 5.0, 6.5]
    assert batch_rate([first, second]) == pytest.approx(5 / 3)


def test_batch_rate_of_one_stream_is_one_over_its_time_per_token():
    assert batch_rate([[1.0, 1.5, 2.0]]) == pytest.approx(1 / time_per_token_s([1.0, 1.5, 2.0]))


def test_streams_one_after_the_other_have_no_common_rate():
    with pytest.raises(ValueError, match="never ran all"):
        batch_rate([[1.0, 2.0], [2.0, 3.0]])
