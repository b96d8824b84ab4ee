"""Add ``replicaGrouping`` to the parameters that an executor returns."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ... import _capture
from ..._base.errors import StateError
from ...enums import CommGroupType, VariableRetrievalMode
from .model import Model
from .model_tensors import GroupingRequest, paths_of
from .programs import Programs


def make_groupable(value: nn.Parameter | nn.Module, model: Model, programs: Programs) -> None:
    """Add the method to a parameter, or to all parameters of a layer. In a compiled model it raises
    an error.
    """
    parameters = [*value.parameters()] if isinstance(value, nn.Module) else [value]
    if programs.all:
        parameters = [each for each in parameters if "replicaGrouping" not in vars(each)]
    if not parameters:
        return
    names = paths_of(_capture.tensors_of(model.module, values=False))
    for parameter in parameters:
        if id(parameter) in names:
            _make_groupable(parameter, names[id(parameter)], model, programs)


def _make_groupable(parameter: nn.Parameter, name: str, model: Model, programs: Programs) -> None:
    """Add the method for this model. Copies and pickles of the parameter do not have it."""
    own, compiled = weakref.ref(model), weakref.ref(programs)
    handed_out = weakref.ref(parameter)

    def replicaGrouping(  # noqa: N802
        comm_group_type: CommGroupType, shards: int, variable_retrieval_mode: VariableRetrievalMode
    ) -> None:
        """Let each group of replicas have its own value of this parameter, before compilation.

        The host's tensor has a leading dimension with one value per group; ``forward`` sees the
        value of its replica's group, without that dimension.

        Args:
            comm_group_type: how replicas form groups; ``All`` for one shared value.
            shards: replicas per group; unused with ``NoGrouping``.
            variable_retrieval_mode: read back one value per group, or one per replica.

        Raises:
            RuntimeError: the model is compiled.
            ValueError: an argument is not a member of its enum.
        """
        model, programs = own(), compiled()
        if model is None or programs is None or programs.all:
            raise StateError(
                "replicaGrouping must be called before the model is compiled",
                got=f"parameter '{name}'",
                fix="call destroy() on the wrapped model first",
            )
        model.groupings[name] = GroupingRequest(
            CommGroupType(comm_group_type), shards, VariableRetrievalMode(variable_retrieval_mode)
        )

    def state() -> dict[str, Any]:
        return {key: value for key, value in vars(handed_out()).items() if key not in given}

    given = ("replicaGrouping", "__getstate__")
    vars(parameter).update(zip(given, (replicaGrouping, state), strict=True))
