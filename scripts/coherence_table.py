"""Write the table of which copy of a tensor is newer, host or device, into ARCHITECTURE.md.

Usage: python scripts/coherence_table.py
"""

from __future__ import annotations

from pathlib import Path

from poptorch._residency import TABLE, Coherence, CopyDirection, Event

PAGE = Path(__file__).resolve().parent.parent / "ARCHITECTURE.md"
BEGIN, END = "<!-- scripts/coherence_table.py -->\n", "<!-- end of the table -->\n"


def as_text() -> str:
    """Return the table as text, without transitions that change nothing."""
    lines = ["|event|" + "|".join(state.name for state in Coherence) + "|"]
    lines.append("|---" * (len(Coherence) + 1) + "|")
    for event in Event:
        cells = []
        for state in Coherence:
            row = TABLE[event, state]
            what = [row.transfer.name] if row.transfer is not CopyDirection.NONE else []
            what += [row.state.name] if row.state is not state else []
            cells.append(",".join(what))
        lines.append(f"|{event.name}|" + "|".join(cells) + "|")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the text of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + as_text() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
