"""From the device's flat results to what ``forward`` returned (PopTorch user guide, "Features")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from .._base import source, trees
from .._base.errors import Error


def _refuse_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise Error(
        "backward() cannot be called explicitly on the outputs of a wrapped model",
        where=source.calling_line(),
        fix="nothing: a call of a training model does the backward pass and the optimizer step",
    )


def _no_state() -> None:
    """Results are pickled as plain tensors."""


# On each result rather than on a subclass: the type of a result is torch.Tensor.
_EXPLAINING = {"backward": _refuse_backward, "__getstate__": _no_state}


class Outputs:
    """What ``forward`` returned, waiting for tensors.

    Args:
        structure: its structure.
        hosts: tensors that did not pass through the device, by their place among all tensors.
    """

    def __init__(self, structure: trees.Structure, hosts: Mapping[int, torch.Tensor]) -> None:
        self.structure = structure
        self.hosts = dict(sorted(hosts.items()))
        self.count = len(structure.paths) - len(hosts)

    def build(self, results: Sequence[torch.Tensor]) -> Any:
        """Return the structure around the results of one call."""
        for result in results:
            result.__dict__.update(_EXPLAINING)
        if self.hosts:
            results = list(results)
            for place, tensor in self.hosts.items():
                results.insert(place, tensor)
        plain = self.structure.plain
        return plain(results) if plain is not None else self.structure.unflatten(results)
