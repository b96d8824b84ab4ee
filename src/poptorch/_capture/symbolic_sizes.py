"""Decide what Python code may do with symbolic sizes, and what it may keep of them.

A size is an instance of ``int`` for the user's code, which may branch on that. What ``float``,
``int``, ``len`` and ``math.sqrt`` return for it is symbolic, too. If a size is converted to text,
its number is used and becomes a constant, because the program may depend on the text, for example
on a key of a dictionary or on the length of the text. A program for all sizes must leave no symbols
behind, because code that reads them later expects numbers.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._base import nested_values, source
from .._ir.symbolic import NotSymbolic, has_symbols
from .python_state import OF_MODULES
from .replaced_tensors import Replacement, changed

_SYMBOLS: Mapping[type, Callable[..., Any]] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}
_OF_LIBRARIES = ("torch", __name__.partition(".")[0])
_WITHOUT_SIZES = (torch.Tensor, nn.Module, type, types.ModuleType)
_DEEPEST, _MOST = 8, 20_000  # how far, and at how many objects, a search looks


@contextlib.contextmanager
def as_numbers(root: nn.Module, converting: bool = True) -> Iterator[None]:
    """Within the block, let the code of the user and of the model's classes see numbers when a size
    becomes text, and when ``isinstance`` asks for its class.

    ``converting``: sizes stay symbolic if that code passes them to ``float`` or ``int``.
    """
    thread = threading.get_ident()

    def showing(usual: Callable[[Any], str], number: Callable[..., Any]) -> Any:
        def text(size: Any) -> str:
            caller = sys._getframe(1).f_code.co_filename
            of_user = threading.get_ident() == thread and source.is_user_file(caller)
            return repr(number(size)) if of_user else usual(size)

        return text

    changes: list[Replacement] = [
        (kind, "__repr__", showing(vars(kind)["__repr__"], number))
        for kind, number in _SYMBOLS.items()
    ]
    # As global variables, they are found before Python's own. Torch's code keeps those.
    added = {**_FUNCTIONS, **(_CLASSES if converting else {})}
    for module in _with_user_code(root):
        variables = vars(module)
        changes += [(module, name, new) for name, new in added.items() if name not in variables]
        changes += [(module, name, _sqrt) for name, old in variables.items() if old is math.sqrt]
    with changed([*changes, (math, "sqrt", _sqrt)]):
        yield


def _is_instance(value: object, kinds: Any) -> bool:
    number = _SYMBOLS.get(type(value))
    return isinstance(value if number is None else number(), kinds)


class NumberClass(type):
    """The class of classes that replace ``int`` and ``float``. A size that is converted to one of
    them stays symbolic.
    """

    of: type
    convert: Callable[[Any], Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Convert a value."""
        symbolic = len(args) == 1 and isinstance(args[0], tuple(_SYMBOLS))
        return cls.convert(*args) if symbolic else cls.of(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        """Return whether a value is a number of this kind."""
        return isinstance(value, cls.of)

    def __subclasscheck__(cls, kind: type) -> bool:
        """Return whether instances of a class are numbers of this kind."""
        return issubclass(kind, cls.of)

    def __eq__(cls, other: object) -> bool:
        """Return whether this replaces another class."""
        return other is cls or other is cls.of

    def __hash__(cls) -> int:
        """Return the hash of the class that this replaces."""
        return hash(cls.of)


class _Float(float, metaclass=NumberClass):
    of, convert = float, torch.sym_float


class _Int(int, metaclass=NumberClass):
    of, convert = int, torch.sym_int


_plain_sqrt = math.sqrt


def _len(value: Any) -> Any:
    is_symbolic = isinstance(value, torch.Tensor) and value.dim() and has_symbols(value.shape[:1])
    return value.shape[0] if is_symbolic else len(value)


def _sqrt(value: Any) -> Any:
    return torch.sym_sqrt(value) if isinstance(value, tuple(_SYMBOLS)) else _plain_sqrt(value)


def _divmod(value: Any, by: Any) -> Any:
    is_symbolic = isinstance(value, tuple(_SYMBOLS)) or isinstance(by, tuple(_SYMBOLS))
    return (value // by, value % by) if is_symbolic else divmod(value, by)


_FUNCTIONS: Mapping[str, Any] = {"isinstance": _is_instance, "len": _len, "divmod": _divmod}
_CLASSES: Mapping[str, Any] = {"float": _Float, "int": _Int}


def _with_user_code(root: nn.Module) -> list[types.ModuleType]:
    """Return the Python modules of the user, and those in which the model's classes are."""
    names = {type(part).__module__ for part in root.modules()}
    found = (
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        and (name in names or source.is_user_file(getattr(module, "__file__", None) or "<"))
        and name.partition(".")[0] not in _OF_LIBRARIES
    )
    by_variables = {id(vars(module)): module for module in found}  # it may have several names
    return [*by_variables.values()]


def refuse_returned(structure: nested_values.Structure) -> None:
    for path, value in structure.constants:
        if _Search().holds(value):
            raise NotSymbolic(f"forward returns a size, {path}")


def refuse_kept(root: nn.Module) -> None:
    """Refuse sizes in attributes of modules, and in variables outside of ``forward``."""
    search = _Search()
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in OF_MODULES and search.holds(value):
                where = f"{path}.{name}" if path else name
                raise NotSymbolic(f"forward keeps a size in the attribute {where}")
        if search.holds(type(module).forward):
            name = type(module).__name__
            raise NotSymbolic(f"forward of {name} keeps a size in a variable outside of it")


class _Search:
    """Looks for symbols in containers, objects, and what functions refer to, in each once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def holds(self, value: object, depth: int = 0) -> bool:
        if isinstance(value, (*_SYMBOLS, NumberClass)):
            return True
        plain = isinstance(value, (str, bytes, int, float, *_WITHOUT_SIZES)) or value is None
        if plain or id(value) in self._seen or depth > _DEEPEST or len(self._seen) >= _MOST:
            return False
        self._seen.add(id(value))
        return any(self.holds(each, depth + 1) for each in _parts(value))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (tuple, list, set, frozenset)):
        return [*value]
    if isinstance(value, types.MethodType):
        return [value.__func__]
    if isinstance(value, types.FunctionType):
        return _variables(value)
    return [*getattr(value, "__dict__", {}).values()]


def _variables(function: types.FunctionType) -> list[Any]:
    """Return the values of variables that a user's function refers to, and its defaults."""
    if not source.is_user_file(function.__code__.co_filename):
        return []
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            found.append(cell.cell_contents)
    names = function.__code__.co_names
    own = function.__globals__
    return [*found, *(own[name] for name in names if name in own)]
