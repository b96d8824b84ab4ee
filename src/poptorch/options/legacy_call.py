"""Read the arguments of ``trainingModel`` and ``inferenceModel`` in the forms of all releases."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch.optim import Optimizer

from .._base import log
from .._base.errors import Error, InvalidType, InvalidValue
from ..enums import OutputMode
from .option_table import deprecated
from .options import Options
from .strategies import PipelinedExecution

Function = TypeVar("Function", bound=Callable[..., Any])
_COUNTS = ("device_iterations", "gradient_accumulation", "replication_factor")
_ANCHORS = ("anchor_mode", "anchor_return_period")
_TRAINING = (*_COUNTS, "profile", "trace_model", "loss", "optimizer", *_ANCHORS)
_INFERENCE = ("device_iterations", "replication_factor", "profile", "trace_model", *_ANCHORS)
_MODES = {mode.name.upper(): mode for mode in OutputMode if mode != OutputMode.Default}

_ARGUMENTS_OF = {
    True: "use poptorch.trainingModel(model, options, optimizer)",
    False: "use poptorch.inferenceModel(model, options)",
}


@dataclass(frozen=True)
class WrapCall:
    options: Options
    optimizer: Optimizer | None = None
    loss: Callable[..., Any] | None = None


def takes_options(wrap: Function) -> Function:
    """Refuse an ``options`` argument that is not an ``Options``. A positional int in its place is a
    count of release 1.0.
    """

    @functools.wraps(wrap)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_options(kwargs.get("options"))
        return wrap(*args, **kwargs)

    return cast(Function, call)


def _check_options(options: Any) -> None:
    if isinstance(options, Optimizer):
        raise Error(
            "Invalid type: 'options' must be a poptorch.Options",
            got=f"an optimizer ({type(options).__name__}) in place of the options",
            fix="pass the optimizer by keyword: poptorch.trainingModel(model, optimizer=optimizer)",
        )
    if options is not None and not isinstance(options, Options) and options:
        raise Error(
            "Invalid type: 'options' must be a poptorch.Options",
            got=f"{options!r}, of type {type(options).__name__}",
            fix="pass poptorch.Options(), or nothing for the defaults",
        )


def read_call(
    training: bool,
    options: Any = None,
    optimizer: Any = None,
    extra: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> WrapCall:
    """Return what the arguments after ``model`` mean.

    The modern form is ``(options=None, optimizer=None)``. The 1.0 form names counts instead of an
    Options object; for a few weeks in 2020 it was ``(options, loss, optimizer)``. The types of the
    arguments decide: an int means the device iterations of the 1.0 form, and a torch optimizer is
    never a loss.
    """
    keywords = dict(keywords or {})
    names = _TRAINING if training else _INFERENCE
    unknown = sorted(set(keywords) - set(names))
    if unknown:
        raise InvalidType(
            f"Unexpected keyword argument {unknown[0]!r}",
            got=", ".join(unknown),
            fix=_ARGUMENTS_OF[training],
        )
    if isinstance(options, int) or keywords.keys() - {"loss"}:
        return _read_first_release(names, options, optimizer, extra, keywords)
    _check_options(options)
    given = [*([] if optimizer is None else [optimizer]), *extra]
    if given and not training:
        raise InvalidType(
            "inferenceModel accepts only a model and options",
            got=repr(given[0]),
            fix=_ARGUMENTS_OF[False],
        )
    return WrapCall(options or Options(), **_optimizer_and_loss(given, keywords))


def _optimizer_and_loss(given: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = dict(keywords)
    for value in (*given, *keywords.values()):
        if isinstance(value, type):
            arguments = "model.parameters(), lr=0.01" if issubclass(value, Optimizer) else ""
            raise InvalidType(
                "Expected an instance, got its class",
                got=f"{value.__module__}.{value.__qualname__}",
                fix=f"pass an instance: {value.__name__}({arguments})",
            )
    for value in given:
        name = "optimizer" if isinstance(value, Optimizer) or not callable(value) else "loss"
        if value is None:
            continue
        if name in result:
            raise InvalidType(
                f"Too many arguments: a second {name}", got=repr(value), fix=f"pass one {name}"
            )
        result[name] = value
    if result.get("loss") is not None:
        deprecated("The argument loss of trainingModel", "a model that computes its own loss")
    return result


def _read_first_release(
    names: tuple[str, ...],
    first: Any,
    optimizer: Any,
    extra: Sequence[Any],
    keywords: dict[str, Any],
) -> WrapCall:
    if isinstance(first, Options):
        raise Error(
            "Legacy keywords and an Options object cannot be combined",
            got=", ".join(sorted(keywords)),
            fix=(
                "remove these keywords, and call the setters of the Options object, for example "
                "options.deviceIterations(4) instead of device_iterations=4"
            ),
        )
    positional = [] if first is None else [first]
    if isinstance(optimizer, Optimizer):
        keywords["optimizer"] = optimizer
    elif optimizer is not None:
        positional.append(optimizer)
    positional += extra
    if len(positional) > len(names):
        raise InvalidType(
            "Too many positional arguments", got=str(len(positional)), fix=_ARGUMENTS_OF[True]
        )
    values = dict(zip(names, positional, strict=False))
    repeated = sorted(values.keys() & keywords.keys())
    if repeated:
        raise InvalidType(
            f"Argument {repeated[0]!r} was given twice",
            got="once by position and once by keyword",
            fix=f"pass {repeated[0]} only once",
        )
    values.update(keywords)
    deprecated(f"Wrapping a model with {', '.join(values)}", "poptorch.Options")
    return WrapCall(_options_from(values), values.get("optimizer"), values.get("loss"))


def _options_from(values: Mapping[str, Any]) -> Options:
    options = Options()
    strategy = PipelinedExecution()
    strategy._first_release = True
    options.setExecutionStrategy(strategy)
    options.deviceIterations(values.get("device_iterations", 1))
    options.replicationFactor(values.get("replication_factor", 1))
    options.Training.gradientAccumulation(values.get("gradient_accumulation", 1))
    if values.get("profile", False):
        options.enableProfiling()
    if not values.get("trace_model", True):
        options.Jit.traceModel(False)
    mode, period = values.get("anchor_mode"), values.get("anchor_return_period")
    if mode is not None:
        known = mode if isinstance(mode, OutputMode) else _MODES.get(str(mode).upper())
        if known is None:
            fix = f"use one of {', '.join(_MODES)}"
            raise InvalidValue("Unknown anchor_mode", got=repr(mode), fix=fix)
        options.outputMode(known, period)
    elif period is not None:
        log.python.warning(
            "anchor_return_period=%s is ignored: only anchor_mode='EVERYN' has a period", period
        )
    return options
