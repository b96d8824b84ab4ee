"""Pickles with their tensors outside, read by name: what a file may contain is listed here.

Tensors travel as safetensors. Of everything else a reader that was not told to trust the file makes
only containers, torch's values, modules of ``torch.nn``, this library's own values, and modules and
optimizers of the user that can be imported by name.
"""

from __future__ import annotations

import collections
import copyreg
import importlib
import io
import pickle
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import torch
from torch import nn

from .._base.archive import InvalidFile

PROTOCOL = 4
_BUILTINS = frozenset(
    (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list"),
        *("object", "range", "set", "slice", "str", "tuple"),
    )
)
_EXACT: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): collections.Counter,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("torch", "device"): torch.device,
    ("torch", "Size"): torch.Size,
}
# Makes an object of a class that has passed find_class itself.
_RECONSTRUCTORS = frozenset({("copyreg", "_reconstructor"), ("copyreg", "__newobj__")})
_CALLED = (copyreg._reconstructor, copyreg.__newobj__)  # type: ignore[attr-defined]
_HOMES_OF_ACTIVATIONS = ("torch.nn.functional", "torch._C._nn")
_OWN = (
    "poptorch.options.",
    "poptorch.optim.",
    "poptorch.enums",
    "poptorch._base.trees",
    "popdist.",
)
_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)
# Modules of torch whose objects carry code of their own.
_CARRIES_CODE = (torch.fx.GraphModule, torch.jit.ScriptModule)


def dump(value: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Pickle a value, leaving its tensors out.

    Returns:
        The pickle, and the tensors by the names that it refers to them by.

    Raises:
        pickle.PicklingError, AttributeError, TypeError: something in it cannot be pickled, a
            locally defined class for instance.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=PROTOCOL)
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors


def load(data: bytes, tensors: Mapping[str, torch.Tensor], trusted: bool = False) -> Any:
    """Return the value that ``dump`` was given.

    Args:
        data: the pickle.
        tensors: what it refers to.
        trusted: make whatever it says, as ``pickle`` does. Only for files from trusted sources.

    Raises:
        InvalidFile: it needs something that is not on the list; the message names it. Nothing of
            it has been called.
    """
    unpickler = (_Unpickler if trusted else _RestrictedUnpickler)(io.BytesIO(data), tensors)
    try:
        return unpickler.load()
    except InvalidFile:
        raise
    except Exception as error:
        raise InvalidFile(
            "Invalid file", got=f"its objects cannot be rebuilt: {type(error).__name__}: {error}"
        ) from error


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[int, tuple[str, bool, bool]] = {}

    def persistent_id(self, obj: Any) -> tuple[str, bool, bool] | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._known:
            name = str(len(self.tensors))
            self.tensors[name] = obj.detach()
            self._known[id(obj)] = (name, isinstance(obj, nn.Parameter), obj.requires_grad)
        return self._known[id(obj)]


class _Tensors:
    """What both readers do with tensors."""

    def __init__(self, file: io.BytesIO, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file)  # type: ignore[call-arg]
        self._stored = tensors
        self._made: dict[str, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        name, is_parameter, requires_grad = pid
        if name not in self._made:
            tensor = self._stored[name]
            if is_parameter:
                tensor = nn.Parameter(tensor, requires_grad=bool(requires_grad))
            self._made[name] = tensor
        return self._made[name]


class _Unpickler(_Tensors, pickle.Unpickler):
    """Makes whatever the pickle says."""


_InPython: Any = pickle._Unpickler


class _RestrictedUnpickler(_Tensors, _InPython):  # type: ignore[misc]
    """The reader in Python, because it lets single instructions be checked."""

    dispatch = dict(_InPython.dispatch)

    def load_build(self) -> None:
        """Give an object its state; a class or function would be changed for everybody."""
        target = self.stack[-2]
        if isinstance(target, (type, FunctionType, BuiltinFunctionType)):
            _refuse(target.__module__, f"{target.__qualname__} with a state")
        _InPython.load_build(self)

    def load_reduce(self) -> None:
        """Make an object of a class; functions and objects are never called."""
        function = self.stack[-2]
        if not isinstance(function, type) and function not in _CALLED:
            _refuse(str(getattr(function, "__module__", "")), f"a call of {function!r}")
        _InPython.load_reduce(self)

    def load_old_call(self) -> None:
        """Calls in the form of the oldest protocols, which nothing here writes."""
        _refuse("pickle", "a call in the form of protocol 0")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.INST[0]] = dispatch[pickle.OBJ[0]] = load_old_call

    def find_class(self, module: str, name: str) -> Any:
        if (module == "builtins" and name in _BUILTINS) or (module, name) in _RECONSTRUCTORS:
            return super().find_class(module, name)
        if (module, name) in _EXACT:
            return _EXACT[module, name]
        if module.split(".")[0] == "torch":
            return self._of_torch(module, name)
        if module.startswith(_OWN):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
            _refuse(module, name)
        return self._of_user(module, name)

    def _of_torch(self, module: str, name: str) -> Any:
        if module == "torch" and "." not in name:
            found = getattr(torch, name, None)
            if isinstance(found, _TORCH_VALUES):
                return found
        elif module.startswith(("torch.nn.", "torch.optim")):
            found = _resolved(module, name)
            if _is_class_of(found, (nn.Module, torch.optim.Optimizer)):
                return found
            if module == "torch.nn.functional" and _is_activation(found, name):
                return found
        _refuse(module, name)

    def _of_user(self, module: str, name: str) -> Any:
        found = _resolved(module, name)
        is_tuple = _is_class_of(found, (tuple,)) and hasattr(found, "_fields")
        if is_tuple or _is_class_of(found, (nn.Module, torch.optim.Optimizer)):
            return found
        _refuse(module, name)


def _resolved(module: str, name: str) -> Any:
    """Import a module and return a class in it, nested ones included; None if there is none."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise InvalidFile(
            "Invalid file",
            got=f"it needs {module}.{name}, which cannot be imported here: {error}",
            fix="make the module that defines the model importable",
        ) from error
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _is_class_of(found: Any, bases: tuple[type, ...]) -> bool:
    return (
        isinstance(found, type)
        and issubclass(found, bases)
        and not issubclass(found, _CARRIES_CODE)
    )


def _is_activation(found: Any, name: str) -> bool:
    """Whether it is a public function of torch.nn.functional: torch's own layers keep some."""
    is_function = isinstance(found, (FunctionType, BuiltinFunctionType))
    home = getattr(found, "__module__", None)
    return is_function and not name.startswith("_") and home in _HOMES_OF_ACTIVATIONS


def _refuse(module: str, name: str) -> NoReturn:
    raise InvalidFile(
        "Invalid file",
        got=f"it contains {module}.{name}, which is no tensor, container, module or value of this "
        "library",
        fix="poptorch.load(path, trusted=True), if you know where the file comes from",
    )
