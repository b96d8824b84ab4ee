"""Decide which changes of an optimizer are accepted, refused or ignored after compilation."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterable, Iterator

import torch

from .._base import log
from .._base.errors import Error, InvalidValue
from .._ir.spec import OptimGroup, OptimSpec
from .._ir.traced_step import StepHooks
from ..enums import MeanReductionStrategy
from . import KINDS
from .joint import class_of, members_of
from .optimizer import Optimizer

_CLASSES = [cls for kind in KINDS for cls in kind.classes]
# Schedulers wrap ``step`` and store the wrapper in the object.
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
# torch's schedulers store these in groups, and no optimizer reads them.
_OF_GROUPS |= {"initial_lr", "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"}


def needs_running_mean(spec: OptimSpec) -> bool:
    return dict(spec.settings).get("accum_type") == "float16"


def check_replacement(
    compiled: OptimSpec,
    new: OptimSpec,
    strategy: MeanReductionStrategy | None = None,
    compiles_again: bool = False,
) -> bool:
    """Return whether changed constants need a new program. Refuse them unless ``compiles_again``
    allows a new program, and refuse all other changes.
    """
    if needs_running_mean(new) and strategy not in (None, MeanReductionStrategy.Running):
        raise InvalidValue(
            "accum_type=torch.float16 needs MeanReductionStrategy.Running, but the model is "
            f"already compiled with {strategy}",
            fix=(
                "use this optimizer from the start, or call destroy() on the model before "
                "you set it"
            ),
        )
    if compiled == new:
        return False
    if compiled.algorithm != new.algorithm:
        hooked = new.traced is not None and any(
            e.hooks != StepHooks() for e in new.traced.optimizers
        )
        now = f"{new.algorithm} with hooks" if hooked else new.algorithm
        got = f"{now}; compiled: {compiled.algorithm}"
        raise _refused("The type of the optimizer", got)
    if len(compiled.groups) != len(new.groups):
        got = f"{len(new.groups)}; compiled: {len(compiled.groups)}"
        raise _refused("The number of parameter groups", got)
    if not compiles_again:
        _check_level("", compiled, new)
    for index, (old_group, new_group) in enumerate(zip(compiled.groups, new.groups, strict=True)):
        differing = sorted({*old_group.params} ^ {*new_group.params})
        if differing:
            got = f"group {index} differs in {', '.join(differing)}"
            raise _refused("The parameters of a group", got)
        if not compiles_again:
            _check_level(f" of parameter group {index}", old_group, new_group)
    return compiles_again


def _refused(what: str, got: str) -> Error:
    fix = "call destroy() on the wrapped model first, or wrap the model again"
    return Error(f"{what} cannot change after compilation", got=got, fix=fix)


def _check_level(place: str, compiled: OptimSpec | OptimGroup, new: OptimSpec | OptimGroup) -> None:
    constants, new_constants = dict(compiled.settings), dict(new.settings)
    for name in sorted(constants.keys() | new_constants.keys()):
        user_name = repr("betas" if name in ("beta1", "beta2") else name)
        become_variable = (
            f"before compilation, pass {user_name} to the optimizer, or call "
            f"optimizer.variable_attrs.markAsVariable({user_name})",
            "or call destroy() on the wrapped model first, so that the next call compiles again",
        )
        if name not in constants:
            raise Error(
                f"The attribute {user_name}{place} is compiled as variable and cannot become "
                "constant",
                fix=become_variable,
            )
        if name not in new_constants:
            raise Error(
                f"The attribute {user_name}{place} is compiled as constant and cannot become "
                "variable",
                fix=(
                    f"call optimizer.variable_attrs.markAsConstant({user_name}) before you pass "
                    "the optimizer to setOptimizer"
                ),
            )
        if constants[name] != new_constants[name]:
            raise Error(
                "An attribute of the optimizer that is compiled as constant has changed",
                got=(
                    f"{user_name}{place} is {new_constants[name]}, but was {constants[name]} "
                    "when the model was compiled"
                ),
                fix=become_variable,
            )


class AttributeWatch:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._seen = {*_attributes(optimizer)}

    def expect(self, names: Iterable[str]) -> None:
        """Accept names that the optimizer's own step adds."""
        for name in names:
            self._seen |= {("optimizer attribute", name), ("group attribute", name)}

    def check(self, optimizer: torch.optim.Optimizer, relaxed: bool = False) -> None:
        """Warn once about attributes that were added later and are ignored, with one line for each
        place.
        """
        new = [pair for pair in dict.fromkeys(_attributes(optimizer)) if pair not in self._seen]
        self._seen.update(new)
        for place in dict.fromkeys(place for place, _ in new):
            log.python.log(
                logging.DEBUG if relaxed else logging.WARNING,
                "Ignoring unexpected %s in %s optimizer: %s",
                place,
                class_of(optimizer).__name__,
                ", ".join(name for each, name in new if each == place),
            )


def _attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    """Yield (place, name) of attributes that are not known."""
    for name in itertools.chain(*map(vars, members_of(optimizer))):
        if name not in _OF_OBJECTS and not name.startswith("_"):
            yield "optimizer attribute", name
    yield from (
        ("default group variable", name) for name in optimizer.defaults if name not in _OF_GROUPS
    )
    for group in optimizer.param_groups:
        yield from (("group attribute", name) for name in group if name not in _OF_GROUPS)
