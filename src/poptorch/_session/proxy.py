"""What ``executor.weight`` is: the parameter, and a way to give replicas values of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._base.errors import StateError
from ..enums import CommGroupType, VariableRetrievalMode
from .weights import GroupingRequest

if TYPE_CHECKING:
    from .session import Session


class ParameterProxy:
    """Stands for a parameter in every operation of torch."""

    __slots__ = ("_name", "_parameter", "_session")

    def __init__(self, parameter: torch.nn.Parameter, name: str, session: Session) -> None:
        object.__setattr__(self, "_parameter", parameter)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_session", session)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(executor.weight, nn.Parameter) holds
        return type(self._parameter)

    def replicaGrouping(  # noqa: N802
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
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
            ValueError: an argument is no member of its enum.
        """
        if self._session.programs.all:
            raise StateError(
                "replicaGrouping must be called before the model is compiled",
                got=f"parameter '{self._name}'",
                fix="destroy() the executor first",
            )
        self._session.model.groupings[self._name] = GroupingRequest(
            CommGroupType(comm_group_type), shards, VariableRetrievalMode(variable_retrieval_mode)
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*_parameter_of(args), **_parameter_of(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._parameter, name, value)


def _parameter_of(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_parameter_of(item) for item in value)
    if type(value) is dict:
        return {name: _parameter_of(item) for name, item in value.items()}
    return value._parameter if type(value) is ParameterProxy else value


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: ParameterProxy, *args: Any) -> Any:
        return getattr(self._parameter, name)(*map(_parameter_of, args))

    return forward


# Python looks operators up on the class, past __getattr__.
_OPERATORS = """
    abs add and bool contains div eq float floordiv format ge getitem gt hash iadd imul index int
    invert isub itruediv iter le len lt matmul mod mul ne neg or pow radd repr reversed rmatmul rmul
    rpow rsub rtruediv setitem sub truediv xor array deepcopy reduce_ex
"""
for _name in _OPERATORS.split():
    if hasattr(torch.nn.Parameter, f"__{_name}__"):
        setattr(ParameterProxy, f"__{_name}__", _forwarding(f"__{_name}__"))
