"""Save and restore, as JSON, the random generators on which batches depend.

These are the generators of torch, Python and NumPy, and those in attributes of a loader, its
samplers and its data sets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .._base.errors import Error
from .._base.json_codec import Json

_HOLDERS = ("sampler", "batch_sampler", "dataset", "datasets")  # attributes to search


def _kinds() -> tuple[type, ...]:
    """Return the classes of generators. NumPy is imported only when this is first called."""
    return torch.Generator, random.Random, np.random.Generator, np.random.RandomState


def held_by(loader: Any) -> list[Any]:
    """Return the generators that a loader and its parts have as attributes, each once."""
    found: dict[int, Any] = {}
    waiting, known = [loader], {id(torch.default_generator)}
    for holder in waiting:
        for name, value in getattr(holder, "__dict__", {}).items():
            if id(value) in known:
                continue
            known.add(id(value))
            if isinstance(value, _kinds()) and not isinstance(value, random.SystemRandom):
                found[id(value)] = value
            elif name in _HOLDERS:
                waiting += value if isinstance(value, list | tuple) else [value]
    return [*found.values()]


def state(own: Sequence[Any] = ()) -> Json:
    """Return the states of the host's generators and of other ones."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": _state_of(random),
        "numpy": _state_of(np.random),
        "own": [[type(each).__name__, _state_of(each)] for each in own],
    }


def check(states: Json, own: Sequence[Any] = ()) -> None:
    """Raise the errors that ``restore`` would raise, because a file may contain anything in place
    of the states.

    Raises:
        poptorch.Error: the states belong to other generators than ``own``.
    """
    _restore(torch.Generator(), states["torch"])
    _restore(random.Random(), states["python"])
    _restore(np.random.RandomState(), states["numpy"])
    kept, given = [kind for kind, _ in states.get("own", [])], [type(each).__name__ for each in own]
    if kept != given:
        raise Error(
            "The checkpoint was saved with a loader that has other random generators",
            got=f"{', '.join(map(str, kept)) or 'none'} in the checkpoint; "
            f"{', '.join(given) or 'none'} in the loader, its samplers and data sets",
            fix="create the loader in the same way as in the run that saved the checkpoint",
        )
    for each, (_, content) in zip(own, states.get("own", []), strict=True):
        if not isinstance(each, torch.Generator) and not _has_layout_of(content, _state_of(each)):
            raise ValueError(f"this is not a state of {type(each).__name__}: {content!s:.80}")
        if isinstance(each, torch.Generator):
            _restore(torch.Generator(), content)


def restore(states: Json, own: Sequence[Any] = ()) -> None:
    """Restore states that ``state`` returned."""
    _restore(torch.default_generator, states["torch"])
    _restore(random, states["python"])
    _restore(np.random, states["numpy"])
    for each, (_, content) in zip(own, states.get("own", []), strict=True):
        _restore(each, content)


def _state_of(generator: Any) -> Json:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return _plain(generator.getstate() if hasattr(generator, "getstate") else generator.get_state())


def _restore(generator: Any, content: Json) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(content, dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(content)
    elif hasattr(generator, "getstate"):
        version, words, gauss = content
        generator.setstate((version, tuple(words), None if gauss is None else float(gauss)))
    else:
        name, keys, *rest = content
        generator.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))


def _plain(value: Any) -> Json:
    """Return the state of a generator as JSON values."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def _with_arrays(content: Json) -> Any:
    """Undo ``_plain`` for a state from NumPy, which contains arrays instead of lists."""
    if isinstance(content, dict):
        return {name: _with_arrays(each) for name, each in content.items()}
    return np.asarray(content, dtype=np.uint64) if isinstance(content, list) else content


def _has_layout_of(content: Json, present: Json) -> bool:
    """Return whether a state in a file has the structure of the present one."""
    if isinstance(present, dict):
        same = isinstance(content, dict) and content.keys() == present.keys()
        return same and all(_has_layout_of(content[name], each) for name, each in present.items())
    if isinstance(present, list):
        same = isinstance(content, list) and len(content) == len(present)
        return same and all(map(_has_layout_of, content, present))
    # the stored second value of a normal distribution
    if isinstance(present, float) or present is None:
        return content is None or isinstance(content, int | float)
    if isinstance(present, int):
        return type(content) is int and 0 <= content < 1 << 128
    return bool(content == present)
