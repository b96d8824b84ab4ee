"""Convert the device's flat list of results to the structure that ``forward`` returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ..._base import nested_values
from ..._base.errors import Error


def _refuse_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise Error(
        "backward() cannot be called explicitly on the outputs of a wrapped model",
        fix=(
            "delete this line: a call of a training model runs the backward pass and the "
            "optimizer step"
        ),
    )


_INT32 = torch.iinfo(torch.int32)

# Set on each result instead of in a subclass, because the type of a result must be torch.Tensor,
# also in pickles.
_EXPLAINING = {"backward": _refuse_backward, "__getstate__": lambda: None}
_explaining = _EXPLAINING.copy  # results are new tensors, and have no other attributes


# Times of a call: when it began, when the batch was taken, when all results were ready, and when
# they were returned.
CallMoments = tuple[float, float, float, float]
LastCall = tuple[
    CallMoments, Mapping[str, torch.Tensor]
]  # also contains the anchors, by short name


class Outputs:
    """The structure that ``forward`` returned, without its tensors.

    ``hosts`` are tensors that did not pass through the device, by their index among all tensors.
    """

    def __init__(
        self,
        structure: nested_values.Structure,
        hosts: Mapping[int, torch.Tensor],
        narrow_64bit: bool,
    ) -> None:
        self.structure, self._plain = structure, structure.plain
        self.hosts = dict(sorted(hosts.items()))
        self._narrow = narrow_64bit
        self._wide: list[int] | None = None
        self.count = len(structure.paths) - len(hosts)

    def build(self, results: Sequence[torch.Tensor]) -> Any:
        if self._wide is None:  # this is the same in each call
            wide = [at for at, result in enumerate(results) if result.dtype is torch.int64]
            self._wide = wide if self._narrow else []
        if self._wide:
            results = list(results)
            for at in self._wide:
                results[at] = self._narrowed(at, results[at])
        for result in results:
            result.__dict__ = _explaining()
        if self.hosts:
            results = list(results)
            for place, tensor in self.hosts.items():
                results.insert(place, tensor)
        plain = self._plain
        return plain(results) if plain is not None else self.structure.unflatten(results)

    def _narrowed(self, at: int, result: torch.Tensor) -> torch.Tensor:
        if result.numel():
            least, most = (int(bound) for bound in torch.aminmax(result))
            if least < _INT32.min or most > _INT32.max:
                places = [i for i in range(len(self.structure.paths)) if i not in self.hosts]
                raise Error(
                    "An integer result does not fit into 32 bits",
                    got=f"{self.structure.paths[places[at]]}: int64 from {least} to {most}",
                    fix=(
                        (
                            "to return 64-bit results, call options.Precision.narrow64Bit(False) "
                            "before you wrap the model"
                        ),
                        "or return smaller numbers, or split each number into two parts",
                    ),
                )
        return result.to(torch.int32)
