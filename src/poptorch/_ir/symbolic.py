"""Define symbolic sizes, with which one graph serves all sizes of some dimensions of its inputs.

A slot of such an input names its symbolic dimensions. The graph reads their sizes with ``sym_size``
operators and computes with them, so it runs with any sizes that satisfy its conditions: these are
what torch's ``ShapeEnv`` assumed while the shapes of all values were derived.

Values on nodes and shapes of slots are plain numbers nevertheless, so that every package can read
them. They are those for *example sizes*, which depend on the graph and its conditions alone, so
that no decision depends on which sizes came first. ``settle`` chooses example sizes for which two
dimensions are equal only if they are equal for all sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from .._base import private, source
from .block_labels import line_of
from .conditions import Conditions, Sizes, expression, numbers, symbol
from .equal_sizes import always_equal
from .graph import Graph
from .known_results import KnownResults, RepeatedCalls, is_repeatable
from .operators import name_of
from .propagation import propagate_values
from .slots import Slot

aten = torch.ops.aten

SHAPE = "symbolic shape"  # key of a node's meta: sizes and strides as texts, if one is symbolic
_PRIMES = (
    67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 61, 59, 53, 47, 43, 41, 37, 31, 29, 23,
    19, 17, 13, 11, 7, 5, 3, 2, 131, 257, 521, 1031, 2053, 4099,
)  # fmt: skip
# For several sizes. Torch's compiler adds more than 4096 numbers in another way than fewer, and the
# rows and lengths of most batches are fewer.
_SMALLER_PRIMES = (37, 41, 43, 47, 53, 59, 61)
_FACTORS = (1, 2, 4, 8, 16, 32, 64)  # some models require sizes to be multiples of these
_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.neg, operator.pow, torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min,
    math.floor, math.ceil, math.trunc, torch.sym_sqrt, round,
}  # fmt: skip
# Only torch's dispatcher in Python derives their shapes for symbolic sizes.
_IN_PYTHON = {
    aten.constant_pad_nd.default, aten.upsample_linear1d.default, aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default, aten.upsample_trilinear3d.default, aten._unsafe_index.Tensor,
    aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default, aten.polar.default,
    aten.baddbmm.default, aten.im2col.default, aten.col2im.default, aten._trilinear.default,
}  # fmt: skip
# Torch derives their shape for numbers only. It is one of their arguments. The layout is
# contiguous, or the one named here if the first argument has it.
_OF_SHAPE_IN_ARGUMENTS = {
    aten.upsample_nearest1d_backward.default: None,
    aten.upsample_linear1d_backward.default: None,
    aten.upsample_nearest2d_backward.default: torch.channels_last,
    aten.upsample_bilinear2d_backward.default: torch.channels_last,
    aten.upsample_bicubic2d_backward.default: None,
    aten.upsample_nearest3d_backward.default: None,
    aten._upsample_nearest_exact1d_backward.default: None,
    aten._upsample_nearest_exact2d_backward.default: torch.channels_last,
    aten._upsample_nearest_exact3d_backward.default: None,
    aten.upsample_trilinear3d_backward.default: torch.channels_last_3d,
}
_END = 2**63 - 1  # the end of a slice that has no end
# The argument that is the start of a slice, and the one that a whole slice returns.
_SLICES: Mapping[Any, tuple[int, int]] = {
    aten.slice.Tensor: (2, 0),
    aten.slice_scatter.default: (3, 1),
    aten.slice_backward.default: (3, 0),
}
_READING = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default}

# By name of a symbol, another one that it follows, and at which distance: a mask is one longer than
# the cache to which it belongs.
Ties = Mapping[str, tuple[str, int]]
_UNKNOWN_PLACE = "forward, or an operator,"  # if a program was not recorded with symbols
# Windows over one side of an image need 1800 terms, and windows over two sides more than 7000. Each
# term of these costs milliseconds, because many sizes are tried in each condition.
LONGEST_CONDITIONS = 4000
_TRIALS = 8  # example sizes for which shapes are derived
_MOST_TIED = 4  # symbols


class NotSymbolic(Exception):  # noqa: N818 (each size then has its own program)
    """Why sizes cannot be symbolic, in words."""


class UsedAsNumber(NotSymbolic):
    """A size was used as the number that it was. Another size may not be."""


class Excluded(NotSymbolic):
    """The sizes of a call do not satisfy the conditions of a program for all other sizes."""


def computes_size(node: fx.Node) -> bool:
    """Return whether a node reads a size or computes with sizes; its value is a number."""
    return node.op == "call_function" and (node.target in _READING or node.target in _ARITHMETIC)


def symbolic_dims(node: fx.Node) -> tuple[bool, ...]:
    """Return for each dimension of a node's value whether its size is symbolic."""
    shape = node.meta.get(SHAPE)
    if shape is None:
        value: torch.Tensor = node.meta["val"]
        return (False,) * value.dim()
    return tuple(not text.isdigit() for text in shape[0])


