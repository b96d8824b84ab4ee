"""Run an optimizer's Python code with tensors in place of its numbers.

While ``Numbers`` is entered, 0-d tensors of float64 replace the Python numbers that change between
updates: step counts and hyper-parameters. Arithmetic with them makes more such tensors. Code that
reads their value, or the value of any other tensor, is intercepted. If the value decides an ``if``,
``_update.value_branches`` chooses the branch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._base.errors import Error
from .arithmetic import Arithmetic
from .known_functions import (
    ABOUT,
    FILLING,
    FROM_VALUES,
    GET_DATA,
    GET_GRADIENT,
    ITEMS,
    MADE_OF_NOTHING,
    READS,
    SCALED,
    SET_DATA,
    TRUTHS,
    UNSET,
    WHOLE,
    by_position,
    operation_of,
    title_of,
)
from .lists_of_tensors import one_by_one
from .memory_reads import MemoryReads
from .step_value_reads import Restart, ValueNeeded, foreign_tensor
from .step_values import (
    ATOMS,
    MARK,
    as_number,
    is_number,
    is_whole,
    replaced,
    tensors_in,
)
from .traced_numbers import TracedNumber, holds_numbers, read_value, seen_by_steps, with_tensors
from .value_origins import HYPER, Identifier, Origins, ValueSources

_MAY_HOLD = frozenset({TracedNumber, list, tuple})
_QUESTIONS = ABOUT - MemoryReads.FUNCTIONS
Memo = Callable[[Any, Identifier, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]


class Numbers(TorchFunctionMode):
    """The mode. ``decide`` answers a question about a condition; see ``value_branches``."""

    def __init__(self, decide: Callable[[Tensor, ValueSources, Identifier], bool]) -> None:
        super().__init__()
        self._decide = decide
        self.memo: Memo | None = None  # may answer for an operator that another weight had
        self.hosts: dict[int, Tensor] = {}  # traced parameters by the id of the user's tensor
        self.reached: set[int] = set()  # identities of those that code has used
        self.without_values: type | None = None  # class of all tensors of a step, if it is known
        self.memory_reads: MemoryReads | None = None
        # returns a context for operators on some tensors
        self.within: Callable[[Any], contextlib.AbstractContextManager[None]] | None = None
        # raised by a call, whether or not the user's code handled the exception
        self.refused: Error | Restart | None = None
        self.origins = Origins()
        self._arithmetic = Arithmetic(self.origins)
        self._computed: dict[Identifier, Tensor] = {}  # numbers that were computed before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if len(args) == 1 and type(args[0]) is self.without_values and not kwargs:
            # Most calls ask something about a tensor of the step.
            about = getattr(func, "__name__", "") in _QUESTIONS and func != GET_DATA
            if about and id(args[0]) not in self.hosts:
                return func(*args)
        kwargs = kwargs or {}
        kinds = {*map(type, args), *map(type, kwargs.values())}
        try:
            if not _MAY_HOLD.isdisjoint(kinds) and holds_numbers((*args, *kwargs.values())):
                args, kwargs = with_tensors(args), with_tensors(kwargs)
                return seen_by_steps(self._called(func, args, kwargs))
            result = self._called(func, args, kwargs)
            return seen_by_steps(result) if func in ITEMS else result
        except (Error, Restart) as error:
            self.refused = error
            raise

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Answer a call in which tensors represent numbers."""
        name = getattr(func, "__name__", "")
        if name in MemoryReads.FUNCTIONS and self.memory_reads is not None:
            self.memory_reads.check(name, tensors_in((args, kwargs)))
        kwargs = dict(kwargs)
        if not args:
            args, kwargs = by_position(kwargs)
        args, kwargs, given = self._of_run(func, args, kwargs)
        if func is nn.init.constant_:
            return self._answered(Tensor.fill_, args[0], kwargs["val"])
        if func is read_value:
            self._arithmetic.refuse(*args)
        if func in TRUTHS:
            return self._truth(args[0])
        if func in ITEMS and isinstance(args[0], Tensor) and args[0].dim() == 0:
            return self._item(args[0])
        if func in READS or func in ITEMS:
            self._arithmetic.refuse(args, READS.get(func, ".tolist()"))
        if func == GET_DATA:
            return args[0].detach()
        if func == SET_DATA:
            known = self.origins.name(title_of(func), args, kwargs)
            args[0].detach().copy_(args[1])
            self.origins.note(func, args, kwargs, known, args[0])
            return None
        if name in ABOUT:
            return func(*args, **kwargs)
        if name == "__setitem__" and _is_by_mask(*args):
            chosen = self._compute(torch.where, "where", (args[1], args[2], args[0]), {})
            self._compute(Tensor.copy_, "copy_", (args[0], chosen), {})
            return None
        if name.startswith("_foreach_"):
            return one_by_one(self._answered, name, args, kwargs)
        if func in FROM_VALUES and isinstance(args[0], int | float):
            kwargs["dtype"] = kwargs.get("dtype") or _usual_type(args[0])
            return self._compute(torch.full, "full", ((), args[0]), kwargs)
        return self._compute(func, name, args, kwargs, given)

    def _answered(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self._called(func, args, kwargs)

    # The user's own tensors, which code can reach through a model or a closure.

    def _of_run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Return arguments in which the tensors of the step replace the user's parameters, and the
        tensors among them.
        """
        hosts, kind = self.hosts, self.without_values
        given: list[Any] = []
        for each in (*args, *kwargs.values()):  # nearly all calls have only tensors of the step
            if type(each) is kind and id(each) not in hosts:
                given.append(each)
            elif type(each) not in ATOMS:
                break
        else:
            return args, kwargs, given
        given = tensors_in((*args, *kwargs.values()))
        if not any(map(self._is_host, given)):
            return args, kwargs, given
        self._check_hosts(func, given)
        args, kwargs = replaced((args, kwargs), lambda each: self.hosts.get(id(each), each))
        return args, kwargs, tensors_in((args, kwargs))

    def _is_host(self, tensor: Tensor) -> bool:
        kind = self.without_values
        return id(tensor) in self.hosts or (kind is not None and not isinstance(tensor, kind))

    def _check_hosts(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors whose values, or gradients, the program would take as constants."""
        self.reached.update(id(each) for each in tensors if id(each) in self.hosts)
        strangers = [each for each in tensors if self._is_host(each) and id(each) not in self.hosts]
        if not strangers or (title_of(func) in ABOUT and func != GET_GRADIENT):
            return
        if func == GET_GRADIENT and not strangers[0].requires_grad:
            return
        raise foreign_tensor(strangers[0], is_gradient=func == GET_GRADIENT)

    # Computations.

    def _compute(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor] | None = None,
    ) -> Any:
        """``given``: the tensors among the arguments, if the caller has found them."""
        given = tensors_in((args, kwargs)) if given is None else given
        numbers = bool(kwargs) and name.rstrip("_") in SCALED and bool(tensors_in(kwargs))
        for each in given:
            numbers = numbers or MARK in vars(each)
        if (
            numbers
            and args
            and is_number(args[0])
            and name.endswith("_")
            and not name.endswith("__")
        ):
            # Python numbers do not change in place: ``x += 1`` makes a new number.
            name = name[:-1]
            func = getattr(Tensor, name)
        known = self.origins.name(name or title_of(func), args, kwargs)
        if numbers:
            return self._with_numbers(func, name, args, kwargs, known, given)

        def compute() -> Any:
            with self.within(given) if self.within is not None else contextlib.nullcontext():
                return self._arithmetic.call(func, args, kwargs)

        return self.origins.note(
            func, args, kwargs, known, self._once(func, known, args, kwargs, compute), given
        )

    def _once(
        self,
        func: Any,
        known: Identifier,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        if self.memo is None:
            return compute()
        return self.memo(func, known, args, kwargs, compute)

    def _with_numbers(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Identifier,
        given: list[Tensor],
    ) -> Any:
        if all(map(is_number, given)):
            return self._of_numbers(func, args, kwargs, known, given)
        if func in FILLING:
            return self._filled(func, args, kwargs, known)

        def compute() -> Any:
            return self._arithmetic.mixed(func, name, args, dict(kwargs), given)

        return self.origins.note(
            func, args, kwargs, known, self._once(func, known, args, kwargs, compute), given
        )

    def _of_numbers(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Identifier,
        given: list[Tensor],
    ) -> Any:
        """Compute with numbers alone. The result is a number if torch returns a scalar."""
        if known in self._computed:
            return self._computed[known]
        if func in FROM_VALUES:
            value = args[0] if isinstance(args[0], Tensor) else torch.stack(args[0])
            usual = torch.get_default_dtype() if value.is_floating_point() else value.dtype
            result = value.to(kwargs.get("dtype") or usual, copy=True)
            return self.origins.note(func, args, kwargs, known, result)
        if func in FILLING:
            return self._filled(func, args, kwargs, known)

        def compute() -> Any:
            return self._arithmetic.call(func, args, kwargs)

        result = self._once(func, known, args, kwargs, compute)
        self.origins.note(func, args, kwargs, known, result, given)
        made_of_nothing = func in MADE_OF_NOTHING or func in UNSET
        if isinstance(result, Tensor) and result.dim() == 0 and not made_of_nothing:
            operands = (*args, *kwargs.values())
            keeps = operation_of(title_of(func)) in WHOLE and all(map(is_whole, operands))
            self._computed[known] = as_number(result, whole=keeps)
        return result

    def _filled(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Identifier
    ) -> Any:
        at = FILLING[func]
        number = args[at] if len(args) > at else kwargs["fill_value"]
        kwargs.setdefault("dtype", None)
        rest = (*args[:at], 0.0) if len(args) > at else args
        if "fill_value" in kwargs:
            kwargs["fill_value"] = 0.0
        if func is Tensor.fill_:
            return self.origins.note(func, args, {}, known, args[0].copy_(number))
        result = func(*rest, **kwargs)
        result.copy_(number)
        self.origins.note(func, (*rest[:at], number), kwargs, known, result)
        return result

    # Questions.

    def _item(self, tensor: Tensor) -> Tensor:
        if is_number(tensor):
            return tensor
        known = self.origins.name("item", tensor)
        if known not in self._computed:

            def read() -> Any:
                return tensor.to(torch.float64, copy=True)

            made = self.origins.derive(
                known, tensor, self._once(Tensor.item, known, (tensor,), {}, read)
            )
            fractional = tensor.dtype.is_floating_point or tensor.dtype is torch.bool
            self._computed[known] = as_number(made, whole=not fractional)
            value = self.origins.uniform(tensor)
            if value is not None:
                self.origins.mark_uniform(made, value)
        return self._computed[known]

    def _truth(self, tensor: Tensor) -> bool:
        sources = self.origins.sources(tensor)
        if tensor.numel() != 1:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
        hypers = frozenset(key for role, key in sources if role == HYPER)
        if hypers == frozenset(key for _, key in sources) and sources:
            raise ValueNeeded(hypers)
        return self._decide(tensor, sources, self.origins.identifier(tensor))


def _usual_type(value: float) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.get_default_dtype()


def _is_by_mask(target: Tensor, index: Any, value: Any) -> bool:
    is_mask = isinstance(index, Tensor) and index.dtype is torch.bool
    one = not isinstance(value, Tensor) or value.dim() == 0
    return is_mask and one and index.shape == target.shape
