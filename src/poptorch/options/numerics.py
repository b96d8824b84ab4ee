"""Options about random numbers, numerics and kept tensors (PopTorch user guide, "Options")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from ..enums import OutputMode
from .batching import check_period
from .check import expect
from .container import Container
from .popart import _PopartOptions

SYNTHETIC_OFF, SYNTHETIC_NORMAL = 0, 2


class NumericsOptions(Container):
    """What the device computes with, and what it keeps for the host."""

    anchored_tensors: dict[str, list[Any]]
    random_seed: int
    _popart: _PopartOptions

    def randomSeed(self, random_seed: int) -> Self:
        """Seed the device generator; also calls ``torch.manual_seed`` on the host, now.

        Raises:
            AssertionFailure: not an int (an ``AssertionError``).
        """
        self._check_writable("random_seed")
        expect("random_seed", random_seed, int)
        torch.manual_seed(random_seed)
        return self.createOrSet(random_seed=random_seed)

    def enableStableNorm(self, enabled: bool) -> Self:
        """Compute the variance of normalisation layers in two passes; here that is always so."""
        self._popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled: bool | int) -> Self:
        """Skip host input and output, to time the device alone; the outputs are meaningless.

        Args:
            enabled: anything truthy: random normal data on the device.
        """
        self._popart.set("syntheticDataMode", SYNTHETIC_NORMAL if enabled else SYNTHETIC_OFF)
        return self

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> None:
        """Keep an intermediate tensor of each run, for ``executor.getAnchoredTensor(short_name)``.

        Args:
            short_name: what to call it; a name used before is replaced.
            long_name: the tensor's name in the program, as ``getTensorNames()`` lists it.
            output_mode: None for the model's own output mode.
            output_return_period: for ``EveryN``; forced to 1 otherwise.

        Raises:
            AssertionFailure: an argument has another type, or ``EveryN`` has no positive period
                (an ``AssertionError``).
        """
        self._check_writable("anchored_tensors")
        expect("short_name", short_name, str)
        expect("long_name", long_name, str)
        if output_mode is not None:
            expect("output_mode", output_mode, OutputMode)
        if output_mode == OutputMode.EveryN:
            check_period(output_return_period)
        else:
            output_return_period = 1
        entry = [long_name, output_mode is None, output_mode, output_return_period]
        self.anchored_tensors[short_name] = entry

    def updatableNamedBuffers(self, buffers: Sequence[str]) -> Self:
        """Name the buffers that ``executor.copyNamedBuffersToDevice()`` may update."""
        self._popart.set("updatableNamedBuffers", buffers)
        return self