def size_text(node: fx.Node, dim: int) -> str:
    """Return the size of a dimension: a number, or an expression with symbols."""
    shape = node.meta.get(SHAPE)
    return str(node.meta["val"].shape[dim]) if shape is None else str(shape[0][dim])


def sizes_of(slots: Iterable[Slot], shapes: Iterable[Sequence[int]]) -> dict[str, int] | None:
    """Return the size for each symbol, or None if shapes disagree about one."""
    sizes: dict[str, int] = {}
    for slot, shape in zip(slots, shapes, strict=True):
        for name, size in zip(slot.symbols, shape, strict=False):
            if name and sizes.setdefault(name, size) != size:
                return None
    return sizes


def with_sizes(graph: Graph, sizes: Sizes) -> Graph:
    """Return a graph with the values that its nodes have for some sizes."""
    copy = graph.copy()
    _fill_in_numbers(copy, sizes)
    return copy


def for_one_size(graph: Graph, sizes: Sizes) -> Graph:
    """Return a graph in which numbers take the place of symbols."""
    copy = with_sizes(graph, sizes)
    fxgraph = copy.module.graph

    def number(node: fx.Node) -> Any:
        return node.meta["val"] if computes_size(node) else node

    for node in fxgraph.nodes:
        if not computes_size(node):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), number)
    for node in reversed(fxgraph.nodes):
        if computes_size(node):
            fxgraph.erase_node(node)
    copy.module.recompile()
    inputs, outputs = (
        tuple(
            replace(slot, shape=tuple(node.meta["val"].shape), symbols=())
            for slot, node in zip(ends, nodes, strict=True)
        )
        for ends, nodes in ((copy.inputs, copy.placeholders), (copy.outputs, copy.returned))
    )
    return replace(copy, inputs=inputs, outputs=outputs)


def _fill_in_numbers(graph: Graph, sizes: Sizes) -> None:
    """Give nodes their values for some sizes: a tenth of what symbols take."""
    mode, inputs = private.FakeTensorMode(allow_non_fake_inputs=True), []
    for slot in graph.inputs:
        names = slot.symbols or ("",) * len(slot.shape)
        shape = [sizes[n] if n else size for n, size in zip(names, slot.shape, strict=True)]
        with mode:
            inputs.append(torch.empty(shape, dtype=slot.dtype))
    propagate_values(graph.module, inputs, mode)
    for node in graph.module.graph.nodes:
        node.meta.pop(SHAPE, None)
        if computes_size(node):
            node.meta["val"] = _computed(node)
        elif node.op == "output":
            node.meta.pop("val", None)


def example_sizes(inputs: Sequence[Slot]) -> Sizes:
    """Return the sizes for which a settled graph has values."""
    sizes = sizes_of(inputs, [slot.shape for slot in inputs])
    assert sizes is not None
    return sizes


