"""Text of a tensor as ``ipu_print_tensor`` prints it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import torch

FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")
_ELLIPSIS = "..."
_FIXED_RANGE = (1e-4, 1e6)  # magnitudes that are readable without an exponent


@dataclass(frozen=True)
class Layout:
    """How a tensor becomes text; the arguments of ``ipu_print_tensor`` under the same names."""

    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 80
    digits: int = 4
    float_format: str = "auto"
    separator: str = ", "
    open_bracket: str = "("
    close_bracket: str = ")"

    def to_text(self) -> str:
        """Return a form that ``from_text`` reads, for operators' string arguments."""
        return quote(json.dumps(dataclasses.astuple(self)))

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """Read the result of ``to_text``."""
        return cls(*json.loads(unquote(text)))


def tensor_text(title: str, tensor: torch.Tensor, layout: Layout) -> str:
    """Return ``title: (values)``, one line per row, without a newline at the end."""
    shown, cuts = _edges(tensor.detach().cpu(), layout)
    texts = _Elements(shown, layout)
    return "\n".join(_block(texts, shown, cuts, layout, f"{title}: ", depth=0))


def _edges(tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, list[bool]]:
    """Return the part of the tensor that is shown, and per dimension whether it was cut."""
    edge, threshold = layout.edge_items, layout.summarise_threshold
    cuts = [threshold > 0 and tensor.numel() > threshold and n > 2 * edge for n in tensor.shape]
    for dim, cut in enumerate(cuts):
        if cut:
            size = tensor.shape[dim]
            kept = torch.tensor([*range(edge), *range(size - edge, size)])
            tensor = tensor.index_select(dim, kept)
    return tensor, cuts


def _block(
    texts: _Elements,
    tensor: torch.Tensor,
    cuts: list[bool],
    layout: Layout,
    lead: str,
    depth: int,
) -> list[str]:
    """Return the lines of one nesting level; the first starts with ``lead``."""
    if tensor.dim() == 0:
        return [f"{lead}{layout.open_bracket}{texts(tensor)}{layout.close_bracket}"]
    cut, edge = cuts[0], layout.edge_items
    if tensor.dim() == 1:
        values = [texts(value) for value in tensor]
        if cut:
            values.insert(edge, _ELLIPSIS)
        return _row(values, layout, lead)
    inner = " " * (depth + 1)
    lines = [lead + layout.open_bracket]
    for at, part in enumerate(tensor):
        if cut and at == edge:
            lines.append(inner + _ELLIPSIS)
        lines += _block(texts, part, cuts[1:], layout, inner, depth + 1)
    return [*lines, " " * depth + layout.close_bracket]


def _row(values: list[str], layout: Layout, lead: str) -> list[str]:
    start = lead + layout.open_bracket
    lines: list[str] = []
    line, empty = start, True
    for at, value in enumerate(values):
        text = value + (layout.separator if at < len(values) - 1 else layout.close_bracket)
        if (
            layout.max_line_width
            and not empty
            and len((line + text).rstrip()) > layout.max_line_width
        ):
            lines.append(line.rstrip())
            line = " " * len(start)
        line, empty = line + text, False
    return [*lines, line if values else line + layout.close_bracket]


class _Elements:
    """Turns single elements into text; aligned to the widest one that is shown."""

    def __init__(self, shown: torch.Tensor, layout: Layout) -> None:
        self._write = _writer(shown, layout)
        aligned = layout.digits > 0 and layout.float_format != "none"
        self._width = max((len(t) for t in self._all(shown)), default=0) if aligned else 0

    def _all(self, shown: torch.Tensor) -> Iterable[str]:
        return (self._write(value) for value in shown.flatten().tolist())

    def __call__(self, element: torch.Tensor) -> str:
        return self._write(element.item()).rjust(self._width)


# Decimal digits that tell every value of a type from its neighbours; more would be invented.
_SIGNIFICANT = {torch.float16: 5, torch.bfloat16: 4, torch.float32: 8, torch.float64: 17}


def _writer(shown: torch.Tensor, layout: Layout) -> Callable[[Any], str]:
    digits = layout.digits
    if not shown.is_floating_point():
        return str
    most = _SIGNIFICANT.get(shown.dtype, 3)
    if layout.float_format == "none" or digits == 0:
        return lambda value: f"{value:.{min(digits or 6, most)}g}"
    if layout.float_format == "auto":
        fixed = _readable(shown)
    else:
        fixed = layout.float_format == "fixed"
    if not fixed:
        return lambda value: f"{value:.{min(digits, most - 1)}e}"
    return lambda value: f"{value:.{max(0, min(digits, most - 1 - _magnitude(value)))}f}"


def _magnitude(value: float) -> int:
    """The power of ten of the first digit."""
    return math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def _readable(shown: torch.Tensor) -> bool:
    low, high = _FIXED_RANGE
    sizes = [abs(v) for v in shown.flatten().tolist() if v and math.isfinite(v)]
    return all(low <= size < high for size in sizes)
