import pytest

from baton.v1 import worker_pb2
from bench.drill.ledgers import QuietCheck, ledger_problems


def ledger(**fields):
    return worker_pb2.GetLedgerResponse(**{"total_blocks": 10, "free_blocks": 6, "cached_blocks": 4, **fields})


def test_a_clean_ledger_has_no_problems():
    assert ledger_problems({"a": ledger(), "b": ledger(stale_writes=7, num_prefilled_tokens=100)}) == ()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"owned_blocks": 2}, "2 owned blocks"),
        ({"in_flight_blocks": 3}, "3 blocks in flight"),
        ({"num_sequences": 1}, "1 sequences"),
        ({"num_open_tickets": 1}, "1 open tickets"),
        ({"repaired_blocks": 4}, "4 repaired blocks"),
        ({"quarantined_blocks": 1}, "1 quarantined blocks"),
        ({"free_blocks": 5}, "9 free and cached of 10 blocks"),
    ],
)
def test_what_is_held_or_lost_is_named_with_its_worker(fields, told):
    assert ledger_problems({"a": ledger(), "b": ledger(**fields)}) == (f"b: {told}",)


def test_a_silent_worker_is_a_problem():
    assert ledger_problems({"a": None}) == ("a: no ledger: it does not answer",)


def test_quiet_has_a_limit():
    assert QuietCheck(1.9, ()).violations(2.0) == []
    assert "only after 3.0 s" in QuietCheck(3.0, ()).violations(2.0)[0]
    assert QuietCheck(15.0, ("a: 1 sequences", "b: 2 owned blocks")).violations(2.0) == [
        "after 15.0 s of quiet: a: 1 sequences",
        "after 15.0 s of quiet: b: 2 owned blocks",
    ]
