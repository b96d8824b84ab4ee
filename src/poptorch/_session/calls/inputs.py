"""Compare the arguments of calls with the compiled ones: shapes, types, the number of rows, ranges
of indices. Converts tensors for the device.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from ..._base import log, nested_values, private, source
from ..._base.errors import AssertionFailure, Error
from ..._capture import report_narrowed
from ..._ir import slots
from ..._ir.conditions import Conditions
from ..._ir.indices import IndexRange
from ..._ir.micro_batches import Loops
from ..._ir.program import State
from ..._ir.slots import Kind, Slot, narrowed, type_text
from ..._ir.spec import Spec
from ..._ir.symbolic import sizes_of
from ..._residency import unwatched
from .signature import Arguments, BoundArguments, Signature

_RENEW = (
    "to compile for these inputs, call destroy() on the wrapped model, or wrap the model again",
    (
        "or call options.programs(2) before you wrap the model, to keep a second program for "
        "other kinds of inputs, or for other sizes"
    ),
)
_PAD = (
    "pad the inputs to a few sizes, and keep a program for each of them: poptorch.PadToSizes(...) "
    "and options.programs(4)"
)
_DENSE = "pass a dense tensor with values: tensor.to_dense(), tensor.dequantize(), torch.stack(...)"
_OWN = "pass a tensor with its own memory: call tensor.clone() before its storage is resized"
_PLAIN = (
    "pass a plain tensor that has its values in the memory of this process: torch.tensor(...), or "
    "tensor.as_subclass(torch.Tensor)"
)
_COMPLAINT = re.compile("out of (range|bounds)")
_REMEMBERED = 1024  # combinations of sizes
_data_ptr = torch.Tensor.data_ptr
_facts_of = operator.attrgetter("dtype", "shape", "is_cpu", "requires_grad")
_CHECKED = "or disable this check: options.Precision.checkIndices(False) before you wrap the model"


class Inputs:
    """The inputs for which a program is compiled. Checks later calls and prepares their tensors."""

    def __init__(
        self,
        bound: BoundArguments,
        signature: Signature,
        spec: Spec,
        placeholders: bool = False,
        quiet: bool = False,
        symbols: Mapping[tuple[int, int], str] = MappingProxyType({}),
    ) -> None:
        for path, tensor in zip(bound.paths, bound.tensors, strict=True):
            if not placeholders:
                refuse_without_values(path, tensor)
            _check_batch(path, tensor, spec.loops)
        self.bound, self._signature = bound, signature
        self.looked_at = False  # whether the compiled program depends on the values
        self._loops, self._placeholders = spec.loops, placeholders
        self._narrow = spec.precision.narrow_64bit
        self._dtypes = [t.dtype for t in bound.tensors]
        self._shapes = [t.shape for t in bound.tensors]
        self.symbols = symbols  # names of symbolic sizes, by input and dimension
        self.conditions: Conditions | None = None  # conditions on these sizes, after compiling
        self._allowed: dict[tuple[torch.Size, ...], bool] = {}  # shapes that were looked at
        self.is_retired = False
        # The shapes of a complete batch, if this shorter batch is divided in the same way.
        self.whole: Sequence[Sequence[int]] | None = None
        self.reason: str | None = None  # why there is no program for all sizes
        self._types = [torch.Tensor] * len(self._dtypes)
        self._expect(self._shapes)
        self._warned: set[str] = set()
        # Whether a call that passes only these tensors, in their order, is of this kind.
        self._tensors_only = signature.takes_tensors_alone(bound)
        # The parameters of the tensors, if a call that passes only these, by name, is of this kind.
        self._names = signature.names_of_tensors(bound)
        self._by_position = signature.count_positional(self._names)
        if self._narrow:
            for dtype in self._dtypes:
                # a double is returned as a float, but labels are never returned
                if dtype.is_floating_point:
                    report_narrowed(dtype)
        if not quiet and any(structure.has_dicts for _, structure in bound.parts):
            log.python.warning(
                "Dictionaries are only partially supported as inputs: their keys are fixed by the "
                "first call"
            )

    def _expect(self, shapes: list[torch.Size]) -> None:
        """Use tensors of these shapes as they are, unless they must be converted."""
        self._shapes = shapes
        # None for a dtype that has to be narrowed.
        same = [d if self._device_dtype(d) is d else None for d in self._dtypes]
        devices = [t.is_cpu for t in self.bound.tensors]
        gradients = [False] * len(shapes)
        self._known = list(zip(same, shapes, devices, gradients, strict=True))
        self._strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
        # Returns whether the tensors are like those of an earlier call, which were ready.
        self._are_alike: Callable[..., bool] | None = None

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes that the program was made for or, with symbolic sizes, used with last."""
        return self._shapes

    def slots(self) -> tuple[Slot, ...]:
        """Return the slots of one micro-batch."""
        shapes = [self._loops.of_micro_batch(shape) for shape in self._shapes]
        names = [
            tuple(self.symbols.get((i, dim), "") for dim in range(len(shape)))
            for i, shape in enumerate(shapes)
        ]
        kinds = zip(shapes, map(self._device_dtype, self._dtypes), names, strict=True)
        return tuple(
            slots.batch_input(i, shape, dtype, symbols if any(symbols) else ())
            for i, (shape, dtype, symbols) in enumerate(kinds)
        )

    def first_micro_batch(self) -> list[torch.Tensor]:
        if self._placeholders:
            raise Error(
                "A model with a branch that depends on the values of its inputs cannot be "
                "compiled from a file",
                got=(
                    "a model that is compiled from a file, which contains only the shapes of "
                    "the inputs"
                ),
                fix=(
                    "create and wrap the model yourself, call the wrapped model with a batch, and "
                    "then load the weights"
                ),
            )
        self.looked_at = True
        whole = (
            tensor.detach().to(self._device_dtype(tensor.dtype)) for tensor in self.bound.tensors
        )
        return [self._loops.cut([t])[0][0] if t.dim() else t for t in whole]

    @property
    def sample(self) -> Callable[[int], list[list[torch.Tensor]]] | None:
        """Return a function that makes the first micro-batches of the call, in the order of lanes.

        Return None if there are none.
        """
        return None if self._placeholders else self._micro_batches

    def _micro_batches(self, count: int) -> list[list[torch.Tensor]]:
        loops = self._loops
        places = [divmod(lane, loops.replicas) for lane in range(count)]
        slices = [loops.slice_of(step, replica) for step, replica in places]
        tensors = [tensor.detach() for tensor in self.bound.tensors]
        return [
            [loops.cut([each.contiguous()])[0][at] if each.dim() else each for each in tensors]
            for at in slices
        ]

    def synthetic(self) -> list[torch.Tensor]:
        """Return tensors on the device that replace every batch."""
        return [
            torch.randn(shape, dtype=self._device_dtype(dtype))
            if dtype.is_floating_point
            else torch.zeros(shape, dtype=dtype)
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        ]

    def example(self) -> Sequence[torch.Tensor]:
        """Return the inputs for which the program was compiled, ready for the device, or
        placeholders. From then on, these are the latest inputs.
        """
        if self.symbols:
            self._resize([tensor.shape for tensor in self.bound.tensors])
        return self.synthetic() if self._placeholders else self._prepare(self.bound.tensors)

    def convert(
        self, arguments: Arguments
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the tensors of a call, as they were passed and ready for the device."""
        given = self._quick(arguments)
        if given is None:
            bound = self._signature.bind(arguments, like=self.bound)
            self._check(bound)
            given = bound.tensors
        if self.symbols:
            shapes = [tensor.shape for tensor in given]
            if self._allows(shapes):
                self._resize(shapes)
        return given, self._prepare(given)

    def _resize(self, shapes: list[torch.Size]) -> None:
        """Accept inputs of other shapes from now on."""
        if shapes != self._shapes:
            self._expect(shapes)

    def retire(self) -> None:
        """Accept no inputs any more, because it turned out that sizes cannot be symbolic."""
        self.is_retired = True
        self._allowed.clear()

    def _allows(self, shapes: list[torch.Size]) -> bool:
        """Return whether the program may be used for tensors of these shapes."""
        if not self.symbols:
            return shapes == self._shapes
        key = tuple(shapes)
        allowed = self._allowed.get(key)
        if allowed is None:
            if len(self._allowed) >= _REMEMBERED:
                self._allowed.clear()
            allowed = self._allowed[key] = self._satisfies(shapes)
        return allowed

    def _satisfies(self, shapes: Sequence[torch.Size]) -> bool:
        if self.is_retired:
            return False
        for at, (shape, own) in enumerate(zip(shapes, self._shapes, strict=True)):
            if len(shape) != len(own):
                return False
            sizes = enumerate(zip(shape, own, strict=True))
            if any(one != two for dim, (one, two) in sizes if (at, dim) not in self.symbols):
                return False
        if not all(map(self._loops.divides, shapes)):
            return False
        if self.whole is not None and self._loops.cuts(shapes, self.whole):
            return False
        sizes_by_name = sizes_of(self.slots(), map(self._loops.of_micro_batch, shapes))
        assert self.conditions is not None
        return sizes_by_name is not None and self.conditions.hold(sizes_by_name)

    def ready(self, arguments: Arguments) -> Sequence[torch.Tensor] | None:
        """Return the tensors of a call that passes only tensors that the device can use as they
        are.
        """
        tensors: Sequence[Any] | None = arguments[0]
        if arguments[1] or not self._tensors_only:
            tensors = self._in_order(arguments)
        if tensors is None or len(tensors) != len(self._types):
            return None
        are_alike = self._are_alike
        if are_alike is not None and are_alike(*tensors) and all(map(_data_ptr, tensors)):
            return tensors
        if not (self._are_plain(tensors) and _are_ready(tensors, self._known, self._strides)):
            return None
        self._are_alike = _comparison(tensors)
        return tensors

    def takes(self, arguments: Arguments) -> bool:
        """Return whether a call is of this kind."""
        given = self._with_other_sizes(arguments)
        return given is not None and self._allows([tensor.shape for tensor in given])

    def covers(self, other: Inputs) -> bool:
        """Return whether a program for this kind takes what another one was used with last."""
        if self._dtypes != other._dtypes or len(self.bound.parts) != len(other.bound.parts):
            return False
        parts = zip(self.bound.parts, other.bound.parts, strict=True)
        if any(nested_values.first_difference(one, two) for (_, one), (_, two) in parts):
            return False
        return self._allows(other.shapes)

    def differs_in_sizes(self, arguments: Arguments) -> bool:
        """Return whether a call has inputs like these but for sizes of dimensions."""
        given = self._with_other_sizes(arguments)
        return given is not None and all(
            tensor.dim() == len(shape) for tensor, shape in zip(given, self._shapes, strict=True)
        )

    def may_have_sizes_of(self, arguments: Arguments) -> bool:
        """Return whether a call has tensors that divide into micro-batches and are not empty."""
        given = self._with_other_sizes(arguments)
        return given is not None and all(
            tensor.numel() > 0 and self._loops.divides(tensor.shape) for tensor in given
        )

    def _with_other_sizes(self, arguments: Arguments) -> Sequence[torch.Tensor] | None:
        """Return the tensors of a call that differs from this kind in shapes at most."""
        given = self._quick(arguments)
        if given is None:
            bound = self._signature.bind(arguments, like=self.bound)
            parts = zip(self.bound.parts, bound.parts, strict=True)
            if any(
                nested_values.first_difference(expected, got) for (_, expected), (_, got) in parts
            ):
                return None
            given = bound.tensors
        pairs = zip(given, self._dtypes, strict=False)
        is_alike = len(given) == len(self._dtypes) and all(
            tensor.dtype is dtype and not tensor.is_nested for tensor, dtype in pairs
        )
        return given if is_alike else None

    def _quick(self, arguments: Arguments) -> Sequence[torch.Tensor] | None:
        """Return the tensors of a call that passes only tensors, or None if the call needs
        all checks.
        """
        given = self._in_order(arguments)
        return given if given is not None and self._are_plain(given) else None

    def _are_plain(self, values: Sequence[Any]) -> bool:
        return list(map(type, values)) == self._types

    def _in_order(self, arguments: Arguments) -> Sequence[Any] | None:
        """Return the arguments in the order of the tensors, if there may be only tensors."""
        args, kwargs = arguments
        if kwargs:
            named = self._names[len(args) :]
            if len(named) != len(kwargs) or len(args) > self._by_position:
                return None
            try:
                args = (*args, *[kwargs[name] for name in named])
            except KeyError:
                return None
        elif not self._tensors_only:
            return None
        return args

    def __str__(self) -> str:
        names = [
            tuple(self.symbols.get((at, dim), size) for dim, size in enumerate(shape))
            for at, shape in enumerate(self._shapes)
        ]
        shapes = zip(self.bound.paths, self._dtypes, names, strict=True)
        return ", ".join(f"{path} {type_text(dtype, shape)}" for path, dtype, shape in shapes)

    def _check(self, bound: BoundArguments) -> None:
        for (name, expected), (_, got) in zip(self.bound.parts, bound.parts, strict=True):
            difference = nested_values.first_difference(expected, got)
            if difference is not None:
                title = difference.title
                if name.startswith("*") and difference.kind == "Length":
                    title = "Number of positional arguments mismatch"
                _mismatch(title, difference.detail)

    def _prepare(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if _are_ready(tensors, self._known, self._strides):
            return tensors
        result = []
        for at, (tensor, look, strides) in enumerate(
            zip(tensors, self._known, self._strides, strict=True)
        ):
            if _are_ready([tensor], [look], [strides]):
                result.append(tensor)
                continue
            self._compare(at, tensor)
            result.append(self._device_form(at, tensor))
        return result

    def _compare(self, at: int, tensor: torch.Tensor) -> None:
        path, compiled = self.bound.paths[at], self.bound.tensors[at]
        refuse_without_values(path, tensor)
        if tensor.device.type != compiled.device.type:
            detail = f"expected {compiled.device} but got {tensor.device}"
            _mismatch(f"Device mismatch for {path}", detail)
        if tensor.dtype != self._dtypes[at]:
            detail = f"expected {self._dtypes[at]} but got {tensor.dtype}"
            _mismatch(f"Data type mismatch for {path}", detail)
        if tensor.shape != self._shapes[at]:
            _refuse_empty(path, tensor)  # no option allows that size
            detail = f"expected {tuple(self._shapes[at])} but got {tuple(tensor.shape)}"
            if self.reason is None:
                _mismatch(f"Shape mismatch for {path}", detail)
            detail += f"; one program cannot serve all sizes, because {self.reason}"
            _mismatch(f"Shape mismatch for {path}", detail, (_PAD, *_RENEW))

    def _device_form(self, at: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            self._warn(
                "Input tensor has requires_grad=True set. This tensor will be detached because "
                "backward pass via inputs is not supported. Input: %s",
                at,
            )
            tensor = tensor.detach()
        if not tensor.is_contiguous():
            self._warn("Input %s is not contiguous: a contiguous copy is made.", at)
            tensor = tensor.contiguous()
        tensor = tensor.to(self._device_dtype(tensor.dtype)).resolve_neg().resolve_conj()
        # A contiguous tensor may have unusual strides in dimensions of size 1, for example a gray
        # image in torch.channels_last. Code is compiled for the strides of a new tensor.
        strides = self._strides[at]
        return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)

    def _warn(self, message: str, at: int) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.python.warning(message, self.bound.paths[at])

    def _device_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Integers keep their type, because torch's operators expect 64-bit indices and labels.
        return narrowed(dtype) if self._narrow and dtype.is_floating_point else dtype


def _are_ready(
    tensors: Sequence[torch.Tensor],
    known: list[tuple[Any, ...]],
    strides: list[tuple[int, ...]],
) -> bool:
    """Return whether the device can read tensors as they are."""
    try:
        return (
            list(map(_facts_of, tensors)) == known
            and list(map(torch.Tensor.stride, tensors)) == strides
            and all(map(_data_ptr, tensors))
        )
    except RuntimeError:  # a tensor has no memory or no shape
        return False


def _comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return torch's check of whether others have the types, shapes, strides and devices of these.

    It takes 0.2 us for one tensor and 1.6 us for ten, and ``_are_ready`` 1 us and 7 us.
    """
    make = private.optional("TensorGuards")
    if make is None or not tensors:
        return None
    shapes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    check: Callable[..., bool] = make(
        *tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides
    ).check
    return check


def _mismatch(title: str, detail: str, fix: tuple[str, ...] = _RENEW) -> NoReturn:
    error = Error(
        title,
        got=f"{detail}; the inputs at run time differ from those that were compiled",
        fix=fix,
    )
    error.of_batch = True
    raise error


def _refuse_empty(path: str, tensor: torch.Tensor) -> None:
    if 0 in tensor.shape:
        raise Error(
            "Zero-sized tensors are unsupported",
            got=f'input "{path}" has shape {tuple(tensor.shape)}',
            fix=(
                "skip calls whose inputs are empty: if x.numel() > 0: model(x)",
                "or omit the argument or pass None, if forward allows that",
            ),
        )


def _check_batch(path: str, tensor: torch.Tensor, loops: Loops) -> None:
    _refuse_empty(path, tensor)
    if not tensor.dim() and loops.slices > 1:
        raise AssertionFailure(
            "Invalid batch dimension: the batch does not divide into micro-batches",
            got=f'input "{path}" has no dimensions; one call has {loops.slices} micro-batches\n'
            f"= {loops}",
            fix=(
                "pass a Python number, which every micro-batch receives: tensor.item()",
                f"or pass one value for each micro-batch: tensor.expand({loops.slices})",
            ),
        )
    if not loops.divides(tensor.shape):
        error = AssertionFailure(
            "Invalid batch dimension: the batch does not divide into micro-batches",
            got=f'input "{path}" has {len(tensor)} rows; one call needs a multiple of '
            f"{loops.slices}\n= {loops}",
            fix=(
                f"pass a multiple of {loops.slices} rows, or let poptorch.DataLoader(options, "
                "...) assemble the batches"
            ),
        )
        error.of_batch = True
        raise error


def refuse_shared_inputs(
    changed: Sequence[int], given: Sequence[torch.Tensor], paths: Sequence[str]
) -> None:
    """Refuse tensors that share memory with an input that forward changes in place.

    In eager PyTorch such a change is seen by all of them. A program reads its inputs in any order.

    Args:
        changed: the numbers of the inputs that forward changes.
    """
    for at in changed:
        for other, tensor in enumerate(given):
            if other != at and _overlap(given[at], tensor):
                raise Error(
                    "An input that forward changes shares memory with another input",
                    got=f"forward changes {paths[at]} in place, and {paths[at]} shares memory with "
                    f"{paths[other]}",
                    fix=(
                        f"pass a copy of {paths[other]}: {paths[other]}.clone()",
                        f"or change a copy in forward: {paths[at]} = {paths[at]}.clone()",
                    ),
                )


def refuse_model_memory(
    model: Mapping[int, Mapping[str, torch.Tensor]],
    given: Sequence[torch.Tensor],
    paths: Sequence[str],
) -> None:
    """Refuse inputs that share memory with tensors of the model that change together with them.

    In eager PyTorch the input and the tensor of the model are the same values. A program has its
    own copy of the model's tensors.

    Args:
        model: the model's tensors by their paths, by the addresses of their storages.
    """
    for name, tensor in zip(paths, given, strict=True):
        for path, own in model.get(tensor.untyped_storage().data_ptr(), {}).items():
            if unwatched(_overlap, tensor, own):
                raise Error(
                    "An input shares memory with a tensor of the model, and forward changes one "
                    "of them",
                    got=f'the argument {name} shares memory with "{path}" of the model',
                    fix=f"pass a copy: call clone() on the tensor that you pass as {name}",
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (start, end), (first, last) = map(_bytes_of, (one, other))
    return start < last and first < end


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return which bytes of its storage a tensor uses, from and to."""
    return int(tensor.storage_offset()) * tensor.element_size(), _needed(tensor)


def return_inputs(
    changed: Sequence[int], given: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]
) -> None:
    """Copy the changes that forward made in place to the user's tensors, if the device
    used copies.
    """
    for at in changed:
        if given[at].data_ptr() != batch[at].data_ptr():
            given[at].detach().copy_(batch[at])


def refuse_without_values(path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that does not have plain values in memory."""
    if torch.nn.parameter.is_lazy(tensor):
        refuse_kind(path, "a parameter that is not initialized", _PLAIN)
    if tensor.is_nested:
        refuse_kind(path, "a nested tensor", _DENSE)
    if tensor.layout is not torch.strided:
        refuse_kind(path, f"a tensor of layout {tensor.layout}", _DENSE)
    if tensor.is_quantized:
        refuse_kind(path, f"a quantized tensor, {tensor.dtype}", _DENSE)
    if tensor.is_meta:
        refuse_kind(path, "on the device meta, a tensor without values", _DENSE)
    if tensor.numel() and not _address(tensor):
        kind = type(tensor).__qualname__
        what = "a tensor" if type(tensor) is torch.Tensor else f"a {kind}"
        refuse_kind(path, f"{what} that has no values in memory", _PLAIN)
    if _needed(tensor) > int(tensor.untyped_storage().nbytes()):
        refuse_kind(path, "a tensor whose storage is too small for it", _OWN)


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.data_ptr())
    except RuntimeError:  # fake, functional and other tensors raise this with different texts
        return 0


def _needed(tensor: torch.Tensor) -> int:
    """Return how many bytes of its storage a tensor uses."""
    if 0 in tensor.shape:
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in strides)
    return (last + 1) * tensor.element_size()


