"""Match the arguments of a call with the signature of ``forward``, and flatten them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._base import nested_values
from ..._base.errors import AssertionFailure, Error

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # by position and by name

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, eq=False)
class BoundArguments:
    """The arguments of one call, flattened."""

    tensors: list[torch.Tensor]
    parts: tuple[
        tuple[str, nested_values.Structure], ...
    ]  # values by parameter name, including defaults
    by_name: frozenset[str] = frozenset()  # names of arguments that were passed as keywords

    @property
    def paths(self) -> list[str]:
        """Return the name of each tensor for error messages."""
        return [path for _, structure in self.parts for path in structure.paths]

    @property
    def constants(self) -> list[tuple[str, Any]]:
        return [each for _, structure in self.parts for each in structure.constants]


class Signature:
    """The signature of the original ``forward``, which is read when the model is wrapped."""

    def __init__(self, forward: Callable[..., Any], model: str) -> None:
        self._model = model
        try:
            parameters = tuple(inspect.signature(forward).parameters.values())
        except (TypeError, ValueError):  # builtins without a signature
            parameters = (
                inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
            )
        self._parameters = {p.name: p for p in parameters}
        self._positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        kinds = {p.kind: p.name for p in parameters}
        self._var_positional = kinds.get(inspect.Parameter.VAR_POSITIONAL)
        self._var_keyword = kinds.get(inspect.Parameter.VAR_KEYWORD)

    def bind(self, arguments: Arguments, like: BoundArguments | None = None) -> BoundArguments:
        """Match and flatten the arguments of a call. Keys of dicts get the order they have in
        ``like``, the compiled call.
        """
        args, kwargs = arguments
        known = dict(like.parts) if like else {}
        tensors: list[torch.Tensor] = []
        parts = []
        for name, value in self._match(args, kwargs).items():
            own, structure = nested_values.flatten(value, name, known.get(name))
            tensors += own
            parts.append((name, structure))
        return BoundArguments(
            tensors, tuple(parts), frozenset(self._parameters.keys() & kwargs.keys())
        )

    def _match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(zip(self._positional, args, strict=False))
        rest = args[len(self._positional) :]
        if rest and self._var_positional is None:
            self._fail(
                "Too many arguments provided",
                f"{len(args)} positional arguments for {len(self._positional)} parameters",
            )
        if "self" in kwargs:  # torch.nn.Module itself does not accept this keyword either
            self._fail("'self' is not a valid parameter", "self=...")
        extra: dict[str, Any] = {}
        for name, value in kwargs.items():
            parameter = self._parameters.get(name)
            if name in values:
                self._fail(f"Parameter '{name}' was passed more than once", repr(name))
            if parameter is None or parameter.kind not in _BY_NAME:
                if self._var_keyword is None:
                    self._fail(f"'{name}' is not a valid parameter", f"{name}=...")
                extra[name] = value
            else:
                values[name] = value
        result: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            if name == self._var_positional:
                result["*" + name] = rest
            elif name == self._var_keyword:
                result["**" + name] = extra
            elif name in values:
                result[name] = values[name]
            elif parameter.default is not inspect.Parameter.empty:
                result[name] = parameter.default
            else:
                raise Error(
                    f"Mandatory parameter '{name}' missing",
                    got=f"a call of {self._model}{self}",
                    fix=f"pass a value for {name}",
                )
        return result

    def _fail(self, title: str, got: str) -> None:
        raise AssertionFailure(
            title,
            got=f"{got} in a call of {self._model}{self}",
            fix=f"call the model as {self._model}{self}",
        )

    def __str__(self) -> str:
        return f"({', '.join(map(str, self._parameters.values()))})"

    def caller(
        self, forward: Callable[..., Any], bound: BoundArguments
    ) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Return a function that calls forward with the given tensors in place of those in
        ``bound``.
        """

        def call(tensors: Sequence[torch.Tensor]) -> Any:
            args, kwargs = self.assemble(self.given(bound, tensors))
            return forward(*args, **kwargs)

        return call

    def assemble(self, values: Mapping[str, Any]) -> Arguments:
        """Return the positional and the keyword arguments of a call.

        Functions that wrap ``forward``, such as hooks and decorators, can distinguish these.
        Arguments therefore stay positional or keyword arguments, and defaults are not passed.

        Args:
            values: by parameter; ``=name`` for one that is passed as a keyword, ``*name`` and
                ``**name`` for those that take any number.
        """
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        # defaults, which are only needed before another positional argument
        skipped: list[Any] = []
        rest = dict(values)
        for name, parameter in self._parameters.items():
            own: tuple[Any, ...] = ()
            if name == self._var_positional:
                own = rest.pop(f"*{name}", ())
            elif name == self._var_keyword:
                kwargs |= rest.pop(f"**{name}", {})
            elif f"={name}" in rest:
                kwargs[name] = rest.pop(f"={name}")
            elif name in rest and parameter.kind in _POSITIONAL:
                own = (rest.pop(name),)
            elif name in rest:
                kwargs[name] = rest.pop(name)
            elif parameter.default is inspect.Parameter.empty:
                raise KeyError(name)
            elif parameter.kind in _POSITIONAL:
                skipped.append(parameter.default)
            if own:
                args += [*skipped, *own]
                skipped = []
        if rest:
            raise KeyError(next(iter(rest)))
        return tuple(args), kwargs

    def takes_tensors_alone(self, bound: BoundArguments) -> bool:
        """Return whether a call that passes only the tensors, in their order, is equal to
        this one.
        """
        return self._equals(bound, (tuple(bound.tensors), {}))

    def names_of_tensors(self, bound: BoundArguments) -> tuple[str, ...]:
        """Return the parameters of the tensors, if a call that passes only the tensors, by name,
        is equal to this one.
        """
        names = tuple(name for name, structure in bound.parts if structure.paths == (name,))
        if len(names) != len(bound.tensors):
            return ()
        equals = self._equals(bound, ((), dict(zip(names, bound.tensors, strict=True))))
        return names if equals else ()

    def count_positional(self, names: Sequence[str]) -> int:
        """Return how many of these parameters, from the first one on, a call can pass by
        position.
        """
        pairs = zip(names, self._positional, strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def _equals(self, bound: BoundArguments, arguments: Arguments) -> bool:
        try:
            other = self.bind(arguments)
        except Error:
            return False
        pairs = zip(bound.parts, other.parts, strict=True)
        return not any(
            nested_values.first_difference(ours, theirs) for (_, ours), (_, theirs) in pairs
        )

    def given(
        self, bound: BoundArguments, tensors: Sequence[torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Return what ``assemble`` needs for such a call, with its tensors or others."""
        remaining = iter(bound.tensors if tensors is None else tensors)
        values: dict[str, Any] = {}
        for name, structure in bound.parts:
            value = structure.unflatten([next(remaining) for _ in structure.paths])
            parameter = self._parameters.get(name)
            if parameter is None or value is not parameter.default:
                values[f"={name}" if name in bound.by_name else name] = value
        return values