class Symbols:
    """Tensors without values whose sizes are symbols of one ``ShapeEnv``."""

    def __init__(
        self,
        sizes: Sizes,
        ties: Ties = MappingProxyType({}),
        longest: float = math.inf,
    ) -> None:
        """
        Args:
            sizes: examples of the sizes, by name of the symbol.
            ties: symbols that follow others.
            longest: how many terms all assumptions about sizes may have together. If they have
                more, the operator that makes the next one raises ``NotSymbolic``.
        """
        self._env = _environment_class()(longest)
        self.mode = _mode_class()(
            allow_non_fake_inputs=True, shape_env=self._env, static_shapes=True
        )
        self.mode.cache_enabled = False  # ``repeated`` takes its place, in a fraction of the time
        self.mode.repeated = RepeatedCalls(self.mode)
        self.sizes = sizes
        free = {name: size for name, size in sizes.items() if name not in ties}
        self._integers = {name: self._integer(name, size) for name, size in free.items()}
        # While nothing is assumed about them yet.
        self._names = {each.node.expr: symbol(n) for n, each in self._integers.items()}
        self._first = {n: each.node.expr for n, each in self._integers.items()}
        for name, (other, more) in ties.items():
            self._integers[name] = self._integers[other] + more
        self._known: dict[Any, Any] = {}  # what ``size`` has returned, by expression
        self._present: dict[Any, None] = {}  # sizes that must be at least 1

    def _integer(self, name: str, size: int) -> Any:
        origin = _source_class()(name)
        made = self._env.create_symbol(size, origin, private.DimDynamic.DYNAMIC)
        return self._env.create_symintnode(made, hint=size, source=origin)

    def tensor(self, slot: Slot) -> torch.Tensor:
        names = slot.symbols or ("",) * len(slot.shape)
        shape = [
            self._integers[name] if name else size
            for name, size in zip(names, slot.shape, strict=True)
        ]
        with self.mode:
            return torch.empty(shape, dtype=slot.dtype)

    @property
    def conditions(self) -> Conditions:
        """What has been assumed so far.

        Raises:
            NotSymbolic: a size was used as a number.
        """
        for name, integer in self._integers.items():
            if not integer.node.expr.free_symbols:
                first = self._first.get(name)
                place = self._env.place_of(lambda each: each.is_Equality and first in each.args)  # noqa: B023
                raise UsedAsNumber(f"{place or _UNKNOWN_PLACE} uses the size {name} as a number")
        return Conditions(tuple(self.named(guard.expr) for guard in self._env.guards))

    def place_of(self, condition: Any) -> str:
        """Return which operator and line of the user assumed something, if they are known."""
        place: str = self._env.place_of(lambda each: self.named(each) == condition)
        return place

    def read(self, text: str) -> Any:
        """Return the size that torch's compiler has written as text."""
        return self._env.deserialize_symexpr(text)

    def named(self, formula: Any) -> Any:
        """Return an expression in which symbols have the names of slots."""
        return formula.xreplace(self._names)

    def size(self, value: Any) -> Any:
        """Return a size or stride in which symbols have the names of slots.

        Torch computes the strides of a tensor that may be empty with ``Max(1, size)``. Without the
        maximum they are equal to the sizes that they come from. ``presence`` returns the
        condition for this: the tensor is not empty. Quotients without a remainder, such as
        ``s0**2 // s0`` for the sides of a square image, are written as what they are.
        """
        if not isinstance(value, torch.SymInt):
            return value
        formula = value.node.expr
        if formula not in self._known:
            without = _without_quotients(self._without_maxima(formula))
            self._known[formula] = self.named(without)
        return self._known[formula]

    def _without_maxima(self, formula: Any) -> Any:
        kind = private.optional("Max")
        replacements = {}
        for maximum in formula.atoms(kind) if kind is not None else ():
            operands = [each for each in maximum.args if each != 1]
            if len(operands) == 1 and len(maximum.args) == 2:
                size = replacements[maximum] = self._without_maxima(operands[0])
                self._present[self.named(size)] = None
        return formula.xreplace(replacements) if replacements else formula

    @property
    def presence(self) -> Conditions:
        """That the tensors are not empty whose strides ``size`` has returned."""
        return Conditions(tuple(size >= 1 for size in self._present))

    @property
    def derived(self) -> dict[str, Any]:
        """Sizes that were assumed to follow from others, as expressions by name."""
        found = {name: self.named(each.node.expr) for name, each in self._integers.items()}
        return {name: each for name, each in found.items() if each != symbol(name)}


