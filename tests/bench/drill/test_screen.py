import io
import json

from rich.console import Console

from bench.drill.result import Findings, TableData, findings_json
from bench.drill.screen import Screen

TABLE = TableData(("phase", "strikes"), (("mid-push", "10"), ("queued [x]", "9")))
PASSED = Findings((), (("streams", "12: 12 right"),), (TABLE,), {"duration_s": 1.5})
FAILED = Findings(tuple(f"problem {number}" for number in range(40)), numbers={"n": 1})


def shown(name, findings):
    output = io.StringIO()
    Screen(Console(file=output)).show(name, findings)
    return output.getvalue()


def test_a_result_that_passed_has_its_facts_and_tables():
    text = shown("kill", PASSED)
    assert "kill: passed" in text
    assert "12: 12 right" in text
    assert "mid-push" in text
    assert "queued [x]" in text  # no markup


def test_violations_are_listed_as_far_as_a_person_reads():
    text = shown("freeze", FAILED)
    assert "freeze: FAILED" in text
    assert "problem 24" in text
    assert "problem 25" not in text
    assert "15 more" in text


def test_without_a_terminal_only_what_stays_is_written():
    output = io.StringIO()
    with Screen(Console(file=output)).stage("kill", 10) as stage:
        stage.say("fine so far")
        stage.advance()
        stage.line("prefill-0 struck")
    assert output.getvalue().splitlines() == ["kill ...", "prefill-0 struck"]


def test_on_a_terminal_progress_is_shown_too():
    output = io.StringIO()
    with Screen(Console(file=output, force_terminal=True, width=120)).stage("kill", 10) as stage:
        stage.advance(3)
        stage.say("fine so far")
    assert "fine so far" in output.getvalue()
    assert "3/10" in output.getvalue()


def test_json_has_all_scenarios_and_whether_all_passed():
    written = json.loads(json.dumps(findings_json([("kill", PASSED), ("freeze", FAILED)], {"seed": 3})))
    assert written["settings"] == {"seed": 3}
    assert not written["is_passed"]
    assert written["scenarios"]["kill"] == {"violations": [], "duration_s": 1.5}
    assert len(written["scenarios"]["freeze"]["violations"]) == 40
    assert findings_json([("kill", PASSED)], {})["is_passed"]
