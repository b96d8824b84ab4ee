"""Flatten nested values (tuples, dicts, dataclasses, registered classes) to a list of tensors and
an immutable description of everything else.

Beyond torch's pytree, this supports subclasses, dataclasses, parsers that users register, the key
order of an earlier value, and a comparison that names the difference.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import log
from .errors import Error

DEEPEST = 100  # levels of containers; a container that contains itself would have no end
ADAPTERS = {  # for each imported package, our module with parsers and substitutes for its objects
    "torch_geometric": "poptorch_geometric",
    "transformers.cache_utils": "poptorch.integrations._caches",
}
Parser = Any  # an object with the methods of poptorch.ICustomArgParser
_parsers: dict[type, Parser] = {}
_like_dataclasses: list[type] = []


def register(kind: type, parser: Parser | None) -> None:
    if parser is None:
        _parsers.pop(kind, None)
    else:
        _parsers[kind] = parser


def registered() -> dict[type, Parser]:
    return dict(_parsers)


def parser_of(value: object) -> Parser | None:
    exact = exact_parser_of(value)
    if exact is not None or not _parsers:
        return exact
    return next((parser for kind, parser in _parsers.items() if isinstance(value, kind)), None)


def exact_parser_of(value: object) -> Parser | None:
    import_adapters()
    return _parsers.get(type(value))


def import_adapters() -> None:
    for package, ours in ADAPTERS.items():
        if package in sys.modules and ours not in sys.modules:
            _import(ours)


@functools.cache
def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:  # our module does not support this release of the package
        log.python.warning("%s cannot be used: %s", name, error)


class Level(NamedTuple):
    items: Iterable[Any]
    keys: tuple[Any, ...] | None  # keys of a dict, or names of fields
    build: Callable[[list[Any]], Any]  # makes the same container with other items
    dotted: bool = False  # whether paths are ``x.y`` instead of ``x[y]``


def _open(value: Any, order: tuple[Any, ...] | None) -> Level | None:
    """Split a container into its items; keys of a dict in ``order`` come first. Return None for a
    leaf.
    """
    parser = parser_of(value)
    if parser is not None:
        build = functools.partial(_reconstructed, parser, value)
        return Level(parser.yieldTensors(value), None, build)
    if isinstance(value, (list, tuple)):
        return Level(value, None, functools.partial(sequence_of, type(value)))
    if isinstance(value, dict):
        keys = tuple(value)
        if order is not None and order != keys:
            known = [key for key in order if key in value]
            keys = (*known, *(key for key in value if key not in order))
        build = functools.partial(_keyed, dict_builder(value), keys)
        return Level([value[key] for key in keys], keys, build)
    if has_fields(value):
        fields = fields_of(value)
        build = functools.partial(
            _keyed, functools.partial(with_fields, type(value)), tuple(fields)
        )
        return Level(fields.values(), tuple(fields), build, dotted=True)
    return None


def sequence_of(kind: type, items: list[Any]) -> Any:
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def dict_builder(value: dict[Any, Any]) -> Callable[[dict[Any, Any]], Any]:
    if isinstance(value, collections.defaultdict):
        return functools.partial(type(value), value.default_factory)
    return type(value)


def traverse_attributes(kind: type) -> None:
    _like_dataclasses.append(kind)


def has_fields(value: object) -> bool:
    return _of_dataclass(value) or isinstance(value, tuple(_like_dataclasses))


def _of_dataclass(value: object) -> bool:
    return hasattr(type(value), "__dataclass_fields__")


def fields_of(value: Any) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(value)] if _of_dataclass(value) else []
    return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})


def with_fields(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Make an instance from what ``fields_of`` returned, without calling its ``__init__``."""
    made = kind.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)  # also if the class is frozen
    return made


def _keyed(build: Callable[[dict[Any, Any]], Any], keys: Any, items: list[Any]) -> Any:
    return build(dict(zip(keys, items, strict=True)))