def _without_quotients(formula: Any) -> Any:
    """Return an expression in which divisions that leave no remainder are carried out."""
    import sympy

    quotients = formula.atoms(private.FloorDiv)
    replacements = {}
    for quotient in quotients:
        exact = sympy.cancel(quotient.args[0] / quotient.args[1])
        if exact.is_polynomial() and all(each.is_integer for each in exact.as_poly().coeffs()):
            replacements[quotient] = exact
    return formula.xreplace(replacements) if replacements else formula


@functools.cache
def _mode_class() -> Any:
    class Mode(private.FakeTensorMode):  # type: ignore[misc]
        """Derives shapes, also of padding by symbolic sizes and of interpolation.

        Torch does that with its dispatcher in Python alone, which is slower for all operators.
        """

        repeated: RepeatedCalls | None = None

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}

            def derived() -> Any:
                return self._derived(func, types, args, kwargs)

            if self.repeated is None or not is_repeatable(func):
                return derived()
            return self.repeated.result(func, args, kwargs, derived)

        def _derived(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            running = self.shape_env.running
            dispatching = private.optional("enable_python_dispatcher")
            if func in _OF_SHAPE_IN_ARGUMENTS:
                layout = _layout_of_gradient(_OF_SHAPE_IN_ARGUMENTS[func], args[0])
                if layout is not None:
                    return args[0].new_empty(args[2]).contiguous(memory_format=layout)
            running.append(func)
            try:
                if func not in _IN_PYTHON or dispatching is None:
                    return super().dispatch(func, types, args, kwargs)
                with dispatching():
                    return super().dispatch(func, types, args, kwargs)
            finally:
                running.pop()

    return Mode


def _layout_of_gradient(
    kept: torch.memory_format | None, outer: torch.Tensor
) -> torch.memory_format | None:
    """Return the layout of the gradient of an interpolation; None if it is not known.

    ``kept``: a layout that the gradient has if ``outer``, that of the result, has it.
    """
    if kept is None or outer.is_contiguous():
        return torch.contiguous_format
    return kept if outer.is_contiguous(memory_format=kept) else None


@functools.cache
def _environment_class() -> Any:
    class Environment(private.ShapeEnv):  # type: ignore[misc]
        """Knows which code assumed what about sizes."""

        def __init__(self, longest: float = math.inf) -> None:
            super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
            self._terms, self._longest = 0, longest
            self.running: list[Any] = []  # operators, the outermost first
            self._places: dict[Any, str] = {}  # by assumption
            self._depth = source.stack_depth()

        def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
            known = len(self.guards)
            result = super().evaluate_expr(*args, **kwargs)
            for guard in self.guards[known:]:
                self._places[guard.expr] = self._place()
                self._terms += _terms(guard.expr)
            if self._terms > self._longest:
                raise NotSymbolic(
                    f"its conditions on sizes are too long to be examined: there are "
                    f"{len(self.guards)} with {self._terms} terms, up to {self._place()}"
                )
            return result

        def _place(self) -> str:
            line = source.calling_line(self._depth)
            running = [each for each in self.running[:1] if each is not aten.size.default]
            return " in ".join([*map(str, running), *([] if line is None else [line])])

        def place_of(self, assumes: Callable[[Any], bool]) -> str:
            """Return the operator and the user's line of an assumption, if they are known."""
            return next((place for each, place in self._places.items() if assumes(each)), "")

    return Environment


def _terms(expression: Any) -> int:
    """Return how many operations, symbols and numbers an expression contains."""
    return 1 + sum(map(_terms, expression.args))


@functools.cache
def _source_class() -> Any:
    class Origin(private.Source):  # type: ignore[misc]
        """Where a symbol comes from. Torch needs only its name."""

        def __init__(self, name: str) -> None:
            self.own_name = name

        @property
        def name(self) -> str:
            return self.own_name

    return Origin


def _all(_: Sizes) -> bool:
    return True


def settle(
    module: fx.GraphModule,
    inputs: Sequence[Slot],
    symbols: Symbols,
    allowed: Callable[[Sizes], bool] = _all,
) -> Conditions:
    """Give nodes the values that they have for example sizes; return the graph's conditions.

    Args:
        symbols: with which the graph was recorded.
        allowed: returns whether these sizes may be the example sizes.

    Raises:
        NotSymbolic: the graph fixes a size, or there are no example sizes.
    """
    if any(part is not module for part in module.modules() if isinstance(part, fx.GraphModule)):
        raise NotSymbolic("the program contains loops or branches")
    recorded = symbols.conditions
    _drop_whole_slices(module.graph)
    values = _recorded_values(module.graph, symbols)
    candidates = (each for each in _candidates(symbols, recorded) if allowed(each[0]))
    for sizes, ties in itertools.islice(candidates, _TRIALS):
        conditions = recorded
        if values is None or ties:
            conditions = propagate(module, inputs, sizes, ties) | recorded | _conditions_of(ties)
        else:
            _give_values(values, symbols, sizes, recorded)
            conditions = recorded | symbols.presence
        if conditions.hold(sizes) and _is_distinct(module.graph):
            return conditions
    if not recorded.expressions:
        raise NotSymbolic("no example sizes were found at which its sizes differ from each other")
    *others, last = recorded.expressions
    place = symbols.place_of(last)
    source_ = f", from {place}" if place else ""
    count = f", and {len(others)} others" if others else ""
    raise NotSymbolic(
        f"no example sizes were found for its conditions on sizes, such as {last}{source_}{count}"
    )


def _drop_whole_slices(graph: fx.Graph) -> None:
    """Drop slices ``[:]``, which torch does not record where it knows the size, assignments to
    them, and their gradients.
    """
    for operator_ in _SLICES:
        for node in graph.find_nodes(op="call_function", target=operator_):
            kept = _whole(node, _END)
            if kept is not None:
                _replace(node, kept)


def _whole(node: fx.Node, size: int) -> fx.Node | None:
    """Return what a slice equals if it goes from the start of a dimension to its end; else None.

    ``size``: the least end of a whole slice.
    """
    first, kept = _SLICES[node.target]
    given = dict(zip(("start", "end", "step"), node.args[first:], strict=False))
    start, end, step = (_number(given.get(name)) for name in ("start", "end", "step"))
    is_whole = start in (0, None) and step in (1, None) and (end is None or end >= size)
    return node.args[kept] if is_whole else None  # type: ignore[return-value]


def _number(argument: Any) -> Any:
    """Return an argument that is a number or None, or what a node computes in example sizes."""
    if not isinstance(argument, fx.Node):
        return argument
    value = argument.meta.get("val")
    return value if isinstance(value, int) else -math.inf


def _replace(node: fx.Node, other: fx.Node) -> None:
    """Let another node with the same shape be used instead of a node."""
    one, two = node.meta.get("val"), other.meta.get("val")
    if one is not None and two is not None and not same_sizes(one.stride(), two.stride()):
        other.meta.pop("val")  # the layouts of all values are derived again
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _candidates(symbols: Symbols, conditions: Conditions) -> Iterator[tuple[dict[str, int], Ties]]:
    """Yield example sizes that satisfy conditions, those with the fewest ties first."""
    derived = symbols.derived
    free = [name for name in symbols.sizes if name not in derived]
    for ties in sorted(_possible_ties(free, symbols.sizes), key=len):
        untied = [name for name in free if name not in ties]
        primes = (_SMALLER_PRIMES if len(untied) > 1 else ()) + _PRIMES
        for factor, start in itertools.product(_FACTORS, range(len(primes))):
            chosen = (primes * 2)[start : start + len(untied)]
            sizes = {name: factor * prime for name, prime in zip(untied, chosen, strict=True)}
            sizes |= {name: sizes[other] + more for name, (other, more) in ties.items()}
            values = numbers(sizes)
            sizes |= {name: int(each.xreplace(values)) for name, each in derived.items()}
            if conditions.hold(sizes):
                yield sizes, ties


def _possible_ties(names: Sequence[str], sizes: Sizes) -> Iterator[Ties]:
    """Yield ways to tie sizes to others: to none, or to one that they follow at a distance."""
    if len(names) > _MOST_TIED:
        yield {}
        return
    choices = [[None, *names[:at]] for at in range(len(names))]
    for chosen in itertools.product(*choices):
        ties = {name: other for name, other in zip(names, chosen, strict=True) if other is not None}
        if not any(other in ties for other in ties.values()):
            yield {name: (other, sizes[name] - sizes[other]) for name, other in ties.items()}


def _conditions_of(ties: Ties) -> Conditions:
    import sympy

    equal = (sympy.Eq(symbol(name), symbol(other) + more) for name, (other, more) in ties.items())
    return Conditions(tuple(equal))


def propagate(
    module: fx.GraphModule,
    inputs: Sequence[Slot],
    sizes: Sizes,
    ties: Ties = MappingProxyType({}),
) -> Conditions:
    """Derive the value of each node for some sizes, and its symbolic shape; return what is assumed.

    Raises:
        NotSymbolic: an operator fixes a size.
    """
    symbols = Symbols(sizes, ties)
    fill_in(module, [symbols.tensor(slot) for slot in inputs], symbols)
    conditions = symbols.conditions
    values = {node: node.meta.pop("val", None) for node in module.graph.nodes}
    _give_values(values, symbols, sizes, conditions)
    return conditions | symbols.presence


def _recorded_values(graph: fx.Graph, symbols: Symbols) -> dict[fx.Node, Any] | None:
    """Return the values with which nodes were recorded; None if some have none.

    What they assumed about sizes are the conditions of the symbols. So an operator would derive the
    same for all sizes that satisfy them.
    """
    values = {node: node.meta.get("val") for node in graph.nodes}
    has_values = all(
        _is_recorded(value, symbols) or node.op == "output" or computes_size(node)
        for node, value in values.items()
    )
    return values if has_values else None


def _is_recorded(value: Any, symbols: Symbols) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_recorded(each, symbols) for each in value)
    return getattr(value, "fake_mode", None) is symbols.mode


