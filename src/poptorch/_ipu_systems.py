"""Describe systems of IPUs: the kinds of chips with their tiles, memory and clock, how many there
are, and their device ids.

Ids follow the list of a real machine: first single chips, then groups of 2, 4, 8 and so on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ._base import env
from ._base.errors import Error


@dataclass(frozen=True)
class ChipKind:
    name: str  # value of the environment variable
    board: str  # machine or card that contains the chips
    generation: int  # hardware generation: 1, 2 or 21
    tiles: int  # processors per chip
    tile_bytes: int  # bytes of memory per tile
    clock_mhz: int
    per_board: int  # chips per machine or card


KINDS = {
    kind.name: kind
    for kind in (
        ChipKind("mk1", "C2", 1, 1216, 256 << 10, 1600, 2),
        ChipKind("mk2", "M2000", 2, 1472, 624 << 10, 1330, 4),
        ChipKind("bow", "Bow-2000", 2, 1472, 624 << 10, 1850, 4),
        ChipKind("c600", "C600", 21, 1472, 624 << 10, 1500, 1),
    )
}


@dataclass(frozen=True)
class System:
    kind: ChipKind
    chips: int

    @property
    def name(self) -> str:
        return f"virtual-{self.kind.name}-{self.chips}"

    @property
    def text(self) -> str:
        return f"{self.kind.name}:{self.chips}"

    @property
    def devices(self) -> list[range]:
        sizes = [1 << power for power in range(self.chips.bit_length())]
        return [
            range(at, at + size) for size in sizes for at in range(0, self.chips - size + 1, size)
        ]

    def check_size(self, replicas: int, chips: int) -> None:
        """Raise an error if the replicas of a model need more chips than the system has."""
        needed = replicas * chips
        if needed > self.chips:
            enough = 1 << (needed - 1).bit_length()
            raise Error(
                "The model needs more IPUs than the system has",
                got=f"{replicas} replicas of {chips} IPUs on {self.text}",
                fix=(
                    f'choose a larger system: system="{self.kind.name}:{enough}"',
                    "or use fewer replicas: options.replicationFactor(n)",
                ),
            )

    def of_size(self, count: int) -> list[int]:
        enough = [len(chips) for chips in self.devices if len(chips) >= count]
        return [i for i, chips in enumerate(self.devices) if enough and len(chips) == min(enough)]


def current() -> System:
    return parse(env.get("POPTORCH_POD"), "POPTORCH_POD does not describe a system")


def system_of(text: object = None) -> System:
    """Return the system for an estimate: the given one, or if there is none, the system of this
    machine. Without either, it is the default system.
    """
    if text is not None:
        return parse(text)
    present = current()
    return present if present.chips else parse(env.TABLE["POPTORCH_POD"].default)


def parse(text: object, title: str = "There is no such system") -> System:
    """Return the system that a text describes: ``bow:16``, or a number, which means chips
    of kind mk2.
    """
    match = re.fullmatch(r"(?:([a-z0-9]+):)?(\d+)", text) if isinstance(text, str) else None
    if match is None or (match[1] or "mk2") not in KINDS:
        raise Error(
            title,
            got=repr(text),
            fix=(
                f"use kind:number, for example mk2:16, with one of the kinds {', '.join(KINDS)}; "
                "or only a number of chips; 0 means a machine without IPUs"
            ),
        )
    return System(KINDS[match[1] or "mk2"], int(match[2]))
