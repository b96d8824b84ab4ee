"""Define the base class of all option groups, on whose methods other code relies."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from .._base.errors import AssertionFailure, InvalidAttribute
from . import option_table
from .option_table import deprecated, expect, show, show_pairs


class Container:
    """Named values that keep their type, can be read as attributes, and can be frozen.

    The keywords, and the rows of the class's options, declare names. Reading an unknown public
    name raises an ``AttributeError``. Writing one, or a value of another type than the stored one,
    raises an ``AssertionError``. Any write while frozen raises an ``AttributeError``.

    Sub-classes assign their private state *before* they call this constructor. Afterwards only
    private names that exist can be assigned.
    """

    _is_frozen = False
    _renamed: Mapping[str, str] = {}  # names of earlier releases, which still work but warn
    _values: dict[str, Any]
    _declared: dict[str, Any]  # defaults of values without a row

    def __init__(self, **defaults: Any) -> None:
        vars(self).update(option_table.defaults(type(self), option_table.Private))
        # Plain dictionaries can be pickled, and reading from them does not use the rules for
        # attributes.
        vars(self)["_declared"] = copy.deepcopy(defaults)
        vars(self)["_values"] = option_table.defaults(type(self)) | defaults

    def _freeze(self, frozen: bool = True) -> None:
        """Forbid writes to this object and to every group nested in it, or allow them again."""
        vars(self)["_is_frozen"] = frozen
        for child in (*vars(self).values(), *self._values.values()):
            if isinstance(child, Container):
                child._freeze(frozen)

    def _check_writable(self, name: str) -> None:
        if self._is_frozen:
            raise InvalidAttribute(
                "Can't modify frozen Options",
                got=f"{name} was set after the options were passed to a model or a DataLoader",
                fix=(
                    "change the options before you pass them to a model or loader, or change "
                    "a copy: options.clone()"
                ),
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(vars(self), memo))
        new._freeze(False)
        return new

    def __copy__(self) -> Self:
        """Copy deeply, because two objects that share half of their state would be surprising."""
        return copy.deepcopy(self)

    def set(self, **values: Any) -> Self:
        """Store values of declared names. If one is refused, none is stored.

        Raises:
            InvalidAttribute: the options are frozen (an ``AttributeError``).
            AssertionFailure: a name is not declared ("Invalid option"), or a value has another type
                than the stored one ("Unexpected type"); an ``AssertionError``.
        """
        for name in values:
            self._check_writable(name)
            if name not in self._values:
                setter = callable(getattr(type(self), name, None))
                fix = f"call it: {name}({show(values[name])})" if setter else self._suggest(name)
                raise AssertionFailure(f"Invalid option {name}", fix=fix)
        return self.createOrSet(**values)

    def createOrSet(self, **values: Any) -> Self:
        """Store values like ``set``; new names may have values of any type."""
        for name in values:
            self._check_writable(name)
        checked = {}
        for name, value in values.items():
            expected_type = type(self._values.get(name, value))
            expect(f"option {name}", value, expected_type)
            # A bool or an enum member in place of an int would make later type checks stricter.
            checked[name] = int(value) if expected_type is int else value
        self._values.update(checked)
        return self

    def exists(self, name: str) -> bool:
        """Return whether a value is stored under the name."""
        expect("name", name, str)
        return name in self._values

    def deleteIfExists(self, name: str) -> None:
        """Remove a stored value; do nothing if there is none."""
        expect("name", name, str)
        self._check_writable(name)
        self._values.pop(name, None)

    def update(self, other: dict[str, Any]) -> dict[str, Any]:
        """Merge the stored values into a dictionary, in place, and return it.

        Raises:
            AssertionFailure: both hold the same key, or ``other`` is not a dictionary (an
                ``AssertionError``).
        """
        expect("other", other, dict)
        return merge(other, self._values)

    def toDict(self) -> dict[str, Any]:
        """Return the stored values as a new dictionary."""
        return self.update({})

    def __call__(self, name: str) -> Any:
        expect("name", name, str)
        return getattr(self, name)

    def _current(self, name: str) -> str:
        if name not in self._renamed:
            return name
        group = type(self).__name__.strip("_").removesuffix("Options")
        deprecated(*(f"{group}.{each}".lstrip(".") for each in (name, self._renamed[name])))
        return self._renamed[name]

    if not TYPE_CHECKING:  # otherwise a type checker would accept every misspelt name

        def __getattr__(self, name: str) -> Any:
            values = vars(self).get("_values", {})
            if name in values:
                return values[name]
            if name in self._renamed:
                return getattr(self, self._current(name))
            # copy and pickle look for hooks before the object has any state
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__} has no attribute {name}")
            raise InvalidAttribute(f"Invalid attribute {name}", fix=self._suggest(name))

        def __setattr__(self, name: str, value: Any) -> None:
            name, built = self._current(name), "_values" in vars(self)
            exists = name in vars(self) or hasattr(type(self), name)
            if built and not name.startswith("_") and name not in vars(self):
                Container.set(self, **{name: value})
                return
            self._check_writable(name)
            if built and not exists:
                raise InvalidAttribute(f"Invalid attribute {name}", fix=self._suggest(name))
            object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def _suggest(self, name: str) -> str:
        names = self._candidates()
        same = [each for each in names if each.rpartition(".")[2] == name]
        close = same or difflib.get_close_matches(name, names, n=3)
        if close:
            return f"did you mean {' or '.join(close)}?"
        shown = sorted(self._values) or names
        return f"use one of the names in {type(self).__name__}: {', '.join(shown)}"

    def _candidates(self) -> list[str]:
        return [name for name in dir(self) if not name.startswith("_")]

    def _changed(self) -> dict[str, Any]:
        """Return the values that differ from the defaults: first in the order of the rows, then
        other values, sorted.
        """
        rows = [value for row in option_table.rows_of(type(self)) for value in row.values]
        own = [value for value in rows if not isinstance(value, option_table.PopartKey)]
        changed = {value.name: value.read(self) for value in own if value.changed(self)}
        for name in sorted(self._values.keys() - {value.name for value in own}):
            if show(self._values[name]) != show(self._declared.get(name, option_table.UNSET)):
                changed[name] = self._values[name]
        return changed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({show_pairs(self._changed())})"


def merge(result: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    common = sorted(result.keys() & values.keys())
    if common:
        raise AssertionFailure(
            "The same option is set twice",
            got=", ".join(common),
            fix="remove the option from one of the two groups or dictionaries",
        )
    result.update(values)
    return result
