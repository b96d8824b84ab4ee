"""Run both branches wherever a step's code branches on a value, and select between the results.

A condition on such a value is a question. A question about one weight, such as whether its norm is
0, has an answer for each weight. One run tries the same answer for all weights. If the answer about
one weight affects others, as in ``if not all(p.grad.isfinite().all() for p in params): return``,
questions about one weight have one answer for all weights, too. A question about numbers, such as
whether this is the tenth step, also has one answer for all weights, and so does a question about
several weights, such as whether the norm of all gradients is above a limit.

If the user's code raises an exception after an answer, as in ``if norm.isnan(): raise ...``, the
program assumes the other answer, because a program cannot raise exceptions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._base.errors import Error
from .._base.source import raising_line
from .number_tracing import Numbers
from .step_value_reads import Restart
from .traced_numbers import TracedNumber
from .value_origins import WEIGHT, Identifier, ValueSources

MOST = 64  # largest number of runs
COMMON = ""  # the owner of answers that are the same for all weights
StepResults = dict[str, dict[str, Tensor]]  # by weight (COMMON for none), then by key


@dataclass(frozen=True)
class _Answer:
    condition: Tensor
    identifier: Identifier
    yes: bool


@dataclass
class _Branch:
    """The questions of one owner, a weight or COMMON, with the answers for the next run."""

    script: list[bool] = field(default_factory=list)
    asked: list[_Answer] = field(default_factory=list)

    def answer(self, condition: Tensor, identifier: Identifier) -> bool:
        for known in self.asked:
            if known.identifier == identifier:
                return known.yes
        yes = self.script[len(self.asked)] if len(self.asked) < len(self.script) else True
        self.asked.append(_Answer(condition, identifier, yes))
        return yes

    def has_unused_answers(self) -> bool:
        return len(self.asked) < len(self.script)

    def advance(self) -> bool:
        """Continue with the next combination of answers. Return False if there is none."""
        answers = [each.yes for each in self.asked]
        while answers and not answers[-1]:
            answers.pop()
        if not answers:
            return False
        self.script, self.asked = [*answers[:-1], False], []
        return True


class _DependentWeightsError(Exception):
    """The answer to a question about one weight decides the results of another one."""


class _AnswerRaisesError(Exception):
    """The user's code raised an exception after an answer, which is not given again."""


_Question = tuple[tuple[tuple[int, bool], ...], int]
"""The numbers of questions that were asked before, with the answers, and that of the question."""
_TakenBranch = tuple[tuple[_Answer, ...], dict[str, Tensor]]


