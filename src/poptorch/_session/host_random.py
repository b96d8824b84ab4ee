"""The states of the generators that data sets and scripts draw from: torch's, Python's, numpy's."""

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


def restore(states: Json) -> None:
    """Go on from what ``state`` returned."""
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
