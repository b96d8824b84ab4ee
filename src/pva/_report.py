"""A profile report under libpva's names."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from poptorch._ipu_model import profile
from poptorch._ipu_model.constants import DEFAULT

from ._programs import Program, of_pass


class IPU:
    """Names of chips."""

    class Architecture(enum.StrEnum):
        """Generations of chips."""

        Ipu1 = "Ipu1"
        Ipu2 = "Ipu2"
        Ipu21 = "Ipu21"


class Version(NamedTuple):
    """A version; ``string`` is the whole of it."""

    major: int
    minor: int
    point: int
    packageHash: str
    string: str


class Target(NamedTuple):
    """What was compiled for: one replica's IPUs, but for ``numReplicas``."""

    numTiles: int
    numIPUs: int
    numReplicas: int
    totalMemory: int
    clockFrequency: float
    architecture: IPU.Architecture


class Total(NamedTuple):
    """Bytes of a tile."""

    includingGaps: float
    excludingGaps: float


class Memory(NamedTuple):
    """Memory of a tile; ``total`` at the fullest moment of its chip."""

    total: Total


class Tile(NamedTuple):
    """One tile."""

    memory: Memory


class Variable(NamedTuple):
    """A tensor; ``size`` in bytes."""

    name: str
    size: float


class Live(NamedTuple):
    """Bytes."""

    bytes: float


class LivenessStep(NamedTuple):
    """One column of the schedule, all chips of a replica together."""

    notAlwaysLiveMemory: Live


class Graph(NamedTuple):
    """The graph of the program."""

    numComputeSets: int


class IpuStep(NamedTuple):
    """What one IPU does in a step."""

    cycles: float


class Step(NamedTuple):
    """One action of the schedule; IPUs that do something else then have no cycles in it."""

    name: str
    ipus: tuple[IpuStep, ...]
    program: Program


class Block(NamedTuple):
    """When a tile does a step, in cycles after the schedule's beginning."""

    name: str
    cyclesFrom: float
    cyclesTo: float


class Run(NamedTuple):
    """One call."""

    name: str


class Settings(NamedTuple):
    """What was instrumented: nothing, the figures are estimates."""

    computeInstrumentationLevel: str = "Off"
    externalExchangeInstrumentationLevel: str = "Off"


class Tiles(Sequence[Tile]):
    """The tiles of a replica's IPUs, one IPU after another."""

    def __init__(self, chips: Sequence[Mapping[str, Any]]) -> None:
        self._bytes = [size for chip in chips for size in chip["tiles"]]

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [_tile(size) for size in self._bytes[at]]
        return _tile(self._bytes[at])


def _tile(size: float) -> Tile:
    return Tile(Memory(Total(size, size / (1 + DEFAULT.gaps))))


class Compilation:
    """What compiling found out."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self._priced = content["estimated"]

    @property
    def target(self) -> Target:
        """What was compiled for."""
        chip, chips = self._content["target"], len(self._priced["chips"])
        tiles = chips * chip["tiles"]
        kind = IPU.Architecture(f"Ipu{chip['generation']}")
        return Target(
            tiles, chips, self._priced["replicas"], tiles * chip["tile_bytes"], chip["clock"], kind
        )

    @property
    def graph(self) -> Graph:
        """The graph."""
        return Graph(sum(each["count"] for each in self._priced["operators"]))

    @cached_property
    def programs(self) -> list[Program]:
        """The program: what a call does."""
        passes = _passes(self._priced)
        parts = tuple(passes[name] for name in sorted(passes))
        runs = self._priced["runs"]
        loop = Program(Program.Type.Repeat, "schedule", parts, count=runs)
        return [Program(Program.Type.Sequence, "call", (loop,))]

    @property
    def tiles(self) -> Tiles:
        """The tiles."""
        return Tiles(self._priced["chips"])

    @property
    def alwaysLiveVariables(self) -> list[Variable]:
        """What is on the chips all the time, by category; tensors of state are parts of these."""
        return [
            Variable(f"IPU {chip['chip']}: {name}", size)
            for chip in self._priced["chips"]
            for name, size in chip["always"].items()
            if size
        ]

    @property
    def livenessProgramSteps(self) -> list[LivenessStep]:
        """What is live besides, column by column of the schedule."""
        chips = self._priced["chips"]
        always = sum(sum(chip["always"].values()) for chip in chips)
        columns = zip(*(chip["live"] for chip in chips), strict=True)
        return [LivenessStep(Live(sum(column) - always)) for column in columns]


class Execution:
    """What a call does, as it was estimated."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._priced = content["estimated"]
        self._calls = (content["measured"] or {}).get("calls", 0)
        self._tiles = content["target"]["tiles"]

    @cached_property
    def steps(self) -> list[Step]:
        """The actions of one run of the schedule."""
        passes, chips = _passes(self._priced), range(len(self._priced["chips"]))
        return [
            Step(
                action["name"],
                tuple(IpuStep(_cycles(action) if at == action["chip"] else 0.0) for at in chips),
                passes.get(_pass_of(action["name"]), of_pass(action["name"], ())),
            )
            for action in self._priced["schedule"]
        ]

    @property
    def totalCycles(self) -> float:
        """Of one call."""
        return float(self._priced["cycles"])

    @property
    def runs(self) -> list[Run]:
        """The calls that were made while the report was written."""
        return [Run(f"call {number}") for number in range(self._calls)]

    def blocks(self, tile: int) -> Iterator[Block]:
        """Yield what a tile does, step by step.

        Args:
            tile: its number; all tiles of an IPU do the same.
        """
        for action in self._priced["schedule"]:
            if action["chip"] == tile // self._tiles:
                start = action["start"]
                yield Block(action["name"], start, start + _cycles(action))


