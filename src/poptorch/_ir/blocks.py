"""What a captured graph remembers of the user's blocks: the visits, and a label on every node.

A block may be entered several times; each entry is a visit. A node of the forward pass carries the
visit that was active when it ran, a node of the backward pass that of the node it differentiates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

_META = "poptorch"
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
        checkpoint: whether the user wants its result kept rather than computed again.
    """

    visit: int | None = None
    backward: bool = False
    checkpoint: bool = False


def label_of(node: fx.Node) -> Label:
    """Return the label of a node; a blank one where none was written."""
    label = node.meta.get("custom", {}).get(_META)
    return label if isinstance(label, Label) else Label()


def with_label(custom: dict[str, object] | None, label: Label) -> dict[str, object]:
    """Return the ``custom`` entry of a node's meta, or of torch's current meta, with a label."""
    return {**(custom or {}), _META: label}


def relabel(node: fx.Node, label: Label) -> None:
    """Write a label."""
    node.meta["custom"] = with_label(node.meta.get("custom"), label)


def keep_mark(removed: fx.Node, source: fx.Node) -> None:
    """Let the checkpoint mark of an identity that is about to go pass to what it stood for."""
    if label_of(removed).checkpoint:
        relabel(source, replace(label_of(source), checkpoint=True))
