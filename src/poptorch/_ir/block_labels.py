"""Describe the user's blocks in a captured graph: visits, stages, and a label on each node."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from .._base import source

# key of the label in the ``custom`` entry of a node's meta; the following are other keys there
META = "poptorch"
KEEP = "poptorch_keep"  # marks values that the backward pass must not compute again
MEMORY = "poptorch_available_memory"  # share of a tile's memory that the user allows for a product
PARTIALS = "poptorch_partials"  # the dtype of partial sums for a convolution in a ``MultiConv``
LINE = "poptorch_line"  # the user's line for a node of the backward pass

OUTSIDE = -1  # visit of nodes that ran after a block ended and before the next one began


@dataclass(frozen=True)
class Visit:
    block: str | None = None  # its id; None for operators before the first block
    ipu: int | None = None  # the device in the annotation
    line: str | None = None  # description of the user's line that entered it


@dataclass(frozen=True)
class PlacedStage:
    chip: int  # index among the model's own devices
    blocks: tuple[str, ...] = ()  # in the order of their first visits; empty before the first block
    phase: int | None = None  # the forward phase; None in strategies without phases

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

    A micro-batch goes through ``0F 1F ... (n-1)F``, and in training back through ``(n-1)B ... 0B``.
    Then the updates of the chips follow, ``0U0 1U0``, in rounds. Comparisons of passes follow this
    order.
    """

    stage: int  # in forward order; the chip for updates
    direction: Direction = Direction.FORWARD
    round: int = 0  # for updates, the number of earlier exchanges of results between chips

    @property
    def backward(self) -> bool:
        return self.direction is Direction.BACKWARD

    @property
    def is_update(self) -> bool:
        return self.direction is Direction.UPDATE

    def delay(self, stages: int) -> int:
        """Return after how many cycles it has its first micro-batch. The last stage of a pipeline
        starts its backward pass immediately.
        """
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
    """Where a node comes from and where it runs. Backward nodes have the visit of their origin."""

    visit: int | None = None  # index or ``OUTSIDE``; None if it depends on the neighbours
    backward: bool = False
    recomputed: bool = False  # the backward pass computes again what the forward pass has computed
    module: str = ""  # path of the innermost module that made it, or whose result it differentiates
    # None before placement, and for nodes that placement does not see
    stage_pass: StagePass | None = None
    scope: str = ""  # the user's name scopes around it, ``outer/inner``

    @property
    def path(self) -> str:
        return "/".join(filter(None, (self.scope, self.module)))


_UNLABELLED = Label()


def label_of(node: fx.Node) -> Label:
    label = marks(node).get(META)
    return label if isinstance(label, Label) else _UNLABELLED


def relabel(node: fx.Node, label: Label) -> None:
    note_on(node, **{META: label})


def pass_of(node: fx.Node) -> StagePass | None:
    return label_of(node).stage_pass


def reader_passes(node: fx.Node) -> list[StagePass]:
    return [where for user in node.users if (where := pass_of(user)) is not None]


def note_line(node: fx.Node, line: tuple[str, int] | None) -> None:
    if line is not None:
        note_on(node, **{LINE: line})


def line_of(node: fx.Node) -> tuple[str, int] | None:
    noted: tuple[str, int] | None = marks(node).get(LINE)
    return noted or source.innermost_user_line(node.meta.get("stack_trace"))


def is_kept(node: fx.Node) -> bool:
    """Return whether the user wants a value stored for the backward pass, or one made together with
    it.
    """
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
    """Return the user's settings for products of the forward pass, by name and line."""
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
