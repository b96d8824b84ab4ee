"""What happens where ``forward`` asks for the value of a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._base import log, source
from .._base.errors import Error
from .constants import constant_value, value_of_inputs
from .substitutes import substitute
from .trace import untraced

_T = torch.Tensor
_BRANCHES: dict[Any, str] = {
    _T.__bool__: "bool(tensor)", _T.is_nonzero: "is_nonzero()", torch.is_nonzero: "is_nonzero()",
    torch.equal: "torch.equal", _T.equal: "equal()",
    torch.allclose: "torch.allclose", _T.allclose: "allclose()", _T.__contains__: "in",
}  # fmt: skip
_NUMBERS: dict[Any, str] = {
    _T.item: ".item()", _T.__int__: "int()", _T.__float__: "float()", _T.__complex__: "complex()",
    _T.__index__: "an index", _T.tolist: ".tolist()", _T.numpy: ".numpy()",
    _T.__array__: "numpy.asarray()",
}  # fmt: skip
_TEXTS = {_T.__repr__, _T.__format__}


class Uncapturable(Error):  # noqa: N818 (as for every Error here)
    """One construct that cannot be part of a program; there may be more."""

    __module__ = "poptorch"


def dynamic_shape(operator: str, line: str | None) -> Uncapturable:
    """What is said of an operator whose result has a shape that depends on values."""
    return Uncapturable(
        "Operators with dynamic output shapes cannot be captured",
        got=f"{operator}: the shape of its result depends on values",
        where=line,
        fix=(
            "give results a fixed size: torch.where, masked_fill, x[mask] = value, topk",
            "select before the model is called, or on the host with poptorch.CPU",
        ),
    )


class BranchOnData(BaseException):
    """Forward branches on values that the capture does not have yet."""


@dataclass(frozen=True)
class Read:
    """One place where forward asks for a value."""

    what: str
    line: str | None


@dataclass(eq=False)
class ValueReads:
    """Answers forward's questions for values."""

    real: bool = False
    state: Mapping[int, torch.Tensor] = field(default_factory=dict)
    relied: dict[int, str | None] = field(default_factory=dict)
    collect: bool = False
    branches: dict[Read, bool] = field(default_factory=dict)
    forbidden: list[Read] = field(default_factory=list)
    printed: list[str | None] = field(default_factory=list)
    shapes: list[Read] = field(default_factory=list)

    def branch(self, tensor: torch.Tensor, what: str, decide: Callable[[_T], Any]) -> Any:
        """Answer a question that a branch depends on."""
        known = constant_value(tensor)
        if known is None and self.state:
            known = self._of_state(tensor)
        if known is None and not self.real:
            raise BranchOnData
        answer = _really(decide, tensor if known is None else known)
        if known is None:
            self.branches[Read(what, source.calling_line())] = bool(answer)
        return answer

    def _of_state(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor that depends on state only, and remember on which."""
        answer = value_of_inputs(tensor, self.state)
        if answer is None:
            return None
        value, indices = answer
        self.relied.update(dict.fromkeys(indices, source.calling_line()))
        return value

    def number(self, tensor: torch.Tensor, what: str, read: Callable[[_T], Any]) -> Any:
        """Answer a question for a number, a list or an array."""
        known = constant_value(tensor)
        if known is not None:
            return _really(read, known)
        if self.collect:
            self.forbidden.append(Read(what, source.calling_line()))
            return _really(read, tensor)
        raise Uncapturable(
            "A tensor's value is needed while the model is being captured",
            got=f"{what} of a tensor whose values are known only when the program runs",
            fix=(
                "keep it a tensor: torch.where, masks, index_select, poptorch.dynamic_slice",
                "pass it to forward as a Python number: a compile-time constant",
                "look at it with poptorch.ipu_print_tensor; compute on the host with poptorch.CPU",
            ),
        )

    def shape(self, operator: str) -> None:
        """Hear of an operator whose result has a shape that depends on values."""
        if not self.collect:
            raise dynamic_shape(operator, source.calling_line())
        self.shapes.append(Read(operator, source.calling_line()))

    def text(self, tensor: torch.Tensor, write: Callable[[_T], str]) -> str:
        """Return what printing a tensor shows."""
        known = constant_value(tensor)
        if known is not None:
            return str(_really(write, known))
        self.printed.append(source.calling_line())
        if len(self.printed) == 1 and not self.collect:
            log.python.warning(
                "forward prints a tensor at %s: that happens once, at capture, and shows no "
                "values. Use poptorch.ipu_print_tensor to print them each time the program runs.",
                self.printed[0],
            )
        kind = f"size={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device}"
        return f"tensor(<unavailable>, {kind})"

    def warn(self) -> None:
        """Say which branches the program has taken for good."""
        for read, answer in self.branches.items():
            log.python.warning(
                "forward branches on the values of tensors at %s (%s is %s for the first inputs): "
                "the program takes this path for all inputs. torch.where and poptorch.cond decide "
                "when the program runs.",
                read.line,
                read.what,
                answer,
            )


@contextlib.contextmanager
def answering(reads: ValueReads) -> Iterator[None]:
    """Within the block questions for values are answered."""
    from .dispatch import DynamicShapes, ScalarReads

    scalars = ScalarReads(lambda t: reads.branch(t, "code of torch's own", lambda v: v.item()))
    # Tensors without data refuse such operators by themselves.
    shapes = DynamicShapes(reads.shape) if reads.real else contextlib.nullcontext()
    with shapes, scalars, ValueReadMode(reads):
        yield


def _really(function: Callable[[_T], Any], tensor: torch.Tensor) -> Any:
    with untraced():
        return function(tensor.detach())


class ValueReadMode(TorchFunctionMode):
    """Notices the questions that Python code asks of tensors."""

    def __init__(self, reads: ValueReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        question = _BRANCHES.get(func)
        if func is _T.item and args[0].dtype is torch.bool:
            question = _NUMBERS[func]  # what is true or false is asked for a branch
        if question is not None:
            tensor, decide = _comparison(func, args, kwargs)
            return self._reads.branch(tensor, question, decide)
        if func in _NUMBERS:
            rest = args[1:]
            return self._reads.number(
                args[0], _NUMBERS[func], lambda value: func(value, *rest, **kwargs)
            )
        if func in _TEXTS:
            rest = args[1:]
            return self._reads.text(args[0], lambda value: func(value, *rest, **kwargs))
        replacement = substitute(func)
        return (replacement or func)(*args, **kwargs)


def _comparison(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, Callable[[_T], Any]]:
    """Turn a question about one or two tensors into one about a single boolean tensor."""
    if func in (torch.equal, _T.equal):
        same = args[0].shape == args[1].shape
        whole = (args[0] == args[1]).all() if same else torch.zeros((), dtype=torch.bool)
        return whole, bool
    if func in (torch.allclose, _T.allclose):
        return torch.isclose(*args, **kwargs).all(), bool
    if func is _T.__contains__:
        return (args[0] == args[1]).any(), bool
    return args[0], func
