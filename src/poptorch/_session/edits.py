"""Weights that are changed on the host, which the device does not have before they are copied."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping

import torch

from .._base import log

_IN_TURN = 4  # tensors that one call looks at: what loads or makes weights changes all of them

_version_of = operator.attrgetter("_version")


class HostEdits:
    """Remembers which values of the host's parameters the device has; warns once of others."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[torch.Tensor, int]] = {}
        self._said = False
        self.settle({})

    def settle(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Host and device have the same values of these now.

        Args:
            parameters: the host's, by path.
        """
        known = {p: (t, _version_of(t)) for p, t in parameters.items() if not t.is_inference()}
        self._known.update(known)
        every = [*self._known.values()]
        groups = [every[start : start + _IN_TURN] for start in range(0, len(every), _IN_TURN)]
        self._turns = itertools.cycle(
            [([t for t, _ in group], sum(v for _, v in group)) for group in groups or [[]]]
        )

    def say(self, on_device: Callable[[str], torch.Tensor | None]) -> None:
        """Warn, once, if some were changed; for every call, of which each looks at a few.

        Args:
            on_device: returns the device's value of a parameter, None if it has it in parts.
        """
        if self._said:
            return
        tensors, versions = next(self._turns)
        if sum(map(_version_of, tensors)) == versions:
            return
        written = {p: t for p, (t, version) in self._known.items() if _version_of(t) != version}
        others = [path for path, host in written.items() if _differ(host, on_device(path))]
        if not others:  # they were put back
            self.settle(written)
            return
        self._said = True
        log.python.warning(
            "Weights were changed on the host (%s), and the device goes on with its own, which the "
            "host gets when it reads them next. Call copyWeightsToDevice() on the executor after "
            "such changes, or load_state_dict() on the executor, which does so",
            ", ".join(others[:5]) + (", ..." if len(others) > 5 else ""),
        )


def _differ(host: torch.Tensor, device: torch.Tensor | None) -> bool:
    if device is None or device.is_meta or device.shape != host.shape:
        return False
    return not torch.equal(host.detach().to(device.dtype), device)
