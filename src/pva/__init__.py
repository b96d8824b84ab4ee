"""Provide libpva's interface to the profile reports and traces that poptorch writes.

Scripts that read a report with ``pva`` work with ``profile.json`` (or ``profile.pop``, its copy),
whose figures are estimates for IPUs. They also read traces that ``PVTI_OPTIONS`` has written, which
were measured on this machine. Figures that the cost model does not know are missing. Source:
libpva's public documentation; PopVision tutorials.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace as Values
from typing import Any

from poptorch import Error
from poptorch._base import archive
from poptorch._ipu_model import profile
from poptorch._ipu_model.constants import DEFAULT

__all__ = [
    "IPU", "Event", "OperationAnalysis", "Process", "Program", "ProgramVisitor", "Report",
    "Thread", "Trace", "openReport", "openTrace",
]  # fmt: skip


class IPU:
    """Names of chips."""

    class Architecture(enum.StrEnum):
        """Generations of chips."""

        Ipu1 = "Ipu1"
        Ipu2 = "Ipu2"
        Ipu21 = "Ipu21"


@dataclass(frozen=True, eq=False)
class Program:
    """A part of the program.

    Attributes:
        type: the kind of program.
        name: name of the operator, pass or loop.
        children: its parts, in order.
        computeset: what an ``OnTileExecute`` computes: the ``name`` of the operator, and
            ``vertices``, one for each occurrence of the operator in the pass.
        vars: tensors by name; the cost model does not list them by program.
        count: how many times a ``Repeat`` runs its parts.
        cycles: estimated cycles of one run.
    """

    class Type(enum.StrEnum):
        """Kinds of programs; a subset of Poplar's."""

        Sequence = "Sequence"
        Repeat = "Repeat"
        OnTileExecute = "OnTileExecute"
        DoExchange = "DoExchange"
        Sync = "Sync"

    type: Program.Type
    name: str
    children: tuple[Program, ...] = field(default=(), repr=False)
    computeset: Values | None = None
    vars: tuple[str, ...] = ()
    count: int = 1
    cycles: float = 0.0

    def accept(self, visitor: ProgramVisitor) -> None:
        """Let a visitor visit this program."""
        getattr(visitor, f"visit{self.type}")(self)


class ProgramVisitor:
    """Traverses a program. Override the methods that you need. Programs with parts visit these."""

    def visitSequence(self, program: Program) -> None:
        """Visit the parts of a sequence, or of a loop, once."""
        for each in program.children:
            each.accept(self)

    visitRepeat = visitSequence

    def visitOnTileExecute(self, program: Program) -> None:
        """Visit what tiles compute."""

    def visitDoExchange(self, program: Program) -> None:
        """Visit an exchange between tiles."""

    def visitSync(self, program: Program) -> None:
        """Visit a synchronisation."""


def _passes(priced: Mapping[str, Any]) -> dict[str, Program]:
    """Return the programs of the passes: exchange, computation and waiting for every operator."""
    steps: dict[str, list[Program]] = {}
    kinds = Program.Type
    for each in priced["operators"]:
        own = steps.setdefault(each["stage_pass"], [])
        name = f"{each['module']}/{each['name']}".lstrip("/")
        if each["exchange"]:
            own.append(Program(kinds.DoExchange, name, cycles=each["exchange"]))
        computed = Values(name=name, vertices=(name,) * each["count"])
        own.append(Program(kinds.OnTileExecute, name, (), computed, cycles=each["compute"]))
        if each["sync"]:
            own.append(Program(kinds.Sync, name, cycles=each["sync"]))
    return {name: Program(kinds.Sequence, name, tuple(own)) for name, own in steps.items()}


