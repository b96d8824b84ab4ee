"""Nested values as a flat list of tensors and a frozen description of everything around them.

Lists, tuples, namedtuples, dicts, their subclasses, dataclasses and registered types are traversed;
tensors are the leaves that may change, all other objects are constants. A described value can be
rebuilt around other tensors, and two descriptions can be compared. Source: PopTorch user guide,
"Features".
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from . import companions
from .depth import DEEPEST, too_deep
from .fields import fields_of, has_fields, with_fields


class Parser(Protocol):
    """What a registered type needs: its tensors in a fixed order, and the way back."""

    def yieldTensors(self, struct: Any) -> Iterable[torch.Tensor]:  # noqa: N802
        """Yield the tensors of the object."""

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Build a new object of the same kind around other tensors."""


_parsers: dict[type, Parser] = {}


def register(kind: type, parser: Parser | None) -> None:
    """Let values of a type be traversed by a parser; None forgets the type (unknown or not)."""
    if parser is None:
        _parsers.pop(kind, None)
    else:
        _parsers[kind] = parser


def registered() -> dict[type, Parser]:
    """Return a copy of the registry, for a process that does not share this one's memory."""
    return dict(_parsers)


def parser_of(value: object) -> Parser | None:
    """Return the parser of the exact type, else of the first registered base class, else None."""
    exact = exact_parser_of(value)
    if exact is not None or not _parsers:
        return exact
    return next((parser for kind, parser in _parsers.items() if isinstance(value, kind)), None)


def exact_parser_of(value: object) -> Parser | None:
    """Return the parser that was registered for exactly this type, or None."""
    companions.bring()
    return _parsers.get(type(value))


@dataclass(frozen=True, eq=False)
class _Node:
    path: str


@dataclass(frozen=True, eq=False)
class _Tensor(_Node):
    pass


@dataclass(frozen=True, eq=False)
class _Constant(_Node):
    value: Any


@dataclass(frozen=True, eq=False)
class _Items(_Node):
    kind: type
    children: tuple[_Node, ...]


@dataclass(frozen=True, eq=False)
class _Keyed(_Items):
    keys: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Fields(_Keyed):
    """The fields of a dataclass and what else its instance remembers; any object's attributes."""


@dataclass(frozen=True, eq=False)
class _Dict(_Keyed):
    build: Callable[[dict[Any, Any]], Any]


@dataclass(frozen=True, eq=False)
class _Custom(_Items):
    original: Any = field(repr=False)
    parser: Parser = field(repr=False)


