"""Provide operators that observe a running program: ``ipu_print_tensor`` and ``nop``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import torch

from .._base import terminal
from .._base.errors import Error, InvalidKey
from .._base.keywords import also_called
from .._ops import identities
from .._ops.context import eager_run, listener
from .._ops.effects import define_effect
from . import operand_checks


@also_called(tensor_to_print="tensor", optional_title="title")
def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Print a tensor to stderr each time the program computes it, and return it unchanged.

    It prints once per micro-batch and replica, in the order of the program. Use the result instead
    of the tensor: a print is dropped if no output or loss depends on its result. Outside a wrapped
    model it prints nothing.

    Args:
        tensor: of any shape and dtype.
        title: printed before the values; by default ``tensor_0`` and so on.
        print_gradient: in training, print the gradient too, as ``<title>_gradient``.
        summarise_threshold: show only the edges of tensors with more elements; 0 to show all.
        edge_items: elements at each end of each dimension in a summary.
        max_line_width: longer lines are wrapped; 0 to wrap none.
        digits: number of digits after the decimal point, at most those of the type. 0 also disables
            alignment.
        float_format: ``"auto"``, ``"fixed"``, ``"scientific"``, or ``"none"`` to format each number
            separately.
        separator: between the values of a row.
        open_bracket, close_bracket: around each row and each nesting level.

    Raises:
        poptorch.Error: not a tensor.
        KeyError: an unknown ``float_format``.
    """
    operand_checks.tensor(tensor, "ipu_print_tensor must take a torch.tensor argument")
    if float_format not in FLOAT_FORMATS:
        known = ", ".join(f'"{name}"' for name in FLOAT_FORMATS)
        raise InvalidKey("Unknown float_format", got=repr(float_format), fix=f"use one of {known}")
    capture = listener()
    if capture is None:
        return tensor
    layout = PrintFormat(
        summarise_threshold, edge_items, max_line_width, digits, float_format, separator,
        open_bracket, close_bracket,
    )  # fmt: skip
    name = title or f"tensor_{next(capture.numbers)}"
    gradient = f"{name}_gradient" if print_gradient else ""
    text = quote(json.dumps(dataclasses.astuple(layout)))
    return _print_tensor(tensor, name, gradient, text, [])  # type: ignore[no-any-return]


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged, through an operator that stays in the program.

    Raises:
        poptorch.Error: the argument is not a tensor.
    """
    operand_checks.tensor(tensor, "nop must take a torch.tensor argument")
    return tensor if listener() is None else identities.nop(tensor)


def getIpuTensorId(tensor: torch.Tensor) -> int:
    """Return the number of a tensor in the model that is being captured.

    Each tensor has its own number. Capturing the same model again gives the same numbers.

    Raises:
        poptorch.Error: the argument is not a tensor of a model that is being captured.
    """
    operand_checks.tensor(tensor, "getIpuTensorId must take a torch.tensor argument")
    capture = listener()
    number = None if capture is None else capture.identify(tensor)
    if number is None:
        raise Error(
            "getIpuTensorId needs a tensor of the model that is being captured",
            got="a tensor that does not belong to the captured model",
            fix=(
                "call it in forward, with an input or with a tensor that is computed from an input"
            ),
        )
    return number


def isRunningOnIpu() -> bool:
    """Return True while an executor captures ``forward`` or checks it, False everywhere else.

    Source: PopTorch user guide, "Features".
    """
    return listener() is not None or eager_run() is not None


FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")
_ELLIPSIS = "..."
_FIXED_RANGE = (1e-4, 1e6)  # absolute values that are readable without an exponent


@dataclass(frozen=True)
class PrintFormat:
    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 80
    digits: int = 4
    float_format: str = "auto"
    separator: str = ", "
    open_bracket: str = "("
    close_bracket: str = ")"


def tensor_text(title: str, tensor: torch.Tensor, layout: PrintFormat) -> str:
    shown, cuts = _edges(tensor.detach().cpu(), layout)
    write, edge = _writer(shown, layout), layout.edge_items

    def block(part: torch.Tensor, lead: str, depth: int) -> list[str]:
        if part.dim() == 0:
            return [f"{lead}{layout.open_bracket}{write(part)}{layout.close_bracket}"]
        if part.dim() == 1:
            values = [write(value) for value in part]
            if cuts[depth]:
                values.insert(edge, _ELLIPSIS)
            return _row(values, layout, lead)
        inner = " " * (depth + 1)
        lines = [lead + layout.open_bracket]
        for at, row in enumerate(part):
            if cuts[depth] and at == edge:
                lines.append(inner + _ELLIPSIS)
            lines += block(row, inner, depth + 1)
        return [*lines, " " * depth + layout.close_bracket]

    return "\n".join(block(shown, f"{title}: ", 0))


def _edges(tensor: torch.Tensor, layout: PrintFormat) -> tuple[torch.Tensor, list[bool]]:
    edge, threshold = layout.edge_items, layout.summarise_threshold
    cuts = [threshold > 0 and tensor.numel() > threshold and n > 2 * edge for n in tensor.shape]
    for dim, cut in enumerate(cuts):
        if cut:
            size = tensor.shape[dim]
            kept = torch.tensor([*range(edge), *range(size - edge, size)])
            tensor = tensor.index_select(dim, kept)
    return tensor, cuts


def _row(values: list[str], layout: PrintFormat, lead: str) -> list[str]:
    start = lead + layout.open_bracket
    lines: list[str] = []
    line, empty = start, True
    for at, value in enumerate(values):
        text = value + (layout.separator if at < len(values) - 1 else layout.close_bracket)
        width = len((line + text).rstrip())
        if layout.max_line_width and not empty and width > layout.max_line_width:
            lines.append(line.rstrip())
            line = " " * len(start)
        line, empty = line + text, False
    return [*lines, line if values else line + layout.close_bracket]


# The number of decimal digits that distinguish all values of a type. More digits would not add
# information.
_SIGNIFICANT = {torch.float16: 5, torch.bfloat16: 4, torch.float32: 8, torch.float64: 17}


def _writer(shown: torch.Tensor, layout: PrintFormat) -> Callable[[torch.Tensor], str]:
    write = _number_writer(shown, layout)
    width = 0
    if layout.digits > 0 and layout.float_format != "none":
        width = max((len(write(value)) for value in shown.flatten().tolist()), default=0)
    return lambda element: write(element.item()).rjust(width)


def _number_writer(shown: torch.Tensor, layout: PrintFormat) -> Callable[[Any], str]:
    digits = layout.digits
    if not shown.is_floating_point():
        return str
    most = _SIGNIFICANT.get(shown.dtype, 3)
    if layout.float_format == "none" or digits == 0:
        return lambda value: f"{value:.{min(digits or 6, most)}g}"
    low, high = _FIXED_RANGE
    sizes = [abs(v) for v in shown.flatten().tolist() if v and math.isfinite(v)]
    fixed = layout.float_format == "fixed" or all(low <= size < high for size in sizes)
    if layout.float_format == "scientific" or not fixed:
        return lambda value: f"{value:.{min(digits, most - 1)}e}"
    return lambda value: f"{value:.{max(0, min(digits, most - 1 - _magnitude(value)))}f}"


def _magnitude(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def _print(
    x: torch.Tensor, title: str, gradient_title: str, layout: str, after: list[torch.Tensor]
) -> torch.Tensor:
    # Print nothing during a capture on real tensors, or in a run that is compared with the program.
    if listener() is None and eager_run() is None:
        how = PrintFormat(*json.loads(unquote(layout)))
        terminal.write_line(tensor_text(title, x, how))
    return x.clone()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, ctx.title, ctx.layout, _ = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    if ctx.title:
        gradient = _print_tensor(gradient, ctx.title, "", ctx.layout, [])
    return gradient, None, None, None, []


_print_tensor = define_effect(
    "print_tensor",
    "(Tensor x, str title, str gradient_title, str layout, Tensor[] after) -> Tensor",
    _print,
    lambda x, *_: torch.empty_like(x),
    backward=_backward,
    setup_context=_remember,
)