class Report:
    """A profile report.

    Args:
        content: of ``profile.json``.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self.compilation = Compilation(content)
        self.execution = Execution(content)
        self.instrumentationSettings = Settings()
        self._shown = 10

    @property
    def poplarVersion(self) -> Version:
        """The version of poptorch, which takes Poplar's place."""
        return self.version

    @property
    def version(self) -> Version:
        """The version of poptorch."""
        text = self._content["poptorch"]
        major, minor, point = ([int(part) for part in re.findall(r"\d+", text)] + [0, 0, 0])[:3]
        return Version(major, minor, point, "", text)

    def listPrintLength(self, length: int) -> None:
        """Set how many operators printing shows."""
        self._shown = length

    def __str__(self) -> str:
        dear = self._content["estimated"]["operators"][: self._shown]
        lines = [f"{each['name']} {each['module']} {each['line']}" for each in dear]
        return "\n".join([f"{self._content['name']}, {self.compilation.target}", *lines])


class Location(NamedTuple):
    """A line of the user's."""

    fileName: str
    lineNumber: int


class DebugContext(NamedTuple):
    """Where an operator comes from."""

    name: str
    location: Location


class Operation(NamedTuple):
    """One kind of operator of one module."""

    name: str
    debugContext: DebugContext
    replacedDebugContext: DebugContext | None
    cycles: float
    flops: int


class OperationAnalysis:
    """The operators of a report, the dearest first."""

    def __init__(self, report: Report) -> None:
        self.operations = [_operation(o) for o in report._content["estimated"]["operators"]]


def openReport(
    profile_path: str | os.PathLike[str], debug_path: str | os.PathLike[str] | None = None
) -> Report:
    """Open a profile report.

    Args:
        profile_path: ``profile.json`` or ``profile.pop``, or their directory.
        debug_path: accepted; the report itself has what debug information there is.

    Raises:
        poptorch.Error: there is none, or it has another form.
    """
    return Report(profile.read(profile_path))


def _operation(row: Mapping[str, Any]) -> Operation:
    match = re.match(r"(.+?):(\d+)", row["line"])
    place = Location(match[1], int(match[2])) if match else Location("", 0)
    context = DebugContext(f"{row['module']}/{row['name']}".lstrip("/"), place)
    cycles = row["compute"] + row["exchange"] + row["sync"]
    return Operation(row["name"], context, None, cycles, row["flops"])


def _passes(priced: Mapping[str, Any]) -> dict[str, Program]:
    operators: dict[str, list[Mapping[str, Any]]] = {}
    for each in priced["operators"]:
        operators.setdefault(each["stage_pass"], []).append(each)
    return {name: of_pass(name, own) for name, own in operators.items()}


def _pass_of(action: str) -> str:
    """``1F3`` is of the pass ``1F``; ``0U1`` is a pass itself."""
    match = re.fullmatch(r"(\d+[FB])\d+", action)
    return match[1] if match else action


def _cycles(action: Mapping[str, Any]) -> float:
    return float(sum(action["parts"].values()) + action["sent"])
