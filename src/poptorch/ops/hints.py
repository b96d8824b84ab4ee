"""Provide marks on tensors: hints that do not change values, and the mark of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._base import nested_values, source
from .._base.errors import AssertionFailure, InvalidValue
from .._base.keywords import also_called
from .._ops.context import eager_run, listener
from .._ops.identities import Hint, hint
from ..enums import OverlapMode
from . import operand_checks


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Limit the memory for temporaries of the operator that made a tensor.

    It is a hint for convolutions, matrix products, embedding lookups and indexing, also through a
    view of their result.

    Args:
        tensor: result of the operator.
        available_memory_proportion: share of a tile's memory, from 0 to 1.

    Returns:
        The tensor, unchanged.

    Raises:
        poptorch.Error: not a tensor, or not a number from 0 to 1.
    """
    operand_checks.tensor(
        tensor, "set_available_memory can only set available memory for torch.tensor"
    )
    proportion = available_memory_proportion
    number = isinstance(proportion, int | float) and not isinstance(proportion, bool)
    title = "The available memory proportion must be a number between 0 and 1"
    fix = "pass a fraction of the memory, for example 0.6, which is the default"
    operand_checks.that(number and 0 <= proportion <= 1, title, repr(proportion), fix)
    return _hinted(tensor, Hint.AVAILABLE_MEMORY, repr(float(proportion)))


@also_called(input_tensor="input_tensors")
def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Load inputs of the model while it computes.

    Source: PopTorch user guide, "PopTorch ops" and "Features".

    Args:
        input_tensors: a tensor, or nested tuples, lists, dicts and registered types. Other values
            pass through.
        mode: which loop overlaps; ``NoOverlap`` changes nothing.

    Returns:
        The same structure. Use its tensors instead of the inputs.

    Raises:
        poptorch.Error: when compiled: a tensor is not an input of the model or is also used
            directly, or the strategy, I/O tiles or output mode do not allow overlap.
    """
    return _overlapped("set_overlap_for_input", input_tensors, mode, Hint.OVERLAP_INPUT)


@also_called(output_tensor="output_tensors")
def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Transfer results to the host while the model continues to compute; see
    ``set_overlap_for_input``.

    Returns:
        The same structure. ``forward`` must return each of its tensors, once.

    Raises:
        poptorch.Error: when compiled: a tensor is not returned or returned twice, or the strategy,
            I/O tiles or output mode do not allow overlap.
    """
    return _overlapped("set_overlap_for_output", output_tensors, mode, Hint.OVERLAP_OUTPUT)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Mark values that recomputation stores instead of computing them again in the backward pass.

    This has an effect if recomputation is on: ``autoRecomputation`` of the PopART options.

    Args:
        tensors: tensors one by one, or one list or tuple of them.

    Returns:
        The tensor, a tuple of several tensors, or the same kind of container.

    Raises:
        ValueError: an argument is not a tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], list | tuple):
        given = tensors[0]
        kept = [_checkpoint(item) for item in given]
        return nested_values.sequence_of(type(given), kept)
    kept = [_checkpoint(item) for item in tensors]
    return kept[0] if len(kept) == 1 else tuple(kept)


def _checkpoint(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidValue(
            "All inputs must be tensors",
            got=f"recomputationCheckpoint received {tensor!r}, of type {type(tensor).__name__}",
            fix="pass tensors, or one list or tuple of tensors",
        )
    return _hinted(tensor, Hint.KEEP, "")


def _overlapped(function: str, tensors: Any, mode: OverlapMode, kind: Hint) -> Any:
    title = f"{function} needs a poptorch.OverlapMode"
    fix = "for instance poptorch.OverlapMode.OverlapAccumulationLoop"
    operand_checks.that(isinstance(mode, OverlapMode), title, repr(mode), fix)
    if mode is OverlapMode.NoOverlap:
        return tensors
    leaves, structure = nested_values.flatten(tensors)
    return structure.unflatten([_hinted(tensor, kind, mode.value) for tensor in leaves])


def _hinted(tensor: torch.Tensor, kind: Hint, value: str) -> torch.Tensor:
    if listener() is None:
        return tensor
    return hint(tensor, kind.value, value, source.calling_line() or "")  # type: ignore[no-any-return]


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.sum,
    "mean": torch.Tensor.mean,
    "none": lambda x: x,
}


@also_called(loss="x")
def identity_loss(x: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    """Mark a value as the loss to train on.

    Outside a wrapped model this function only computes the reduction.

    Args:
        x: the value, of any shape.
        reduction: ``"sum"`` or ``"mean"`` for a scalar. ``"none"`` keeps the shape: the gradient of
            every element is one.

    Returns:
        The reduced value.

    Raises:
        AssertionError: there is no such reduction.
    """
    if reduction not in _REDUCTIONS:
        raise AssertionFailure(
            "Unsupported reduction type!", got=repr(reduction), fix='use "sum", "mean" or "none"'
        )
    loss = _REDUCTIONS[reduction](x)
    capture = listener()
    if capture is not None:
        capture.mark_loss(loss, "identity_loss")
    plain = eager_run()
    if plain is not None:
        plain.losses.append(loss)
    return loss
