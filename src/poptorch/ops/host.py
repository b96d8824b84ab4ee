"""Provide ``CPU``: a host function inside an inference program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from .._base.errors import Error
from .._base.thread_safety import holding
from .._ops.context import Capture, listener
from .._ops.effects import define_effect
from .._ops.library import copied
from . import operand_checks

_running: ContextVar[str | None] = ContextVar("poptorch_host_call", default=None)


class CPU:
    """Run a function or module on the host, in the middle of an inference model.

    Call it in ``forward``. The program then calls the function at this point each time it runs.
    When the model is captured, the function is called once with zeros to find out the shapes of its
    results, which must stay the same. Inside the function, poptorch's operators behave as outside
    of a model.

    Args:
        layer_to_call: the function or module. The parameters of a module no longer require
            gradients. If its weights should stay on the host, store it in a list, so that it is
            not a sub-module of the model.
        ID: a name, which errors show.

    Attributes:
        in_shapes, out_shapes: of the latest captured call.
        inputs, outputs: CPU tensors of the latest call.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if not isinstance(ID, str) or not callable(layer_to_call):
            raise Error(
                "poptorch.CPU needs a callable and a name",
                got=f"{layer_to_call!r}, {ID!r}",
                fix="for example poptorch.CPU(my_function, 'MyFunction')",
            )
        self._layer_to_call = layer_to_call
        self._id = ID
        if isinstance(layer_to_call, nn.Module):
            layer_to_call.requires_grad_(False)
        self.in_shapes: list[torch.Size] = []
        self.out_shapes: list[torch.Size] = []
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def __call__(self, *input: torch.Tensor, **kwargs: Any) -> Any:
        """Call the function on the host.

        Args:
            input: tensors.
            kwargs: other arguments; in a captured call they are constants.

        Returns:
            A tensor if the function returns one; a list of tensors for a tuple or list.

        Raises:
            poptorch.Error: in a training model, within another host call, if an argument is not a
                tensor, or if the shapes of results change.
        """
        for value in input:
            operand_checks.tensor(value, f"Host call '{self._id}' must take torch.tensor arguments")
        if _running.get() is not None:
            raise Error(
                "A host function must not call another poptorch.CPU function",
                got=f"'{self._id}' is called within '{_running.get()}'",
                fix="call plain Python functions inside the function of a poptorch.CPU",
            )
        capture = listener()
        if capture is None:
            results, bare = self._run(list(input), kwargs)
            return results[0] if bare else results
        if capture.training:
            raise Error(
                "poptorch.CPU is only supported in inference",
                got=f"host call '{self._id}' in a training model",
                fix="compute on the device, or before you call the model",
            )
        return self._capture(capture, list(input), kwargs)

    def execute(self) -> None:
        """Call the function on ``inputs``, and store its results in ``outputs``."""
        self.outputs, _ = self._run(self.inputs, {})

    def registerPersistentData(self) -> None:
        """Store zeros with the captured shapes in ``inputs`` and ``outputs``."""
        self.inputs = [torch.zeros(shape) for shape in self.in_shapes]
        self.outputs = [torch.zeros(shape) for shape in self.out_shapes]

    createPersistentData = registerPersistentData  # name in older releases

    def _run(
        self, tensors: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], bool]:
        with holding(_running, self._id):
            returned = self._layer_to_call(*tensors, **kwargs)
        bare = isinstance(returned, torch.Tensor)
        return operand_checks.tensors(returned, f"Host call '{self._id}' must return tensors"), bare

    def _capture(
        self, capture: Capture, tensors: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> Any:
        given = [(tensor.shape, tensor.dtype) for tensor in tensors]
        with capture.paused():
            zeros = [torch.zeros(shape, dtype=dtype) for shape, dtype in given]
            examples, bare = self._run(zeros, kwargs)
        kinds = operand_checks.kinds_of(examples)
        self.in_shapes = [shape for shape, _ in given]
        self.out_shapes = [example.shape for example in examples]

        def call(values: list[torch.Tensor]) -> list[torch.Tensor]:
            self.inputs = values
            self.outputs, _ = self._run(values, kwargs)
            got = operand_checks.kinds_of(self.outputs)
            if got != kinds:
                raise Error(
                    f"The results of host call '{self._id}' changed",
                    got=f"{got}, captured as {kinds}",
                    fix=(
                        "let the function that was passed to poptorch.CPU return the same shapes "
                        "and dtypes each time, also if its inputs are zeros, as when the model is "
                        "compiled"
                    ),
                )
            return self.outputs

        handle = f"{self._id}#{next(_numbers.setdefault(self._id, itertools.count()))}"
        _sites[handle] = call, kinds
        results: list[torch.Tensor] = _host_call(tensors, handle, [])
        return results[0] if bare else results


_numbers: dict[str, itertools.count[int]] = {}
# For each place in a program, permanently: a function of lists of CPU tensors, and the kinds of its
# results.
_sites: dict[
    str, tuple[Callable[..., list[torch.Tensor]], tuple[operand_checks.TensorKind, ...]]
] = {}


def _run_site(
    inputs: list[torch.Tensor], handle: str, after: list[torch.Tensor]
) -> list[torch.Tensor]:
    function, _ = _sites[handle]
    results = function([tensor.detach().cpu().clone() for tensor in inputs])
    device = inputs[0].device if inputs else torch.device("cpu")
    return [copied(result.detach().to(device)) for result in results]


_host_call = define_effect(
    "host_call",
    "(Tensor[] inputs, str handle, Tensor[] after) -> Tensor[]",
    _run_site,
    lambda inputs, handle, after: operand_checks.empty(_sites[handle][1], inputs),
)