def refuse_kind(path: str, what: str, fix: str) -> NoReturn:
    raise Error(
        "Unsupported tensor input type",
        got=f'input "{path}" is {what}',
        fix=fix,
    )


@dataclass(frozen=True, eq=False)
class Indices:
    """The ranges in which the inputs of one compiled program must be."""

    ranges: Sequence[IndexRange]  # empty if the check is off
    # computed from inputs that are used to compute indices
    preconditions: Callable[[], Iterable[IndexRange]]
    paths: Sequence[str]

    def check(
        self,
        batch: Sequence[torch.Tensor],
        state: State,
        others: Iterable[IndexRange] | None = None,
    ) -> None:
        """Raise an error about the first index that is out of a range, or of ``others``."""
        for each in self.ranges if others is None else others:
            slot = each.slot
            value = batch[slot.index] if slot.kind is Kind.BATCH else state.values[slot.key]
            places = each.outside(value)
            if not places:
                continue
            found = value[places[0]].item()
            if others is None:
                raise self._error(each, places[0], found, _CHECKED)
            raise self._error(each, places[0], found)

    def explain(self, error: BaseException, batch: Sequence[torch.Tensor], state: State) -> None:
        """Raise an error that names the input, if an index is the reason why a call failed."""
        if isinstance(error, RuntimeError | IndexError) and _COMPLAINT.search(str(error)):
            try:
                self.check(batch, state, self.preconditions())
            except Error as better:
                better.__notes__ = getattr(error, "__notes__", [])
                raise better from error

    def _error(
        self, index_range: IndexRange, place: tuple[int, ...], value: float, *more: str
    ) -> Error:
        """Return an error about an index that is out of a range."""
        slot = index_range.slot
        name = self.paths[slot.index] if slot.kind is Kind.BATCH else slot.path
        besides = "".join(f", or {each}" for each in sorted(index_range.ignored))
        at = f"[{', '.join(map(str, place))}]" if place else ""
        line = "" if index_range.line is None else f", at {source.describe(*index_range.line)}"
        return Error(
            "Index out of range",
            got=f'input "{name}"{at} is {value}; {index_range.operator} '
            f"takes {index_range.least} to {index_range.most}{besides}{line}",
            fix=(
                (
                    "pass labels and indices within the range, or make the layer larger "
                    "(num_classes, num_embeddings)"
                ),
                *more,
            ),
        )