class Compilation:
    """The results of compiling."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content, self._priced = content, content["estimated"]

    @property
    def target(self) -> Values:
        """The target of compilation: the IPUs of one replica, except for ``numReplicas``."""
        chip, chips = self._content["target"], len(self._priced["chips"])
        tiles, kind = chips * chip["tiles"], IPU.Architecture(f"Ipu{chip['generation']}")
        memory, replicas = tiles * chip["tile_bytes"], self._priced["replicas"]
        return Values(
            numTiles=tiles, numIPUs=chips, numReplicas=replicas, totalMemory=memory,
            clockFrequency=chip["clock"], architecture=kind,
        )  # fmt: skip

    @property
    def graph(self) -> Values:
        return Values(numComputeSets=sum(each["count"] for each in self._priced["operators"]))

    @cached_property
    def programs(self) -> list[Program]:
        """The program of one call."""
        parts = tuple(own for _, own in sorted(_passes(self._priced).items()))
        loop = Program(Program.Type.Repeat, "schedule", parts, count=self._priced["runs"])
        return [Program(Program.Type.Sequence, "call", (loop,))]

    @cached_property
    def tiles(self) -> list[Values]:
        """The tiles of a replica's IPUs, each at the moment when its IPU uses most memory."""
        padding = 1 + DEFAULT.gaps
        sizes = (size for chip in self._priced["chips"] for size in chip["tiles"])
        totals = (Values(includingGaps=size, excludingGaps=size / padding) for size in sizes)
        return [Values(memory=Values(total=total)) for total in totals]

    @property
    def alwaysLiveVariables(self) -> list[Values]:
        """What is on the chips permanently, by category, with the tensors of the state."""
        return [
            Values(name=f"IPU {chip['chip']}: {name}", size=size)
            for chip in self._priced["chips"]
            for name, size in chip["always"].items()
            if size
        ]

    @property
    def livenessProgramSteps(self) -> list[Values]:
        """What is live in addition, for each column of the schedule."""
        chips = self._priced["chips"]
        always = sum(sum(chip["always"].values()) for chip in chips)
        columns = zip(*(chip["live"] for chip in chips), strict=True)
        return [
            Values(notAlwaysLiveMemory=Values(bytes=sum(column) - always)) for column in columns
        ]


class Execution:
    """The estimated execution of a call."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content, self._priced = content, content["estimated"]

    @cached_property
    def steps(self) -> list[Values]:
        """The actions of one run of the schedule. In each, other IPUs have no cycles."""
        passes, chips = _passes(self._priced), range(len(self._priced["chips"]))
        made = []
        for action in self._priced["schedule"]:
            name = profile.pass_of_action(action["name"])
            program = passes.get(name, Program(Program.Type.Sequence, action["name"]))
            spent = (_cycles(action) if at == action["chip"] else 0.0 for at in chips)
            ipus = tuple(Values(cycles=cycles) for cycles in spent)
            made.append(Values(name=action["name"], ipus=ipus, program=program))
        return made

    @property
    def totalCycles(self) -> float:
        """The cycles of one call."""
        return float(self._priced["cycles"])

    @property
    def runs(self) -> list[Values]:
        """The calls that were made while the report was written."""
        calls = (self._content["measured"] or {}).get("calls", 0)
        return [Values(name=f"call {number}") for number in range(calls)]

    def blocks(self, tile: int) -> Iterator[Values]:
        """Yield what a tile does, step by step, in cycles after the beginning of the schedule.

        Args:
            tile: its number; all tiles of an IPU do the same.
        """
        for action in self._priced["schedule"]:
            if action["chip"] == tile // self._content["target"]["tiles"]:
                start = action["start"]
                end = start + _cycles(action)
                yield Values(name=action["name"], cyclesFrom=start, cyclesTo=end)


def _cycles(action: Mapping[str, Any]) -> float:
    return float(sum(action["parts"].values()) + action["sent"])


class Report:
    """A profile report.

    Args:
        content: the content of ``profile.json``.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self.compilation = Compilation(content)
        self.execution = Execution(content)
        # Nothing was instrumented, because the figures are estimates.
        self.instrumentationSettings = Values(
            computeInstrumentationLevel="Off", externalExchangeInstrumentationLevel="Off"
        )
        self._shown = 10

    @property
    def version(self) -> Values:
        """The version of poptorch, in place of Poplar's."""
        text = self._content["poptorch"]
        major, minor, point = ([int(part) for part in re.findall(r"\d+", text)] + [0, 0, 0])[:3]
        return Values(major=major, minor=minor, point=point, packageHash="", string=text)

    poplarVersion = version

    def listPrintLength(self, length: int) -> None:
        """Set how many operators are printed."""
        self._shown = length

    def __str__(self) -> str:
        dear = self._content["estimated"]["operators"][: self._shown]
        lines = [f"{each['name']} {each['module']} {each['line']}" for each in dear]
        return "\n".join([f"{self._content['name']}, {self.compilation.target}", *lines])


