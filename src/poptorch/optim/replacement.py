"""What may change of an optimizer after compilation (PopTorch user guide, "Optimizers")."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import torch

from .._base import log
from .._base.errors import Error, InvalidValue
from .._ir.spec import OptimGroup, OptimSpec, Setting
from ..enums import MeanReductionStrategy
from . import KINDS
from .optimizer import Optimizer

_ABSENT = object()
_CLASSES = [cls for kind in KINDS for cls in kind.classes]
# ``step`` is there once a scheduler has wrapped it.
_OF_OBJECTS = {"defaults", "state", "param_groups", "variable_attrs", "step"} | {
    *("ipu_state_is_dirty", "host_state_is_dirty"),
    *(name for cls in _CLASSES if issubclass(cls, Optimizer) for name in cls._own),
}
_OF_GROUPS = {"param_names", *(name for kind in KINDS for name in kind.hypers)} | {
    name
    for cls in _CLASSES
    if not issubclass(cls, Optimizer)
    for name in inspect.signature(cls).parameters
}


def needs_running_mean(spec: OptimSpec) -> bool:
    """Tell whether half accumulators demand ``MeanReductionStrategy.Running``."""
    return dict(spec.settings).get("accum_type") == "float16"


def check_replacement(
    compiled: OptimSpec,
    new: OptimSpec,
    strategy: MeanReductionStrategy | None = None,
    again: bool = False,
) -> bool:
    """Return whether another program is needed: False if at most values of variables differ.

    Args:
        compiled: the optimizer that is compiled in.
        new: the one to use from now on.
        strategy: the mean reduction strategy that is compiled in, where there is a mean.
        again: may be compiled again, for other constants.
    """
    if needs_running_mean(new) and strategy not in (None, MeanReductionStrategy.Running):
        raise InvalidValue(
            "accum_type=torch.float16 needs MeanReductionStrategy.Running, but the model is "
            f"already compiled with {strategy}",
            fix="use this optimizer from the start, or destroy() the model before setting it",
        )
    if compiled == new:
        return False
    if compiled.algorithm != new.algorithm:
        raise Error(
            "The type of the optimizer cannot change after compilation",
            got=f"{new.algorithm}; compiled: {compiled.algorithm}",
            fix="destroy() the model first, or wrap it again",
        )
    if len(compiled.groups) != len(new.groups):
        raise Error(
            "The number of parameter groups cannot change after compilation",
            got=f"{len(new.groups)}; compiled: {len(compiled.groups)}",
            fix="destroy() the model first, or wrap it again",
        )
    if not again:
        _check_level("", compiled, new)
    for index, (old_group, new_group) in enumerate(zip(compiled.groups, new.groups, strict=True)):
        if set(old_group.params) != set(new_group.params):
            raise Error(
                "The parameters of a group cannot change after compilation",
                got=f"group {index} differs in "
                + ", ".join(sorted({*old_group.params} ^ {*new_group.params})),
                fix="destroy() the model first, or wrap it again",
            )
        if not again:
            _check_level(f" of parameter group {index}", old_group, new_group)
    return again


def _check_level(place: str, compiled: OptimSpec | OptimGroup, new: OptimSpec | OptimGroup) -> None:
    old_constants, new_constants = dict(compiled.settings), dict(new.settings)
    for name in sorted({*old_constants, *new_constants}):
        old: Setting | object = old_constants.get(name, _ABSENT)
        now: Setting | object = new_constants.get(name, _ABSENT)
        if old is _ABSENT or now is _ABSENT:
            was, wants = ("variable", "constant") if old is _ABSENT else ("constant", "variable")
            raise Error(
                f"The attribute {_user_name(name)!r}{place} is compiled as {was} and "
                f"cannot become {wants}",
                fix=_constness_fixes(name, was),
            )
        if old != now:
            raise Error(
                "Values are constant but do not match",
                got=f"{_user_name(name)!r}{place} is {now}; compiled: {old}",
                fix=_constness_fixes(name, "variable"),
            )


def _user_name(name: str) -> str:
    return "betas" if name in ("beta1", "beta2") else name


def _constness_fixes(name: str, wanted: str) -> tuple[str, ...]:
    user_name = _user_name(name)
    if wanted == "constant":
        return (f"before it is set: variable_attrs.markAsConstant({user_name!r})",)
    return (
        f"before compilation: pass {user_name!r} to the optimizer, or call "
        f"variable_attrs.markAsVariable({user_name!r})",
        "or destroy() the model first, so that it is compiled again",
    )


class AttributeWatch:
    """Remembers the attributes that an optimizer had when it was first set."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._seen = {*_attributes(optimizer)}

    def check(self, optimizer: torch.optim.Optimizer, relaxed: bool = False) -> None:
        """Warn once of all attributes that were not there: they are ignored.

        Args:
            optimizer: the one that is set now.
            relaxed: log at debug level (``relaxOptimizerAttributesChecks``).
        """
        new = [pair for pair in dict.fromkeys(_attributes(optimizer)) if pair not in self._seen]
        if not new:
            return
        self._seen.update(new)
        labels = dict.fromkeys(label for label, _ in new)
        log.python.log(
            logging.DEBUG if relaxed else logging.WARNING,
            "Ignoring unexpected attributes of the %s optimizer: %s",
            type(optimizer).__name__,
            "; ".join(
                f"{', '.join(name for each, name in new if each == label)} ({label})"
                for label in labels
            ),
        )


def _attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    """Yield (where, name) of attributes that are not known anyway."""
    for name in optimizer.__dict__:
        if name not in _OF_OBJECTS and not name.startswith("_"):
            yield "object", name
    for where, names in (
        ("defaults", optimizer.defaults),
        *(("parameter groups", group) for group in optimizer.param_groups),
    ):
        for name in names:
            if name not in _OF_GROUPS:
                yield where, name
