"""``what_if``: a wrapped model priced with other settings, side by side. Not in PopTorch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .._base import log
from .._base.errors import Error
from .._ipu_model.comparison import Variant, WhatIf, ranked, variant
from .._systems import parse
from .repricing import LOCATIONS, PRECISIONS, SETTINGS, Repricer, session_of

if TYPE_CHECKING:
    from ..executor import PoplarExecutor

__all__ = ["Variant", "WhatIf", "what_if"]


def what_if(
    executor: PoplarExecutor,
    *args: Any,
    system: str = "bow:16",
    vary: Mapping[str, Sequence[Any]],
    progress: bool = True,
    **kwargs: Any,
) -> WhatIf:
    """Return what a wrapped model would cost on IPUs with other settings: all combinations.

    Each line is what ``poptorch.estimate`` says of the changed options; combinations that cannot
    be, such as samples that do not divide, are left out with a warning.

    The samples of a call, and so of an update, stay those of the arguments: ``accumulation``
    follows from ``micro_batch`` and ``replicas``, or ``micro_batch`` from ``accumulation`` and
    ``replicas``; in inference the device iterations follow. The model is captured once for all
    variants that it is the same for.

    Args:
        executor: from ``trainingModel`` or ``inferenceModel``; it stays as it is.
        args, kwargs: as for a call of the executor: a combined batch, which may be on the ``meta``
            device.
        system: the chips: ``kind:number`` with a kind of mk1, mk2, bow, c600.
        vary: values by setting: ``micro_batch`` (samples), ``accumulation`` (in training),
            ``replicas`` (of this process), ``recomputation`` (bool), ``checkpoints`` (of so many
            that follow one another the last is one), ``half_partials`` (bool),
            ``memory_proportion`` (share of a chip), ``activation_location``, ``weight_location``,
            ``optimizer_location``,
            ``accumulator_location`` ("on chip", "off chip", "on chip, sharded",
            "off chip, sharded"), ``precision`` ("float32", "float16", "bfloat16": of weights,
            buffers and inputs), ``ipus_per_replica`` (cut as ``autoplace`` cuts, whatever blocks
            there are; the strategy names none), ``chip`` (a kind). What is not named is as in the
            options and the model.
        progress: show a bar while it prices, on a terminal.

    Raises:
        poptorch.Error: a setting is unknown, or a value of it cannot be; and what
            ``poptorch.estimate`` raises.
    """
    session = session_of(executor, "what_if")
    _check(vary, session.optimizer is not None)
    repricer = Repricer(session, executor._options, args, kwargs, parse(system))
    combined = [dict(zip(vary, v, strict=True)) for v in itertools.product(*vary.values())]
    bar = tqdm(combined, "Pricing", leave=False, disable=None if progress else True)
    lines, errors = list[Variant](), list[Error]()
    for settings in bar:
        try:
            lines.append(variant(settings, repricer.price(settings)))
        except Error as error:
            errors.append(error)
    if not lines:
        raise errors[0]
    if errors:
        log.python.warning(
            "what_if leaves out %d of %d combinations, which cannot be; the first: %s",
            len(errors), len(combined), errors[0].message,
        )  # fmt: skip
    return ranked(lines)


def _check(vary: Mapping[str, Sequence[Any]], training: bool) -> None:
    if not isinstance(vary, Mapping):
        raise Error(
            "what_if needs values by the names of settings", got=f"vary={vary!r}",
            fix='vary={"micro_batch": [4, 8], "replicas": [1, 2]}',
        )  # fmt: skip
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
    if name in ("micro_batch", "accumulation", "replicas", "ipus_per_replica", "checkpoints"):
        possible, fix = type(value) is int and value > 0, "an int of 1 or more"
    elif name in ("recomputation", "half_partials"):
        possible, fix = isinstance(value, bool), "True or False"
    elif name == "memory_proportion":
        possible, fix = isinstance(value, float) and 0 < value <= 1, "a share above 0, up to 1"
    elif name == "precision":
        possible, fix = value in PRECISIONS, " or ".join(map(repr, PRECISIONS))
    elif name.endswith("_location"):
        possible, fix = value in LOCATIONS, " or ".join(map(repr, LOCATIONS))
    else:
        possible, fix = isinstance(value, str), "mk1, mk2, bow or c600"
    if not possible:
        raise Error(f"{name} cannot be that", got=repr(value), fix=fix)
