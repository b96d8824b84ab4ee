"""The states of the generators that data sets draw from: torch's, Python's, numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Json = Any


def state() -> Json:
    """Return the states as JSON."""
    version, words, gauss = random.getstate()
    numpys: Any = np.random.get_state()
    name, keys, *rest = numpys
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": [version, list(words), gauss],
        "numpy": [str(name), keys.tolist(), *rest],
    }


def check(states: Json) -> None:
    """Raise what ``restore`` would, as a file may have anything in their place."""
    restore(states, torch.Generator(), random.Random(), np.random.RandomState())


def restore(
    states: Json,
    torchs: torch.Generator = torch.default_generator,
    pythons: Any = random,
    numpys: Any = None,
) -> None:
    torchs.set_state(torch.tensor(states["torch"], dtype=torch.uint8))
    version, words, gauss = states["python"]
    pythons.setstate((version, tuple(words), None if gauss is None else float(gauss)))
    name, keys, *rest = states["numpy"]
    (numpys or np.random).set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
