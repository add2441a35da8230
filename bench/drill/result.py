"""What a scenario has found, in a form that a screen and a file can show. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TableData:
    """Rows of text under `columns`; the first column is text, the others are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """`violations` of what must hold, none if all is well; facts as (label, text); tables; `numbers` for programs."""

    violations: tuple[str, ...]
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[TableData, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: "Findings") -> "Findings":
        """Both."""
        return Findings(
            self.violations + other.violations,
            self.facts + other.facts,
            self.tables + other.tables,
            self.numbers | other.numbers,
        )


def findings_json(findings: Sequence[tuple[str, Findings]], settings: dict[str, Any]) -> dict[str, Any]:
    """The findings of all scenarios by name, for programs."""
    return {
        "settings": settings,
        "is_passed": not any(found.violations for _, found in findings),
        "scenarios": {name: {"violations": list(found.violations), **found.numbers} for name, found in findings},
    }
