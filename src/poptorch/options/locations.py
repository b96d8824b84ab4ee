"""Define ``opts.TensorLocations``: where tensors are stored, and tiles for I/O. Results do
not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from .._base.errors import AssertionFailure
from .._ir.spec import Location, Locations
from .container import Container
from .distributed import data_share, replicas
from .option_table import ESTIMATES, RULES, Method, expect, option


class TensorLocationSettings(Container):
    """Where one kind of tensor is stored. Each method stores one choice.

    Every method returns the object, and raises an ``AssertionError`` for a wrong type.
    """

    @option(ESTIMATES, "minElementsForOffChip")
    def minElementsForOffChip(self, min_elements: int) -> Self:
        """Keep tensors with fewer elements on chip, whatever else is set."""

    @option(ESTIMATES, "minElementsForReplicatedTensorSharding")
    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """Keep tensors with fewer elements whole on every replica. Default 8192."""

    def useOnChipStorage(self, use: bool | None = True) -> Self:
        """Store the tensors on chip, or in streaming memory; None removes the choice."""
        if use is None:
            self.deleteIfExists("onChip")
            return self
        expect("use", use, bool)
        return self.createOrSet(onChip=int(use))

    @option(ESTIMATES, "useReplicatedTensorSharding", kind=bool, check=int)
    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        """Give each replica only a part of each tensor.

        Processes divide only the optimizer's state. A warning names what they cannot divide.
        """

    @option(ESTIMATES, "useIOTilesToLoad", kind=bool, check=int)
    def useIOTilesToLoad(self, use: bool = True) -> Self:
        """Load through the I/O tiles."""

    @option(ESTIMATES, "useIOTilesToStore", kind=bool, check=int)
    def useIOTilesToStore(self, use: bool = True) -> Self:
        """Store through the I/O tiles."""


def _io_tiles(count: Any) -> int:
    if not isinstance(count, int) or count not in range(32, 193, 2):
        raise AssertionFailure(
            "numIOTiles must be an even number between 32 and 192",
            got=repr(count),
            fix="for example options.TensorLocations.numIOTiles(64)",
        )
    return count


def _location(kind: str) -> Callable[[Method], Method]:
    """Write the setter for one kind of tensor. It stores a copy, so later changes of the argument
    have no effect.
    """
    return option(
        ESTIMATES,
        f"location_{kind}",
        kind=TensorLocationSettings,
        check=TensorLocationSettings.toDict,
        decides=f"locations.{kind}",
    )


class _TensorLocationOptions(Container):
    """Where activations, weights, optimizer state and accumulators are stored."""

    @option(RULES, "numIOTiles", check=_io_tiles, decides="locations.io_tiles")
    def numIOTiles(self, num_tiles: int) -> Self:
        """Reserve tiles of each chip for I/O; overlapped I/O needs them.

        Raises:
            AssertionFailure: not an even int from 32 to 192 (an ``AssertionError``).
        """

    @_location("activation")
    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        """Choose where activations are stored between the forward and the backward pass."""

    @_location("weight")
    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        """Choose where weights are stored."""

    @_location("optimizer")
    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """Choose where optimizer state is stored.

        If it is sharded over several processes, each keeps a part and updates that part of the
        weights.
        """

    @_location("accumulator")
    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """Choose where gradient accumulators are stored."""


def freeze_locations(options: Any, phased: bool) -> Locations:
    """Translate the locations. Phased strategies store everything off chip by default, and a single
    replica shards nothing.
    """
    values: Mapping[str, Any] = options.TensorLocations._values
    in_all = replicas(options) * data_share(options.Distributed)[1]

    def location(kind: str) -> Location:
        stored = values.get(f"location_{kind}", {})
        return Location(
            on_chip=bool(stored.get("onChip", not phased)),
            sharded=in_all > 1 and bool(stored.get("useReplicatedTensorSharding", 0)),
            load_by_io_tiles=bool(stored.get("useIOTilesToLoad", 0)),
            store_by_io_tiles=bool(stored.get("useIOTilesToStore", 0)),
            min_off_chip=stored.get("minElementsForOffChip"),
            min_sharded=stored.get("minElementsForReplicatedTensorSharding"),
        )

    kinds = ("activation", "weight", "optimizer", "accumulator")
    activation, weight, optimizer, accumulator = map(location, kinds)
    return Locations(activation, weight, optimizer, accumulator, values.get("numIOTiles"))
