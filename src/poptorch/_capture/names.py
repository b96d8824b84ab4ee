"""The names by which users know the tensors of a model (PopTorch user guide, "Features")."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from .._base import trees
from .._base.threads import only_here
from .._ops.annotate import recorder


class Names:
    """Collects the named tensors of one capture."""

    def __init__(self, module: nn.Module, scopes: bool) -> None:
        self._paths = {sub: path for path, sub in module.named_modules()} if scopes else {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._scoped: dict[str, str] = {}  # names of results with the user's name scopes

    @property
    def all(self) -> tuple[str, ...]:
        """Every name, in the order of creation."""
        return tuple(self._tensors)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Name a tensor; a name that is taken gets a number behind it."""
        free, number = name, 0
        while free in self._tensors:
            number += 1
            free = f"{name}/{number}"
        self._tensors[free] = tensor

    def find(self, name: str) -> torch.Tensor | None:
        """Return the tensor of a name, the path of a module standing for its last result."""
        plain = name.removesuffix(":0")
        if plain in self._tensors:
            return self._tensors[plain]
        for module, path in self._paths.items():
            if path and path in (plain, plain.replace("/", ".")):
                name = _name(path, module)
                return self._tensors.get(self._scoped.get(name, name))
        return None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Name what modules return within the block."""
        handle = register_module_forward_hook(only_here(self._heard))
        try:
            yield
        finally:
            handle.remove()

    def _heard(self, module: nn.Module, args: Any, output: Any) -> None:
        name = _name(self._paths.get(module, ""), module)
        active = recorder()
        scope = "" if active is None else active.label.scope
        scoped = f"{scope}/{name}" if scope else name
        self._scoped.setdefault(name, scoped)
        for tensor in trees.flatten(output)[0]:
            self.add(scoped, tensor)


def _name(path: str, module: nn.Module) -> str:
    kind = type(module).__name__.removeprefix("Poptorch")
    return f"{path.replace('.', '/')}/{kind}" if path else kind