class Choices:
    """Answers the questions of ``Numbers``, and joins the results of the runs."""

    def __init__(self) -> None:
        self.mode = Numbers(self._decide)
        self._branches: dict[str, _Branch] = {}
        self._runs = 0
        self._are_dependent = False  # whether an answer about one weight decides about others
        self._assumed: dict[_Question, bool] = {}  # the answers without an exception
        self._last: tuple[_Question, bool] | None = None  # the last answer of this run
        self._constant: dict[Identifier, bool] = {}  # answers in this run that were assumed
        self._given: list[tuple[Tensor, bool]] = []  # conditions of all runs at present
        self.raised: dict[str, str] = {}  # exceptions that a program does not raise, by line

    def results(self, run: Callable[[], StepResults]) -> dict[str, Tensor]:
        """Return the results of a function, by key, for all answers to its questions."""
        common, taken = _Branch(), list[_TakenBranch]()
        self._runs, self._are_dependent = 0, False
        while True:
            try:
                taken.append(self._of_weights(run, common))
            except _DependentWeightsError:
                self._are_dependent = True
                common, taken = _Branch(), []
                continue
            except _AnswerRaisesError:
                common, taken, self._runs = _Branch(), [], 0
                continue
            if not common.advance():
                return self._joined(taken)

    @contextlib.contextmanager
    def given(self, condition: Tensor, is_met: bool) -> Iterator[None]:
        """Note that the results of the runs in the block are used only under a condition."""
        self._given.append((condition, is_met))
        try:
            yield
        finally:
            self._given.pop()

    def taken(self, values: object) -> list[tuple[Tensor, bool]]:
        """Return the conditions, with the answers so far, under which code computes with values."""
        asked = {owner: branch.asked for owner, branch in self._branches.items() if branch.asked}
        if not asked:
            return self._given
        weights = {key for role, key in self.mode.origins.sources(values) if role == WEIGHT}
        owners = [COMMON, *(weights if len(weights) == 1 else ())]
        answers = [each for owner in owners for each in asked.get(owner, ())]
        return [*self._given, *((each.condition, each.yes) for each in answers)]

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Forget at the end of the block which answers were followed by exceptions."""
        assumed, raised = {**self._assumed}, {**self.raised}
        try:
            yield
        finally:
            self._assumed, self.raised = assumed, raised

    def _of_weights(self, run: Callable[[], StepResults], common: _Branch) -> _TakenBranch:
        """Run with given common answers, until the questions about weights were answered
        in all ways.
        """
        self._branches = branches = {COMMON: common}
        taken: dict[str, list[_TakenBranch]] = {}
        path: tuple[_Answer, ...] = ()
        owners: set[str] = set()  # who asked in the first run
        due: set[str] | None = None  # owners with another combination; None before the first run
        while due is None or due:
            found = self._run(run)
            if due is None:
                path, common.script = tuple(common.asked), [each.yes for each in common.asked]
            elif [a.identifier for a in path] != [a.identifier for a in common.asked]:
                raise _too_many("the numbers that a branch depends on depend on the weights")
            owners = {*branches} if due is None else owners
            if owners != {*branches} or any(
                branch.has_unused_answers() for branch in branches.values()
            ):
                raise _DependentWeightsError
            for owner, values in found.items():
                this = self._answers_of(owner), values
                if due is None or owner in due:
                    taken.setdefault(owner, []).append(this)
                elif not self._is_same(this, taken[owner][-1]):
                    raise _DependentWeightsError
            due = {
                owner
                for owner, branch in branches.items()
                if owner and self._has_another_path(branch)
            }
        self._check_independence(run, taken)
        joined: dict[str, Tensor] = {}
        for each in taken.values():
            joined |= self._joined(each)
        return path, joined

    def _check_independence(
        self, run: Callable[[], StepResults], taken: Mapping[str, Sequence[_TakenBranch]]
    ) -> None:
        """Raise an error if the answers about one weight decide the results of another one.

        The runs so far changed the answers about all weights at once. Here, those about every
        second weight are the first ones, and the others are the last ones; then the reverse.
        """
        asking = [owner for owner, branch in self._branches.items() if owner and branch.asked]
        if len(asking) < 2:
            return
        for parity in (0, 1):
            chosen = {o: taken[o][0 if at % 2 == parity else -1] for at, o in enumerate(asking)}
            for owner, (answers, _) in chosen.items():
                self._branches[owner].script = [each.yes for each in answers]
            for owner, values in self._run(run).items():
                this = self._answers_of(owner), values
                if not self._is_same(this, chosen.get(owner, taken[owner][-1])):
                    raise _DependentWeightsError

    def _answers_of(self, owner: str) -> tuple[_Answer, ...]:
        return tuple(self._branches[owner].asked) if owner and owner in self._branches else ()

    def _is_same(self, one: _TakenBranch, other: _TakenBranch) -> bool:
        """Return whether two runs asked the same about a weight and computed the same."""
        same = self.mode.origins.identifier
        (asked, values), (asked_before, before) = one, other
        if [(a.identifier, a.yes) for a in asked] != [(a.identifier, a.yes) for a in asked_before]:
            return False
        return values.keys() == before.keys() and all(
            same(value) == same(before[key]) for key, value in values.items()
        )

    def _has_another_path(self, branch: _Branch) -> bool:
        before = [each.yes for each in branch.asked]
        if branch.advance():
            return True
        branch.script, branch.asked = before, []
        return False

    def _run(self, run: Callable[[], StepResults]) -> StepResults:
        self._count()
        for branch in self._branches.values():
            branch.asked = []
        self._last, self._constant, self.mode.refused = None, {}, None
        try:
            results = run()
        except (Error, Restart):
            raise
        except Exception as error:
            if self.mode.refused is not None:
                raise self.mode.refused from error
            if self._last is None or TracedNumber.__name__ in str(error):
                raise
            question, yes = self._last
            self._assumed[question] = not yes
            line = raising_line(error) or "an unknown line"
            self.raised[line] = type(error).__name__
            raise _AnswerRaisesError from error
        if self.mode.refused is not None:
            raise self.mode.refused
        return results

    def _count(self) -> None:
        self._runs += 1
        if self._runs > MOST:
            raise _too_many(f"it has more than {MOST} combinations of branches")

    def _decide(self, condition: Tensor, sources: ValueSources, identifier: Identifier) -> bool:
        weights = {key for role, key in sources if role == WEIGHT}
        alone = len(weights) == 1 and not self._are_dependent
        owner = weights.pop() if alone else COMMON
        branch = self._branches.setdefault(owner, _Branch())
        if identifier in self._constant:
            return self._constant[identifier]
        before = [*self._branches[COMMON].asked, *(branch.asked if owner else ())]
        question = tuple((a.identifier.number, a.yes) for a in before), identifier.number
        if question in self._assumed and identifier not in {a.identifier for a in before}:
            return self._constant.setdefault(identifier, self._assumed[question])
        yes = branch.answer(condition, identifier)
        if len(branch.asked) + (len(self._branches[COMMON].asked) if owner else 0) > len(before):
            self._last = question, yes
        return yes

    def _joined(self, taken: list[_TakenBranch], depth: int = 0) -> dict[str, Tensor]:
        answers, values = taken[0]
        if len(taken) == 1:
            return values
        condition = answers[depth].condition
        yes = [each for each in taken if each[0][depth].yes]
        no = [each for each in taken if not each[0][depth].yes]
        if not no or not yes:
            return self._joined(yes or no, depth + 1)
        return self.either(condition, self._joined(yes, depth + 1), self._joined(no, depth + 1))

    def either(
        self, condition: Tensor, yes: Mapping[str, Tensor], no: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return, for each value, ``yes`` if the condition holds and ``no`` otherwise."""
        if yes.keys() != no.keys():
            raise _too_many("the entries of its state depend on values")
        same = self.mode.origins.identifier
        return {
            key: value
            if same(value) == same(no[key])
            else torch.where(condition.reshape(()).bool(), value, no[key].to(value.dtype))
            for key, value in yes.items()
        }


def _too_many(why: str) -> Error:
    return Error(
        "The optimizer's step has branches that cannot be compiled",
        got=why,
        fix="choose between two values instead: torch.where(condition, a, b)",
    )
