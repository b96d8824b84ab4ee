"""Decide which statements of exported code are alike, such as those of layers, and write them once,
as a function or a loop.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .._ir.repeats import Stretch, repetitions
from .layout import laid_out
from .quoting import identifier
from .simplify import MARK
from .statements import DICTS, ListNames, Statement, ValueNames, by_name, module_name

# The minimum number of statements that a function, or a loop, must save.
_FEWEST, _FEWEST_IN_LOOPS = 8, 3
_MOST_TRIED = 40  # stretches
_TOKEN = re.compile(r'f?"[^"]*"|(?<![\w.])([a-zA-Z_]\w*)\b(?!=)')
_KEY = re.compile(rf'"([^"{MARK}]*){MARK}([^"]*)"')
Reading = Mapping[str, Sequence[int]]  # for each name, the positions of the statements that read it


def words(code: str) -> list[str]:
    """Return all names in some code, including functions and dicts, in their order."""
    return [found[1] for found in _TOKEN.finditer(code) if found[1]]


def renamed(code: str, names: Callable[[str], str]) -> str:
    return _TOKEN.sub(lambda found: names(found[0]) if found[1] else found[0], code)


@dataclass(frozen=True, eq=False)
class Fold:
    """Runs of statements that differ only in the names that they read and assign."""

    runs: tuple[tuple[Statement, ...], ...]
    start: int  # index of the first statement
    reading: Reading
    variables: frozenset[str]

    @property
    def length(self) -> int:
        return len(self.runs[0])

    @property
    def end(self) -> int:
        return self.start + len(self.runs) * self.length

    @cached_property
    def names(self) -> list[list[str]]:
        """The names in each run, in the order of their first use."""
        codes = ("\n".join(each.code for each in run) for run in self.runs)
        return [list(dict.fromkeys(n for n in words(c) if n in self.variables)) for c in codes]

    @cached_property
    def taken(self) -> list[int]:
        """Indices of the names that come from outside of the run."""
        own = {name for each in self.runs[0] for name in each.assigned}
        return [at for at, name in enumerate(self.names[0]) if name not in own]

    @cached_property
    def given(self) -> list[int]:
        """Indices of the names that are read outside of their run."""
        found, length = set[int](), self.length
        for number, run in enumerate(self.runs):
            begin = self.start + number * length
            for name in (name for each in run for name in each.assigned):
                if any(not begin <= at < begin + length for at in self.reading.get(name, ())):
                    found.add(self.names[number].index(name))
        return sorted(found)

    def readers(self, run: int, name: str, other: Fold) -> set[int]:
        """Return which runs of another fold read a name of a run; -1 means any other
        reader.
        """
        begin, length, size = self.start + run * self.length, self.length, other.length
        places = (p for p in self.reading[name] if not begin <= p < begin + length)
        found = ((place - other.start) // size for place in places)
        return {at if 0 <= at < len(other.runs) else -1 for at in found}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The part of the keys that differs between the runs, for example ``layers.3``; empty texts
        if none differs.

        Without any element if keys differ in another way. Such runs cannot be calls of one
        function.
        """
        rows = [_KEY.findall("\n".join(each.code for each in run)) for run in self.runs]
        columns = [column for column in zip(*rows, strict=True) if len(set(column)) > 1]
        paths = tuple(_common(column[at][1] for column in columns) for at in range(len(rows)))
        alike = all(
            len(
                {
                    (before, key.removeprefix(path))
                    for (before, key), path in zip(c, paths, strict=True)
                }
            )
            == 1
            for c in columns
        )
        if not columns:
            return ("",) * len(rows)
        return paths if alike and all(paths) and len(set(paths)) == len(paths) else ()

    @property
    def is_loop(self) -> bool:
        """Return whether only entries of dicts enter and leave the runs."""
        same = all(len({names[at] for names in self.names}) == 1 for at in self.taken)
        return same and bool(self.paths[0]) and not self.given


def _common(paths: Iterable[str]) -> str:
    split = [path.split(".") for path in paths]
    same = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*split, strict=False))
    return ".".join(each[0] for each in same)


