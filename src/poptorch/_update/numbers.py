"""An optimizer's Python code on stand-ins: its numbers are tensors.

While ``Numbers`` is entered, 0-d tensors of float64 stand for the Python numbers that change
between updates: step counts and hyper-parameters. Arithmetic with them makes such stand-ins again.
What asks for their value, or for the value of any other tensor, is noticed: an ``if`` is answered
by ``_update.choices``.

Every value has an identifier, the same for the same computation on the same inputs. Computations
of numbers alone are therefore done once, and two runs can be shown to compute the same. Values of
two weights have equal numbers in their identifiers if one is computed like the other one.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._base.errors import Error

Source = tuple[str, str]  # what a value depends on: role and key
Sources = frozenset[Source]


class Identifier(NamedTuple):
    """What is the same for values that are computed alike."""

    number: int  # the same for two weights whose values are computed in the same way
    weight: str = ""  # path of the one that the value is computed from; "" for none, or for several


class Geometry(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


HYPER, NUMBER, WEIGHT = "hyper", "number", "weight"  # roles
_NOTHING: Sources = frozenset()
Again = Callable[[Identifier, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]

_ITEMS = {Tensor.item, Tensor.tolist}
_TRUTHS = {Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero}
_READS = {
    Tensor.__float__: "float()", Tensor.__int__: "int()", Tensor.__index__: "an index",
    Tensor.__complex__: "complex()", Tensor.numpy: ".numpy()", Tensor.__array__: "numpy.asarray()",
    torch.equal: "torch.equal", Tensor.equal: "equal()", torch.allclose: "torch.allclose",
    Tensor.allclose: "allclose()",
}  # fmt: skip
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MADE_OF_NOTHING = {
    torch.zeros: 0.0, torch.zeros_like: 0.0, torch.ones: 1.0, torch.ones_like: 1.0,
    Tensor.new_zeros: 0.0, Tensor.new_ones: 1.0, Tensor.zero_: 0.0,
}  # fmt: skip
_FILLING = {torch.full: 1, torch.full_like: 1, Tensor.new_full: 2, Tensor.fill_: 1}
_FROM_VALUES = {torch.tensor, torch.as_tensor}
_BOUNDS = {"maximum": "min", "clamp_min": "min", "minimum": "max", "clamp_max": "max"}
_COPIES = {"clone", "contiguous", "to", "float", "double"}
_UNSET = {torch.empty, torch.empty_like, Tensor.new_empty}
_ABOUT = {
    "__get__",
    "__set__",
    "untyped_storage",
    "stride",
    "storage_offset",
    "dim",
    "size",
    "numel",
    "__hash__",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "__format__",
    "__repr__",
}
_SCALED = {
    name: ("value" if name.startswith("addc") else "alpha", 1)
    for name in ("add", "sub", "addcmul", "addcdiv", "addmm", "addmv", "addbmm", "baddbmm", "addr")
}


_ARITHMETIC = {"mul", "div", "true_divide", "truediv", "multiply", "divide", "pow", "rsub", "lerp"}
_ARITHMETIC |= {"subtract", *_SCALED}
_PRODUCTS = {"addmm", "addmv", "addbmm", "baddbmm", "addr"}
_ROUNDED_NUMBERS = {"add", "sub", "subtract", "rsub", "pow"}  # whose numbers torch rounds to halves
_HALVES = {torch.bfloat16, torch.float16}
# The hyper-parameters that schedules change from step to step.
_SCHEDULED = {"lr", "momentum", "betas", "weight_decay"}


class ValueNeeded(Exception):  # noqa: N818 (it says what is the case)
    """Hyper-parameters whose values decide what the step does: they become constants."""

    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(keys)))
        self.keys = keys


def value_needed(what: str, line: str | None) -> Error:
    return Error(
        "The optimizer's step reads the value of a tensor in Python",
        got=what,
        where=line,
        fix=(
            "compute with tensors: torch.where, x ** 0.5 for math.sqrt(x), torch.clamp",
            "or use another optimizer: one of poptorch.optim, or any of torch.optim except LBFGS",
        ),
    )


class Numbers(TorchFunctionMode):
    """The mode. ``decide`` answers a question about a condition; see ``choices``."""

    def __init__(self, decide: Callable[[Tensor, Sources, Identifier], bool]) -> None:
        super().__init__()
        self._decide = decide
        self.again: Again | None = None  # may answer for an operator that another weight had
        self._names: dict[Any, int] = {}
        self.forms: list[Any] = []  # how a value is computed, by its identifier
        self._contents: dict[int, Identifier] = {}  # of storages
        self._sources: dict[int, Sources] = {}  # of storages
        self._uniform: dict[int, complex] = {}  # storages all of whose elements are one number
        self._computed: dict[Identifier, Tensor] = {}  # numbers
        self._kept: list[Tensor] = []  # so that no storage is taken for another one

    # What enters.

    def enter(self, tensor: Tensor, name: str, source: Source) -> Tensor:
        """Let a tensor, or its present value, be an input of the step.

        Inputs of the same name that belong to two weights are for these what the other is for the
        other one.
        """
        self._kept.append(tensor)
        place = place_of(tensor)
        role, key = source
        known = self._name("input of a weight" if role == WEIGHT else "input", name)
        self._contents[place] = known._replace(weight=key) if role == WEIGHT else known
        self._sources[place] = frozenset({source})
        self._uniform.pop(place, None)
        return tensor

    def number(self, tensor: Tensor, name: str, source: Source) -> Tensor:
        """Let a 0-d tensor be an input that stands for a Python number."""
        return _as_number(self.enter(tensor, name, source))

    def uniform(self, tensor: Tensor) -> complex | None:
        """Return the number that all elements are, if that is known."""
        return self._uniform.get(place_of(tensor))

    def sources(self, value: Any) -> Sources:
        found = (self._sources.get(place_of(each), _NOTHING) for each in tensors_in(value))
        return _NOTHING.union(*found)

    def identifier(self, value: Any) -> Identifier:
        """Return what is the same for two values that are computed in the same way."""
        return self._name(value)

    def spread(self, args: Any, results: Any) -> Sources:
        """Let what results depend on be what arguments do; return it."""
        before = self.sources(args)
        for each in tensors_in(results):
            self._kept.append(each)
            place = place_of(each)
            self._sources[place] = before | self._sources.get(place, _NOTHING)
        return before

    # What is computed.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _TRUTHS:
            return self._truth(args[0])
        if func in _ITEMS and isinstance(args[0], Tensor) and args[0].dim() == 0:
            return self._item(args[0])
        if func in _READS or func in _ITEMS:
            self._refuse(args, _READS.get(func, ".tolist()"))
        if func == _DATA:
            return args[0].detach()
        if func == _SET_DATA:
            known = self._name(_title(func), args, kwargs)
            args[0].detach().copy_(args[1])
            self._note(func, args, kwargs, known, args[0])
            return None
        name = getattr(func, "__name__", "")
        if name in _ABOUT:
            return func(*args, **kwargs)
        if name == "__setitem__" and _is_by_mask(*args):
            chosen = self._compute(torch.where, "where", (args[1], args[2], args[0]), {})
            self._compute(Tensor.copy_, "copy_", (args[0], chosen), {})
            return None
        if name.startswith("_foreach_"):
            return _one_by_one(self._answered, name, args, kwargs)
        if func in _FROM_VALUES and isinstance(args[0], int | float):
            kwargs["dtype"] = kwargs.get("dtype") or _usual_type(args[0])
            return self._compute(torch.full, "full", ((), args[0]), kwargs)
        return self._compute(func, name, args, kwargs)

    def _answered(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(func, (), args, kwargs)

    def _compute(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scaled = name.rstrip("_") in _SCALED and any(True for _ in tensors_in(kwargs))
        numbers = scaled or any(map(is_number, tensors_in((args, kwargs))))
        if numbers and is_number(args[0]) and name.endswith("_") and not name.endswith("__"):
            # Python's numbers do not change in place: ``x += 1`` makes another one.
            name = name[:-1]
            func = getattr(Tensor, name)
        known = self._name(_title(func), args, kwargs)
        if numbers:
            return self._with_numbers(func, name, args, kwargs, known)

        def compute() -> Any:
            return self._call(func, args, kwargs)

        return self._note(func, args, kwargs, known, self._once(known, args, kwargs, compute))

    def _once(
        self,
        known: Identifier,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        if self.again is None:
            return compute()
        return self.again(known, args, kwargs, compute)

    def _with_numbers(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Identifier,
    ) -> Any:
        given = list(tensors_in((args, kwargs)))
        if all(map(is_number, given)):
            if known in self._computed:
                return self._computed[known]
            if func in _FROM_VALUES:
                value = args[0] if isinstance(args[0], Tensor) else torch.stack(args[0])
                usual = torch.get_default_dtype() if value.is_floating_point() else value.dtype
                result = value.to(kwargs.get("dtype") or usual, copy=True)
                return self._note(func, args, kwargs, known, result)
            if func in _FILLING:
                return self._filled(func, args, kwargs, known)
            result = self._note(func, args, kwargs, known, self._call(func, args, kwargs))
            made_of_nothing = func in _MADE_OF_NOTHING or func in _UNSET
            if isinstance(result, Tensor) and result.dim() == 0 and not made_of_nothing:
                self._computed[known] = _as_number(result)
                self._kept.append(result)
            return result
        if func in _FILLING:
            return self._filled(func, args, kwargs, known)

        def compute() -> Any:
            return self._mixed(func, name, args, dict(kwargs), given)

        return self._note(func, args, kwargs, known, self._once(known, args, kwargs, compute))

    def _filled(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Identifier
    ) -> Any:
        at = _FILLING[func]
        number = args[at] if len(args) > at else kwargs["fill_value"]
        kwargs.setdefault("dtype", None)
        rest = (*args[:at], 0.0) if len(args) > at else args
        if "fill_value" in kwargs:
            kwargs["fill_value"] = 0.0
        if func is Tensor.fill_:
            return self._note(func, args, {}, known, args[0].copy_(number))
        result = func(*rest, **kwargs)
        result.copy_(number)
        self._note(func, (*rest[:at], number), kwargs, known, result)
        return result

    def _mixed(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
    ) -> Any:
        """Compute with tensors and with numbers: these are of the tensors' type, as in torch."""
        others = [each for each in given if not is_number(each)]
        floating = [each.dtype for each in others if each.dtype.is_floating_point]
        dtype = floating[0] if floating else None
        base = name.rstrip("_")
        in_half = not _HALVES.isdisjoint(floating) and "out" not in kwargs
        if in_half and _operation(name) in _ARITHMETIC:
            return self._rounded_once(func, name, args, kwargs, others)
        if base in _SCALED:
            args, kwargs = self._scaled(name, args, kwargs, dtype)
        if base == "clamp" or base == "clip":
            args = tuple(
                torch.full((), each, dtype=dtype) if isinstance(each, int | float) else each
                for each in args
            )
            kwargs = {
                key: torch.full((), each, dtype=dtype) if isinstance(each, int | float) else each
                for key, each in kwargs.items()
            }
        args, kwargs = _replaced((args, kwargs), lambda each: self._narrow(each, dtype))
        return self._call(func, args, kwargs, given)

    def _rounded_once(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
    ) -> Any:
        """Compute with halves in float32, as torch does where a number is one of Python.

        Products of matrices are faster in halves. Torch rounds them once if their factors are
        Python's: these become constants, unless schedules change them.
        """
        if _operation(name) in _PRODUCTS:
            sources = self.sources([kwargs.get("alpha"), kwargs.get("beta")])
            keys = frozenset(key for role, key in sources if role == HYPER)
            if len(keys) == len(sources) and not any(map(_is_scheduled, keys)):
                raise ValueNeeded(keys)
        in_place = _is_in_place(name)
        dtype = tensors[0].dtype if in_place else _result_type(tensors)
        if dtype in _HALVES and _operation(name) in _ROUNDED_NUMBERS:
            args, kwargs = _replaced((args, kwargs), lambda each: self._narrow(each, dtype))
        args_now, kwargs_now = _replaced((args, kwargs), _widened)
        given = [*tensors_in((args_now, kwargs_now))]
        if in_place:
            name = name.replace("__i", "__", 1) if name.startswith("__") else name.rstrip("_")
            func = getattr(Tensor, name)
        made = self._mixed(func, name, args_now, kwargs_now, given).to(dtype)
        return args[0].copy_(made) if in_place else made

    def _scaled(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let a factor that has to be a Python number scale an operand instead."""
        keyword, at = _SCALED[name.rstrip("_")]
        listed = list(args)
        if isinstance(kwargs.get(keyword), Tensor):
            factor = self._narrow(kwargs.pop(keyword), dtype)
            listed[at] = listed[at] * factor
        if isinstance(kwargs.get("beta"), Tensor):
            beta = kwargs.pop("beta")
            if name.endswith("_"):
                self._refuse((beta,), f"beta of {name}")
            listed[0] = listed[0] * self._narrow(beta, dtype)
        return tuple(listed), kwargs

    def _narrow(self, number: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return a number in a tensor's type, in memory: compilers then compute it once."""
        if not is_number(number) or dtype is None or number.dtype is torch.bool:
            return number
        known = self._name("narrow", number, str(dtype))
        if known not in self._computed:
            made = number.to(dtype, copy=True).as_strided((), ())
            self._kept.append(made)
            self._computed[known] = made
            self._contents[place_of(made)] = known
            self._sources[place_of(made)] = self.sources(number)
        return self._computed[known]

    def _call(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor] | None = None,
    ) -> Any:
        """``given``: the tensors before numbers among them got a type of tensors."""
        try:
            return func(*args, **kwargs)
        except (ValueNeeded, Error):
            raise
        except Exception:
            given = [*tensors_in((args, kwargs))] if given is None else given
            numbers = [each for each in given if is_number(each)]
            if numbers:  # the function may want those of Python: hyper-parameters become constants
                self._refuse(numbers, getattr(func, "__name__", str(func)))
            raise

    def _note(self, func: Any, args: Any, kwargs: Any, known: Identifier, result: Any) -> Any:
        """Give results identifiers and sources; what was written into has new ones."""
        title = _title(func)
        written = title.endswith("_") and not title.endswith("__")
        written |= title.startswith("__i") or title in ("__setitem__", "__set__")
        outputs = [*tensors_in(result)]
        if title == "__setitem__":
            outputs.append(args[0])
        if "out" in kwargs:
            outputs += tensors_in(kwargs["out"])
            written = True
        before = self.sources((args, kwargs))
        for at, each in enumerate(outputs):
            place = place_of(each)
            if place in self._contents and not written:
                continue  # a view, or the argument itself
            self._kept.append(each)
            self._uniform.pop(place, None)
            if func in _MADE_OF_NOTHING or func in _FILLING:
                self._note_uniform(func, args, kwargs, each)
                continue
            if func in _UNSET:
                self._contents[place] = self._name("unset", geometry_of(each))
                self._sources[place] = _NOTHING
                continue
            was = self._contents.get(place)
            self._contents[place] = self._name(known, at, was, geometry_of(each))
            self._sources[place] = before | self._sources.get(place, _NOTHING)
            if title in _COPIES and place_of(args[0]) in self._uniform:
                self._uniform[place] = self._uniform[place_of(args[0])]
        return result

    def _note_uniform(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        place = place_of(result)
        if func in _FILLING:
            at = _FILLING[func]
            value = args[at] if len(args) > at else kwargs.get("fill_value", kwargs.get("value"))
        else:
            value = _MADE_OF_NOTHING[func]
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
        self._contents[place] = self._name("filled", form, geometry_of(result))

    def say_uniform(self, number: Tensor, value: complex) -> None:
        """Tell what a number is at present."""
        self._uniform[place_of(number)] = value

    # What is asked.

    def _item(self, tensor: Tensor) -> Tensor:
        if is_number(tensor):
            return tensor
        known = self._name("item", tensor)
        if known not in self._computed:
            made = tensor.to(torch.float64, copy=True)
            self._kept.append(made)
            self._computed[known] = _as_number(made)
            self._contents[place_of(made)] = known
            self._sources[place_of(made)] = self.sources(tensor)
            if place_of(tensor) in self._uniform:
                self._uniform[place_of(made)] = self._uniform[place_of(tensor)]
        return self._computed[known]

    def _truth(self, tensor: Tensor) -> bool:
        sources = self.sources(tensor)
        if tensor.numel() != 1:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
        hypers = frozenset(key for role, key in sources if role == HYPER)
        if hypers == frozenset(key for _, key in sources) and sources:
            raise ValueNeeded(hypers)
        return self._decide(tensor, sources, self.identifier(tensor))

    def _refuse(self, value: Any, what: str) -> None:
        sources = self.sources(value)
        if sources and all(role == HYPER for role, _ in sources):
            raise ValueNeeded(frozenset(key for _, key in sources))
        on = sorted(key for role, key in sources if role != HYPER)
        of = ", ".join(on[:3]) or "a tensor"
        raise value_needed(f"{what}, of what {of} is at each update", None)

    # Identifiers.

    def _name(self, *parts: Any) -> Identifier:
        weights: list[str] = []
        form: Any = tuple(self._form(part, weights) for part in parts)
        several = len(set(weights)) > 1
        if several:
            form = *form, ("weights", *weights)
        number = self._names.get(form)
        if number is None:
            number = self._names[form] = len(self.forms)
            self.forms.append(form)
        return Identifier(number, weights[0] if weights and not several else "")

    def _form(self, value: Any, weights: list[str]) -> Any:
        """Return how a value is made, but for names of weights, which are added to a list."""
        if isinstance(value, Tensor):
            place = place_of(value)
            if place not in self._contents:
                self._kept.append(value)
                self._contents[place] = self._name("foreign", id(value))
            return "tensor", self._form(self._contents[place], weights), geometry_of(value)
        if isinstance(value, Identifier):
            if value.weight:
                weights.append(value.weight)
            return Identifier(value.number)
        if isinstance(value, str | Geometry):
            return value
        if isinstance(value, float | complex):
            return f"number {value!r}"  # of zeros, too, the sign matters
        if isinstance(value, list | tuple):
            return tuple([self._form(each, weights) for each in value])
        if isinstance(value, dict):
            return tuple([(key, self._form(each, weights)) for key, each in value.items()])
        try:
            hash(value)
        except TypeError:
            return repr(value)
        return type(value).__name__, value


def _operation(name: str) -> str:
    """Return what functions, methods, and Python's operators have in common: ``__imul__``, mul."""
    if not name.startswith("__"):
        return name.rstrip("_")
    plain = name.strip("_")
    return plain[1:] if plain[:1] in ("i", "r") and plain[1:] in _ARITHMETIC else plain


def _is_in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _is_scheduled(name: str) -> bool:
    return not _SCHEDULED.isdisjoint(name.split("."))


def _result_type(tensors: Sequence[Tensor]) -> torch.dtype:
    dtypes = [each.dtype for each in tensors if each.dim()] or [each.dtype for each in tensors]
    return functools.reduce(torch.promote_types, dtypes)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in _HALVES else tensor


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and getattr(value, "stands_for_a_number", False)


def _as_number(tensor: Tensor) -> Tensor:
    tensor.stands_for_a_number = True  # type: ignore[attr-defined]
    return tensor


def place_of(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def geometry_of(tensor: Tensor) -> Geometry:
    offset = int(tensor.storage_offset())
    return Geometry(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)


def _usual_type(value: float) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.get_default_dtype()


def _is_by_mask(target: Tensor, index: Any, value: Any) -> bool:
    is_mask = isinstance(index, Tensor) and index.dtype is torch.bool
    one = not isinstance(value, Tensor) or value.dim() == 0
    return is_mask and one and index.shape == target.shape


def _title(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def _replaced(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_replaced(each, function) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, function) for key, each in value.items()}
    return value


def _one_by_one(
    do: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Do for each tensor what torch's ``_foreach`` functions do for lists."""
    operation = name.removeprefix("_foreach_").rstrip("_")
    listed = dict(kwargs)
    if operation in ("addcmul", "addcdiv") and len(args) == 4:
        args, listed["value"] = args[:3], args[3]
    if "scalars" in listed:
        listed["value"] = listed.pop("scalars")

    def own(value: Any, at: int) -> Any:
        return value[at] if isinstance(value, list | tuple) else value

    return [
        _one(
            do,
            operation,
            name.endswith("_"),
            [own(each, at) for each in args],
            {key: own(each, at) for key, each in listed.items()},
        )
        for at in range(len(args[0]))
    ]


def _one(
    do: Callable[..., Any],
    operation: str,
    in_place: bool,
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    if operation == "norm":
        return do(torch.linalg.vector_norm, *args, **named)
    if operation in _BOUNDS:
        bound = args[1] if len(args) > 1 else next(iter(named.values()))
        made = do(Tensor.clamp, args[0], **{_BOUNDS[operation]: bound})
        return do(Tensor.copy_, args[0], made) if in_place else made
    return do(getattr(Tensor, f"{operation}_" if in_place else operation), *args, **named)


# Functions of Python that take numbers only.


_MATH = {
    "sqrt": torch.sqrt, "exp": torch.exp, "expm1": torch.expm1, "log": torch.log,
    "log1p": torch.log1p, "log2": torch.log2, "log10": torch.log10, "floor": torch.floor,
    "ceil": torch.ceil, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh,
    "fabs": torch.abs, "isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite,
    "trunc": torch.trunc, "erf": torch.erf,
}  # fmt: skip


def _least(a: Any, b: Any) -> Any:
    return torch.where(b < a, b, a)


def _most(a: Any, b: Any) -> Any:
    return torch.where(b > a, b, a)


def _power(base: Any, exponent: Any) -> Any:
    return base**exponent


def _of_tensors(usual: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return ours(*args) if any(isinstance(a, Tensor) for a in args) else usual(*args)

    return call


def _extreme(usual: Callable[..., Any], ours: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        values = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        if named or not any(isinstance(v, Tensor) and v.dim() == 0 for v in values):
            return usual(*args, **named)
        result, *rest = values
        for each in rest:
            result = ours(result, each)
        return result

    return call


@contextlib.contextmanager
def numbers_functions() -> Iterator[None]:
    """Let ``math``'s functions, ``min`` and ``max`` take tensors that stand for numbers."""
    stand_ins: list[tuple[Any, str, Callable[..., Any]]] = [
        (math, name, _of_tensors(getattr(math, name), ours)) for name, ours in _MATH.items()
    ]
    stand_ins.append((math, "pow", _of_tensors(math.pow, _power)))
    stand_ins.append((builtins, "min", _extreme(min, _least)))
    stand_ins.append((builtins, "max", _extreme(max, _most)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    try:
        for owner, name, ours in stand_ins:
            setattr(owner, name, ours)
        yield
    finally:
        for owner, name, usual in before:
            setattr(owner, name, usual)
