"""The program of a report as a tree that visitors walk."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ComputeSet:
    """What tiles compute in one step.

    Attributes:
        name: of the operator.
        vertices: one for each time that the operator stands in the pass.
    """

    name: str
    vertices: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A part of the program.

    Attributes:
        type: what it is.
        name: of the operator, pass or loop.
        children: its parts, in order.
        computeset: what is computed, of ``OnTileExecute``.
        vars: tensors by name; the cost model does not list them by program.
        count: how often a ``Repeat`` runs its parts.
        cycles: estimated, of one run.
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
    computeset: ComputeSet | None = None
    vars: tuple[str, ...] = ()
    count: int = 1
    cycles: float = 0.0

    def accept(self, visitor: ProgramVisitor) -> None:
        """Have a visitor visit this program."""
        getattr(visitor, f"visit{self.type}")(self)


class ProgramVisitor:
    """Walks a program: override what is of interest. What has parts visits them."""

    def visitSequence(self, program: Program) -> None:
        """Visit the parts of a sequence."""
        self._visit(program)

    def visitRepeat(self, program: Program) -> None:
        """Visit the parts of a loop, once."""
        self._visit(program)

    def visitOnTileExecute(self, program: Program) -> None:
        """Visit what tiles compute."""

    def visitDoExchange(self, program: Program) -> None:
        """Visit an exchange between tiles."""

    def visitSync(self, program: Program) -> None:
        """Visit a synchronisation."""

    def _visit(self, program: Program) -> None:
        for each in program.children:
            each.accept(self)


def of_pass(name: str, operators: Sequence[Mapping[str, Any]]) -> Program:
    """Return the program of one pass: for every operator exchange, computing, waiting."""
    return Program(Program.Type.Sequence, name, tuple(_steps(operators)))


def _steps(operators: Sequence[Mapping[str, Any]]) -> Iterator[Program]:
    for each in operators:
        name = f"{each['module']}/{each['name']}".lstrip("/")
        if each["exchange"]:
            yield Program(Program.Type.DoExchange, name, cycles=each["exchange"])
        computed = ComputeSet(name, (name,) * each["count"])
        yield Program(Program.Type.OnTileExecute, name, computeset=computed, cycles=each["compute"])
        if each["sync"]:
            yield Program(Program.Type.Sync, name, cycles=each["sync"])
