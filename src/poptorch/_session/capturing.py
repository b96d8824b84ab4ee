"""What a session asks to be captured: tensors as slots, what is trained, scaled, named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .. import _capture
from .._ir import slots
from .._ir.optim_spec import OptimSpec
from .._ir.slot import Slot
from .._ir.spec import Spec
from .arguments import Bound, Inputs
from .grouping import Grouping


@dataclass(frozen=True, eq=False)
class Capturing:
    """The part of a capture that does not depend on the arguments.

    Attributes:
        module: what is traced.
        tensors: its parameters and buffers by path.
        groups: those with one value per group of replicas.
        spec: every setting.
    """

    module: nn.Module
    tensors: Mapping[str, _capture.Tied]
    groups: Mapping[str, Grouping]
    spec: Spec

    def request(
        self, call: _capture.Call, bound: Bound, inputs: Inputs, optim: OptimSpec | None
    ) -> _capture.Request:
        """Return the request.

        Args:
            call: runs forward on flat tensors.
            bound, inputs: the arguments.
            optim: the optimizer's structure, None in inference.
        """
        spec = self.spec
        narrow = spec.precision.narrow_64bit
        state = tuple(
            state_slot(path, tied, narrow, self.groups.get(path))
            for path, tied in self.tensors.items()
        )
        trained: frozenset[str] = frozenset()
        scaling: tuple[float | Slot, ...] = ()
        if optim is not None:
            trained = frozenset(path for group in optim.groups for path in group.params)
            half = any(s.dtype == torch.float16 and s.weight in trained for s in state)
            scaling = _loss_scaling(optim, half and spec.reduction.automatic_loss_scaling)
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
            anchors=tuple((short, long) for short, long, *_ in spec.anchors),
            module_scopes=spec.module_scopes,
            grouped={path: found.of_replica for path, found in self.groups.items()},
            arguments=dict(bound.parts),
            examples=lambda: inputs.first_micro_batch(spec.loops),
        )


def state_slot(path: str, tied: _capture.Tied, narrow: bool, grouped: Grouping | None) -> Slot:
    """Return the slot of a parameter or buffer on the device."""
    dtype = tied.tensor.dtype
    if narrow and dtype.is_floating_point:
        dtype = _capture.narrowed(dtype)
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
