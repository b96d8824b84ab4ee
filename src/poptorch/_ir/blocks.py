"""The user's blocks in a captured graph: visits to them, stages of them, a label on each node."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from .._base import source

META = "poptorch"  # key of the label in the ``custom`` entry of a node's meta; others there:
KEEP = "poptorch_keep"  # marks values that the backward pass shall not compute again
MEMORY = "poptorch_available_memory"  # share of a tile's memory that the user lets a product use
PARTIALS = "poptorch_partials"  # the dtype in which a convolution of a ``MultiConv`` keeps its sums
LINE = "poptorch_line"  # the user's line that a node of the backward pass goes back to

OUTSIDE = -1  # visit of nodes that ran after a block ended and before the next began


@dataclass(frozen=True)
class Visit:
    block: str | None = None  # its id; None for what runs before the first block
    ipu: int | None = None  # the device that the annotation names
    line: str | None = None  # the user's line that entered it, described


@dataclass(frozen=True)
class Stage:
    chip: int  # among the model's own devices
    blocks: tuple[str, ...] = ()  # in order of their first visit; before the first block: none
    phase: int | None = None  # the forward phase; None in unphased strategies

    @property
    def name(self) -> str:
        return ", ".join(self.blocks) or "(start)"


class Direction(enum.StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@functools.total_ordering
@dataclass(frozen=True)
class StagePass:
    """What one stage does for one micro-batch in one direction, or one chip in the update.

    A micro-batch goes through ``0F 1F ... (n-1)F``, in training back through ``(n-1)B ... 0B``;
    then come the chips' updates, ``0U0 1U0``, in rounds. Passes compare as in this order.
    """

    stage: int  # in forward order; for updates the chip
    direction: Direction = Direction.FORWARD
    round: int = 0  # for updates, how often chips exchanged results before

    @property
    def backward(self) -> bool:
        return self.direction is Direction.BACKWARD

    @property
    def is_update(self) -> bool:
        return self.direction is Direction.UPDATE

    def delay(self, stages: int) -> int:
        """Cycles until it has its first micro-batch; a pipeline's last stage goes back at once."""
        return 2 * stages - 2 - self.stage if self.backward else self.stage

    def __lt__(self, other: StagePass) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int, int]:
        along = -self.stage if self.backward else self.stage
        return list(Direction).index(self.direction), self.round, along

    def __str__(self) -> str:
        return f"{self.stage}{self.direction}" + (f"{self.round}" if self.is_update else "")


def stage_passes(stages: int, training: bool) -> list[StagePass]:
    forward = [StagePass(stage) for stage in range(stages)]
    backward = [StagePass(stage, Direction.BACKWARD) for stage in reversed(range(stages))]
    return forward + (backward if training else [])


@dataclass(frozen=True)
class Label:
    """Where a node comes from, and where it runs; backward nodes have their origin's visit."""

    visit: int | None = None  # index or ``OUTSIDE``; None where only the neighbours can tell
    backward: bool = False
    again: bool = False  # the backward pass computes what the forward pass has computed
    module: str = ""  # path of the innermost module that made it, or that it differentiates
    stage_pass: StagePass | None = None  # None before placement, and where that does not see it
    scope: str = ""  # the user's name scopes around it, ``outer/inner``

    @property
    def path(self) -> str:
        return "/".join(filter(None, (self.scope, self.module)))


def label_of(node: fx.Node) -> Label:
    label = marks(node).get(META)
    return label if isinstance(label, Label) else Label()


def relabel(node: fx.Node, label: Label) -> None:
    note_on(node, **{META: label})


def pass_of(node: fx.Node) -> StagePass | None:
    return label_of(node).stage_pass


def reader_passes(node: fx.Node) -> list[StagePass]:
    return [where for user in node.users if (where := pass_of(user)) is not None]


def keep_line(node: fx.Node, line: tuple[str, int] | None) -> None:
    if line is not None:
        note_on(node, **{LINE: line})


def line_of(node: fx.Node) -> tuple[str, int] | None:
    noted: tuple[str, int] | None = marks(node).get(LINE)
    return noted or source.innermost_user_line(node.meta.get("stack_trace"))


def is_kept(node: fx.Node) -> bool:
    """Tell whether the user wants a value kept for the backward pass, or one made with it."""
    if node.target is operator.getitem:
        (node, *_) = node.all_input_nodes
    return bool(marks(node).get(KEEP))


def forget_kept(node: fx.Node) -> None:
    node.meta["custom"] = {name: mark for name, mark in marks(node).items() if name != KEEP}


def note_on(node: fx.Node, **values: Any) -> None:
    node.meta["custom"] = {**marks(node), **values}


def marks(node: fx.Node) -> Mapping[str, Any]:
    custom: Mapping[str, Any] = node.meta.get("custom") or {}
    return custom


def product_settings(graph: fx.Graph) -> dict[str, str]:
    """Return what the user set for single products, of the forward pass, by name and line."""
    found = {}
    for node in graph.nodes:
        noted = marks(node)
        named = {"available memory": noted.get(MEMORY), "partials type": noted.get(PARTIALS)}
        texts = [f"{name} {value}" for name, value in named.items() if value is not None]
        if texts and not label_of(node).backward:
            line = line_of(node)
            where = f" ({source.describe(*line).split(',')[0]})" if line else ""
            found[f"{node.name}{where}"] = ", ".join(texts)
    return found