def _give_values(
    values: Mapping[fx.Node, Any], symbols: Symbols, sizes: Sizes, conditions: Conditions
) -> None:
    """Give nodes the values for some sizes, and their symbolic shapes.

    ``values``: of nodes, with symbols in their shapes.
    """
    number_of = numbers(sizes)
    texts = _Texts(symbols, conditions)
    create = _creator()

    def number(size: Any) -> int:
        is_symbol = isinstance(size, torch.SymInt)
        return int(symbols.named(size.node.expr).xreplace(number_of)) if is_symbol else size

    def concrete(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(concrete, value))
        if not isinstance(value, torch.Tensor):
            return value
        shape, strides = ([*map(number, each)] for each in (value.shape, value.stride()))
        return create(shape, value.dtype, strides)

    def text(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(text, value))
        if not isinstance(value, torch.Tensor):
            return None
        return tuple(
            tuple(texts.text(size, number(size)) for size in each)
            for each in (value.shape, value.stride())
        )

    for node, value in values.items():
        node.meta.pop("val", None)
        node.meta.pop(SHAPE, None)
        if computes_size(node):
            node.meta["val"] = _computed(node)
        elif isinstance(value, torch.SymInt | torch.SymFloat):
            raise NotSymbolic(f"a size is computed with {name_of(node)}")
        elif node.op != "output" and value is not None:
            shape = text(value)
            node.meta["val"] = concrete(value)
            if _has_symbols(shape):
                node.meta[SHAPE] = shape


