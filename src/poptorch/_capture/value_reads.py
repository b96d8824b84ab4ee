"""Decide what happens if ``forward`` reads the value of a tensor. Values of constants are known,
the first inputs decide branches, and all other reads are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from .._base import log, private, source
from .._base.errors import Error
from .._ops.dispatch import answering
from . import eager_errors
from .constant_masks import ConstantMasks
from .eager_errors import is_mask
from .recorded import constant_value, forget_failed, value_of_inputs
from .trace import untraced

aten: Any = torch.ops.aten
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
_TORCHS_OWN = "code of torch"
_READ_BY_OPERATOR = (
    "An operator reads the number in a tensor at %s (%s for the first inputs). The program uses "
    "this number for all inputs. To compute with the tensor, use an operator that takes tensors, "
    "such as a product or index_select. Otherwise, pass a Python number to forward."
)
_DECIDED_BY_TORCH = (
    "A function of torch that forward calls at %s branches on the values of tensors, for example "
    "to check its arguments (the condition is %s for the first inputs). The program takes this "
    "branch for all inputs. If other inputs can occur, check their values before you call the "
    "model."
)
QUESTIONS = {**_BRANCHES, **_NUMBERS, **dict.fromkeys((_T.__repr__, _T.__format__), "")}


class Uncapturable(Error):  # noqa: N818 (as for every Error here)
    """A construct that cannot be part of a program. There may be more in the same module."""

    __module__ = "poptorch"


def dynamic_shape(operator: str, line: str | None) -> Uncapturable:
    return Uncapturable(
        "Operators with dynamic output shapes cannot be captured",
        got=f"{operator}: the shape of its result depends on values",
        where=line,
        fix=(
            SHAPE_FIX,
            (
                "or, if the mask is the same in every call, compute it once in __init__, and keep "
                "it in a buffer that forward does not change"
            ),
            "or select the elements before you call the model, or on the host with poptorch.CPU",
        ),
    )


class BranchOnData(BaseException):
    """Forward branches on values that the capture does not have yet."""


NUMBER_FIX = (
    "compute with tensors (torch.where, masks), pass the value as a Python number, "
    "or use poptorch.CPU"
)
SHAPE_FIX = (
    "use operators with results of a fixed size: torch.where, masked_fill, x[mask] = value, topk"
)
PRINT_FIX = "use poptorch.ipu_print_tensor, which prints the values each time the program runs"


class Frozen:
    """A number that was read from a tensor. It may decide branches, but operators may not compute
    with it.
    """

    what: str
    line: str | None

    @staticmethod
    def of(value: float, what: str, line: str | None) -> Frozen:
        number: Frozen = _FROZEN[int if isinstance(value, int) else float](value)
        number.what, number.line = what, line
        return number


def _propagating(name: str, base: type) -> Callable[..., Any]:
    usual = getattr(base, name)

    def call(self: Any, *args: Any) -> Any:
        result = usual(self, *args)
        if type(result) in (int, float):
            return Frozen.of(result, self.what, self.line)
        return result

    return call


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OPERATORS = (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), "neg", "abs")
_FROZEN: dict[type, Any] = {
    base: type("Frozen", (Frozen, base), {
        f"__{name}__": _propagating(f"__{name}__", base) for name in _OPERATORS
    })
    for base in (int, float)
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    what: str
    line: str | None  # description of the user's line
    fatal: bool  # whether it prevents compiling
    certain: bool  # whether it ran; otherwise it is on a path that the first inputs do not take
    fix: str

    def __str__(self) -> str:
        verdict = "error" if self.fatal else "note"
        doubt = "" if self.certain else ", if this line runs"
        return f"{self.line or 'unknown line'}\n    {verdict}{doubt}: {self.what}\n    {self.fix}"


@dataclass(eq=False)
class ValueReads:
    """Answers reads of values from constants. Fixed ``state`` decides branches. Where it does not,
    the first inputs do.
    """

    real: bool = False  # whether tensors have the values of the first inputs
    state: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by index among the inputs
    # used state, with the line that asked
    relied: dict[int, str | None] = field(default_factory=dict)
    # state whose values decided shapes, with an operator and its line
    shaping: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    collect: bool = False  # record forbidden questions and answer them
    # For each question and line, what the first inputs decided.
    branches: dict[tuple[str, str | None], float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    # what was refused first, which ``forward`` may have caught together with errors that it expects
    refusal: BaseException | None = None
    _asked: str = _TORCHS_OWN
    _raised: list[BaseException] | None = None  # while a script runs

    def __post_init__(self) -> None:
        self._masks = ConstantMasks(self.for_shape)

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def read(value: torch.Tensor) -> Any:
            return func(value, *args[1:], **kwargs)

        what = QUESTIONS[func]
        # Boolean values are read for branches.
        if func in _BRANCHES or (func is _T.item and args[0].dtype is torch.bool):
            self._asked = what
            try:
                return func(*args, **kwargs)  # reads one value
            finally:
                self._asked = _TORCHS_OWN
        if func is _T.item and not args[0].is_complex():
            return self.branch(args[0], func, what)
        known = constant_value(args[0])
        if known is not None:
            return _really(read, known)
        line = source.calling_line()
        if not what:
            return self._print(args[0], line)
        self._refuse(what, line)
        return _really(read, args[0])

    def computed_with(self, number: Frozen) -> Any:
        """Refuse to compute with a number that was read for a branch only, if it may be frozen as
        branches are.
        """
        self._refuse(number.what, number.line)
        self.branches.pop((number.what, number.line), None)
        return number

    def raise_caught(self) -> None:
        """Raise the first refusal again, if there was one. ``forward`` returned, so it caught it,
        and did not compute what it computes in eager PyTorch.
        """
        if self.refusal is not None:
            raise self.refusal

    def note_refusal(self, refusal: BaseException) -> None:
        self.refusal = self.refusal or refusal

    def _raise(self, refusal: BaseException) -> NoReturn:
        self.note_refusal(refusal)
        raise refusal

    def _refuse(self, what: str, line: str | None) -> None:
        if not self.collect:
            self._raise(
                Uncapturable(
                    "A tensor's value is needed while the model is being captured",
                    got=(
                        f"{what} needs the values of a tensor, which are known only when the "
                        "program runs"
                    ),
                    where=line,
                    fix=(
                        (
                            "compute with the tensor itself: torch.where, masks, index_select, "
                            "poptorch.dynamic_slice"
                        ),
                        (
                            "or pass the value to forward as a Python number, which becomes a "
                            "compile-time constant"
                        ),
                        (
                            "or compute on the host with poptorch.CPU; to print the tensor, use "
                            "poptorch.ipu_print_tensor"
                        ),
                    ),
                )
            )
        title = f"{what} needs a tensor's value"
        self.findings.append(Finding(title, line, True, True, NUMBER_FIX))

    def branch(self, tensor: torch.Tensor, decide: Callable[[_T], Any], what: str) -> Any:
        known = constant_value(tensor)
        if known is None and self.state and not self.real:
            answer = value_of_inputs(tensor, self.state)
            if answer is not None:
                known, indices = answer
                self.relied.update(dict.fromkeys(indices, source.calling_line()))
        if known is not None:
            return _really(decide, known)
        if not self.real:
            self._raise(BranchOnData())
        decided, line = _really(decide, tensor), source.calling_line()
        self.branches[what, line] = decided
        return decided if isinstance(decided, bool) else Frozen.of(decided, what, line)

    def for_shape(self, tensor: torch.Tensor, operator: str) -> torch.Tensor | None:
        """Return the value of a tensor on which a shape depends, if it is the same in all runs."""
        known = constant_value(tensor)
        answer = value_of_inputs(tensor, self.state) if known is None and self.state else None
        if answer is None:
            return known
        known, indices = answer
        for each in indices:
            self.shaping.setdefault(each, (operator, source.calling_line()))
        return known

    def refuse_shapes(self, changed: Set[int]) -> None:
        """Refuse that shapes depend on state that forward changes."""
        for at, (operator, line) in self.shaping.items():
            if at in changed:
                raise dynamic_shape(operator, line)

    def _refuse_shape(self, operator: str) -> None:
        line = source.calling_line()
        if not self.collect:
            self._raise(dynamic_shape(operator, line))
        title = f"{operator}: the shape of its result depends on values"
        self.findings.append(Finding(title, line, True, True, SHAPE_FIX))

    def _print(self, tensor: torch.Tensor, line: str | None) -> str:
        if not self.findings and not self.collect:
            log.python.warning(
                (
                    "forward prints a tensor at %s. This happens only once, while the model is "
                    "captured, and shows no values. To print the values each time the program "
                    "runs, use poptorch.ipu_print_tensor."
                ),
                line,
            )
        self.findings.append(Finding("printing shows no values", line, False, True, PRINT_FIX))
        kind = f"size={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device}"
        return f"tensor(<unavailable>, {kind})"

    def warn(self) -> None:
        for (what, line), answer in self.branches.items():
            if what == _TORCHS_OWN:
                by_operator = not isinstance(answer, bool)
                text = _READ_BY_OPERATOR if by_operator else _DECIDED_BY_TORCH
                log.python.warning(text, line, answer)
                continue
            log.python.warning(
                (
                    "forward branches on the values of tensors at %s (%s is %s for the first "
                    "inputs). The program takes this branch for all inputs. To decide when the "
                    "program runs, use torch.where or poptorch.cond."
                ),
                line,
                what,
                answer,
            )

    def by_torch(self, caught: Callable[..., Any]) -> Any:
        """Within the block, also answer questions of torch's own compiled code.

        ``caught`` returns the arguments and keyword arguments that an operator gets.
        """

        def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._answer_torch(func, *caught(func, args, kwargs))

        return answering(answer)

    @contextlib.contextmanager
    def by_script(self) -> Iterator[list[BaseException]]:
        """Within the block, questions come from a script. Yields exceptions from answering them."""
        before, self._raised = self._raised, []
        try:
            yield self._raised
        finally:
            self._raised = before

    def _answer_torch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._decide(args[0])
        if func is aten.equal.default:
            first, second = args
            return first.shape == second.shape and self._decide((first == second).all())
        if func is aten.allclose.default:
            return self._decide(torch.isclose(*args, **kwargs).all())
        if func is aten._efficientzerotensor.default:
            # Forward-mode gradients start from this value. Products with it are computed on another
            # device to find out their shapes, and tensors without data do not support this under
            # vmap.
            return aten.zeros.default(*args, **kwargs)
        eager_errors.check(func, args, kwargs)
        found = self._masks.answer(func, args, kwargs)
        if found is not NotImplemented:
            return found
        # Tensors without data raise an error by themselves.
        dynamic = torch.Tag.dynamic_output_shape in getattr(func, "tags", ())
        selects = func is not aten.index.Tensor or any(map(is_mask, args[1]))
        if self.real and dynamic and selects:
            self._refuse_shape(str(func).removesuffix(".default"))
        try:
            return func(*args, **kwargs)
        except _without_values() as error:
            self._raise(error)
        except Exception:
            forget_failed(func)
            eager_errors.write_until_failure(func, args, kwargs)
            raise

    def _decide(self, tensor: torch.Tensor) -> Any:
        if self._raised is None:
            return self.branch(tensor, lambda v: v.item(), self._asked)
        try:
            return self._decide_for_script(tensor)
        except (BranchOnData, Error) as error:
            self._raised.append(error)
            raise

    def _decide_for_script(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype is not torch.bool and constant_value(tensor) is None:
            self._refuse("a scripted function asks for the number", source.calling_line())
        return self.branch(tensor, lambda v: v.item(), "a scripted function's question")


def _without_values() -> tuple[type[Exception], ...]:
    """Return torch's errors about results that depend on values that a tensor does not have."""
    names = "DynamicOutputShapeException", "DataDependentOutputException"
    return tuple(filter(None, map(private.optional, names)))


def _really(function: Callable[[_T], Any], tensor: torch.Tensor) -> Any:
    with untraced():
        return function(tensor.detach())
