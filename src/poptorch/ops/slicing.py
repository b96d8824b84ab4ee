"""Provide windows into tensors: slices whose start is a tensor. The program reads this tensor when
it runs. Windows have a fixed size and wrap around at the end of a dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from . import operand_checks


def dynamic_slice(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int
) -> torch.Tensor:
    """Return a window of a tensor; another tensor holds its start.

    The program reads the start when it runs. The size is a constant of the program. Gradients flow
    to ``tensor``.

    Args:
        tensor: the tensor to slice.
        dim: the dimension.
        start: integer tensor of one element. A window that exceeds the end continues at 0.
        size: how many elements the window spans, at most the extent of the dimension.
        step: take every ``step``-th of them.

    Returns:
        A new tensor with ``ceil(size / step)`` elements along ``dim``.

    Raises:
        poptorch.Error: an argument has the wrong type, or size or step is out of range.
    """
    operand_checks.tensor(tensor, "dynamic_slice must take a torch.tensor input")
    operand_checks.tensor(start, "Slice start argument to dynamic_slice must be a torch.tensor")
    _check_window(tensor, dim, start, size, "dynamic_slice")
    _check_int(step, "step", "dynamic_slice")
    operand_checks.that(
        step >= 1, "Slicing step must be at least 1", f"step={step}", "pass a step of 1 or more"
    )
    return tensor.index_select(dim, _window(tensor, dim, start, size, step))


def dynamic_update(
    input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    """Return a copy of a tensor with a window replaced; another tensor holds its start.

    Gradients flow to ``input`` and ``src``.

    Args:
        input: the tensor to copy; it does not change.
        src: the new values, shaped like ``input`` with ``size`` elements along ``dim``.
        dim: the dimension.
        start: integer tensor of one element; see ``dynamic_slice``.
        size: how many elements to replace.

    Raises:
        poptorch.Error: an argument has the wrong type, or shapes or dtypes do not match.
    """
    operand_checks.tensor(input, "dynamic_update must take a torch.tensor input")
    operand_checks.tensor(src, "dynamic_update must take a torch.tensor src")
    operand_checks.tensor(start, "Slice start argument to dynamic_update must be a torch.tensor")
    operand_checks.that(
        input.dim() == src.dim(),
        "input and src tensors must have same dimensionality",
        f"{input.dim()} and {src.dim()} dimensions",
        "add the missing dimension, for example src.unsqueeze(dim)",
    )
    title = "input and src tensors must have same dtype"
    dtypes = f"{input.dtype} and {src.dtype}"
    operand_checks.that(input.dtype == src.dtype, title, dtypes, "convert src: src.to(input.dtype)")
    _check_window(input, dim, start, size, "dynamic_update")
    expected = list(input.shape)
    expected[dim] = size
    title, got = "src does not fit the window of dynamic_update", f"shape {tuple(src.shape)}"
    operand_checks.that(list(src.shape) == expected, title, got, f"pass shape {tuple(expected)}")
    return input.index_copy(dim, _window(input, dim, start, size, 1), src)


def _window(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int
) -> torch.Tensor:
    offsets = torch.arange(0, size, step, device=tensor.device)
    return (start.reshape(()).long() + offsets) % tensor.shape[dim]


def _check_window(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, function: str
) -> None:
    _check_int(dim, "dim", function)
    _check_int(size, "size", function)
    operand_checks.that(
        start.numel() == 1 and not start.is_floating_point() and start.dtype != torch.bool,
        f"The start of {function} must be one integer",
        f"{start.dtype} of shape {tuple(start.shape)}",
        "pass an integer tensor of shape [] or [1]",
    )
    title = "The start and end of a slice must be different"
    operand_checks.that(size != 0, title, "size=0", "pass a size of 1 or more")
    title = "A slice cannot have an end less than the start"
    operand_checks.that(size > 0, title, f"size={size}", "pass a positive size")
    operand_checks.that(
        -tensor.dim() <= dim < tensor.dim(),
        f"The dimension of {function} is out of range",
        f"dim={dim} for {tensor.dim()} dimensions",
        f"pass a dimension from {-tensor.dim()} to {tensor.dim() - 1}",
    )
    title = "A slice cannot be longer than its dimension"
    extent = tensor.shape[dim]
    got = f"size={size} for an extent of {extent}"
    operand_checks.that(
        size <= extent, title, got, "pass a size of at most the extent of the dimension"
    )


def _check_int(value: Any, name: str, function: str) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool)
    title = f"{function}: {name} must be an integer"
    operand_checks.that(
        fits, title, repr(value), "pass a Python int; its value is part of the compiled program"
    )
