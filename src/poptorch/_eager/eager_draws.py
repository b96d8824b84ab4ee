"""Record the random values that eager PyTorch draws, in order, and pass them to a captured
graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._base import nested_values
from .._ir.block_labels import marks
from .._ir.graph import Graph
from .._ops.draws import ORDER, draw_of, drawing


class Disagreement(Exception):  # noqa: N818 (it is on its way to becoming a finding)
    """The graph and eager PyTorch do not draw the same values. The message says how they differ."""

    def __init__(self, what: str, node: fx.Node | None = None) -> None:
        super().__init__(what)
        self.node = node


@dataclass(frozen=True, eq=False)
class EagerDraw:
    operator: str
    values: tuple[torch.Tensor, ...]
    certain: bool  # False if forward may have made the generator, so that the values are constants


class EagerDraws:
    """What eager PyTorch drew, counted as in a capture.

    A draw from a restored state repeats an earlier one, and a draw from a state that ``forward``
    has set itself is a constant of the program. Neither is counted.

    Args:
        users: generators in the model.
    """

    def __init__(self, users: Iterable[torch.Generator]) -> None:
        self._all: list[EagerDraw] = []
        self._made: set[bytes] = set()  # states from which something was drawn
        self._new = {_state(torch.default_generator), *map(_state, users)}
        self._kept: list[tuple[torch.Generator, torch.Tensor]] = []
        self._seen = {_key(torch.default_generator), *map(_key, users)}
        self._uncertain: set[int] = set()  # generators that forward may have made
        self._counts = self._certain = True
        for each in users:
            self._kept.append((each, each.get_state()))

    def before(self, generator: torch.Generator | None) -> None:
        source = torch.default_generator if generator is None else generator
        if _key(source) not in self._seen:
            self._seen.add(_key(source))
            self._uncertain.add(_key(source))
            self._kept.append((source, source.get_state()))
            self._new.add(_state(source))
        state = _state(source)
        self._certain = _key(source) not in self._uncertain
        self._counts = state in self._new and state not in self._made
        if self._counts:
            self._made.add(state)

    def after(
        self, operator: str, values: Sequence[torch.Tensor], generator: torch.Generator | None
    ) -> None:
        if self._counts:
            self._new.add(_state(torch.default_generator if generator is None else generator))
            copies = tuple(value.detach().clone() for value in values)
            self._all.append(EagerDraw(operator, copies, self._certain))

    def restore(self) -> None:
        """Restore the states of the user's generators."""
        for generator, state in self._kept:
            generator.set_state(state)

    def counted(self, count: int) -> list[EagerDraw] | None:
        """Return the draws if their number is the one that a capture counted; else None."""
        certain = [draw for draw in self._all if draw.certain]
        return next((each for each in (self._all, certain) if len(each) == count), None)

    def __len__(self) -> int:
        return len(self._all)


def _key(generator: torch.Generator) -> int:
    """Return the key of a generator, for which torch makes new Python objects each time."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def _state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def counted(graph: Graph, drawn: EagerDraws, captured: int) -> list[EagerDraw]:
    """Return the draws in order. Raise a Disagreement if the capture counted other draws."""
    found = drawn.counted(captured)
    if found is None:
        node = next((node for node, _ in drawing(graph.module.graph)), None)
        raise Disagreement(
            f"the program draws {captured} random tensors for a micro-batch, eager PyTorch "
            f"{len(drawn)}",
            node,
        )
    return found


def used(graph: Graph, drawn: EagerDraws, captured: int) -> list[EagerDraw]:
    """Return the draws as ``counted`` does, for a run that may lack draws whose values are not
    used.

    If ``forward`` makes a layer in its first run, only that run draws the layer's initial values.
    """
    numbers = sorted({draw.number for _, draw in drawing(graph.module.graph)})
    found = drawn.counted(len(numbers))
    if found is None or len(numbers) == captured:
        return counted(graph, drawn, captured)
    by_number = dict(zip(numbers, found, strict=True))
    unused = EagerDraw("", (), certain=True)
    return [by_number.get(number, unused) for number in range(captured)]


def handed_over(node: fx.Node, drawn: Sequence[EagerDraw]) -> Any:
    """Return the result of a node that draws, with the values that eager PyTorch drew."""
    noted = draw_of(node)
    if noted is None or noted.number >= len(drawn):
        raise Disagreement(f"eager PyTorch draws nothing where the program has {node.target}", node)
    draw = drawn[noted.number]
    expected, structure = nested_values.flatten(node.meta["val"], "drawn")
    left = list(draw.values)
    return structure.unflatten([_matching_draw(left, each, node, draw) for each in expected])


def _matching_draw(
    left: list[torch.Tensor], expected: torch.Tensor, node: fx.Node, draw: EagerDraw
) -> torch.Tensor:
    order = marks(node).get(ORDER)
    for at, value in enumerate(left):
        turned = value if order is None or value.dim() != len(order) else value.permute(order)
        if turned.shape == expected.shape and _is_comparable(turned.dtype, expected.dtype):
            del left[at]
            return turned.to(expected.dtype)
    shapes = ", ".join(f"{value.dtype} {list(value.shape)}" for value in draw.values)
    raise Disagreement(
        f"the program draws {expected.dtype} {list(expected.shape)} by {node.target}, "
        f"eager PyTorch {shapes} by {draw.operator}",
        node,
    )


def _is_comparable(one: torch.dtype, other: torch.dtype) -> bool:
    return one == other or (one.is_floating_point and other.is_floating_point)
