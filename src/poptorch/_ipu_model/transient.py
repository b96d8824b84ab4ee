"""What one pass needs while it runs: the most bytes of its own values that are alive at once.

Activations that a backward pass computes again are computed as late as they can be, so that
checkpoints help. Elementwise operators write over operands that die with them. A mask that was
drawn at random is drawn again from its seed, as PopTorch does it, and takes no memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from .._ir.graph import Graph
from .._ir.operators import aten, draws, may_view
from .._ir.slots import Kind
from .cycles import Chip, temporary_bytes
from .sizes import node_bytes
from .work import Work, is_conversion_of_product, is_identity, tensors

_EMPTY = (aten.empty_like.default, aten.empty.memory_format, aten.zeros_like.default)


@dataclass(frozen=True)
class Transient:
    """What a pass needs while it runs.

    Attributes:
        values: bytes of its own values at the fullest moment.
        temporary: bytes that the operator of that moment needs besides: operands of a product
            brought together, partial sums.
        at: the node of that moment; None in an empty graph.
    """

    values: float = 0.0
    temporary: float = 0.0
    at: fx.Node | None = None

    @property
    def bytes(self) -> float:
        """Both together."""
        return self.values + self.temporary


@dataclass(frozen=True)
class Course:
    """What a pass holds of its own values while it runs, whatever chip that is on.

    Attributes:
        nodes: in the order in which they run.
        held: bytes while each of them runs.
    """

    nodes: tuple[fx.Node, ...]
    held: tuple[float, ...]

    def fullest(self, works: Mapping[fx.Node, Work], chip: Chip, shares: int = 1) -> Transient:
        """Return the moment at which a pass needs most.

        Args:
            works: of its nodes.
            chip: that it runs on.
            shares: replicas that each do a part of the pass.
        """
        most = Transient()
        for node, held in zip(self.nodes, self.held, strict=True):
            work = works.get(node)
            temporary = 0.0
            if work is not None and (work.products or work.parts):
                temporary = temporary_bytes(work, chip)
            if held / shares + temporary > most.bytes:
                most = Transient(held / shares, temporary, node)
        return most


def course(graph: Graph, works: Mapping[fx.Node, Work]) -> Course:
    """Return what a pass holds besides what it reads, operator by operator."""
    order = tuple(in_demand(graph))
    owners = {node: _owner(node) for node in order}
    streamed = _never_whole(graph)
    sizes = {node: 0 if node in streamed else _own_bytes(node) for node in order}
    for slot, node in zip(graph.outputs, graph.returned, strict=True):
        if slot.is_state:  # is written over the old value
            sizes[node] = 0
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(order):
        for each in (node, *node.all_input_nodes):
            last[owners.get(each, each)] = at
    for node in graph.returned:
        last[owners.get(node, node)] = len(order)
    dying: dict[int, list[fx.Node]] = {}
    for node, at in last.items():
        dying.setdefault(at, []).append(node)
    alive, held = 0, []
    for at, node in enumerate(order):
        new = sizes[node] if owners[node] is node else 0
        gone = sum(sizes.get(n, 0) for n in dying.get(at, ()) if n.op == "call_function")
        over = min(new, gone) if _in_place(works.get(node)) else 0
        alive += new
        held.append(alive - over)
        alive -= gone
    return Course(order, tuple(held))


def _never_whole(graph: Graph) -> set[fx.Node]:
    """Values inside the loop that updates a tensor: of each only the element at hand exists.

    What is reduced has to be there as a whole, as the update whose norm LAMB takes.
    """
    inside = set()
    for node in accumulating(graph):
        size = _elements(node)
        users = [user for user in node.users if user.op == "call_function"]
        if size > 1 and users and all(_elements(user) == size for user in users):
            inside.add(node)
    return inside


def _elements(node: fx.Node) -> int:
    return max((each.numel() for each in tensors(node)), default=0)


def in_demand(graph: Graph) -> Iterator[fx.Node]:
    """Yield the operators of a pass in the order in which they need least memory.

    Those of another direction come when they are first needed; what adds a gradient to its
    accumulator as soon as the gradient is there.
    """
    nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    direction = graph.name.lstrip("0123456789")[:1]
    # Weight after weight, where a pass updates them.
    own = [node for node in nodes if direction != "U" and _direction(node) == direction]
    early = accumulating(graph)
    done: set[fx.Node] = set()
    for target in (*own, *graph.returned, *nodes):
        stack = [target]
        while stack:
            node = stack[-1]
            if node in done or node.op != "call_function":
                stack.pop()
                continue
            missing = [i for i in node.all_input_nodes if i not in done and i.op == "call_function"]
            if missing:
                stack += missing
                continue
            stack.pop()
            done.add(node)
            yield node
            ready = (user for user in node.users if user in early and user not in done)
            stack += [u for u in ready if all(_is_there(i, done) for i in u.all_input_nodes)]


def _is_there(node: fx.Node, done: set[fx.Node]) -> bool:
    return node in done or node.op != "call_function"


def accumulating(graph: Graph) -> set[fx.Node]:
    """Return the elementwise operators that nothing but state is computed from."""
    pairs = zip(graph.outputs, graph.returned, strict=True)
    results = {node for slot, node in pairs if slot.is_state}
    other = {node for slot, node in zip(graph.outputs, graph.returned, strict=True)
             if not slot.is_state}  # fmt: skip
    early: set[fx.Node] = set()
    for node in reversed(list(graph.module.graph.nodes)):
        if node.op != "call_function" or node in other or is_product(node):
            continue
        users = [user for user in node.users if user.op != "output"]
        if (node in results or users) and all(user in early for user in users):
            early.add(node)
    return early


def _direction(node: fx.Node) -> str:
    from .._ir.blocks import pass_of

    where = pass_of(node)
    return "U" if where is None else str(where.direction)


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory holds a node's value."""
    while node.op == "call_function" and node.all_input_nodes:
        source = node.args[0] if node.args else None
        product = is_conversion_of_product(node) and not _converts_result(node)
        if not isinstance(source, fx.Node) or not (may_view(node) or is_identity(node) or product):
            break
        if node.target is operator.getitem:
            break  # one of several results; each has memory of its own
        node = source
    return node


def _converts_result(node: fx.Node) -> bool:
    """Whether a conversion turns a product's result into the format that is kept."""
    return not all(is_product(user) for user in node.users)


def is_product(node: fx.Node) -> bool:
    """Whether a node is computed by the matrix unit."""
    return node.target in (
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.convolution.default, aten.convolution_backward.default,
    )  # fmt: skip


def _own_bytes(node: fx.Node) -> int:
    if node.target in _EMPTY or is_random_mask(node):
        return 0
    value = node.meta.get("val")
    if isinstance(value, list | tuple):  # its results have nodes of their own
        return 0
    users = list(node.users)
    if is_product(node) and users and all(is_conversion_of_product(user) for user in users):
        return 0  # the conversion holds it
    return node_bytes(node)


def is_random_mask(node: fx.Node) -> bool:
    """Whether a value can be drawn again from a seed: drawn at random, perhaps scaled."""
    inputs = node.all_input_nodes
    return draws(node) or (len(inputs) == 1 and draws(inputs[0]) and node.op == "call_function")


def _in_place(work: Work | None) -> bool:
    return work is not None and bool(work.cycles) and not work.products and work.steps == 1


def seeded_values(graph: Graph) -> set[str]:
    """Return the keys of values that a pass hands on, of which a seed is enough."""
    pairs = zip(graph.outputs, graph.returned, strict=True)
    return {slot.key for slot, node in pairs if slot.kind is Kind.VALUE and is_random_mask(node)}
