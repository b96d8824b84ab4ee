"""``opts.TensorLocations``: where tensors rest, and the tiles kept for I/O.

Nothing here changes a result; the machine model reads it.
"""

from __future__ import annotations

from typing import Any, Self

from .._base.errors import AssertionFailure
from .check import expect, refuse
from .container import Container

IO_TILES = range(32, 193, 2)


class TensorLocationSettings(Container):
    """Where one kind of tensor rests. Starts empty; each method stores one key.

    Every method returns the object itself and raises ``AssertionError`` for a wrong type.
    """

    def __init__(self) -> None:
        super().__init__()

    def minElementsForOffChip(self, min_elements: int) -> Self:
        """Keep tensors with fewer elements on chip even where off-chip is asked for."""
        expect("min_elements", min_elements, int)
        return self.createOrSet(minElementsForOffChip=min_elements)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """Keep tensors with fewer elements whole on every replica."""
        expect("min_elements", min_elements, int)
        return self.createOrSet(minElementsForReplicatedTensorSharding=min_elements)

    def useOnChipStorage(self, use: bool | None = True) -> Self:
        """Keep the tensors on chip, or in streaming memory; None forgets the choice."""
        if use is None:
            self.deleteIfExists("onChip")
            return self
        return self._switch("onChip", use)

    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        """Give each replica a part of the tensors rather than all of them."""
        return self._switch("useReplicatedTensorSharding", use)

    def useIOTilesToLoad(self, use: bool = True) -> Self:
        """Load through the I/O tiles."""
        return self._switch("useIOTilesToLoad", use)

    def useIOTilesToStore(self, use: bool = True) -> Self:
        """Store through the I/O tiles."""
        return self._switch("useIOTilesToStore", use)

    def _switch(self, key: str, use: bool) -> Self:
        expect("use", use, bool)
        return self.createOrSet(**{key: int(use)})


class _TensorLocationOptions(Container):
    """Where activations, weights, optimiser state and accumulators rest.

    Each setter takes a snapshot of the settings: later changes to them are not seen.
    """

    def __init__(self) -> None:
        super().__init__()

    def numIOTiles(self, num_tiles: int) -> Self:
        """Reserve tiles of each chip for I/O; overlapped I/O needs them.

        Raises:
            AssertionFailure: not an even int from 32 to 192 (an ``AssertionError``).
        """
        if not isinstance(num_tiles, int) or num_tiles not in IO_TILES:
            refuse(
                AssertionFailure,
                "numIOTiles must be an even number between 32 and 192",
                got=repr(num_tiles),
            )
        return self.createOrSet(numIOTiles=num_tiles)

    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        """Say where activations rest between forward and backward."""
        return self._place("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        """Say where weights rest."""
        return self._place("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """Say where optimiser state rests."""
        return self._place("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """Say where gradient accumulators rest."""
        return self._place("location_accumulator", location)

    def _place(self, name: str, location: TensorLocationSettings) -> Self:
        expect("location", location, TensorLocationSettings)
        snapshot: dict[str, Any] = location.toDict()
        return self.createOrSet(**{name: snapshot})
