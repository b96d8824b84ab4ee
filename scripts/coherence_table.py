"""Writes the table of who is newer, host or device, into ARCHITECTURE.md.

python scripts/coherence_table.py
"""

from __future__ import annotations

from pathlib import Path

from poptorch._residency.table import as_text

PAGE = Path(__file__).resolve().parent.parent / "ARCHITECTURE.md"
BEGIN, END = "<!-- scripts/coherence_table.py -->\n", "<!-- end of the table -->\n"


def page() -> str:
    """Return the page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + as_text() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
