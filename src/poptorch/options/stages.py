"""Stage and Phase: the user's names for what runs together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from .._base.errors import AssertionFailure
from .check import expect

_WHAT = "stages and phases must either be block IDs (strings) or Stages"


class Stage:
    """Blocks that run together on one device.

    Args:
        block_ids: ids of the blocks.

    Raises:
        AssertionFailure: an id is no ``str`` (an ``AssertionError``).
    """

    def __init__(self, *block_ids: str) -> None:
        if not all(isinstance(block, str) for block in block_ids):
            raise AssertionFailure(
                "Block IDs are supposed to be strings",
                got=", ".join(map(repr, block_ids)),
            )
        self._blocks = block_ids
        self._ipu: int | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """The ids of the blocks."""
        return self._blocks

    def ipu(self, ipu: int) -> Self:
        """Fix the device, an index among the model's own devices; beats the blocks' ``ipu_id``.

        Raises:
            AssertionFailure: not an int (an ``AssertionError``).
        """
        expect("ipu", ipu, int)
        self._ipu = ipu
        return self

    def __repr__(self) -> str:
        device = "" if self._ipu is None else f".ipu({self._ipu})"
        return f"Stage({', '.join(map(repr, self._blocks))}){device}"


class Phase:
    """Stages that run side by side, one phase after another.

    Args:
        arg: all ``Stage`` objects, each a parallel stage of the phase; or all block ids, which
            make one stage.

    Raises:
        AssertionFailure: anything else (an ``AssertionError``).
    """

    def __init__(self, *arg: Stage | str) -> None:
        self._stages = _stages_of(arg)

    @property
    def stages(self) -> list[Stage]:
        """The parallel stages."""
        return self._stages

    def stage(self, idx: int) -> Stage:
        """Return one of the parallel stages."""
        return self._stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Assign devices to the stages, in order.

        Raises:
            AssertionFailure: not one device per stage, or not ints (an ``AssertionError``).
        """
        if len(ipus) != len(self._stages):
            raise AssertionFailure(
                "A phase needs one IPU per stage",
                got=f"{len(ipus)} IPUs for {len(self._stages)} stages",
            )
        for ipu in ipus:
            expect("ipu", ipu, int)
        for stage, ipu in zip(self._stages, ipus, strict=True):
            stage.ipu(ipu)

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self._stages))})"


def stage_of(item: Stage | str | Sequence[str]) -> Stage:
    """Return one stage from a Stage, a block id, or a sequence of block ids."""
    if isinstance(item, Stage):
        return item
    if isinstance(item, str):
        return Stage(item)
    if isinstance(item, (list, tuple)) and item and all(isinstance(part, str) for part in item):
        return Stage(*item)
    raise AssertionFailure(f"Invalid stage: {_WHAT}", got=repr(item))


def _stages_of(items: Sequence[Stage | str]) -> list[Stage]:
    if items and all(isinstance(item, Stage) for item in items):
        return list(items)  # type: ignore[arg-type]
    if items and all(isinstance(item, str) for item in items):
        return [Stage(*items)]  # type: ignore[arg-type]
    raise AssertionFailure(
        f"Invalid phase: {_WHAT}",
        got=", ".join(map(repr, items)) or "no arguments",
    )
