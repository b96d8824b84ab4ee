"""A module as it is at one moment: its tensors as slots, and what of it is to be captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .. import _capture
from .._base import log
from .._base.errors import Error
from .._base.storage import address
from .._ir import slots
from .._ir.optim_spec import OptimSpec
from .._ir.slots import Slot, narrowed
from .._ir.spec import Spec
from .arguments import Inputs
from .grouping import Grouping, Request
from .signature import Bound


@dataclass(frozen=True, eq=False)
class Reading:
    """What was read.

    Attributes:
        module: what is traced.
        tensors: its parameters and buffers by path.
        groups: those with one value per group of replicas.
    """

    module: nn.Module
    tensors: Mapping[str, _capture.Tied]
    groups: Mapping[str, Grouping]

    @property
    def paths(self) -> dict[int, str]:
        """Paths of the parameters by the address of their values."""
        return paths_of(self.tensors)

    def request(
        self,
        call: _capture.Call,
        bound: Bound,
        inputs: Inputs,
        spec: Spec,
        optim: OptimSpec | None,
    ) -> _capture.Request:
        """Return what is to be captured.

        Args:
            call: runs forward on flat tensors.
            bound, inputs: the arguments.
            spec: every setting.
            optim: the optimizer's structure, None in inference.
        """
        state = tuple(
            _state_slot(path, tied, spec.precision.narrow_64bit, self.groups.get(path))
            for path, tied in self.tensors.items()
        )
        trained: frozenset[str] = frozenset()
        scaling: tuple[float | Slot, ...] = ()
        if optim is not None:
            trained = frozenset(path for group in optim.groups for path in group.params)
            half = any(s.dtype == torch.float16 and s.weight in trained for s in state)
            automatic = spec.reduction.automatic_loss_scaling
            if automatic and not half:
                log.python.warning(
                    "Training.setAutomaticLossScaling does nothing: it follows the gradients of "
                    "float16 weights, of which the model trains none"
                )
            scaling = _loss_scaling(optim, half and automatic)
        return _capture.Request(
            module=self.module,
            call=call,
            tensors=self.tensors,
            state=state,
            batch=inputs.slots(spec.loops),
            trained=trained,
            training=optim is not None,
            loss_scaling=scaling,
            precision=spec.precision,
            replicas=spec.loops.replicas,
            processes=spec.loops.processes,
            anchors=spec.inner_anchors,
            module_scopes=spec.module_scopes,
            grouped={path: grouping.of_replica for path, grouping in self.groups.items()},
            arguments=dict(bound.parts),
            examples=lambda: inputs.first_micro_batch(spec.loops),
        )


def paths_of(tensors: Mapping[str, _capture.Tied]) -> dict[int, str]:
    """Return the paths of the parameters among tensors, by the address of their values."""
    return {address(tied.tensor): path for path, tied in tensors.items() if tied.is_parameter}


def read(module: nn.Module, asked: Mapping[str, Request], spec: Spec) -> Reading:
    """Look at a module's tensors.

    Args:
        module: what will be traced.
        asked: parameters that are to have a value per group of replicas, by path.
        spec: every setting.

    Raises:
        Error: a grouped parameter does not fit, or a buffer that is named does not exist.
    """
    tensors = _capture.tensors_of(module)
    groups = {}
    for path, request in asked.items():
        grouping = request.resolve(path, tensors[path].tensor, spec.loops.all_replicas)
        if grouping is not None:
            groups[path] = grouping
    buffers = {path for path, tied in tensors.items() if not tied.is_parameter}
    unknown = sorted(set(spec.updatable_buffers) - buffers)
    if unknown:
        raise Error(
            "A buffer named as updatable does not exist",
            got=", ".join(unknown),
            fix=f"the model has {', '.join(sorted(buffers)) or 'no buffers'}",
        )
    return Reading(module, tensors, groups)


def _state_slot(path: str, tied: _capture.Tied, narrow: bool, grouped: Grouping | None) -> Slot:
    """Return the slot of a parameter or buffer on the device."""
    dtype = tied.tensor.dtype
    if narrow and dtype.is_floating_point:
        dtype = narrowed(dtype)
    shape = tuple(tied.tensor.shape)
    if grouped is not None:
        shape = (grouped.groups, *shape[1:])
    return (slots.param if tied.is_parameter else slots.buffer)(path, shape, dtype)


def _loss_scaling(optim: OptimSpec, automatic: bool) -> tuple[float | Slot, ...]:
    factor = (slots.LOSS_SCALE_FACTOR,) if automatic else ()
    if slots.LOSS_SCALING.name in optim.variables:
        return (slots.LOSS_SCALING, *factor)
    value = dict(optim.settings).get("loss_scaling", 1.0)
    assert isinstance(value, float)
    return (value, *factor)
