"""Choose the code of a graph with symbolic sizes by the sizes of its inputs.

Torch's compiler may assume more about sizes than the graph does, and its code may then be used for
a range of them. Other sizes get further code. It is compiled for example sizes that satisfy the
same conditions as these sizes, of all conditions that were met so far, so that the code for some
sizes does not depend on which sizes came first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from .._ir.conditions import ALWAYS, Conditions, Sizes
from .._ir.graph import Graph
from .._ir.symbolic import NotSymbolic, with_other_example_sizes
from ..backends import Compiled, conditions_of

# The largest number of versions of one graph's code. Without a limit, a graph with many conditions
# would be compiled again and again.
MOST = 6
_REMEMBERED = 1024  # combinations of sizes

KeyOf = Callable[[Graph], str | None]


class SizeRange:
    """A range of sizes for which the same conditions hold, and the code of a graph for this range.

    Args:
        graph: the graph with example sizes in this range.
        met: the conditions that hold.
    """

    def __init__(self, graph: Graph, key: str | None, met: Conditions = ALWAYS) -> None:
        self.graph, self.key, self._met = graph, key, met
        self.code: Compiled | None = None
        # the ranges that the code does not serve, by the conditions that hold in them
        self.rest: dict[tuple[bool, ...], SizeRange] = {}

    def excludes(self, sizes: Sizes) -> bool:
        """Return whether there is code, and it does not serve these sizes."""
        return self.code is not None and not conditions_of(self.code).hold(sizes)

    def truths(self, sizes: Sizes) -> tuple[bool, ...]:
        return self._conditions.truths(sizes)

    def divided(self, sizes: Sizes, key_of: KeyOf) -> SizeRange:
        """Return the range of sizes that the code does not serve.

        Raises:
            NotSymbolic: no example sizes were found in this range.
        """
        met, truths = self._conditions, self.truths(sizes)
        graph = with_other_example_sizes(self.graph, lambda each: met.truths(each) == truths)
        return SizeRange(graph, key_of(graph), met)

    @property
    def _conditions(self) -> Conditions:
        assert self.code is not None
        return self._met | conditions_of(self.code)

    def all(self) -> Iterator[SizeRange]:
        """Yield this range, and those of the rest."""
        yield self
        for each in self.rest.values():
            yield from each.all()


class Ranges:
    """The versions of a graph's code. A call runs the one that serves the sizes of its arguments.

    Args:
        interpreted: makes a function that runs the graph with all sizes.
    """

    def __init__(self, graph: Graph, key_of: KeyOf, interpreted: Callable[[], Compiled]) -> None:
        self._key_of, self._interpreted = key_of, functools.cache(interpreted)
        self.first = SizeRange(graph, key_of(graph))
        read: dict[str, tuple[int, int]] = {}  # by symbol, an argument and its dimension
        for at, slot in enumerate(graph.inputs):
            for dim, name in enumerate(slot.symbols):
                read.setdefault(name, (at, dim))
        read.pop("", None)
        self._names, self._places = [*read], [*read.values()]
        self._chosen: dict[tuple[int, ...], Compiled] = {}

    def __call__(self, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        sizes = tuple([arguments[at].shape[dim] for at, dim in self._places])
        code = self._chosen.get(sizes)
        if code is None:
            code = self._choose(sizes)
        return code(arguments)

    def _choose(self, sizes: tuple[int, ...]) -> Compiled:
        found = self._range(dict(zip(self._names, sizes, strict=True)))
        if found is None or found.code is None:
            return self._interpreted()
        if len(self._chosen) >= _REMEMBERED:
            self._chosen.clear()
        self._chosen[sizes] = found.code
        return found.code

    def _range(self, sizes: Sizes) -> SizeRange | None:
        found: SizeRange | None = self.first
        while found is not None and found.excludes(sizes):
            found = found.rest.get(found.truths(sizes))
        return found

    def serve(self, sizes: Sizes) -> bool:
        """Return whether there is code for these sizes. If not, ``missing`` has what it needs.

        Raises:
            NotSymbolic: there cannot be such code.
        """
        found = self.first
        while found.excludes(sizes):
            truths = found.truths(sizes)
            if truths not in found.rest:
                if len(self.all()) >= MOST:
                    raise NotSymbolic(f"the compiler needs more than {MOST} ranges of sizes")
                found.rest[truths] = found.divided(sizes, self._key_of)
            found = found.rest[truths]
        return found.code is not None

    def all(self) -> list[SizeRange]:
        return [*self.first.all()]

    def missing(self) -> list[SizeRange]:
        return [each for each in self.all() if each.code is None]

    @property
    def have_begun(self) -> bool:
        """Return whether there is code for some sizes."""
        return self.first.code is not None
