"""Define ``Schedule``: which chip does what and when, as a grid of actions with a text form.

``1F3`` is the forward pass of stage 1 for micro-batch 3, ``1B3`` its backward pass, ``0U1`` round 1
of the update on chip 0. ``L1F3`` loads from streaming memory what ``1F3`` needs, and ``S1F3``
stores what it leaves. What a chip sends arrives between two columns.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from .block_labels import Direction, PlacedStage, StagePass, stage_passes

_CELL = 44, 26
_MARGIN = 64, 8
_COLOURS = {
    Direction.FORWARD: "#9ecae1",
    Direction.BACKWARD: "#fdae6b",
    Direction.UPDATE: "#a1d99b",
}
_MOVED = "#d9d9d9"


class Traffic(enum.StrEnum):
    LOAD = "L"
    STORE = "S"


@dataclass(frozen=True)
class Action:
    stage_pass: StagePass
    micro_batch: int = 0  # 0 for updates
    # None for the computation itself; otherwise a transfer before or after it
    traffic: Traffic | None = None

    def __str__(self) -> str:
        number = "" if self.stage_pass.is_update else self.micro_batch
        return f"{self.traffic or ''}{self.stage_pass}{number}"

    def describe(self) -> str:
        number = self.stage_pass.stage
        if self.stage_pass.is_update:
            what = f"update on chip {number}, round {self.stage_pass.round}"
        else:
            direction = self.stage_pass.direction.name.lower()
            what = f"{direction} of stage {number}, micro-batch {self.micro_batch}"
        return f"{self.traffic.name.lower()} for {what}" if self.traffic else what


Row = tuple[Action | None, ...]


@dataclass(frozen=True)
class Schedule:
    """Rows of equal length. ``str`` has a line per chip, for example ``chip 0: 0F0 0F1 . 0B0``."""

    rows: Mapping[int, Row]

    @property
    def columns(self) -> int:
        return max((len(row) for row in self.rows.values()), default=0)

    def cells(self) -> Iterator[tuple[int, int, Action]]:
        for column in range(self.columns):
            for chip, row in self.rows.items():
                action = row[column] if column < len(row) else None
                if action is not None:
                    yield column, chip, action

    @property
    def bubble(self) -> float:
        size = self.columns * len(self.rows)
        return 1 - sum(1 for _ in self.cells()) / size if size else 0.0

    def grid(self, mark: tuple[int, int] | None = None) -> str:

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
        width, height = _CELL
        left, top = _MARGIN
        rows = list(self.rows)
        size = left + self.columns * width + top, 2 * top + len(rows) * height
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
            'font-family="monospace" font-size="11">',
            *(
                f'<text x="{top}" y="{top + i * height + height * 0.65:.1f}" fill="currentColor">'
                f"chip {chip}</text>"  # the page's colour, because its background may be dark
                for i, chip in enumerate(rows)
            ),
        ]
        for column, chip, action in self.cells():
            x, y = left + column * width, top + rows.index(chip) * height
            colour = _MOVED if action.traffic else _COLOURS[action.stage_pass.direction]
            lines.append(
                f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" rx="3" '
                f'fill="{colour}"><title>{escape(action.describe())}</title></rect>'
                f'<text x="{x + width / 2 - 1}" y="{y + height * 0.65:.1f}" text-anchor="middle">'
                f"{escape(str(action))}</text>"
            )
        return "\n".join([*lines, "</svg>\n"])

    def to_trace(self, microseconds: float = 1000.0) -> str:
        """Return Chrome trace JSON with a thread for each chip; a column takes this number of
        ``microseconds``.
        """
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": chip,
             "args": {"name": f"chip {chip}"}}
            for chip in self.rows
        ]  # fmt: skip
        events += [
            {
                "ph": "X", "name": str(action),
                "cat": (action.traffic or action.stage_pass.direction).name.lower(),
                "pid": 0, "tid": chip, "ts": column * microseconds, "dur": microseconds,
                "args": {"what": action.describe()},
            }
            for column, chip, action in self.cells()
        ]  # fmt: skip
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1)


def padded(rows: Mapping[int, Sequence[Action | None]]) -> dict[int, Row]:
    columns = max((len(row) for row in rows.values()), default=0)
    return {chip: (*row, *[None] * (columns - len(row))) for chip, row in rows.items()}


KeysByPass = Mapping[StagePass, tuple[str, ...]]


@dataclass(frozen=True)
class Streaming:
    loads: KeysByPass = field(default_factory=dict)  # loaded to the chip before a pass
    stores: KeysByPass = field(default_factory=dict)  # stored from the chip after a pass
    # freed after a pass, because streaming memory has them
    drops: KeysByPass = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    stages: tuple[PlacedStage, ...]  # in forward order
    micro_batches: int
    training: bool
    # Passes whose results a pass reads, for the same micro-batch.
    needs: Mapping[StagePass, frozenset[StagePass]] = field(default_factory=dict)
    updates: tuple[StagePass, ...] = ()  # in order
    streaming: Streaming = field(default_factory=Streaming)

    @property
    def passes(self) -> list[StagePass]:
        return stage_passes(len(self.stages), self.training)

    def chip_of(self, stage_pass: StagePass) -> int:
        return stage_pass.stage if stage_pass.is_update else self.stages[stage_pass.stage].chip

    @property
    def chips(self) -> list[int]:
        return sorted({self.chip_of(each) for each in (*self.passes, *self.updates)})

    @functools.cached_property
    def fetches(self) -> Mapping[StagePass, list[StagePass]]:
        """Return the passes whose stored values a load reads; those of later passes belong to the
        previous micro-batch.
        """
        return {loading: list(self._stored_for(loading)) for loading in self.streaming.loads}

    def _stored_for(self, loading: StagePass) -> Iterator[StagePass]:
        wanted = set(self.streaming.loads[loading])
        for storing, keys in self.streaming.stores.items():
            same_chip = self.chip_of(storing) == self.chip_of(loading)
            # What the update stores is for the next cycle, except that rounds follow one another.
            too_late = storing.is_update and (not loading.is_update or loading <= storing)
            if same_chip and wanted.intersection(keys) and not too_late:
                yield storing

    def with_traffic(self, stage_pass: StagePass, micro_batch: int = 0) -> list[Action]:
        actions = [Action(stage_pass, micro_batch)]
        if stage_pass in self.streaming.loads:
            actions.insert(0, Action(stage_pass, micro_batch, Traffic.LOAD))
        if stage_pass in self.streaming.stores:
            actions.append(Action(stage_pass, micro_batch, Traffic.STORE))
        return actions

    def actions(self) -> Iterator[Action]:
        for micro_batch in range(self.micro_batches):
            for each in self.passes:
                yield from self.with_traffic(each, micro_batch)
        for each in self.updates:
            yield from self.with_traffic(each)
