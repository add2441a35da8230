"""Reads the tables of docs/handoff.md: a row for each event, a column for each state."""

from enum import Enum
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "handoff.md"


def documented(heading: str, states: type[Enum], events: type[Enum], instructions: type[Enum]) -> dict:
    """The table under this heading, as the code has it: (state, event) -> (state, instructions).

    A cell is `-`, or `→ state`, instructions, or both with a colon between; without a state, it stays.
    """
    section = DOC.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = section[section.index("| event |") :]
    header, _, *rows = [_cells(line) for line in table.splitlines() if line.startswith("|")]
    transitions = {}
    for event_name, *cells in rows:
        for state_name, cell in zip(header[1:], cells, strict=True):
            state, event = states(state_name), events(event_name)
            assert (state, event) not in transitions, f"{state_name}, {event_name} stands there twice"
            transitions[state, event] = _transition(cell, state, states, instructions)
    return transitions


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _transition(cell: str, state: Enum, states: type[Enum], instructions: type[Enum]) -> tuple[Enum, tuple[Enum, ...]]:
    if cell == "-":
        return state, ()
    if cell.startswith("→"):
        name, _, cell = cell.removeprefix("→").partition(":")
        state = states(name.strip())
    return state, tuple(instructions(name.strip()) for name in cell.split(",") if name.strip())
