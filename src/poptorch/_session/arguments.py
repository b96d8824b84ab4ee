"""Arguments of a call: matched with the signature, flattened, compared with the compiled ones.

Source: PopTorch user guide, "Features".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._base import log, source, trees
from .._base.errors import AssertionFailure, Error
from .._capture import narrowed
from .._ir import slots
from .._ir.slot import Slot
from .._ir.spec import Loops

_RENEW = (
    "wrap the model again, or call destroy() on this wrapper, to compile for these inputs",
    "pass inputs of the compiled kind",
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, eq=False)
class Bound:
    """The arguments of one call, flattened.

    Attributes:
        tensors: every tensor, in the order of the signature.
        parts: per parameter its name and structure.
    """

    tensors: list[torch.Tensor]
    parts: tuple[tuple[str, trees.Structure], ...]

    @property
    def paths(self) -> list[str]:
        """What error messages call each tensor."""
        return [path for _, structure in self.parts for path in structure.paths]


@dataclass(frozen=True, eq=False)
class CompiledInputs:
    """The arguments that a model was compiled for, defaults included.

    Attributes:
        args: in the order of the signature; tensors have the compiled shape and dtype.
    """

    args: tuple[Any, ...]


class Signature:
    """The signature of the original ``forward``, captured when the model is wrapped."""

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

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Bound | None = None
    ) -> Bound:
        """Match a call with the signature and flatten it.

        Args:
            args, kwargs: the call.
            like: the compiled arguments, for the order of dict keys.

        Raises:
            AssertionFailure: too many arguments, an unknown keyword, or one given twice.
            Error: a required parameter is missing.
        """
        known = dict(like.parts) if like else {}
        tensors: list[torch.Tensor] = []
        parts = []
        for name, value in self._match(args, kwargs).items():
            found, structure = trees.flatten(value, name, known.get(name))
            tensors += found
            parts.append((name, structure))
        return Bound(tensors, tuple(parts))

    def _match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(zip(self._positional, args, strict=False))
        rest = args[len(self._positional) :]
        if rest and self._var_positional is None:
            self._fail(
                "Too many arguments provided",
                f"{len(args)} positional arguments for {len(self._positional)} parameters",
            )
        extra: dict[str, Any] = {}
        for name, value in kwargs.items():
            parameter = self._parameters.get(name)
            if name in values:
                self._fail(f"Parameter '{name}' was passed more than once", repr(name))
            if parameter is None or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                if self._var_keyword is None:
                    self._fail(f"'{name}' is not a valid parameter", f"{name}=...")
                extra[name] = value
            else:
                values[name] = value
        return self._complete(values, rest, extra)

    def _complete(
        self, values: dict[str, Any], rest: tuple[Any, ...], extra: dict[str, Any]
    ) -> dict[str, Any]:
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
                    where=source.calling_line(),
                    fix=f"pass a value for {name}",
                )
        return result

    def _fail(self, title: str, got: str) -> None:
        raise AssertionFailure(
            title,
            got=f"{got} in a call of {self._model}{self}",
            where=source.calling_line(),
            fix=f"call it as {self._model}{self}",
        )

    def __str__(self) -> str:
        return f"({', '.join(map(str, self._parameters.values()))})"

    def caller(
        self, forward: Callable[..., Any], bound: Bound
    ) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Return a function that calls forward with the tensors in place of ``bound``'s."""
        sizes = [len(structure.paths) for _, structure in bound.parts]

        def call(tensors: Sequence[torch.Tensor]) -> Any:
            args: list[Any] = []
            kwargs: dict[str, Any] = {}
            start = 0
            for (name, structure), size in zip(bound.parts, sizes, strict=True):
                value = structure.unflatten(tensors[start : start + size])
                start += size
                if name.startswith("**"):
                    kwargs.update(value)
                elif name.startswith("*"):
                    args.extend(value)
                elif self._parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
                    kwargs[name] = value
                else:
                    args.append(value)
            return forward(*args, **kwargs)

        return call


