"""Give draws that are repeated from a restored random state the result of the original draws."""

from __future__ import annotations

from torch import fx

from .._base.errors import Error
from .._ir.operators import draws, draws_unseen
from .._ops.draws import drawing


def reuse(graph: fx.Graph) -> None:
    """Replace draws in a pure graph that have the number of an earlier draw by its result."""
    first: dict[int, fx.Node] = {}
    alike: set[tuple[fx.Node, fx.Node]] = set()
    for node, draw in list(drawing(graph)):
        earlier = first.setdefault(draw.number, node)
        if earlier is node:
            continue
        if not draws_unseen(node.target, node.args) and not _same_operands(earlier, node, alike):
            raise Error(
                "Random numbers cannot be drawn here, because forward has set the state of the "
                "random generator",
                got=f"{draw.operator} draws from a state from which it drew with other arguments",
                where=draw.line,
                fix="draw once, keep the result in a variable, and use the variable again",
            )
        node.replace_all_uses_with(earlier)
        graph.erase_node(node)


def _same_operands(one: fx.Node, two: fx.Node, alike: set[tuple[fx.Node, fx.Node]]) -> bool:
    """Return whether two nodes compute the same from the same values, as recomputed
    activations do.
    """
    pairs, seen = [(one, two)], set[tuple[fx.Node, fx.Node]]()
    while pairs:
        first, second = pairs.pop()
        if first is second or (first, second) in seen | alike:
            continue
        seen.add((first, second))
        if first.op != "call_function" or first.target != second.target:
            return False
        if draws(first) and first is not one:
            return False
        if _text(first) != _text(second):
            return False
        pairs += zip(_operands(first), _operands(second), strict=True)
    alike |= seen
    return True


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return all operands in order, including repeated ones."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _text(node: fx.Node) -> str:
    return str(fx.map_arg((node.args, node.kwargs), lambda _: None))