def _creator() -> Callable[[Sequence[int], torch.dtype, Sequence[int]], torch.Tensor]:
    """Return a function that creates tensors without values, by shape, type and strides."""
    mode = private.FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownResults.of(mode)
    if known is not None:
        return known.fresh

    def create(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]) -> torch.Tensor:
        with mode:
            return torch.empty_strided(shape, strides, dtype=dtype)

    return create


class _Texts:
    """One text for all expressions of a size that are equal for all sizes."""

    def __init__(self, symbols: Symbols, conditions: Conditions) -> None:
        self._symbols, self._conditions = symbols, conditions
        self._known: dict[int, list[Any]] = {}  # expressions that differ, by example size

    def text(self, size: Any, number: int) -> str:
        expression = self._symbols.size(size)
        known = self._known.setdefault(number, [])
        for each in known:
            if each == expression or always_equal(each, expression, self._conditions):
                return str(each)
        known.append(expression)
        return str(expression)


def fill_in(module: fx.GraphModule, inputs: Sequence[torch.Tensor], symbols: Symbols) -> None:
    """Give nodes values with symbols in their shapes."""
    propagate_values(module, inputs, symbols.mode)


def hint(size: Any) -> int:
    """Return a size for decisions that change no results: the example size, if it is symbolic."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def same_sizes(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Compare sizes or strides that may be symbolic, without recording the comparison."""
    return [*map(expression, one)] == [*map(expression, two)]


