"""The states of the generators that data sets draw from: torch's, Python's, numpy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

Json = Any


def state() -> Json:
    """Return the states as JSON; numpy's if it is imported."""
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state().tolist(),
        "python": [version, list(words), gauss],
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [str(name), keys.tolist(), *rest]
    return states


def check(states: Json) -> None:
    """Raise what ``restore`` would, as a file may have anything in their place."""
    restore(states, torch.Generator(), random.Random(), own=True)


def restore(
    states: Json,
    torchs: torch.Generator = torch.default_generator,
    pythons: Any = random,
    own: bool = False,
) -> None:
    torchs.set_state(torch.tensor(states["torch"], dtype=torch.uint8))
    version, words, gauss = states["python"]
    pythons.setstate((version, tuple(words), None if gauss is None else float(gauss)))
    if "numpy" in states:
        import numpy as np

        name, keys, *rest = states["numpy"]
        numpys: Any = np.random.RandomState() if own else np.random
        numpys.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
