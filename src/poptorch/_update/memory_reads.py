"""Refuse a step that reads how or where its tensors are in memory.

All weights of a program are contiguous, and each has its own memory. The user's weights may be
arranged in another way, or may be parts of a larger tensor. Addresses in the trace are those of
placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .._base.errors import Error
from .._ir.traced_step import TracedParam
from .known_functions import ADDRESSES, LAYOUTS, PLACES
from .step_values import place_of, unobserved
from .value_origins import WEIGHT, Origins


class MemoryReads:
    """Checks the functions that a step calls."""

    FUNCTIONS = ADDRESSES | LAYOUTS | PLACES

    def __init__(
        self,
        params: Mapping[str, TracedParam],
        hosts: Mapping[int, Tensor],
        origins: Origins,
        kind: type | None,
    ) -> None:
        """Prepare the checks.

        Args:
            params: the weights, by path.
            hosts: the traced parameters, by the identity of the user's parameters.
            kind: the class of all tensors of a step, if it is known.
        """
        self._hosts, self._origins, self._kind = hosts, origins, kind
        self._scattered = {p: each.shape for p, each in params.items() if not each.is_contiguous}
        self._parts = {each.identity: path for path, each in params.items() if each.is_part}

    def check(self, function: str, tensors: Sequence[Tensor]) -> None:
        """Refuse a function if its results could differ from those in eager PyTorch.

        Raises:
            Error: the function describes the memory of one of these tensors.
        """
        for tensor in (self._hosts.get(id(each), each) for each in tensors):
            if self._scattered and function in LAYOUTS:
                self._check_layout(function, tensor)
            if self._parts and function in PLACES:
                self._check_place(function, tensor)
            if function in ADDRESSES and (self._kind is None or isinstance(tensor, self._kind)):
                raise _address_read(function, tensor, self._weights(tensor))

    def _check_layout(self, function: str, tensor: Tensor) -> None:
        """Refuse to describe the layout of a weight, or of a tensor that may have the same one."""
        if not tensor.dim():
            return
        weights = self._weights(tensor)
        for path, shape in self._scattered.items():
            if path in weights or tuple(tensor.shape) == shape:
                raise _layout_read(function, path)

    def _check_place(self, function: str, tensor: Tensor) -> None:
        with unobserved():
            place = place_of(tensor)
            for identity, path in self._parts.items():
                weight = self._hosts.get(identity)  # some runs leave weights out
                if weight is not None and place_of(weight) == place:
                    raise _place_read(function, path)

    def _weights(self, tensor: Tensor) -> set[str]:
        return {key for role, key in self._origins.sources(tensor) if role == WEIGHT}


def _layout_read(function: str, weight: str) -> Error:
    return Error(
        "The optimizer's step reads the memory layout of a weight that is not contiguous",
        got=(
            f"{function} of '{weight}', or of a tensor of the same shape; in the compiled program, "
            "all weights are contiguous"
        ),
        fix=(
            "make the weights contiguous before you wrap the model: "
            "model.to(memory_format=torch.contiguous_format), or parameter.data = "
            "parameter.data.contiguous()",
            "or compute from shapes instead, which are the same as in PyTorch: parameter.shape",
        ),
    )


def _place_read(function: str, weight: str) -> Error:
    return Error(
        "The optimizer's step reads the position of a weight within a larger tensor",
        got=f"{function} of '{weight}'; in the compiled program, each weight has its own memory",
        fix=(
            "give the weight its own memory before you wrap the model: "
            "parameter.data = parameter.data.clone()",
            "or compute from shapes instead, which are the same as in PyTorch: parameter.numel()",
        ),
    )


def _address_read(function: str, tensor: Tensor, weights: set[str]) -> Error:
    of = f"a tensor of shape {tuple(tensor.shape)}"
    if len(weights) == 1:
        of = f"'{min(weights)}', or of a tensor that is computed from it"
    return Error(
        "The optimizer's step reads the memory address of a tensor",
        got=f"{function} of {of}; in the compiled program, the tensor has another address",
        fix=(
            "compare the Python objects instead: a is b, or id(a) == id(b)",
            "or read addresses before you wrap the model, for example in the constructor of the "
            "optimizer",
        ),
    )
