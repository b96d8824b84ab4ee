"""What a captured graph remembers of the user's blocks: the visits, and a label on every node.

A block may be entered several times; each entry is a visit. A node of the forward pass carries the
visit that was active when it ran, a node of the backward pass that of the node it differentiates.
Placement adds the stage and the direction in which the node runs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from .._base import source
from .stage_pass import StagePass

META = "poptorch"
"""The key of the label in the ``custom`` entry of a node's meta."""
KEEP = "poptorch_keep"
MEMORY = "poptorch_available_memory"
"""The key of the mark on values that the backward pass shall not compute again."""
LINE = "poptorch_line"
"""The key of the user's line that a node of the backward pass goes back to."""

OUTSIDE = -1
"""Stands for the visit of nodes that ran after a block had ended and before the next began."""


@dataclass(frozen=True)
class Visit:
    """One entry into a block while ``forward`` ran.

    Attributes:
        block: the block's id; None for what runs before the first block.
        ipu: the device that the annotation names, or None.
        line: the user's line that entered it, described, or None.
    """

    block: str | None = None
    ipu: int | None = None
    line: str | None = None


@dataclass(frozen=True)
class Label:
    """Where a node comes from.

    Attributes:
        visit: index of the visit, ``OUTSIDE``, or None where only the neighbours can tell.
        backward: whether it belongs to the backward pass.
        module: path of the innermost module whose ``forward`` made it, or that it differentiates.
        stage_pass: where it runs; None before placement, and for what placement does not see.
        scope: the user's name scopes around it, ``outer/inner``.
    """

    visit: int | None = None
    backward: bool = False
    module: str = ""
    stage_pass: StagePass | None = None
    scope: str = ""

    @property
    def path(self) -> str:
        """By which name users are told of it: the scopes, then the module."""
        return "/".join(filter(None, (self.scope, self.module)))


def label_of(node: fx.Node) -> Label:
    """Return the label of a node; a blank one where none was written."""
    label = _custom(node).get(META)
    return label if isinstance(label, Label) else Label()


def relabel(node: fx.Node, label: Label) -> None:
    """Write a label."""
    node.meta["custom"] = {**_custom(node), META: label}


def pass_of(node: fx.Node) -> StagePass | None:
    """Return where a placed node runs; None for placeholders and the like."""
    return label_of(node).stage_pass


def keep_line(node: fx.Node, line: tuple[str, int] | None) -> None:
    """Note the (file, line) that a node of the backward pass goes back to."""
    if line is not None:
        node.meta["custom"] = {**_custom(node), LINE: line}


def line_of(node: fx.Node) -> tuple[str, int] | None:
    """Return the user's (file, line) that a node comes from, or None."""
    noted: tuple[str, int] | None = _custom(node).get(LINE)
    return noted or source.innermost_user_line(node.meta.get("stack_trace"))


def is_kept(node: fx.Node) -> bool:
    """Tell whether the user wants a value kept for the backward pass, or one made with it."""
    if node.target is operator.getitem:
        (node, *_) = node.all_input_nodes
    return bool(_custom(node).get(KEEP))


def forget_kept(node: fx.Node) -> None:
    """Take away the note that the user wants a value kept."""
    node.meta["custom"] = {name: note for name, note in _custom(node).items() if name != KEEP}


def memory_share_of(node: fx.Node) -> float | None:
    """Return the share of a tile that the user lets a product use, or None."""
    share: float | None = _custom(node).get(MEMORY)
    return share


def _custom(node: fx.Node) -> Mapping[str, Any]:
    notes: Mapping[str, Any] = node.meta.get("custom") or {}
    return notes
