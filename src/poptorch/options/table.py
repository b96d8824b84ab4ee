"""The one table of options: a row, a setter's decorator, says everything about an option."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .._base import log
from .._base.errors import AssertionFailure, InvalidValue

Method = TypeVar("Method", bound=Callable[..., Any])
_KINDS = {"bool": bool, "int": int, "str": str}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def expect(name: str, value: Any, types: type | tuple[type, ...]) -> None:
    if not isinstance(value, types):
        wanted = types if isinstance(types, tuple) else (types,)
        raise AssertionFailure(
            f"Unexpected type for {name}",
            got=f"{value!r}, of type {type(value).__name__}",
            fix=f"pass a value of type {' or '.join(kind.__name__ for kind in wanted)}",
        )


def deprecated(old: str, new: str) -> None:
    log.python.warning("%s is deprecated: use %s", old, new)


def deprecated_without_effect(old: str, reason: str) -> None:
    log.python.warning("[Deprecated] %s is deprecated and has no effect: %s", old, reason)


def show(value: Any) -> str:
    """Return a text of a value: equal ones print equally, and no address appears."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, dict):
        pairs = sorted((show(key), show(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(show, value))) + "}" if value else "set()"
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(show, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, (str, bytes)):
        return repr(value)
    if getattr(type(value), "__repr__", None) is object.__repr__:
        return f"{type(value).__name__}({show_pairs(getattr(value, '__dict__', {}))})"
    return _ADDRESS.sub("", repr(value))


def show_pairs(values: dict[Any, Any]) -> str:
    return ", ".join(f"{name}={show(value)}" for name, value in values.items())


class Effect(enum.Enum):
    """What an option changes: the letter that tables show, and what it stands for."""

    RESULTS = "N", "changes results"
    RULES = "V", "decides what is accepted and which chips are taken"
    LOGS = "L", "logs, files, caching"
    ESTIMATES = "E", "changes what estimates say of IPUs, not what runs here"
    HINT = "H", "a hint to hardware, no effect here"
    MISSING = "M", "not done here"


RESULTS, RULES, LOGS, ESTIMATES, HINT, MISSING = Effect
IDLE = (HINT, MISSING)


class _Unset:
    """The default of what is stored only once it is set."""

    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Value:
    """One value that an option keeps among the named values of its group."""

    name: str
    default: Any = UNSET  # or what exists before it is set
    kind: type | None = None  # of the setter's argument; None for that of the default
    check: Callable[[Any], Any] = _unchanged  # from the argument to what is stored; may refuse it
    least: int | None = None  # the smallest number that is accepted
    field: str = ""  # the field of the Spec that it becomes, such as ``loops.replicas``
    frozen: Callable[[Any], Any] = _unchanged  # from what is stored to the field's value
    decides: str = ""  # a field that ``freeze`` computes from this and other values
    reader: str = ""  # the module that reads it from the options, for what is in no Spec
    here: bool = False  # belongs to this machine or process: not saved with a model

    def keep(self, group: Any, value: Any, setter: str) -> None:
        group._check_writable(self.name)
        if self.kind is not None:
            expect(self.name, value, self.kind)
        checked = self.check(value)
        if isinstance(checked, int):
            self.refuse_less(setter, checked)
        self._write(group, checked)

    def refuse_less(self, setter: str, stored: int) -> None:
        if self.least is not None and stored < self.least:
            raise InvalidValue(
                f"{setter} must be at least {self.least}",
                got=str(stored),
                fix=f"{setter}({self.least}) or more",
            )

    def read(self, group: Any) -> Any:
        return group._values.get(self.name, UNSET)

    def text(self, group: Any) -> str:
        """Return what a group holds, an enum's integer by its member's name."""
        value = self.read(group)
        if self.kind is not None and issubclass(self.kind, enum.Enum) and value in list(self.kind):
            value = self.kind(value)
        return show(value)

    def changed(self, group: Any) -> bool:
        return show(self.read(group)) != show(self.default)

    def _write(self, group: Any, value: Any) -> None:
        group.createOrSet(**{self.name: value})


class Private(Value):
    """A value kept in a private attribute: outside code reads it, ``toDict`` does not show it."""

    def read(self, group: Any) -> Any:
        return vars(group)[self.name]

    def _write(self, group: Any, value: Any) -> None:
        setattr(group, self.name, value)


@dataclass(frozen=True)
class Backend(Value):
    """A value kept under a key of ``_Popart``, as scripts may set it there themselves."""

    part: str = ""  # the entry of the key's dictionary that is meant
    others: frozenset[str] = frozenset()  # entries that have rows of their own

    def read(self, group: Any) -> Any:
        value = group._popart.options.get(self.name, UNSET)
        if self.part:
            return value.get(self.part, UNSET) if isinstance(value, dict) else UNSET
        return value

    def changed(self, group: Any) -> bool:
        value = self.read(group)
        if self.others and isinstance(value, dict):
            return not value.keys() <= self.others
        return super().changed(group)

    def _write(self, group: Any, value: Any) -> None:
        group._popart.set(self.name, value)


@dataclass(frozen=True)
class Row:
    option: str
    effect: Effect
    values: tuple[Value, ...]
    sentence: str


class Setting(NamedTuple):
    """``option`` is written as after ``options.``."""

    option: str
    group: Any
    row: Row

    @property
    def changed(self) -> bool:
        return any(value.changed(self.group) for value in self.row.values)


def row(effect: Effect, *values: Value) -> Callable[[Method], Method]:
    """Record the row of an option whose setter has a body of its own."""

    def record(method: Method) -> Method:
        sentence = (inspect.getdoc(method) or "").split("\n\n")[0].replace("\n", " ")
        method._row = Row(method.__name__, effect, values, sentence)  # type: ignore[attr-defined]
        return method

    return record


def option(
    effect: Effect,
    name: str,
    default: Any = UNSET,
    *,
    store: type[Value] = Value,
    instead: str = "",
    **more: Any,
) -> Callable[[Method], Method]:
    """Record the row of an option and write its setter: check the one argument, keep it, chain.

    Without a default the type is that of the setter's argument; ``more`` is of the ``Value``.
    """

    def write(method: Method) -> Method:
        signature = inspect.signature(method)
        _, parameter = signature.parameters
        if "check" not in more and (default is UNSET or store is Private):
            more.setdefault("kind", _KINDS.get(signature.parameters[parameter].annotation))
        value = store(name, default, **more)

        @functools.wraps(method)
        def setter(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            value.keep(self, given.arguments[parameter], method.__name__)
            if instead:
                deprecated(method.__qualname__.strip("_").replace("Options.", "."), instead)
            return self

        return row(effect, value)(setter)  # type: ignore[return-value]

    return write


def rows_of(cls: type) -> Iterator[Row]:
    """Yield the rows of a class, base classes first, in the order of their methods."""
    for base in reversed(cls.__mro__):
        for method in vars(base).values():
            if isinstance(getattr(method, "_row", None), Row):
                yield method._row


def defaults(cls: type, kind: type[Value] = Value) -> dict[str, Any]:
    return {
        value.name: copy.deepcopy(value.default)
        for each in rows_of(cls)
        for value in each.values
        if type(value) is kind and value.default is not UNSET
    }
