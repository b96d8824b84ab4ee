"""Tensors that share one flat storage: what the update of many small weights works on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .slots import Slot

ALIGNMENT = 64  # members start at multiples of this many elements: 128 bytes in half, 256 in float

BUCKET = 4 << 20
"""Bytes that are exchanged at once. While gloo waits for one sum it works on another: two processes
add 14.8 MB up in 0.9 of the time in two pieces; smaller pieces take longer.
"""


@dataclass(frozen=True)
class Member:
    """One weight in a bundle: elements ``offset`` to ``offset + slot.numel`` are its values."""

    slot: Slot
    offset: int


@dataclass(frozen=True)
class Bundle:
    """Weights behind one another, padded with zeros; flat tensors of all roles have these views."""

    slot: Slot
    members: tuple[Member, ...]


@dataclass(frozen=True)
class View:
    slot: Slot
    flat: str  # the key of the tensor that it is a part of
    offset: int  # where in it its first element is


def laid_out(slots: Iterable[Slot]) -> tuple[tuple[Member, ...], int]:
    members, end = [], 0
    for slot in slots:
        members.append(Member(slot, end))
        end += -(-slot.numel // ALIGNMENT) * ALIGNMENT
    return tuple(members), end


def in_chunks(slots: Iterable[Slot], most: float) -> list[list[Slot]]:
    """Return tensors in runs of so many bytes at most, unless a single one has more."""
    chunks: list[list[Slot]] = []
    room = 0.0
    for slot in slots:
        if not chunks or room < slot.bytes:
            chunks.append([])
            room = most
        chunks[-1].append(slot)
        room -= slot.bytes
    return chunks
