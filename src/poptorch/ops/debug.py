"""Looking into a program as it runs: ``ipu_print_tensor`` and ``nop``."""

from __future__ import annotations

import torch

from .._base.errors import Error, InvalidKey
from .._ops import identities
from .._ops.context import listener
from .._ops.formatting import FLOAT_FORMATS, Layout
from .._ops.printing import print_tensor
from . import check


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
    """Print a tensor to stderr each time the program computes it; return it unchanged.

    It prints once per micro-batch and replica, in the order of the program. Use the result in the
    place of the tensor: a print whose result feeds neither an output nor the loss is dropped.
    Outside a wrapped model nothing is printed. Source: PopTorch user guide, "PopTorch ops".

    Args:
        tensor: of any shape and dtype.
        title: stands before the values; empty for ``tensor_0`` and so on.
        print_gradient: in training, print the gradient too, under ``<title>_gradient``.
        summarise_threshold: with more elements than this show only the edges; 0 for never.
        edge_items: elements at each end of each dimension in a summary.
        max_line_width: longer lines are wrapped; 0 for never.
        digits: after the point of floating point numbers, as far as their type has so many; 0
            switches alignment off too.
        float_format: ``"auto"``, ``"fixed"``, ``"scientific"``, or ``"none"`` for each on its own.
        separator: between the values of a row.
        open_bracket, close_bracket: around each row and each nesting level.

    Raises:
        poptorch.Error: not a tensor.
        KeyError: an unknown ``float_format``.
    """
    check.tensor(tensor, "ipu_print_tensor must take a torch.tensor argument")
    if float_format not in FLOAT_FORMATS:
        known = ", ".join(f'"{name}"' for name in FLOAT_FORMATS)
        raise InvalidKey("Unknown float_format", got=repr(float_format), fix=f"use one of {known}")
    capture = listener()
    if capture is None:
        return tensor
    layout = Layout(
        summarise_threshold, edge_items, max_line_width, digits, float_format, separator,
        open_bracket, close_bracket,
    )  # fmt: skip
    name = title or f"tensor_{capture.number()}"
    gradient = f"{name}_gradient" if print_gradient else ""
    return print_tensor(tensor, name, gradient, layout.to_text(), [])  # type: ignore[no-any-return]


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged through an operator that is never optimised away.

    Source: PopTorch user guide, "PopTorch ops".

    Raises:
        poptorch.Error: not a tensor.
    """
    check.tensor(tensor, "nop must take a torch.tensor argument")
    return tensor if listener() is None else identities.nop(tensor)


def getIpuTensorId(tensor: torch.Tensor) -> int:
    """Return a number that names a tensor of the model that is being captured.

    Other tensors have other numbers, and every capture of the same program gives the same.
    Source: PopTorch user guide, "PopTorch ops".

    Raises:
        poptorch.Error: no tensor of a model that is being captured.
    """
    check.tensor(tensor, "getIpuTensorId must take a torch.tensor argument")
    capture = listener()
    number = None if capture is None else capture.identify(tensor)
    if number is None:
        raise Error(
            "getIpuTensorId needs a tensor of the model that is being captured",
            got="a tensor of the host",
            fix="call it in forward, on an input or on what was computed from one",
        )
    return number
