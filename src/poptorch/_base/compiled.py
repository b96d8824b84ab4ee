"""Which modules belong to compiled models: what is annotated there comes too late."""

from __future__ import annotations

import weakref

from torch import nn

_models: weakref.WeakKeyDictionary[object, nn.Module] = weakref.WeakKeyDictionary()


def remember(owner: object, model: nn.Module) -> None:
    """Count a model as compiled for as long as its owner lives."""
    _models[owner] = model


def holds(layer: nn.Module) -> bool:
    """Tell whether a module, or a shallow copy of it, is part of a compiled model."""
    own = layer._modules
    return any(part._modules is own for model in _models.values() for part in model.modules())
