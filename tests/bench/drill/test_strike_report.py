import pytest

from bench.drill.answers import Scorecard
from bench.drill.strike_report import blamed, strike_rows, usual_silences_s
from bench.drill.strikes import Phase, Strike, Struck

EXPECTED = [[5, 6, 7]]


def struck(phase, role, at_s):
    return Struck(Strike(phase, role, 0), f"{role}-0", 1, "r-1", at_s)


KILLS = [
    struck(Phase.PUSHED, "decode", 2.1),
    struck(Phase.QUEUED, "prefill", 20.0),
    struck(Phase.QUEUED, "prefill", 30.0),
]


def rows(strikes, *streams):
    card = Scorecard(EXPECTED)
    for asked in streams:
        card.add(asked)
    return strike_rows(strikes, card)


def test_a_row_for_each_phase_and_role_in_the_order_of_a_request(asked):
    found = rows(KILLS, asked())
    assert [(row.phase, row.victim_role, row.num_strikes) for row in found] == [
        (Phase.QUEUED, "prefill", 2),
        (Phase.PUSHED, "decode", 1),
    ]
    assert all(row.num_hit == 0 and row.worst_silence_s is None and row.median_silence_s is None for row in found)


def test_recovered_streams_count_for_the_strike_in_their_silence(asked):
    second = {"started_at_s": 19.0, "ended_at_s": 26.0, "token_times_s": (19.5, 24.5, 25.0), "num_recoveries": 2}
    queued, pushed = rows(KILLS, asked(num_recoveries=1), asked(**second))
    assert (pushed.num_hit, pushed.num_recoveries, pushed.worst_silence_s) == (1, 1, 7.0)
    assert (queued.num_hit, queued.num_recoveries, queued.worst_silence_s) == (1, 2, 5.0)


def test_silences_are_summed_up(asked):
    streams = [asked(num_recoveries=1, token_times_s=(1.0, 2.0, 2.0 + gap)) for gap in (3.0, 4.0, 8.0)]
    (row,) = rows(KILLS[:1], *streams)
    # The last stream ends at 10 s, and so its silence before the end is 0; those of the others are 5 and 4 s.
    assert (row.num_hit, row.worst_silence_s, row.median_silence_s) == (3, 8.0, 5.0)


def test_wrong_and_failed_streams_count_without_a_recovery_too(asked):
    streams = [
        asked(token_ids=(5, 9, 7)),
        asked(token_ids=(5,), failure="UNAVAILABLE"),
        asked(token_ids=(5,), failure="HUNG"),
    ]
    (row,) = rows(KILLS[:1], *streams)
    assert (row.num_hit, row.num_wrong, row.num_failed, row.num_recoveries) == (3, 1, 2, 0)


@pytest.mark.parametrize(
    ("at_s", "expected"),
    [((2.1, 8.0), 2.1), ((0.5, 2.1), 2.1), ((8.0,), 8.0), ((11.0,), None), ((), None)],
)
def test_the_strike_nearest_to_the_beginning_of_the_silence_is_blamed(asked, at_s, expected):
    found = blamed(asked(), [struck(Phase.QUEUED, "prefill", s) for s in at_s])
    assert (found and found.at_s) == expected


def test_a_failed_stream_blames_the_last_strike_before_its_end(asked):
    failed = asked(token_ids=(5,), failure="UNAVAILABLE")
    assert blamed(failed, [struck(Phase.QUEUED, "prefill", at_s) for at_s in (2.1, 8.0, 11.0)]).at_s == 8.0


def test_streams_that_were_not_hit_are_the_comparison(asked):
    card = Scorecard(EXPECTED)
    for stream in (asked(), asked(num_recoveries=1), asked(token_ids=(), failure="HUNG")):
        card.add(stream)
    assert usual_silences_s(card) == [7.0]
