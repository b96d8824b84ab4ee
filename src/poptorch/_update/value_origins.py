"""Record where the values of a step come from: what each depends on, and how it is computed.

Every value has an identifier, which is equal for equal computations on equal inputs. Computations
with only numbers are therefore done once, and two runs can be shown to compute the same.
Identifiers of values of two weights have equal numbers if the values are computed in the same way.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .known_functions import COPIES, FILLING, MADE_OF_NOTHING, UNSET, title_of
from .step_values import Geometry, as_number, geometry_of, place_of, tensors_in, unobserved

ValueSource = tuple[str, str]  # what a value depends on: role and key
ValueSources = frozenset[ValueSource]
HYPER, NUMBER, WEIGHT = "hyper", "number", "weight"  # roles
_NOTHING: ValueSources = frozenset()
# The usual types of arguments, which are recognised without a look at their base classes.
_AS_IT_IS, _SEQUENCES = frozenset({str, Geometry}), frozenset({list, tuple})
_EXACT, _INEXACT = frozenset({int, bool, type(None), torch.dtype}), frozenset({float, complex})


class Identifier(NamedTuple):
    """Identifies a computation."""

    number: int  # equal for two weights whose values are computed in the same way
    # path of the only weight that the value is computed from; "" for none or several
    weight: str = ""


class Origins:
    """The sources and identifiers of all tensors in some runs, by their memory."""

    def __init__(self) -> None:
        self.forms: list[Any] = []  # how a value is computed, by the number of its identifier
        self._plain: list[Identifier] = []  # identifiers without a weight, by number
        self._names: dict[Any, int] = {}
        self._contents: dict[int, Identifier] = {}  # by storage
        self._sources: dict[int, ValueSources] = {}  # by storage
        self._uniform: dict[int, complex] = {}  # storages in which all elements are the same number
        self._kept: list[Tensor] = []  # keeps storages alive, so that their ids stay unique

    # Inputs.

    def enter(self, tensor: Tensor, name: str, source: ValueSource) -> Tensor:
        """Make a tensor, or its present value, an input of the step.

        Two weights may have inputs with the same name. These inputs correspond to each other.
        """
        self.keep(tensor)
        with unobserved():
            place = place_of(tensor)
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

    def keep(self, tensor: Tensor) -> None:
        self._kept.append(tensor)

    def mark_uniform(self, number: Tensor, value: complex) -> None:
        """Record the present value of a number."""
        with unobserved():
            self._uniform[place_of(number)] = value

    # Queries.

    def uniform(self, tensor: Tensor) -> complex | None:
        """Return the number that all elements are equal to, if it is known."""
        with unobserved():
            return self._uniform.get(place_of(tensor))

    def sources(self, value: Any) -> ValueSources:
        with unobserved():
            return self._sources_of(tensors_in(value))

    def _sources_of(self, tensors: list[Tensor]) -> ValueSources:
        found = [self._sources.get(place_of(each), _NOTHING) for each in tensors]
        return found[0] if len(found) == 1 else _NOTHING.union(*found)

    def identifier(self, value: Any) -> Identifier:
        """Return the identifier of a value."""
        return self.name(value)

    # Computations.

    def spread(self, args: Any, results: Any) -> ValueSources:
        """Record that results depend on the sources of the arguments, and return these."""
        before = self.sources(args)
        for each in tensors_in(results):
            self.keep(each)
            place = place_of(each)
            self._sources[place] = before | self._sources.get(place, _NOTHING)
        return before

    def derive(self, known: Identifier, before: Tensor, made: Tensor) -> Tensor:
        """Record that a new tensor was made from another one, with the given identifier."""
        self.keep(made)
        self._contents[place_of(made)] = known
        self._sources[place_of(made)] = self.sources(before)
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
        with unobserved():
            title = title_of(func)
            written = _writes(title)
            outputs = [result] if isinstance(result, Tensor) else tensors_in(result)
            if title == "__setitem__":
                outputs.append(args[0])
            if "out" in kwargs:
                outputs += tensors_in(kwargs["out"])
                written = True
            before = self._sources_of(tensors_in((args, kwargs)) if given is None else given)
            for at, each in enumerate(outputs):
                place = place_of(each)
                if place in self._contents and not written:
                    continue  # a view, or the argument itself
                self._kept.append(each)
                self._uniform.pop(place, None)
                if func in MADE_OF_NOTHING or func in FILLING:
                    self._note_uniform(func, args, kwargs, each)
                    continue
                if func in UNSET:
                    self._contents[place] = self.name("unset", geometry_of(each))
                    self._sources[place] = _NOTHING
                    continue
                was = self._contents.get(place)
                self._contents[place] = self._identified((known, at, was, geometry_of(each)))
                self._sources[place] = before | self._sources.get(place, _NOTHING)
                if title in COPIES and place_of(args[0]) in self._uniform:
                    self._uniform[place] = self._uniform[place_of(args[0])]
        return result

    def _note_uniform(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        place = place_of(result)
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
            known = self._uniform.get(place_of(value))
            if known is not None:
                self._uniform[place] = known
            form: Any = value
        else:
            self._sources[place] = _NOTHING
            form = value if isinstance(value, complex) else float(value)
            self._uniform[place] = form
        self._contents[place] = self.name("filled", form, geometry_of(result))

    # Identifiers.

    def name(self, *parts: Any) -> Identifier:
        """Return the identifier of a computation from its parts, such as a function and
        its arguments.
        """
        with unobserved():
            return self._identified(parts)

    def _identified(self, parts: tuple[Any, ...]) -> Identifier:
        weights: list[str] = []
        form: Any = self._form(parts, weights)
        several = len(weights) > 1 and len(set(weights)) > 1
        if several:
            form = *form, ("weights", *weights)
        number = self._names.get(form)
        if number is None:
            number = self._names[form] = len(self.forms)
            self.forms.append(form)
            self._plain.append(Identifier(number))
        return Identifier(number, weights[0]) if weights and not several else self._plain[number]

    def _form(self, value: Any, weights: list[str]) -> Any:
        """Return how a value is computed, without the names of weights, which are appended
        to a list.
        """
        kind = type(value)
        if kind in _AS_IT_IS:
            return value
        if kind in _SEQUENCES:
            return tuple(
                [each if type(each) in _AS_IT_IS else self._form(each, weights) for each in value]
            )
        if kind is dict:
            if not value:
                return ()
            return tuple([(key, self._form(each, weights)) for key, each in value.items()])
        if kind in _EXACT:
            return kind.__name__, value
        if kind in _INEXACT:
            return f"number {value!r}"  # the sign of a zero matters, too
        if kind is Identifier:
            if value.weight:
                weights.append(value.weight)
            return self._plain[value.number]
        if isinstance(value, Tensor):
            place = place_of(value)
            known = self._contents.get(place)
            if known is None:
                self.keep(value)
                known = self._contents[place] = self.name("foreign", id(value))
            if known.weight:
                weights.append(known.weight)
            return "tensor", self._plain[known.number], geometry_of(value)
        if isinstance(value, list | tuple):
            return tuple([self._form(each, weights) for each in value])
        if isinstance(value, float | complex):
            return f"number {value!r}"
        if isinstance(value, dict):
            return tuple([(key, self._form(each, weights)) for key, each in value.items()])
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
