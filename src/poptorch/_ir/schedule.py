"""Schedule: which chip does what and when; a grid of actions with a text form that parses back.

An action is a part of the work for one micro-batch: ``1F3`` is the forward part of stage 1 for
micro-batch 3, ``1B3`` its backward part, ``0U1`` round 1 of the optimizer's update on chip 0.
``L1F3`` loads from streaming memory what ``1F3`` needs, ``S1F3`` stores what it leaves. All chips
go through the columns of the grid in step; what a chip sends arrives between two columns.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


class Do(enum.StrEnum):
    """The kinds of work."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


class Move(enum.StrEnum):
    """Traffic with streaming memory that belongs to an action."""

    LOAD = "L"
    STORE = "S"


@dataclass(frozen=True, order=True)
class Part:
    """What an action does, whatever the micro-batch.

    Attributes:
        do: the kind of work.
        index: the stage; for updates the chip.
        round: for updates, how often chips exchanged results before; else 0.
    """

    do: Do
    index: int
    round: int = 0

    def __str__(self) -> str:
        return f"{self.index}{self.do}" + (f"{self.round}" if self.do is Do.UPDATE else "")


@dataclass(frozen=True, order=True)
class Action:
    """One cell of the grid.

    Attributes:
        part: the work.
        micro: the micro-batch; for updates 0.
        move: None for the work itself, else the traffic before or after it.
    """

    part: Part
    micro: int = 0
    move: Move | None = None

    def __str__(self) -> str:
        number = self.part.round if self.part.do is Do.UPDATE else self.micro
        return f"{self.move or ''}{self.part.index}{self.part.do}{number}"

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action that a text stands for.

        Raises:
            ValueError: the text stands for none.
        """
        match = re.fullmatch(r"([LS]?)(\d+)([FBU])(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no action: write for instance 1F3, 0U0 or L2B0")
        move, index, do, number = match.groups()
        if do == Do.UPDATE:
            part, micro = Part(Do(do), int(index), int(number)), 0
        else:
            part, micro = Part(Do(do), int(index)), int(number)
        return Action(part, micro, Move(move) if move else None)


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


@dataclass(frozen=True)
class Work:
    """What a schedule has to get done: for one update in training, for one call in inference.

    Attributes:
        chips: the chip of each stage.
        micros: number of micro-batches.
        training: whether stages have backward parts.
        needs: parts whose results a part reads, of the same micro-batch.
        updates: chips that have an update to do in each round.
        loads: parts that need something from streaming memory first.
        stores: parts that leave something to be stored.
        fetches: parts whose stores a part's load brings back: of the same micro-batch where they
            come earlier, of the one before where they do not.
        phases: the forward phase of each stage; None in unphased strategies.
    """

    chips: tuple[int, ...]
    micros: int
    training: bool
    needs: Mapping[Part, frozenset[Part]] = field(default_factory=dict)
    updates: tuple[tuple[int, ...], ...] = ()
    loads: frozenset[Part] = frozenset()
    stores: frozenset[Part] = frozenset()
    fetches: Mapping[Part, frozenset[Part]] = field(default_factory=dict)
    phases: tuple[int | None, ...] = ()

    @property
    def parts(self) -> list[Part]:
        """Forward parts in order, then backward parts in theirs."""
        stages = range(len(self.chips))
        forward = [Part(Do.FORWARD, stage) for stage in stages]
        backward = [Part(Do.BACKWARD, stage) for stage in reversed(stages)]
        return forward + (backward if self.training else [])

    @property
    def update_parts(self) -> list[Part]:
        """The parts of the update, in order."""
        return [
            Part(Do.UPDATE, chip, number)
            for number, chips in enumerate(self.updates)
            for chip in chips
        ]

    def chip_of(self, part: Part) -> int:
        """The chip on which a part runs."""
        return part.index if part.do is Do.UPDATE else self.chips[part.index]

    @property
    def all_chips(self) -> list[int]:
        """Every chip that has something to do."""
        return sorted({*self.chips, *(chip for chips in self.updates for chip in chips)})

    def with_moves(self, part: Part, micro: int = 0) -> list[Action]:
        """Return a part's actions: loading, the work, storing."""
        actions = [Action(part, micro)]
        if part in self.loads:
            actions.insert(0, Action(part, micro, Move.LOAD))
        if part in self.stores:
            actions.append(Action(part, micro, Move.STORE))
        return actions

    def actions(self) -> Iterator[Action]:
        """Yield everything that has to be done, once."""
        for micro in range(self.micros):
            for part in self.parts:
                yield from self.with_moves(part, micro)
        for part in self.update_parts:
            yield from self.with_moves(part)