def has_symbols(sizes: Sequence[Any]) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)


def size_symbols(value: Any) -> set[Any]:
    """Return the symbols in the sizes and strides of a tensor or of several, or in a size."""
    if isinstance(value, list | tuple):
        return {each for part in value for each in size_symbols(part)}
    if isinstance(value, torch.Tensor):
        return size_symbols((*value.shape, *value.stride(), value.storage_offset()))
    return value.node.expr.free_symbols if isinstance(value, torch.SymInt) else set()


def _computed(node: fx.Node) -> Any:
    """Compute a size from values that are known."""
    args: Any = fx.map_arg(node.args, lambda each: each.meta["val"])
    if node.target is aten.sym_size.int:
        return args[0].shape[args[1]]
    if node.target is aten.sym_stride.int:
        return args[0].stride()[args[1]]
    if node.target is aten.sym_numel.default:
        return args[0].numel()
    return node.target(*args)  # type: ignore[operator]


def _has_symbols(shape: Any) -> bool:
    if isinstance(shape, str):
        return not shape.isdigit()
    return shape is not None and any(map(_has_symbols, shape))


def _is_distinct(graph: fx.Graph) -> bool:
    """Whether no two sizes or strides are equal for the example sizes and differ for others."""
    meanings: dict[int, str] = {}
    for node in graph.nodes:
        shape, value = node.meta.get(SHAPE), node.meta.get("val")
        values = [value] if isinstance(value, torch.Tensor) else value
        if not isinstance(values, list | tuple):
            continue
        shapes = [shape] if isinstance(value, torch.Tensor) else shape or [None] * len(values)
        for each, texts in zip(values, shapes, strict=True):
            if not isinstance(each, torch.Tensor):
                continue
            for sizes, names in zip((each.shape, each.stride()), texts or (), strict=False):
                for number, name in zip(sizes, names, strict=True):
                    if meanings.setdefault(number, name) != name:
                        return False
            if texts is None:
                fixed = (*each.shape, *each.stride())
                if any(meanings.setdefault(n, str(n)) != str(n) for n in fixed):
                    return False
    return True


