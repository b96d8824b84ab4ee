"""Schedule: which chip does what and when; a grid of actions with a text form that parses back.

An action is a stage's pass for one micro-batch: ``1F3`` is the forward pass of stage 1 for
micro-batch 3, ``1B3`` its backward pass, ``0U1`` round 1 of the optimizer's update on chip 0.
``L1F3`` loads from streaming memory what ``1F3`` needs, ``S1F3`` stores what it leaves. All chips
go through the columns of the grid in step; what a chip sends arrives between two columns.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .stage_pass import Direction, StagePass


class Traffic(enum.StrEnum):
    """Traffic with streaming memory that belongs to an action."""

    LOAD = "L"
    STORE = "S"


@dataclass(frozen=True)
class Action:
    """One cell of the grid.

    Attributes:
        stage_pass: what is done.
        micro_batch: for which micro-batch; for updates 0.
        traffic: None for the computation itself, else the traffic before or after it.
    """

    stage_pass: StagePass
    micro_batch: int = 0
    traffic: Traffic | None = None

    def __str__(self) -> str:
        number = "" if self.stage_pass.is_update else self.micro_batch
        return f"{self.traffic or ''}{self.stage_pass}{number}"

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action that a text stands for.

        Raises:
            ValueError: the text stands for none.
        """
        match = re.fullmatch(r"([LS]?)(\d+)([FBU])(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no action: write for instance 1F3, 0U0 or L2B0")
        direction, number = Direction(match[3]), int(match[4])
        rounds, micro_batch = (number, 0) if direction is Direction.UPDATE else (0, number)
        traffic = Traffic(match[1]) if match[1] else None
        return Action(StagePass(int(match[2]), direction, rounds), micro_batch, traffic)


Row = tuple[Action | None, ...]


@dataclass(frozen=True)
class Schedule:
    """A grid of actions: a row for each chip, all of the same length.

    ``str`` writes one line per chip, for instance ``chip 0: 0F0 0F1 . 0B0``; ``parse`` reads it.
    """

    rows: Mapping[int, Row]

    @property
    def columns(self) -> int:
        """Number of columns."""
        return max((len(row) for row in self.rows.values()), default=0)

    def cells(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (column, chip, action), column by column."""
        for column in range(self.columns):
            for chip, row in self.rows.items():
                action = row[column] if column < len(row) else None
                if action is not None:
                    yield column, chip, action

    @property
    def bubble(self) -> float:
        """Share of the cells in which a chip idles, from 0 to 1."""
        size = self.columns * len(self.rows)
        return 1 - sum(1 for _ in self.cells()) / size if size else 0.0

    def grid(self, mark: tuple[int, int] | None = None) -> str:
        """Return the grid as aligned text.

        Args:
            mark: (chip, column) of a cell to put between angle brackets.
        """

        def text(chip: int, column: int) -> str:
            row = self.rows[chip]
            action = row[column] if column < len(row) else None
            plain = str(action) if action else "."
            return f">{plain}<" if mark == (chip, column) else plain

        table = {c: [text(c, i) for i in range(self.columns)] for c in self.rows}
        widths = [max(len(row[i]) for row in table.values()) for i in range(self.columns)]
        head = max((len(str(chip)) for chip in table), default=0)
        lines = []
        for chip, cells in table.items():
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append(f"chip {chip:>{head}}: {' '.join(padded)}".rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.grid()

    def to_svg(self) -> str:
        """Return the grid as an SVG picture: a row for each chip, a column for each step."""
        from .schedule_pictures import to_svg

        return to_svg(self)

    def to_trace(self, microseconds: float = 1000.0) -> str:
        """Return JSON that a browser's trace viewer opens, a thread for each chip.

        Args:
            microseconds: shown length of a column; the schedule itself knows no times.
        """
        from .schedule_pictures import to_trace

        return to_trace(self, microseconds)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Return the schedule that a text stands for.

        Raises:
            ValueError: a line or a cell is malformed, or a chip occurs twice.
        """
        rows: dict[int, Row] = {}
        for line in filter(None, map(str.strip, text.splitlines())):
            match = re.fullmatch(r"chip\s+(\d+):(.*)", line)
            if match is None or int(match[1]) in rows:
                raise ValueError(f"{line!r}: write one line 'chip N: ...' for each chip")
            cells = match[2].split()
            rows[int(match[1])] = tuple(None if c == "." else Action.parse(c) for c in cells)
        return Schedule(padded(rows))


def padded(rows: Mapping[int, Sequence[Action | None]]) -> dict[int, Row]:
    """Return the rows filled up to the same length."""
    columns = max((len(row) for row in rows.values()), default=0)
    return {chip: (*row, *[None] * (columns - len(row))) for chip, row in rows.items()}