class OperationAnalysis:
    """The operators of a report, the most expensive first. Figures are per call."""

    def __init__(self, report: Report) -> None:
        rows = report._content["estimated"]["operators"]
        self.operations = list(map(_operation, rows))


def _operation(row: Mapping[str, Any]) -> Values:
    match = re.match(r"(.+?):(\d+)", row["line"])
    file, line = (match[1], int(match[2])) if match else ("", 0)
    name = f"{row['module']}/{row['name']}".lstrip("/")
    context = Values(name=name, location=Values(fileName=file, lineNumber=line))
    return Values(
        name=row["name"], debugContext=context, replacedDebugContext=None,
        cycles=profile.cycles_of(row), flops=row["runs"] * row["flops"],
    )  # fmt: skip


def openReport(
    profile_path: str | os.PathLike[str], debug_path: str | os.PathLike[str] | None = None
) -> Report:
    """Open a profile report.

    Args:
        profile_path: ``profile.json`` or ``profile.pop``, or their directory.
        debug_path: has no effect; the report itself contains the debug information.

    Raises:
        poptorch.Error: there is no report, or it has another form.
    """
    return Report(profile.read(profile_path))


class Event:
    """A period of time on a thread.

    Attributes:
        label: what was done.
        channel: the channel of the event.
        timestamp: seconds after the trace began.
        duration: seconds.
    """

    def __init__(self, row: dict[str, Any]) -> None:
        self.label, self.channel = row["name"], row.get("cat", "")
        self.timestamp, self.duration = row["ts"] / 1e6, row["dur"] / 1e6
        self._children: list[Event] = []

    def children(self) -> list[Event]:
        """Return the direct children: events inside this one, without those inside them."""
        return self._children

    def __repr__(self) -> str:
        return f"<{self.channel}.{self.label}: {self.duration:.6f} s>"


@dataclass(frozen=True)
class Thread:
    """A thread. ``events`` are those that are not inside another event."""

    tid: int
    events: list[Event]


@dataclass(frozen=True)
class Process:
    """A process and its threads, by their numbers."""

    pid: int
    threads: dict[int, Thread]

    def thread(self, tid: int) -> Thread:
        """Return a thread by its number."""
        return self.threads[tid]


@dataclass(frozen=True)
class Trace:
    """A trace; ``processes`` by their numbers."""

    processes: dict[int, Process]

    def process(self, pid: int) -> Process:
        """Return a process by its number."""
        return self.processes[pid]


def openTrace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace in the Trace Event Format.

    Raises:
        poptorch.Error: there is no trace.
    """
    try:
        rows = json.loads(archive.read_text(path))["traceEvents"]
    except (Error, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Error(
            "There is no trace to open",
            got=f"{os.fspath(path)}: {error}",
            fix="pass a JSON file with traceEvents, for example one written by torch.profiler",
        ) from None
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("ph") == "X":
            lanes.setdefault((row["pid"], row["tid"]), []).append(row)
    threads: dict[int, dict[int, Thread]] = {}
    for (pid, tid), own in lanes.items():
        threads.setdefault(pid, {})[tid] = Thread(tid, _nested(own))
    return Trace({pid: Process(pid, own) for pid, own in threads.items()})


def _nested(rows: list[dict[str, Any]]) -> list[Event]:
    """Nest events in those that were active when they began."""
    outer: list[Event] = []
    stack: list[Event] = []
    for row in sorted(rows, key=lambda each: (each["ts"], -each["dur"])):
        event = Event(row)
        while stack and event.timestamp >= stack[-1].timestamp + stack[-1].duration:
            stack.pop()
        (stack[-1].children() if stack else outer).append(event)
        stack.append(event)
    return outer
