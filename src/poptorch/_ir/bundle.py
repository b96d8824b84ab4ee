"""Define ``Bundle``: tensors that share one flat storage. Small weights are updated in bundles, and
gradients are exchanged in bundles of ``BUCKET`` bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .slots import Slot

# members start at multiples of this number of elements: 128 bytes in half, 256 in float
ALIGNMENT = 64

BUCKET = 4 << 20
"""Bytes per exchange. While gloo waits for one sum, it works on another. Two processes sum 14.8 MB
in two pieces in 0.9 of the time for one; smaller pieces take longer.
"""


@dataclass(frozen=True)
class Member:
    """One weight in a bundle. Its values are the elements ``offset`` to ``offset + slot.numel``."""

    slot: Slot
    offset: int


@dataclass(frozen=True)
class Bundle:
    """Weights one after another, padded with zeros. Flat tensors of all roles have these views."""

    slot: Slot
    members: tuple[Member, ...]


@dataclass(frozen=True)
class BundleView:
    slot: Slot
    flat: str  # the key of the tensor that contains it
    offset: int  # index of its first element in that tensor


def laid_out(slots: Iterable[Slot]) -> tuple[tuple[Member, ...], int]:
    members, end = [], 0
    for slot in slots:
        members.append(Member(slot, end))
        end += -(-slot.numel // ALIGNMENT) * ALIGNMENT
    return tuple(members), end


def in_chunks(slots: Iterable[Slot], most: float) -> list[list[Slot]]:
    """Return groups of successive tensors with at most this number of bytes, unless a single tensor
    has more.
    """
    chunks: list[list[Slot]] = []
    room = 0.0
    for slot in slots:
        if not chunks or room < slot.bytes:
            chunks.append([])
            room = most
        chunks[-1].append(slot)
        room -= slot.bytes
    return chunks
