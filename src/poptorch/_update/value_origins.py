"""Record where the values of a step come from: what each depends on, and how it is computed.

Every value has an identifier, which is equal for equal computations on equal inputs. Computations
with only numbers are therefore done once, and two runs can be shown to compute the same.
Identifiers of values of two weights have equal numbers if the values are computed in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .known_functions import (
    COPIES,
    FILLING,
    KEEPS_GEOMETRY,
    MADE_OF_NOTHING,
    UNSET,
    operation_of,
    title_of,
)
from .step_values import Geometry, as_number, geometry_of, place_of, tensors_in, unobserved

ValueSource = tuple[str, str]  # what a value depends on: role and key
ValueSources = frozenset[ValueSource]
HYPER, NUMBER, WEIGHT = "hyper", "number", "weight"  # roles
_NOTHING: ValueSources = frozenset()
# The usual types of arguments, which are recognised without a look at their base classes.
_AS_IT_IS, _SEQUENCES = frozenset({str, Geometry}), frozenset({list, tuple})
_EXACT, _INEXACT = frozenset({int, bool, type(None), torch.dtype}), frozenset({float, complex})
_ABSENT = type(None).__name__, None


class Identifier(NamedTuple):
    """Identifies a computation."""

    number: int  # equal for two weights whose values are computed in the same way
    # path of the only weight that the value is computed from; "" for none or several
    weight: str = ""


class _Spot(NamedTuple):
    """Where a tensor is, which asking torch for takes as long as all the rest."""

    tensor: Tensor  # keeps its memory alive, so that no other tensor gets it
    place: int
    geometry: Geometry


class Origins:
    """The sources and identifiers of all tensors in some runs, by their memory."""

    def __init__(self) -> None:
        self.forms: list[Any] = []  # how a value is computed, by the number of its identifier
        self._plain: list[Identifier] = []  # identifiers without a weight, by number
        self._names: dict[Any, int] = {}
        self._contents: dict[int, Identifier] = {}  # by storage
        self._sources: dict[int, ValueSources] = {}  # by storage
        self._uniform: dict[int, complex] = {}  # storages in which all elements are the same number
        self._spots: dict[int, _Spot] = {}  # by the id of a tensor
        self._former: list[_Spot] = []  # of tensors that have changed their shape

    def _spot(self, tensor: Tensor) -> _Spot:
        known = self._spots.get(id(tensor))
        if known is None:
            with unobserved():
                known = _Spot(tensor, place_of(tensor), geometry_of(tensor))
            self._spots[id(tensor)] = known
        return known

    # Inputs.

    def enter(self, tensor: Tensor, name: str, source: ValueSource) -> Tensor:
        """Make a tensor, or its present value, an input of the step.

        Two weights may have inputs with the same name. These inputs correspond to each other.
        """
        place = self._spot(tensor).place
        role, key = source
        known = self.name("input of a weight" if role == WEIGHT else "input", name)
        self._contents[place] = known._replace(weight=key) if role == WEIGHT else known
        self._sources[place] = frozenset({source})
        self._uniform.pop(place, None)
        return tensor

    def enter_number(self, tensor: Tensor, name: str, source: ValueSource, kind: str) -> Tensor:
        """Make a 0-d tensor an input that represents a Python number. ``kind``: "int" or
        "float".
        """
        return as_number(self.enter(tensor, name, source), whole=kind == "int")

    def mark_uniform(self, number: Tensor, value: complex) -> None:
        """Record the present value of a number."""
        self._uniform[self._spot(number).place] = value

    # Queries.

    def uniform(self, tensor: Tensor) -> complex | None:
        """Return the number that all elements are equal to, if it is known."""
        return self._uniform.get(self._spot(tensor).place)

    def sources(self, value: Any) -> ValueSources:
        return self._sources_of(tensors_in(value))

    def _sources_of(self, tensors: list[Tensor]) -> ValueSources:
        found = _NOTHING
        for each in tensors:
            sources = self._sources.get(self._spot(each).place, _NOTHING)
            found = found | sources if found else sources
        return found

    def identifier(self, value: Any) -> Identifier:
        """Return the identifier of a value."""
        return self.name(value)

    # Computations.

    def spread(self, args: Any, results: Any) -> ValueSources:
        """Record that results depend on the sources of the arguments, and return these."""
        before = self.sources(args)
        for each in tensors_in(results):
            place = self._spot(each).place
            self._sources[place] = before | self._sources.get(place, _NOTHING)
        return before

    def derive(self, known: Identifier, before: Tensor, made: Tensor) -> Tensor:
        """Record that a new tensor was made from another one, with the given identifier."""
        place = self._spot(made).place
        self._contents[place] = known
        self._sources[place] = self.sources(before)
        return made

    def note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        known: Identifier,
        result: Any,
        given: list[Tensor] | None = None,
    ) -> Any:
        """Give results identifiers and sources. Tensors that were written to get new ones.

        ``given``: the tensors among the arguments, if the caller has found them.
        """
        title = title_of(func)
        written = _writes(title)
        outputs = [result] if isinstance(result, Tensor) else tensors_in(result)
        if title == "__setitem__":
            outputs.append(args[0])
        if "out" in kwargs:
            outputs += tensors_in(kwargs["out"])
            written = True
        before = self._sources_of(tensors_in((args, kwargs)) if given is None else given)
        if written and ("out" in kwargs or operation_of(title) not in KEEPS_GEOMETRY):
            for each in outputs:
                self._forget(each)
        for at, each in enumerate(outputs):
            _, place, geometry = self._spot(each)
            if place in self._contents and not written:
                continue  # a view, or the argument itself
            self._uniform.pop(place, None)
            if func in MADE_OF_NOTHING or func in FILLING:
                self._note_uniform(func, args, kwargs, each)
                continue
            if func in UNSET:
                self._contents[place] = self.name("unset", geometry)
                self._sources[place] = _NOTHING
                continue
            self._contents[place] = self._result(known, at, self._contents.get(place), geometry)
            sources = self._sources.get(place)
            self._sources[place] = before | sources if sources else before
            if title in COPIES:
                uniform = self._uniform.get(self._spot(args[0]).place)
                if uniform is not None:
                    self._uniform[place] = uniform
        return result

    def _forget(self, tensor: Tensor) -> None:
        """Ask torch again for the shape of a tensor, which may have changed in place."""
        known = self._spots.pop(id(tensor), None)
        if known is not None:
            self._former.append(known)

    def _note_uniform(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        _, place, geometry = self._spot(result)
        if func in FILLING:
            at = FILLING[func]
            value = args[at] if len(args) > at else kwargs.get("fill_value", kwargs.get("value"))
        else:
            value = MADE_OF_NOTHING[func]
        if isinstance(value, Tensor):
            of_number = self.sources(value)
            self._sources[place] = of_number
            if place in self._uniform:
                del self._uniform[place]
            known = self._uniform.get(self._spot(value).place)
            if known is not None:
                self._uniform[place] = known
            form: Any = value
        else:
            self._sources[place] = _NOTHING
            form = value if isinstance(value, complex) else float(value)
            self._uniform[place] = form
        self._contents[place] = self.name("filled", form, geometry)

    # Identifiers.

    def name(self, *parts: Any) -> Identifier:
        """Return the identifier of a computation from its parts, such as a function and
        its arguments.
        """
        weights: list[str] = []
        return self._numbered(self._forms(parts, weights), weights)

    def _result(
        self, known: Identifier, at: int, was: Identifier | None, geometry: Geometry
    ) -> Identifier:
        """Return the identifier of a result. ``was``: what its memory contained before."""
        before: Any = _ABSENT if was is None else self._plain[was.number]
        weights = [each.weight for each in (known, was) if each is not None and each.weight]
        return self._numbered((self._plain[known.number], ("int", at), before, geometry), weights)

    def _numbered(self, form: tuple[Any, ...], weights: list[str]) -> Identifier:
        several = len(weights) > 1 and len(set(weights)) > 1
        if several:
            form = *form, ("weights", *weights)
        number = self._names.get(form)
        if number is None:
            number = self._names[form] = len(self.forms)
            self.forms.append(form)
            self._plain.append(Identifier(number))
        return Identifier(number, weights[0]) if weights and not several else self._plain[number]

    def _forms(self, values: Iterable[Any], weights: list[str]) -> tuple[Any, ...]:
        """Return how values are computed, without the names of weights, which are appended
        to a list.
        """
        forms: list[Any] = []
        for value in values:
            kind = type(value)
            form: Any = value
            if kind in _EXACT:
                form = kind.__name__, value
            elif kind in _INEXACT:
                form = f"number {value!r}"  # the sign of a zero matters, too
            elif kind is Identifier:
                form = self._plain[value.number]
                if value.weight:
                    weights.append(value.weight)
            elif kind in _SEQUENCES:
                form = self._forms(value, weights)
            elif kind is dict:
                form = self._of_entries(value, weights) if value else ()
            elif isinstance(value, Tensor):
                form = self._of_tensor(value, weights)
            elif kind not in _AS_IT_IS:
                form = self._of_other(value, weights)
            forms.append(form)
        return tuple(forms)

    def _of_entries(self, values: Mapping[Any, Any], weights: list[str]) -> Any:
        return tuple(zip(values, self._forms(values.values(), weights), strict=True))

    def _of_tensor(self, tensor: Tensor, weights: list[str]) -> Any:
        _, place, geometry = self._spot(tensor)
        known = self._contents.get(place)
        if known is None:
            known = self._contents[place] = self.name("foreign", id(tensor))
        if known.weight:
            weights.append(known.weight)
        return "tensor", self._plain[known.number], geometry

    def _of_other(self, value: Any, weights: list[str]) -> Any:
        if isinstance(value, list | tuple):
            return self._forms(value, weights)
        if isinstance(value, float | complex):
            return f"number {value!r}"
        if isinstance(value, dict):
            return self._of_entries(value, weights)
        try:
            hash(value)
        except TypeError:
            return repr(value)
        return type(value).__name__, value


@functools.cache
def _writes(title: str) -> bool:
    """Return whether a function with this name writes to its first argument."""
    is_method = title.endswith("_") and not title.endswith("__")
    return is_method or title.startswith("__i") or title in ("__setitem__", "__set__")