def folded(statements: Sequence[Statement], given: Sequence[str]) -> list[Statement | Fold]:
    """Return statements in which repeated runs are replaced by folds; ``given`` lists names that
    are returned.
    """
    made = (name for each in statements for name in each.assigned)
    variables = frozenset((*given, *made)) - {*DICTS}
    reading: dict[str, list[int]] = {}
    for at, statement in enumerate(statements):
        for name in words(statement.code):
            if name in variables and name not in statement.assigned:
                reading.setdefault(name, []).append(at)
    for name in given:  # the function returns these
        reading.setdefault(name, []).append(len(statements))

    def tokens(statement: Statement) -> str:
        code = renamed(statement.code, lambda name: "_" if name in variables else name)
        without_paths = _KEY.sub(r'"\1"', code)
        return f"{statement.backward} {without_paths}"

    def cheapest(stretches: list[Stretch]) -> Fold | None:
        for start, length, end in stretches[:_MOST_TRIED]:
            copies = (end - start) // length
            firsts = range(start, end - copies * length + 1)
            folds = [fold for first in firsts for fold in _longest_repeat(first, length, copies)]
            if folds:
                return min(folds, key=_cost)
        return None

    def _longest_repeat(first: int, length: int, copies: int) -> Iterator[Fold]:
        """Return the largest number of equal runs from a position on, if replacing them is
        worth it.
        """
        runs = [tuple(statements[first + at * length :][:length]) for at in range(copies)]
        shapes = [_shape(run, variables) for run in runs]
        groups = itertools.groupby(range(copies), shapes.__getitem__)
        alike = max((list(group) for _, group in groups), key=len)
        if len(alike) > 1:
            chosen = tuple(runs[at] for at in alike)
            fold = Fold(chosen, first + alike[0] * length, reading, variables)
            if not fold.paths:
                return
            fewest = _FEWEST if fold.paths[0] else 5 * _FEWEST
            if (len(alike) - 1) * length >= (_FEWEST_IN_LOOPS if fold.is_loop else fewest):
                yield fold

    items: list[Statement | Fold] = []
    done = 0
    for fold in repetitions([tokens(each) for each in statements], cheapest):
        items += [*statements[done : fold.start], fold]
        done = fold.end
    return [*items, *statements[done:]]


def _shape(run: Sequence[Statement], variables: frozenset[str]) -> list[int]:
    """Return the pattern that runs must share: the position of each name's first use."""
    numbers: dict[str, int] = {}
    names = [name for each in run for name in words(each.code) if name in variables]
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _cost(fold: Fold) -> tuple[bool, int, int]:
    return not fold.paths[0], -len(fold.runs), len(fold.taken) + len(fold.given)