def _reconstructed(parser: Parser, original: Any, items: list[Any]) -> Any:
    # The parser only gets its own tensors, so that a parser which takes too few does not shift the
    # others.
    return parser.reconstruct(original, iter(items))


@dataclass(eq=False)
class Structure:
    """A value without its tensors. ``==`` compares by identity; use ``first_difference`` to compare
    contents.
    """

    path: str  # path of the value: ``x``, ``x[0]``, ``x[key]``, ``x.y``
    kind: type  # torch.Tensor for tensors of all classes
    children: tuple[Structure, ...] = ()
    keys: tuple[Any, ...] | None = None
    build: Callable[[list[Any]], Any] | None = None  # None for tensors and constants
    value: Any = None  # value of a constant

    @functools.cached_property
    def _leaves(self) -> tuple[Structure, ...]:
        if self.build is None:
            return (self,)
        return tuple(leaf for child in self.children for leaf in child._leaves)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        return tuple(leaf.path for leaf in self._leaves if leaf.kind is torch.Tensor)

    @property
    def constants(self) -> tuple[tuple[str, Any], ...]:
        return tuple(
            (leaf.path, leaf.value) for leaf in self._leaves if leaf.kind is not torch.Tensor
        )

    @functools.cached_property
    def plain(self) -> Callable[[Sequence[torch.Tensor]], Any] | None:
        """Return a function from the tensors to the value, if the value is a tensor, or a tuple or
        list of tensors.
        """
        if self.kind is torch.Tensor:
            return operator.itemgetter(0)
        flat = all(child.kind is torch.Tensor for child in self.children)
        return self.kind if flat and self.kind in (tuple, list) else None

    @property
    def has_dicts(self) -> bool:
        """Return whether it contains a dictionary, not counting the one of ``**kwargs`` itself."""
        is_dict = self.keys is not None and issubclass(self.kind, dict)
        are_keywords = self.path.startswith("**") and "[" not in self.path
        return (is_dict and not are_keywords) or any(child.has_dicts for child in self.children)

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        if len(tensors) != len(self.paths):
            raise ValueError(f"{len(tensors)} tensors for a structure of {len(self.paths)}")
        return self._around(iter(tensors))

    def _around(self, tensors: Iterator[torch.Tensor]) -> Any:
        if self.build is not None:
            return self.build([child._around(tensors) for child in self.children])
        return next(tensors) if self.kind is torch.Tensor else self.value


def flatten(
    value: Any, name: str = "", like: Structure | None = None
) -> tuple[list[torch.Tensor], Structure]:
    """Split a value into tensors and structure; ``like`` determines the order of keys."""
    tensors: list[torch.Tensor] = []
    return tensors, _describe(value, name, like, tensors, 0)


def _describe(
    value: Any, path: str, like: Structure | None, tensors: list[torch.Tensor], depth: int
) -> Structure:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Structure(path, torch.Tensor)
    if depth > DEEPEST:
        start = path if len(path) < 60 else f"{path[:60]}..."
        raise Error(
            "Containers are nested too deeply, or contain themselves",
            got=f"{start}: a {type(value).__name__} is nested in more than {DEEPEST} levels",
            fix="use fewer levels of lists, tuples, dicts and dataclasses, and no cycles",
        )
    level = _open(value, like.keys if like else None)
    if level is None:
        return Structure(path, type(value), value=value)
    known = like.children if like else ()
    if like and level.keys != like.keys:
        by_key = dict(zip(like.keys or (), known, strict=False))
        known = tuple(by_key.get(key) for key in level.keys or ())  # type: ignore[misc]
    children = []
    for at, item in enumerate(level.items):
        key = at if level.keys is None else level.keys[at]
        place = f"{path}.{key}" if level.dotted else f"{path}[{key}]"
        before = known[at] if at < len(known) else None
        children.append(_describe(item, place, before, tensors, depth + 1))
    return Structure(path, type(value), tuple(children), level.keys, level.build)


