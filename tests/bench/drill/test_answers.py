import pytest

from bench.drill.answers import Scorecard, Verdict, describe, judge

EXPECTED = [5, 6, 7]


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, Verdict.RIGHT),
        ({"num_recoveries": 2}, Verdict.RIGHT),
        ({"token_ids": (5, 9, 7)}, Verdict.WRONG),
        ({"token_ids": (5, 6)}, Verdict.WRONG),
        ({"token_ids": (5, 6, 7, 8)}, Verdict.WRONG),
        ({"token_ids": (5, 6), "failure": "UNAVAILABLE"}, Verdict.FAILED),
        ({"token_ids": (), "failure": "DEADLINE_EXCEEDED"}, Verdict.HUNG),
        ({"token_ids": (), "failure": "HUNG"}, Verdict.HUNG),
        ({"token_ids": (5,), "failure": "CANCELLED", "is_cancelled": True}, Verdict.CANCELLED),
        ({"token_ids": (), "failure": "CANCELLED", "is_cancelled": True}, Verdict.CANCELLED),
        ({"token_ids": (5, 6), "failure": "CANCELLED"}, Verdict.FAILED),
        # Wrong tokens stay wrong whatever ended the stream.
        ({"token_ids": (9,), "failure": "CANCELLED", "is_cancelled": True}, Verdict.WRONG),
        ({"token_ids": (9,), "failure": "UNAVAILABLE"}, Verdict.WRONG),
    ],
)
def test_verdicts(asked, fields, verdict):
    assert judge(asked(**fields), EXPECTED) is verdict


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"token_ids": (5, 9, 7)}, "token 1 is 9, expected 6"),
        ({"token_ids": (5, 6)}, "2 of 3 tokens came"),
        ({"token_ids": (5,), "failure": "UNAVAILABLE", "message": "gone"}, "UNAVAILABLE after 1 of 3 tokens: gone"),
        ({"token_ids": (5, 9), "num_recoveries": 1, "recovery_reason": "decode-0 died"}, "last: decode-0 died"),
    ],
)
def test_what_is_wrong_is_told(asked, fields, told):
    assert told in describe(asked(**fields), EXPECTED)
    assert "r-1, question 0" in describe(asked(**fields), EXPECTED)


@pytest.mark.parametrize(
    ("fields", "silence"),
    [
        ({}, (2.0, 9.0)),
        ({"token_times_s": (8.0, 8.5, 9.0)}, (0.0, 8.0)),
        ({"token_times_s": (), "token_ids": ()}, (0.0, 10.0)),
        ({"token_times_s": (1.0, 1.0, 1.0)}, (1.0, 10.0)),
    ],
)
def test_the_longest_silence_counts_from_the_start_to_the_end(asked, fields, silence):
    assert asked(**fields).longest_silence == silence


def test_a_scorecard_counts_and_keeps_a_line_for_each_problem(asked):
    card = Scorecard([EXPECTED, [1]])
    card.add(asked())
    card.add(asked(num_recoveries=2, recovery_reason="prefill-1 died"))
    card.add(asked(question=1))
    card.add(asked(token_ids=(5,), failure="UNAVAILABLE", num_recoveries=1))
    card.add(asked(token_ids=(), failure="HUNG"))
    card.add(asked(token_ids=(), failure="CANCELLED", is_cancelled=True))
    assert {v.name: n for v, n in card.counts.items()} == {
        "RIGHT": 2,
        "CANCELLED": 1,
        "WRONG": 1,
        "FAILED": 1,
        "HUNG": 1,
    }
    assert card.num_recovered == 1
    assert card.num_bad == 3
    assert [problem.split(":")[0] for problem in card.problems] == ["wrong", "failed", "hung"]
    assert card.numbers()["streams"]["right"] == 2
    hit = card.numbers()["hit"]
    assert [line["verdict"] for line in hit] == ["right", "failed", "hung"]
    assert (hit[0]["recovery_reason"], hit[0]["silent_from_s"], hit[0]["silent_until_s"]) == (
        "prefill-1 died",
        2.0,
        9.0,
    )
