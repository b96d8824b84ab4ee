"""Change the user's module when it is wrapped for training, and undo the change. Warns code that
looks for gradients in it.

The object stays the same. Its class becomes a subclass named ``Poptorch<Name>`` with two more
methods. Copies and pickles of it are ordinary modules.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import copyreg
import itertools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.nn.utils import clip_grad

from .._base import log, source, syntax
from .._base.errors import StateError
from .._capture import TENSOR_HOLDERS
from .._residency import NO_GRADIENTS


class Watched(dict[str, Any]):
    """A dict that announces every access and change. Copies and pickles of it are plain dicts."""

    __slots__ = ("listeners",)

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.listeners: list[Callable[[], None]] = []  # one for each model that contains the module

    def _announce(self, changes: bool) -> None:
        for listener in self.listeners:
            listener()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (list(self.items()),)


def announce_in(cls: type[dict[Any, Any]], names: str, changes: bool = False) -> None:
    """Make methods of a dict call ``_announce`` before they call the method of the base class."""
    for name in names.split():
        setattr(cls, name, _announcing(getattr(cls.__base__, name), changes))


def _announcing(method: Callable[..., Any], changes: bool) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._announce(changes)
        return method(self, *args, **kwargs)

    return call


# Before changes, too, because trained values belong to the tensor that is being replaced.
announce_in(Watched, "__setitem__ __getitem__ get items values")


def watch(module: nn.Module, announce: Callable[[], None]) -> weakref.WeakSet[nn.Module]:
    """Return what is watched, for ``unwatch``, because layers may be removed from the module in
    between.
    """
    watched = weakref.WeakSet(module.modules())
    for sub in watched:
        for holder in TENSOR_HOLDERS:
            entries = sub.__dict__[holder]
            if not isinstance(entries, Watched):
                sub.__dict__[holder] = entries = Watched(entries)
            entries.listeners.append(announce)
    return watched


def unwatch(watched: Iterable[nn.Module], announce: Callable[[], None]) -> None:
    """Restore plain dicts, unless other listeners remain."""
    for sub in watched:
        for holder in TENSOR_HOLDERS:
            entries = sub.__dict__[holder]
            if isinstance(entries, Watched) and announce in entries.listeners:
                entries.listeners.remove(announce)
                if not entries.listeners:
                    sub.__dict__[holder] = dict(entries)


class Owner(Protocol):
    """The executor. Automatic transfers call its methods, so that users can override them."""

    def copyWeightsToHost(self) -> None: ...  # noqa: N802

    def copyWeightsToDevice(self) -> None: ...  # noqa: N802

    def copyWeightsToHostIfNeeded(self) -> bool: ...  # noqa: N802

    def destroy(self) -> None: ...


@dataclass(frozen=True, eq=False)
class _Wrapping:
    owner: weakref.ref[Owner]
    announce: Callable[[], None]  # called by the dicts of the watched modules
    watched: weakref.WeakSet[nn.Module]


_wrappings: weakref.WeakKeyDictionary[nn.Module, _Wrapping] = weakref.WeakKeyDictionary()


def owner_of(module: nn.Module) -> Owner | None:
    return _wrappings[module].owner() if module in _wrappings else None


def refuse_wrapped(module: nn.Module) -> None:
    """Raise an error if another executor wraps the module. An executor that was destroyed may not
    wrap it again then.
    """
    if module in _wrappings:
        raise StateError(
            "The model has already been wrapped for training",
            got=type(module).__bases__[0].__name__,
            fix="call destroy() on the first wrapped model, or continue to use it",
        )


def wrap(module: nn.Module, owner: Owner, traced: nn.Module) -> None:
    """Change the class of a module and watch its tensors. The owner is referenced weakly."""
    reference = weakref.ref(owner)

    has_announced = False

    def announce() -> None:
        nonlocal has_announced
        living = reference()
        is_read = living is not None and living.copyWeightsToHostIfNeeded()
        if not is_read or has_announced:
            return
        if _reads_gradients():
            has_announced = True
            log.python.warning(NO_GRADIENTS)
        elif caller := _clipping():
            has_announced = True
            log.python.warning(
                f"{caller} finds no gradients in a model that is wrapped for training. The "
                "gradients stay in the program and are not clipped. Set the limit on the "
                "optimizer instead: pass the argument max_grad_norm to SGD, Adam or AdamW of "
                "poptorch.optim, or assign the attribute max_grad_norm to an optimizer of "
                "torch before you wrap the model"
            )

    _wrappings[module] = _Wrapping(reference, announce, watch(module, announce))
    for holder in TENSOR_HOLDERS:  # from now on the shallow copy shares the dicts of tensors
        traced.__dict__[holder] = module.__dict__[holder]
    module.__class__ = _subclass(type(module))


def _clipping() -> str | None:
    """Return the name of the torch function that is clipping gradients and therefore reads
    a weight.
    """
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), 12):
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == clip_grad.__name__ and name.startswith("clip_grad"):
            return name
    return None


def _reads_gradients() -> bool:
    """Return whether the user's statement that reads a weight, or the loop that it starts, reads
    ``.grad``.
    """
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), 12):
        if source.is_own_file(frame.f_code.co_filename):
            statement = syntax.executed(frame)
            return statement is not None and _mentions_gradient(statement)
    return False


def _mentions_gradient(statement: ast.AST) -> bool:
    nodes = list(ast.walk(statement))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]  # torch.autograd.grad()
    changed = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    return any(
        node not in called and (isinstance(node.ctx, ast.Load) or node in changed)
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr == "grad"
    )


def unwrap(module: nn.Module) -> None:
    if module in _wrappings:
        resume(module)
        wrapping = _wrappings.pop(module)
        module.__class__ = type(module).__bases__[0]
        unwatch(wrapping.watched, wrapping.announce)


def suspend(module: nn.Module) -> None:
    """Give a wrapped module its own class until ``resume``; other modules do not change."""
    if module in _wrappings:
        module.__class__ = type(module).__bases__[0]


def resume(module: nn.Module) -> None:
    if module in _wrappings and not any(made() is type(module) for made in _subclasses.values()):
        module.__class__ = _subclass(type(module))


def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    """Remove gradients. If there are none, no weight is read, and none is copied from the
    device.
    """
    tensors = (x for sub in self.modules() for x in dict.values(sub._parameters))
    if any(x is not None and x.grad is not None for x in tensors):
        nn.Module.zero_grad(self, set_to_none)


# Weak references, because a class refers to the variables of its script, which may include
# executors.
_subclasses: weakref.WeakKeyDictionary[type, weakref.ref[type[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    def copy_weights_to_host_if_needed(self: nn.Module) -> bool:
        """Copy newer weights from the device. Return whether there were any."""
        owner = owner_of(self)
        return owner is not None and owner.copyWeightsToHostIfNeeded()

    def destroy(self: nn.Module) -> None:
        """Release the executor of this model. The model is an ordinary module afterwards."""
        owner = owner_of(self)
        if owner is not None:
            owner.destroy()
        unwrap(self)

    made = _subclasses[cls]() if cls in _subclasses else None
    if made is not None:
        return made
    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce_unwrapped,
        "__deepcopy__": _deepcopy_unwrapped,
        "__copy__": _copy_wrapped,
        "copyWeightsToHostIfNeeded": copy_weights_to_host_if_needed,
        "destroy": destroy,
    }
    if cls.zero_grad is nn.Module.zero_grad:
        members["zero_grad"] = zero_grad
    made = _without_hooks(f"Poptorch{cls.__name__}", cls, members)
    _subclasses[cls] = weakref.ref(made)
    return made


def _without_hooks(name: str, cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """Create a subclass without calling hooks of the class or its metaclass."""
    made: Any = type.__new__(type(cls), name, (nn.Module,), members)
    try:
        made.__bases__ = (cls,)
    except TypeError:  # its memory layout differs
        made = type(name, (cls,), members)
    return made  # type: ignore[no-any-return]


@contextlib.contextmanager
def _unwrapped(module: nn.Module) -> Iterator[None]:
    """Show the user's class to its own methods and to code that inspects the object."""
    own = type(module)
    module.__class__ = own.__bases__[0]
    try:
        yield
    finally:
        module.__class__ = own


def _reduce_unwrapped(self: nn.Module, protocol: Any) -> Any:
    with _unwrapped(self):
        reduced: Any = self.__reduce_ex__(max(protocol, 2))
    make, (cls, *_), *rest = reduced
    if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced
    # The reconstructor of old pickles, because the modern one requires the object's own class.
    return copyreg._reconstructor, (cls, object, None), *rest  # type: ignore[attr-defined]


def _deepcopy_unwrapped(self: nn.Module, memo: dict[int, Any]) -> Any:
    with _unwrapped(self):
        return copy.deepcopy(self, memo)


def _copy_wrapped(self: nn.Module) -> Any:
    with _unwrapped(self):
        result = copy.copy(self)
    if type(result) in _subclasses and result is not self:
        result.__class__ = type(self)
        _wrappings[result] = _wrappings[self]
    return result


def shallow(module: nn.Module) -> nn.Module:
    """Return a module with the same tensors and layers, without using the class's own methods for
    copying.
    """
    result: nn.Module = object.__new__(type(module))
    result.__dict__.update(module.__dict__)
    if module in _wrappings:
        _wrappings[result] = _wrappings[module]
    return result
