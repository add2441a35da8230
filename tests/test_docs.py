"""What the documents say of this repository is so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = [(path.name, path.read_text()) for path in ROOT.glob("tests/**/test_*.py")]
DOCUMENTS = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", (ROOT / "docs" / "failures.md").read_text())
    assert len(named) > 30
    assert [
        test for test in named if not any(test[0] == file and f"def {test[1]}" in text for file, text in TESTS)
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    assert [t for t in targets if "://" not in t and not (document.parent / t).exists()] == []
