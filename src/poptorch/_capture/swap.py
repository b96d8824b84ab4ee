"""Traced tensors in the place of a module's parameters and buffers; reassignment noticed."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from .._base import source
from .._base.errors import Error
from .._base.threads import PerThread

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_HOLDERS = ("_parameters", "_buffers")
Place = tuple[nn.Module, str, str]  # the module, "_parameters" or "_buffers", the name in it


@dataclass(eq=False)
class Tied:
    """One tensor of the module, under its first qualified name, and every place it stands in."""

    tensor: torch.Tensor
    is_parameter: bool
    places: list[Place] = field(default_factory=list)

    @property
    def is_statistic(self) -> bool:
        """Whether it is a batch norm's running statistic."""
        return any(isinstance(owner, BATCH_NORMS) for owner, _, _ in self.places)


def tensors_of(module: nn.Module, values: bool = True) -> dict[str, Tied]:
    """Return parameters, then buffers, by qualified name; a tied one once, with all its places."""
    items = operator.methodcaller("items") if values else dict.items
    by_identity: dict[int, tuple[str, Tied]] = {}
    for holder in _HOLDERS:
        for prefix, owner in module.named_modules(remove_duplicate=True):
            for name, tensor in items(getattr(owner, holder)):
                if tensor is None:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                _, tied = by_identity.setdefault(
                    id(tensor), (path, Tied(tensor, holder == "_parameters"))
                )
                tied.places.append((owner, holder, name))
    return dict(by_identity.values())


@contextlib.contextmanager
def swapped(
    places: Mapping[str, Tied], values: Mapping[str, torch.Tensor], users: nn.Module | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Within the block this thread finds ``values`` in the module; others find its own tensors."""
    seen: dict[int, dict[str, torch.Tensor]] = {}  # by the dict that they stand in
    for path, tied in places.items():
        for owner, holder, name in tied.places:
            own = owner.__dict__[holder]
            seen.setdefault(id(own), dict(own))[name] = values[path]
    owners = {owner for tied in places.values() for owner, _, _ in tied.places}
    before = [
        (owner, holder, owner.__dict__[holder])
        for owner in (owners if users is None else {*owners, users})
        for holder in _HOLDERS
        if id(owner.__dict__[holder]) in seen
    ]
    reassigned: dict[str, torch.Tensor] = {}
    try:
        for owner, holder, own in before:
            owner.__dict__[holder] = PerThread(own, seen[id(own)])
        yield reassigned
        for path, tied in places.items():
            _check(path, tied, values[path], reassigned)
    finally:
        for owner, holder, own in before:
            owner.__dict__[holder] = own


def _check(path: str, tied: Tied, value: torch.Tensor, reassigned: dict[str, torch.Tensor]) -> None:
    for owner, holder, name in tied.places:
        now = getattr(owner, holder).get(name)
        if now is value:
            continue
        if isinstance(owner, BATCH_NORMS) and isinstance(now, torch.Tensor):
            reassigned[path] = now
            continue
        what = "parameter" if holder == "_parameters" else "buffer"
        verb = "removed from" if now is None else "reassigned within"
        raise Error(
            f"{what.capitalize()} '{path}' is {verb} the model",
            got=f"forward of {type(owner).__name__} binds another value to self.{name}",
            where=source.definition_line(type(owner).forward),
            fix=f"change its value in place: self.{name}.copy_(new_value)",
        )
