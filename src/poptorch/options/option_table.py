"""Define the table of options. A row, which is the decorator of a setter, contains everything about
an option.
"""

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
from .._ir.spec import Spec

Method = TypeVar("Method", bound=Callable[..., Any])
_KINDS = {"bool": bool, "int": int, "str": str}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def expect(name: str, value: Any, types: type | tuple[type, ...]) -> None:
    if not isinstance(value, types):
        expected_types = types if isinstance(types, tuple) else (types,)
        raise AssertionFailure(
            f"Unexpected type for {name}",
            got=f"{value!r}, of type {type(value).__name__}",
            fix=f"pass a value of type {' or '.join(kind.__name__ for kind in expected_types)}",
        )


def deprecated(old: str, new: str) -> None:
    log.python.warning("%s is deprecated: use %s", old, new)


def deprecated_without_effect(old: str, reason: str) -> None:
    log.python.warning("[Deprecated] %s is deprecated and has no effect: %s", old, reason)


def show(value: Any) -> str:
    """Return a value as text. Equal values have equal texts, and no text contains an address."""
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
    """What an option changes: the letter in tables, and its meaning."""

    RESULTS = "N", "changes results"
    RULES = "V", "decides which models and calls are accepted, and which chips are taken"
    LOGS = "L", "changes logs, files and caching"
    ESTIMATES = "E", "changes estimates for IPUs, but not what runs here"
    HINT = "H", "is a hint to hardware and has no effect here"
    MISSING = "M", "is not implemented here"


RESULTS, RULES, LOGS, ESTIMATES, HINT, MISSING = Effect
IDLE = (HINT, MISSING)


class _Unset:
    """The default of values that exist only after they are set."""

    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


class _OfField:
    """Represents the default of the field of the ``Spec`` that a value sets."""


OF_FIELD = _OfField()


def _default_of(field: str) -> Any:
    return functools.reduce(getattr, field.split("."), Spec())


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Value:
    """One value that an option stores among the named values of its group."""

    name: str
    default: Any = UNSET  # or the value in use before it is set; OF_FIELD: that of the field
    kind: type | None = None  # type of the setter's argument; None for the type of the default
    # converts the argument to the stored value; may refuse it
    check: Callable[[Any], Any] = _unchanged
    least: int | None = None  # the smallest accepted number
    field: str = ""  # the field of the Spec that it sets, such as ``loops.replicas``
    frozen: Callable[[Any], Any] = _unchanged  # converts the stored value to the value of the field
    decides: str = ""  # a field that ``freeze`` computes from this value and others
    reader: str = ""  # the module that reads it from the options, if it is in no Spec
    here: bool = False  # only applies to this machine or process, so it is not saved with a model

    def __post_init__(self) -> None:
        if self.default is OF_FIELD:
            object.__setattr__(self, "default", _default_of(self.field))

    def keep(self, group: Any, value: Any, setter: str) -> None:
        group._check_writable(self.name)
        if self.kind is not None:
            expect(self.name, value, self.kind)
        checked = self.check(value)
        if isinstance(checked, int):
            self.refuse_too_small(setter, checked)
        self._write(group, checked)

    def refuse_too_small(self, setter: str, stored: int) -> None:
        if self.least is not None and stored < self.least:
            raise InvalidValue(
                f"{setter} must be at least {self.least}",
                got=str(stored),
                fix=f"use {setter}({self.least}), or a larger number",
            )

    def read(self, group: Any) -> Any:
        return group._values.get(self.name, UNSET)

    def text(self, group: Any) -> str:
        """Return the value in a group as text; an enum's integer as the name of its member."""
        value = self.read(group)
        if self.kind is not None and issubclass(self.kind, enum.Enum) and value in list(self.kind):
            value = self.kind(value)
        return show(value)

    def changed(self, group: Any) -> bool:
        return show(self.read(group)) != show(self.default)

    def _write(self, group: Any, value: Any) -> None:
        group.createOrSet(**{self.name: value})


class Private(Value):
    """A value in a private attribute, which other code reads and ``toDict`` does not contain."""

    def read(self, group: Any) -> Any:
        return vars(group)[self.name]

    def _write(self, group: Any, value: Any) -> None:
        setattr(group, self.name, value)


@dataclass(frozen=True)
class PopartKey(Value):
    """A value under a key of ``_Popart``, where scripts may also set it themselves."""

    part: str = ""  # the entry of the key's dictionary that contains the value
    others: frozenset[str] = frozenset()  # entries of the dictionary that have their own rows

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
class OptionRow:
    option: str
    effect: Effect
    values: tuple[Value, ...]
    sentence: str


class OptionSetting(NamedTuple):
    """The row of an option. ``option`` is its name after ``options.``."""

    option: str
    group: Any
    row: OptionRow

    @property
    def changed(self) -> bool:
        return any(value.changed(self.group) for value in self.row.values)


def row(effect: Effect, *values: Value) -> Callable[[Method], Method]:
    """Record the row of an option whose setter has its own body."""

    def record(method: Method) -> Method:
        sentence = (inspect.getdoc(method) or "").split("\n\n")[0].replace("\n", " ")
        method._row = OptionRow(method.__name__, effect, values, sentence)  # type: ignore[attr-defined]
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
    """Record the row of an option and write its setter, which checks the argument, stores it and
    returns the object.

    Without a default, the type is that of the setter's argument. ``more`` are fields of the
    ``Value``.
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


def rows_of(cls: type) -> Iterator[OptionRow]:
    """Yield the rows of a class, base classes first, in the order of their methods."""
    for base in reversed(cls.__mro__):
        for method in vars(base).values():
            if isinstance(getattr(method, "_row", None), OptionRow):
                yield method._row


def defaults(cls: type, kind: type[Value] = Value) -> dict[str, Any]:
    return {
        value.name: copy.deepcopy(value.default)
        for each in rows_of(cls)
        for value in each.values
        if type(value) is kind and value.default is not UNSET
    }