def with_example_sizes(slots: Sequence[Slot], nodes: Sequence[fx.Node]) -> tuple[Slot, ...]:
    """Return slots with the shapes of the nodes that they describe.

    Inputs keep the names of their symbols; results get expressions.
    """
    found = []
    for slot, node in zip(slots, nodes, strict=True):
        names = slot.symbols
        if SHAPE in node.meta and not names:
            names = tuple("" if text.isdigit() else text for text in node.meta[SHAPE][0])
        shape = tuple(node.meta["val"].shape)
        found.append(replace(slot, shape=shape, symbols=names if any(names) else ()))
    return tuple(found)


def settled(
    graph: Graph, symbols: Symbols, allowed: Callable[[Sizes], bool] = _all
) -> tuple[Graph, Conditions]:
    """Return a graph with example sizes, and its conditions; see ``settle``."""
    conditions = settle(graph.module, graph.inputs, symbols, allowed)
    inputs = with_example_sizes(graph.inputs, graph.placeholders)
    outputs = with_example_sizes(graph.outputs, graph.returned)
    if any(slot.is_state and slot.symbols for slot in outputs):
        raise NotSymbolic("the shape of a weight or buffer depends on a size")
    return replace(graph, inputs=inputs, outputs=outputs), conditions


def with_other_example_sizes(graph: Graph, allowed: Callable[[Sizes], bool]) -> Graph:
    """Return a graph with the first example sizes that are allowed.

    Raises:
        NotSymbolic: there are none.
    """
    copy, symbols = graph.copy(), Symbols(example_sizes(graph.inputs))
    fill_in(copy.module, [symbols.tensor(slot) for slot in copy.inputs], symbols)
    return settled(copy, symbols, allowed)[0]


def is_symbolic(graph: Graph) -> bool:
    return any(slot.symbols for slot in graph.inputs)


def first_difference(graph: Graph, sizes: Sizes, other: Graph, other_sizes: Sizes) -> str | None:
    """Name an operator in which two graphs differ for some sizes, or return None."""
    none = None, None
    pairs = itertools.zip_longest(
        _resolved(graph, sizes), _resolved(other, other_sizes), fillvalue=none
    )
    for (one, node), (two, of_other) in pairs:
        if one != two:
            lines = (line_of(each) for each in (node, of_other) if each is not None)
            line = next(filter(None, lines), None)
            where = f" in {source.describe(*line)}" if line else ""
            return f"{one} and {two}{where}"
    return None


def _sliced(node: fx.Node) -> int:
    """Return the size of the dimension that a slice takes a part of, or assigns to."""
    if node.target is aten.slice_backward.default:
        sizes: Any = node.args[1]
        size = sizes[node.args[2]]
        return int(_number(size))
    dim: Any = node.args[_SLICES[node.target][0] - 1] if len(node.args) > 1 else 0
    source_: Any = node.args[0]
    return int(source_.meta["val"].shape[dim])


def _resolved(graph: Graph, sizes: Sizes) -> list[tuple[str, fx.Node]]:
    """Return the operators of a graph, also as texts in which sizes are numbers."""
    module = (with_sizes(graph, sizes) if is_symbolic(graph) else graph).module
    names: dict[fx.Node, str] = {}
    lines: list[tuple[str, fx.Node]] = []

    def resolve(node: fx.Node) -> Any:
        return names[node]

    for node in module.graph.nodes:
        if node.op == "call_function" and computes_size(node):
            names[node] = node.meta["val"]
            continue
        if node.target in _SLICES and (kept := _whole(node, _sliced(node))) is not None:
            names[node] = names[kept]  # torch does not record it if it knows the size
            continue
        names[node] = f"%{len(lines)}"
        args = fx.map_arg((node.args, node.kwargs), resolve) if node.op != "placeholder" else ()
        what = node.op if node.op == "placeholder" else node.target
        lines.append((f"{what} {args}", node))
    return lines