class Inputs:
    """The compiled kind of inputs: checks later calls and prepares their tensors for the device."""

    def __init__(self, bound: Bound, loops: Loops, narrow_64bit: bool) -> None:
        self.bound = bound
        self._narrow = narrow_64bit
        self._dtypes = [t.dtype for t in bound.tensors]
        self._shapes = [t.shape for t in bound.tensors]
        # What a tensor must be like to be used as it is.
        same = [self._device_dtype(dtype) is dtype for dtype in self._dtypes]
        self._ready = list(zip(self._dtypes, self._shapes, same, strict=True))
        self._warned: set[str] = set()
        self._plain = all(
            len(structure.paths) == 1 and not structure.constants and path == structure.name
            for path, (_, structure) in zip(bound.paths, bound.parts, strict=False)
        ) and len(bound.paths) == len(bound.parts)
        for path, tensor in zip(bound.paths, bound.tensors, strict=True):
            _check_kind(path, tensor)
            _check_batch(path, tensor, loops)
        if narrow_64bit:
            warn_of_narrowing(self._dtypes)
        if any(structure.has_dicts for _, structure in bound.parts):
            log.python.warning(
                "Dictionaries are only partially supported as inputs: their keys are fixed by the "
                "first call"
            )

    def slots(self, loops: Loops) -> tuple[Slot, ...]:
        """The slots of one micro-batch."""
        return tuple(
            slots.batch_input(i, _micro_shape(t, loops), self._device_dtype(t.dtype))
            for i, t in enumerate(self.bound.tensors)
        )

    def first_micro_batch(self, loops: Loops) -> list[torch.Tensor]:
        """The first micro-batch of the inputs that were compiled for, as the device sees it."""
        whole = (
            tensor.detach().to(self._device_dtype(tensor.dtype)) for tensor in self.bound.tensors
        )
        return [t[: t.shape[0] // loops.slices] if t.dim() else t for t in whole]

    def synthetic(self) -> list[torch.Tensor]:
        """Return made-up tensors on the device that stand for every batch."""
        return [
            torch.randn(shape, dtype=self._device_dtype(dtype))
            if dtype.is_floating_point
            else torch.zeros(shape, dtype=dtype)
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        ]

    def quick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """Return the tensors of a plain positional call at once, or None for the long way."""
        if not self._plain or kwargs or len(args) != len(self._dtypes):
            return None
        for value in args:
            if not isinstance(value, torch.Tensor):
                return None
        return list(args)

    def check(self, bound: Bound) -> None:
        """Compare the structure of a later call with the compiled one.

        Raises:
            Error: they differ; the expected value comes first in the message.
        """
        for (name, expected), (_, got) in zip(self.bound.parts, bound.parts, strict=True):
            difference = trees.first_difference(expected, got)
            if difference is not None:
                title = difference.title
                if name.startswith("*") and difference.kind == "Length":
                    title = "Number of positional arguments mismatch"
                _mismatch(title, difference.detail)

    def prepare(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Check dtypes and shapes; return detached, contiguous, narrowed tensors.

        Raises:
            Error: a dtype or shape differs from the compiled one.
        """
        result = []
        for at, (tensor, (dtype, shape, same)) in enumerate(zip(tensors, self._ready, strict=True)):
            matches = tensor.dtype is dtype and tensor.shape == shape
            if matches and same and not tensor.requires_grad and tensor.is_contiguous():
                result.append(tensor)
                continue
            if tensor.dtype != self._dtypes[at]:
                path = self.bound.paths[at]
                detail = f"expected {self._dtypes[at]} but got {tensor.dtype}"
                _mismatch(f"Data type mismatch for {path}", detail)
            if tensor.shape != self._shapes[at]:
                path = self.bound.paths[at]
                detail = f"expected {tuple(self._shapes[at])} but got {tuple(tensor.shape)}"
                _mismatch(f"Shape mismatch for {path}", detail)
            result.append(self._device_form(at, tensor))
        return result

    def _device_form(self, at: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            self._warn("Input tensor has requires_grad=True: input %s will be detached.", at)
            tensor = tensor.detach()
        if not tensor.is_contiguous():
            self._warn("Input %s is not contiguous: a contiguous copy is made.", at)
            tensor = tensor.contiguous()
        return tensor.to(self._device_dtype(tensor.dtype))

    def _warn(self, message: str, at: int) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.python.warning(message, self.bound.paths[at])

    def _device_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Integers stay: torch's own operators want 64-bit indices and labels.
        return narrowed(dtype) if self._narrow and dtype.is_floating_point else dtype


def _mismatch(title: str, detail: str) -> None:
    raise Error(
        title,
        got=f"{detail}; the inputs at run time differ from the compiled ones",
        where=source.calling_line(),
        fix=_RENEW,
    )


def _micro_shape(tensor: torch.Tensor, loops: Loops) -> tuple[int, ...]:
    if tensor.dim() == 0:
        return ()
    return (tensor.shape[0] // loops.slices, *tensor.shape[1:])


_narrowed_before: set[torch.dtype] = set()


def warn_of_narrowing(dtypes: Iterable[torch.dtype]) -> None:
    """Say once for each 64-bit type that its values come back in 32 bits."""
    for dtype in dtypes:
        if narrowed(dtype) is not dtype and dtype not in _narrowed_before:
            _narrowed_before.add(dtype)
            log.python.warning(
                "%s is not supported natively: results of this type come back as %s "
                "(options.Precision.narrow64Bit(False) keeps them)",
                dtype,
                narrowed(dtype),
            )


def _check_kind(path: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Error(
            "Unsupported tensor input type",
            got=f'input "{path}" is {tensor.dtype} with layout {tensor.layout}',
            where=source.calling_line(),
            fix="pass a dense tensor: tensor.to_dense(), tensor.dequantize()",
        )


def _check_batch(path: str, tensor: torch.Tensor, loops: Loops) -> None:
    if 0 in tensor.shape:
        raise Error(
            "Zero-sized tensors are unsupported",
            got=f'input "{path}" has shape {tuple(tensor.shape)}',
            where=source.calling_line(),
            fix="leave the argument out, or pass None",
        )
    rows = tensor.shape[0] if tensor.dim() else 1
    if rows % loops.slices:
        raise AssertionFailure(
            "Invalid batch dimension: the batch does not divide into micro-batches",
            got=f'input "{path}" has {rows} rows; one call needs a multiple of {loops.slices}\n'
            f"= {loops.iterations} device iterations x {loops.input_groups} replicas "
            f"x {loops.accumulation} accumulation steps",
            where=source.calling_line(),
            fix=f"pass a multiple of {loops.slices} rows, or let "
            "poptorch.DataLoader(options, ...) cut the batches",
        )
