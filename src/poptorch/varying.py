"""``what_if``: a wrapped model priced with other settings, side by side. Not in PopTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import _compile, _session
from ._base.errors import Error
from ._machine.comparison import Variant, WhatIf, ranked, variant
from ._machine.systems import System, parse
from .estimating import refuse_too_few
from .options import Options, TensorLocationSettings
from .options.freeze import freeze

if TYPE_CHECKING:
    from .executor import PoplarExecutor

__all__ = ["Variant", "WhatIf", "what_if"]

LOCATIONS = {
    "on chip": (True, False),
    "off chip": (False, False),
    "on chip, sharded": (True, True),
    "off chip, sharded": (False, True),
}


def _located(setter: str) -> Callable[[Options, Any], object]:
    def change(options: Options, where: str) -> object:
        on_chip, sharded = LOCATIONS[where]
        settings = TensorLocationSettings().useOnChipStorage(on_chip)
        settings.useReplicatedTensorSharding(sharded)
        return getattr(options.TensorLocations, setter)(settings)

    return change


def _recomputing(options: Options, recompute: bool) -> object:
    return options._Popart.set("autoRecomputation", int(recompute))


def _partials(options: Options, half: bool) -> object:
    return options.Precision.setPartialsType(torch.float16 if half else torch.float32)


CHANGES: Mapping[str, Callable[[Options, Any], object]] = {
    "replicas": Options.replicationFactor,
    "recomputation": _recomputing,
    "half_partials": _partials,
    "activation_location": _located("setActivationLocation"),
    "weight_location": _located("setWeightLocation"),
    "optimizer_location": _located("setOptimizerLocation"),
    "accumulator_location": _located("setAccumulatorLocation"),
}
SETTINGS = ("micro_batch", "accumulation", *CHANGES, "chip")


def what_if(
    executor: PoplarExecutor,
    *args: Any,
    system: str = "bow:16",
    vary: Mapping[str, Sequence[Any]],
    **kwargs: Any,
) -> WhatIf:
    """Return what a wrapped model would cost on IPUs with other settings: all combinations.

    Each line is what ``poptorch.estimate`` says of the changed options. The samples of a call, and
    so of an update, stay those of the arguments: ``accumulation`` follows from ``micro_batch`` and
    ``replicas``, or ``micro_batch`` from ``accumulation`` and ``replicas``; in inference the device
    iterations follow. The model is captured once for all variants that it is the same for.

    Args:
        executor: from ``trainingModel`` or ``inferenceModel``; it stays as it is.
        args, kwargs: as for a call of the executor: a combined batch, which may be on the ``meta``
            device.
        system: the chips: ``kind:number`` with a kind of mk1, mk2, bow, c600.
        vary: values by setting: ``micro_batch`` (samples), ``accumulation`` (in training),
            ``replicas`` (of this process), ``recomputation`` (bool), ``half_partials`` (bool),
            ``activation_location``, ``weight_location``, ``optimizer_location``,
            ``accumulator_location`` ("on chip", "off chip", "on chip, sharded",
            "off chip, sharded"), ``chip`` (a kind). What is not named is as in the options.

    Raises:
        poptorch.Error: a setting is unknown, or a value of it cannot be; and what
            ``poptorch.estimate`` raises.
    """
    _check(vary, executor._optimizer is not None)
    chips = parse(system)
    captures = _session.Captures(executor._session, args, kwargs)
    variants = []
    for values in itertools.product(*vary.values()):
        settings = dict(zip(vary, values, strict=True))
        variants.append(_priced(executor, captures, chips, settings))
    return ranked(variants)


def _priced(
    executor: PoplarExecutor,
    captures: _session.Captures,
    chips: System,
    settings: Mapping[str, Any],
) -> Variant:
    training = executor._optimizer is not None
    options = executor._options.clone()
    micro = captures.rows / freeze(options, training).loops.slices
    for name, value in settings.items():
        if name in CHANGES:
            CHANGES[name](options, value)
    if settings.keys() & {"micro_batch", "accumulation", "replicas"}:
        share = settings.get("accumulation", settings.get("micro_batch", micro))
        _divide(options, captures.rows, share, "accumulation" in settings, training)
    if "chip" in settings:
        chips = parse(f"{settings['chip']}:{chips.chips}")
    spec = freeze(options, training)
    priced = _compile.estimate(captures.capture(spec), spec, chips, guesses=False)
    refuse_too_few(priced, chips)
    return variant(settings, priced)


def _divide(options: Options, rows: int, share: float, steps_given: bool, training: bool) -> None:
    """Share the rows of a call out over micro-batches.

    Args:
        options: get the steps.
        rows: of the combined batch.
        share: steps if they are given, else samples of a micro-batch.
        steps_given: which of the two.
        training: steps accumulate gradients; in inference they are device iterations.
    """
    loops = freeze(options, training).loops
    at_once = loops.input_groups * (loops.iterations if training else 1)
    if share % 1 or rows % (at_once * share):
        unit = "accumulation steps" if steps_given else "samples per micro-batch"
        per = rows // loops.iterations if training else rows
        raise Error(
            "The samples do not divide",
            got=f"{share:g} {unit} on {loops.replicas} replicas, {per} samples",
            fix=f"values in vary whose product with the replicas divides {per}",
        )
    steps = int(share if steps_given else rows // (at_once * share))
    if training:
        options.Training.gradientAccumulation(steps)
    else:
        options.deviceIterations(steps)


def _check(vary: Mapping[str, Sequence[Any]], training: bool) -> None:
    for name, values in vary.items():
        if name not in SETTINGS:
            raise Error(
                "what_if cannot vary that", got=f"vary={{{name!r}: ...}}",
                fix=f"one of {', '.join(SETTINGS)}",
            )  # fmt: skip
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise Error(
                f"vary needs a list of values for {name}", got=repr(values),
                fix=f'vary={{"{name}": [...]}}',
            )  # fmt: skip
        for value in values:
            _check_value(name, value)
    if "accumulation" in vary and not training:
        raise Error(
            "There is no gradient accumulation in inference",
            got="vary={'accumulation': ...}", fix='"micro_batch": device iterations follow',
        )  # fmt: skip
    if {"accumulation", "micro_batch"} <= vary.keys():
        raise Error(
            "One of accumulation and micro_batch follows from the other",
            got="both in vary", fix="one of them: the samples per update stay the same",
        )  # fmt: skip


def _check_value(name: str, value: Any) -> None:
    if name in ("micro_batch", "accumulation", "replicas"):
        possible, fix = type(value) is int and value > 0, "an int of 1 or more"
    elif name in ("recomputation", "half_partials"):
        possible, fix = isinstance(value, bool), "True or False"
    elif name.endswith("_location"):
        possible, fix = value in LOCATIONS, " or ".join(map(repr, LOCATIONS))
    else:
        possible, fix = isinstance(value, str), "mk1, mk2, bow or c600"
    if not possible:
        raise Error(f"{name} cannot be that", got=repr(value), fix=fix)
