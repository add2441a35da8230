import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest

PROGRAM = """
import logging
from deploy.process_logging import log_to_stderr
log_to_stderr("decode-0", {log_format!r})
logging.getLogger("router.service").info("request %s finished: é", "r-1")
logging.getLogger("router.service").debug("too fine")
logging.getLogger("some_library").info("chatter")
logging.getLogger("some_library").warning("watch out")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("engine.engine").exception("a step failed")
"""


@pytest.fixture
def lines_of():
    """What a process with this log format writes, line by line."""

    def run(log_format: str) -> list[str]:
        program = PROGRAM.format(log_format=log_format)
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True)
        return ran.stderr.splitlines()

    return run


def test_json_has_one_object_a_line_with_all_of_it(lines_of):
    first, second, third = map(json.loads, lines_of("json"))
    assert (first["level"], first["member"], first["logger"]) == ("INFO", "decode-0", "router.service")
    assert first["message"] == "request r-1 finished: é"
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert second["message"] == "watch out"
    assert "ZeroDivisionError" in third["traceback"]
    assert "traceback" not in first


def test_text_is_for_people(lines_of):
    first, second, third, *traceback = lines_of("text")
    assert first.endswith("INFO    decode-0 router.service: request r-1 finished: é")
    assert second.endswith("watch out")
    assert third.endswith("a step failed")
    assert "ZeroDivisionError" in traceback[-1]


def test_importing_it_changes_nothing():
    assert logging.getLogger("router").level == logging.NOTSET