class BodyWriter:
    """The lines of a function. Functions that it calls are appended to ``functions``."""

    def __init__(
        self,
        items: Sequence[Statement | Fold],
        given: Sequence[str],
        constants: ListNames,
        functions: list[list[str]],
        named: Counter[str],
    ) -> None:
        self._constants, self._functions, self._named = constants, functions, named
        taken = {n for item in items if isinstance(item, Statement) for n in item.assigned}
        self._names = ValueNames((*given, *taken))
        self._renamed: dict[str, str] = {}
        self._folds = [item for item in items if isinstance(item, Fold)]
        # for each name, (variable with a call's saved values, name inside the function)
        self._saved: dict[str, tuple[str, str]] = {}
        self.lines: list[str] = []
        written = Lines(4)
        for item in items:
            if isinstance(item, Statement):
                written.add(item, renamed(item.code, self.now))
            elif item.is_loop:
                written.lines.append(f"    for name in {constants[item.paths]}:")
                inner = Lines(8, written)
                for each in item.runs[0]:
                    inner.add(each, by_name(renamed(each.code, self.now), item.paths[0], "name"))
                written.lines += inner.lines
            else:
                for statement in self._called(item):
                    written.add(statement, statement.code)
        self.lines = written.lines

    def now(self, name: str) -> str:
        return self._renamed.get(name, name)

    def _called(self, fold: Fold) -> Iterator[Statement]:
        """Write the function for all runs, and return its calls."""
        path, first = fold.paths[0], fold.runs[0]
        backward = first[0].backward
        inner = self._inside(fold)
        saved = self._kept(fold)
        returned = [at for at in fold.given if at not in saved]
        body = Lines(4)
        for each in first:
            code = renamed(each.code, lambda name: inner.get(name, name))
            body.add(each, by_name(code, path, "at") if path else code)
        gives = [inner[fold.names[0][at]] for at in (*returned, *saved)]
        if gives:
            body.lines += laid_out(f"return {', '.join(gives)}", 4)
        lists = [self._lists(fold, run) for run in range(len(fold.runs))]
        taken = [at for at in fold.taken if fold.names[0][at] not in self._saved]
        used = set(words("\n".join(body.lines)))
        dicts = [each for each in (*DICTS, "generators") if each in used]
        of_lists = [self._saved[name][1] for name in self._of_lists(fold, 0)]
        inputs = [inner[fold.names[0][at]] for at in taken]
        name = identifier(re.sub(r"_?\d+", "", module_name(path))) or "repeated"
        name = name if name.isidentifier() else f"x{name}"
        ending = "_backward" if backward else "_forward"
        name = f"update_{name}" if first[0].late else f"{name}{ending}"
        self._named[name] += 1
        name = name if self._named[name] == 1 else f"{name}_{self._named[name]}"
        takes = ", ".join([*(["at"] if path else []), *dicts, *inputs, *of_lists])
        which = re.sub(r"\d+", "*", path)
        docstring = [f'    """Run one of ``{which}``; ``at`` is its name."""'] if path else []
        self._functions.append([*laid_out(f"def {name}({takes}):", 0), *docstring, *body.lines])
        for run, names in enumerate(fold.names):
            called = module_name(fold.paths[run]) if path else f"repeated_{run}"
            arguments = [f'"{fold.paths[run]}"'] if path else []
            arguments += [*dicts, *(self.now(names[at]) for at in taken)]
            arguments += [f"*{each}" for each in lists[run]]
            call = f"{name}({', '.join(arguments)})"
            targets = []
            for at in returned:
                targets.append(self._names.new(f"d_{called}" if backward else called))
                self._renamed[names[at]] = targets[-1]
            if saved:
                kept = self._names.new(f"saved_{called}")
                targets.append(f"*{kept}")
                for at in saved:
                    self._saved[names[at]] = kept, inner[fold.names[0][at]]
            line = first[0].line
            yield Statement(
                f"{', '.join(targets)} = {call}" if targets else call, (), line, backward
            )

    def _inside(self, fold: Fold) -> dict[str, str]:
        """Return short names for those of the first run."""
        before = f"{module_name(fold.paths[0])}_"
        names, short = ValueNames(["at"]), dict[str, str]()
        for name in self._of_lists(fold, 0):
            short[name] = names.new(self._saved[name][1])
        chained = [at for at in fold.taken if len({each[at] for each in fold.names}) > 1
                   and fold.names[0][at] not in self._saved]  # fmt: skip
        for at in chained[:1]:
            short[fold.names[0][at]] = names.new("d_out" if fold.runs[0][0].backward else "x")
        for name in fold.names[0]:
            if name not in short:
                begin = "d_" if name.startswith("d_") else ""
                rest = name.removeprefix(begin).removeprefix(before)
                short[name] = names.new(re.sub(r"_\d+$", "", f"{begin}{rest}"))
        return short

    def _kept(self, fold: Fold) -> list[int]:
        """Return the names that exactly one run of one later function reads, and nothing else."""
        for other in self._folds[self._folds.index(fold) + 1 :]:
            # for each tuple of readers, one per run, the names that they read
            found: dict[tuple[int, ...], list[int]] = {}
            for at in fold.given:
                readers = [
                    fold.readers(run, names[at], other) for run, names in enumerate(fold.names)
                ]
                if all(len(each) == 1 and -1 not in each for each in readers):
                    found.setdefault(tuple(each.pop() for each in readers), []).append(at)
            for order, names in found.items():
                pairs = len(set(order)) == len(fold.runs) == len(other.runs)
                if pairs and len(names) > 2 and not other.is_loop:
                    return names
        return []

    def _of_lists(self, fold: Fold, run: int) -> list[str]:
        """Return the names that a run reads from lists of earlier calls, in their order."""
        names = {fold.names[run][at] for at in fold.taken}
        return [name for name in self._saved if name in names]

    def _lists(self, fold: Fold, run: int) -> list[str]:
        return list(dict.fromkeys(self._saved[name][0] for name in self._of_lists(fold, run)))


class Lines:
    """Statements one below the other, with the user's lines in comments at their ends."""

    def __init__(self, indent: int, before: Lines | None = None) -> None:
        self._indent = indent
        self._line: str = before._line if before is not None else ""
        self._backward: bool = before._backward if before is not None else False
        self.lines: list[str] = []

    def add(self, statement: Statement, code: str) -> None:
        if statement.backward and not self._backward and self.lines:
            self.lines += ["", f"{' ' * self._indent}# Backward."]
        self._backward = self._backward or statement.backward
        new = statement.line if statement.line != self._line else ""
        self._line = statement.line or self._line
        self.lines += laid_out(code.replace(MARK, ""), self._indent, new)