@dataclass(frozen=True)
class StructureDifference:
    kind: str  # "Type", "Length", "Keys" or "Value"
    path: str  # path of the element that differs
    detail: str  # the expected value first, then the actual one

    @property
    def title(self) -> str:
        return f"{self.kind} mismatch for {self.path}"

    def __str__(self) -> str:
        return f"{self.title}: {self.detail}"


def first_difference(expected: Structure, got: Structure) -> StructureDifference | None:
    """Compare structures from the outside to the inside; ``got`` was flattened with
    ``like=expected``.
    """
    differs = functools.partial(StructureDifference, path=expected.path)
    if expected.kind is not got.kind:
        kinds = f"expected {_name(expected.kind)} but got {_name(got.kind)}"
        return differs("Type", detail=kinds)
    if expected.build is None and not same_constant(expected.value, got.value):
        return differs("Value", detail=f"expected {expected.value!r} but got {got.value!r}")
    if expected.keys is not None and got.keys is not None and expected.keys != got.keys:
        return differs("Keys", detail=_keys_detail(expected.keys, got.keys))
    if len(expected.children) != len(got.children):
        numbers = f"expected {len(expected.children)} but got {len(got.children)}"
        return differs("Length", detail=numbers)
    pairs = zip(expected.children, got.children, strict=True)
    return next((first for pair in pairs if (first := first_difference(*pair))), None)


def _name(kind: type) -> str:
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def _keys_detail(expected: tuple[Any, ...], got: tuple[Any, ...]) -> str:
    unexpected = sorted(str(key) for key in got if key not in expected)
    missing = sorted(str(key) for key in expected if key not in got)
    parts = [f"Unexpected arguments: {', '.join(unexpected)}"] if unexpected else []
    parts += [f"Missing arguments: {', '.join(missing)}"] if missing else []
    return ". ".join(parts) or f"expected the order {expected} but got {got}"


def same_constant(expected: Any, got: Any) -> bool:
    if expected is got:
        return True
    if isinstance(expected, (float, complex)):  # -0.0 == 0.0 and NaN != NaN, but not as texts
        return repr(expected) == repr(got)
    differs = expected != got
    try:
        return not differs
    except (ValueError, RuntimeError):  # comparing arrays gives an array, which has no truth value
        same_shape = getattr(expected, "shape", None) == getattr(got, "shape", None)
        return same_shape and not bool(differs.any())


def dtypes_of(value: Any) -> set[torch.dtype]:
    """Return the types of the tensors that ``with_tensors`` would replace."""
    dtypes: set[torch.dtype] = set()
    with_tensors(lambda tensor: dtypes.add(tensor.dtype), value)
    return dtypes


def with_tensors(
    function: Callable[[Any], Any], value: Any, kinds: tuple[type, ...] = (torch.Tensor,)
) -> Any:
    """Replace tensors, or values of other kinds, in plain tuples, lists and dicts, as they occur in
    the arguments of operators.
    """
    if isinstance(value, kinds):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(with_tensors(function, item, kinds) for item in value)
    if type(value) is dict:
        return {key: with_tensors(function, item, kinds) for key, item in value.items()}
    return value


_MOST_OBJECTS = 10_000  # limits the delay if a whole program can be reached from one object
_OPAQUE = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.GeneratorType, types.FrameType, types.CodeType,
)  # fmt: skip


def holds_tensors(value: object) -> bool:
    """Return whether any tensor can be found in an object: in its attributes and elements,
    recursively.
    """
    seen: set[int] = set()
    stack = [value]
    while stack and len(seen) < _MOST_OBJECTS:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            return True
        # Untracked objects, for example texts and numbers, do not refer to tracked ones.
        if gc.is_tracked(item) and id(item) not in seen and not isinstance(item, _OPAQUE):
            seen.add(id(item))
            stack += gc.get_referents(item)
    return False