@dataclass(frozen=True, eq=False)
class Structure:
    """A value without its tensors; immutable, and picklable when its constants are.

    Compare two with ``first_difference``: constants of any type may be inside, so ``==`` means
    identity only.
    """

    root: _Node

    @property
    def name(self) -> str:
        """The name that the whole value was flattened under."""
        return self.root.path

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """One path per tensor, in order of the list: ``x``, ``x[0]``, ``x[key]``, ``x.y``."""
        return tuple(node.path for node in _leaves(self.root) if isinstance(node, _Tensor))

    @functools.cached_property
    def plain(self) -> type | None:
        """``tuple`` or ``list`` if it is one of nothing but tensors, else None."""
        root = self.root
        if not isinstance(root, _Items) or root.kind not in (tuple, list):
            return None
        return root.kind if all(isinstance(child, _Tensor) for child in root.children) else None

    @property
    def has_dicts(self) -> bool:
        """Whether there is a dictionary in it; the one of ``**kwargs`` does not count."""
        top = [self.root]
        if self.name.startswith("**") and isinstance(self.root, _Dict):
            top = list(self.root.children)
        return any(isinstance(node, _Dict) for root in top for node in _nodes(root))

    @functools.cached_property
    def constants(self) -> tuple[tuple[str, Any], ...]:
        """(path, value) of everything that is neither a tensor nor a container."""
        return tuple(
            (node.path, node.value) for node in _leaves(self.root) if isinstance(node, _Constant)
        )

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Build a value of this structure around other tensors (or any other objects).

        Raises:
            ValueError: not as many tensors as the structure has places.
        """
        if len(tensors) != len(self.paths):
            raise ValueError(f"{len(tensors)} tensors for a structure of {len(self.paths)}")
        return _build(self.root, iter(tensors))


def flatten(
    value: Any, name: str = "", like: Structure | None = None
) -> tuple[list[torch.Tensor], Structure]:
    """Split a value into its tensors and its structure.

    Args:
        value: any nesting of containers, tensors and constants.
        name: path of the whole value; elements get ``name[0]``, ``name[key]``, ``name.field``.
        like: an earlier structure whose dicts give the order of keys. Keys that it lacks follow;
            whether they are allowed is for ``first_difference`` to say.

    Returns:
        The tensors in traversal order, and the structure.
    """
    tensors: list[torch.Tensor] = []
    return tensors, Structure(_describe(value, name, like.root if like else None, tensors, 0))


def _describe(
    value: Any, path: str, like: _Node | None, tensors: list[torch.Tensor], depth: int
) -> _Node:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Tensor(path)
    if depth > DEEPEST:
        raise too_deep(path, value)
    depth += 1
    parser = parser_of(value)
    if parser is not None:
        own = list(parser.yieldTensors(value))
        tensors.extend(own)
        places = tuple(_Tensor(f"{path}[{at}]") for at in range(len(own)))
        return _Custom(path, type(value), places, value, parser)
    if isinstance(value, (list, tuple)):
        known = like.children if isinstance(like, _Items) else ()
        children = tuple(
            _describe(item, f"{path}[{at}]", known[at] if at < len(known) else None, tensors, depth)
            for at, item in enumerate(value)
        )
        return _Items(path, type(value), children)
    if isinstance(value, dict):
        order = dict(zip(like.keys, like.children, strict=True)) if isinstance(like, _Dict) else {}
        keys = (
            *(key for key in order if key in value),
            *(key for key in value if key not in order),
        )
        children = tuple(
            _describe(value[key], f"{path}[{key}]", order.get(key), tensors, depth) for key in keys
        )
        return _Dict(path, type(value), children, keys, dict_builder(value))
    if has_fields(value):
        fields = fields_of(value)
        known_fields = (
            dict(zip(like.keys, like.children, strict=True)) if isinstance(like, _Fields) else {}
        )
        children = tuple(
            _describe(field, f"{path}.{name}", known_fields.get(name), tensors, depth)
            for name, field in fields.items()
        )
        return _Fields(path, type(value), children, tuple(fields))
    return _Constant(path, value)


def dict_builder(value: dict[Any, Any]) -> Callable[[dict[Any, Any]], Any]:
    """Return what turns a plain dict into one of the same class as the value."""
    if isinstance(value, collections.defaultdict):
        return functools.partial(type(value), value.default_factory)
    return type(value)


def sequence_of(kind: type, items: list[Any]) -> Any:
    """Build a list, tuple, namedtuple or a subclass of one of them."""
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _nodes(node: _Node) -> Iterator[_Node]:
    yield node
    for child in node.children if isinstance(node, _Items) else ():
        yield from _nodes(child)


def _leaves(node: _Node) -> Iterator[_Node]:
    if isinstance(node, _Items):
        for child in node.children:
            yield from _leaves(child)
    else:
        yield node


def _build(node: _Node, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(node, _Tensor):
        return next(tensors)
    if isinstance(node, _Custom):
        # The parser sees its own tensors only: taking too few must not shift what follows.
        own = [next(tensors) for _ in node.children]
        return node.parser.reconstruct(node.original, iter(own))
    if isinstance(node, _Dict):
        items = [_build(child, tensors) for child in node.children]
        return node.build(dict(zip(node.keys, items, strict=True)))
    if isinstance(node, _Fields):
        values = [_build(child, tensors) for child in node.children]
        return with_fields(node.kind, dict(zip(node.keys, values, strict=True)))
    if isinstance(node, _Items):
        return sequence_of(node.kind, [_build(child, tensors) for child in node.children])
    assert isinstance(node, _Constant)
    return node.value


@dataclass(frozen=True)
class Difference:
    """What differs between two structures and where.

    Attributes:
        kind: ``"Type"``, ``"Length"``, ``"Keys"`` or ``"Value"``.
        path: the element that differs.
        detail: the expected value first, then the one that was got.
    """

    kind: str
    path: str
    detail: str

    @property
    def title(self) -> str:
        """For instance ``Type mismatch for x[0]``."""
        return f"{self.kind} mismatch for {self.path}"

    def __str__(self) -> str:
        return f"{self.title}: {self.detail}"


def first_difference(expected: Structure, got: Structure) -> Difference | None:
    """Compare types, lengths, keys and constants, outside in and left to right.

    Flatten ``got`` with ``like=expected``, so that the order of dict keys does not matter. Of a
    registered type only the type and the number of tensors count.
    """
    return _compare(expected.root, got.root)


def _compare(expected: _Node, got: _Node) -> Difference | None:
    path, wanted, given = expected.path, _kind(expected), _kind(got)
    if wanted is not given:
        return Difference("Type", path, f"expected {_name(wanted)} but got {_name(given)}")
    if isinstance(expected, _Constant) and isinstance(got, _Constant):
        if same_constant(expected.value, got.value):
            return None
        return Difference("Value", path, f"expected {expected.value!r} but got {got.value!r}")
    if isinstance(expected, _Keyed) and isinstance(got, _Keyed) and expected.keys != got.keys:
        return Difference("Keys", path, _keys_detail(expected.keys, got.keys))
    if not isinstance(expected, _Items) or not isinstance(got, _Items):
        return None
    if len(expected.children) != len(got.children):
        numbers = f"expected {len(expected.children)} but got {len(got.children)}"
        return Difference("Length", path, numbers)
    pairs = zip(expected.children, got.children, strict=True)
    return next((first for pair in pairs if (first := _compare(*pair)) is not None), None)


def _kind(node: _Node) -> type:
    if isinstance(node, _Items):
        return node.kind
    return type(node.value) if isinstance(node, _Constant) else torch.Tensor


def _name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _keys_detail(expected: tuple[Any, ...], got: tuple[Any, ...]) -> str:
    unexpected = sorted(str(key) for key in got if key not in expected)
    missing = sorted(str(key) for key in expected if key not in got)
    parts = []
    if unexpected:
        parts.append(f"Unexpected arguments: {', '.join(unexpected)}")
    if missing:
        parts.append(f"Missing arguments: {', '.join(missing)}")
    return ". ".join(parts) or f"expected the order {expected} but got {got}"


def same_constant(expected: Any, got: Any) -> bool:
    """Tell whether two constants are equal; arrays are equal when all their elements are."""
    if expected is got:
        return True
    if isinstance(expected, float) and isinstance(got, float) and math.isnan(expected):
        return math.isnan(got)
    differs = expected != got
    try:
        return not differs
    except (ValueError, RuntimeError):  # an array of answers, which has no truth value
        same_shape = getattr(expected, "shape", None) == getattr(got, "shape", None)
        return same_shape and not bool(differs.any())


def with_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return nested tuples, lists and dicts with every tensor replaced by what a function returns.

    For the arguments of operators; other containers are left as they are.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(with_tensors(function, item) for item in value)
    if type(value) is dict:
        return {key: with_tensors(function, item) for key, item in value.items()}
    return value
