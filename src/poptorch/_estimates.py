"""``estimate`` and ``what_if``: what a wrapped model would cost on IPUs. Additions to PopTorch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from ._base import log
from ._base.errors import Error
from ._ipu_model import variants
from ._ipu_model.estimate import Estimate
from ._ipu_model.variants import PRESENT, Variant, WhatIf
from ._repricing import Repricer
from .executor import PoplarExecutor

__all__ = ["Estimate", "Variant", "WhatIf", "estimate", "what_if"]


def estimate(
    executor: PoplarExecutor, *args: Any, system: str | None = None, **kwargs: Any
) -> Estimate:
    """Return what a wrapped model would cost on IPUs, in memory and in time.

    The model is captured, placed and scheduled for inputs like the arguments; nothing is compiled
    and nothing runs. Its weights and the arguments may be on the ``meta`` device, so that a model
    of any size can be priced. The prices are a model's: the page "What it would cost on IPUs" says
    what they are made of, and how far off they are where it could be checked.

    Args:
        executor: from ``trainingModel`` or ``inferenceModel``.
        args, kwargs: as for a call of the executor: a combined batch.
        system: the chips, ``kind:number`` with a kind of mk1, mk2, bow, c600; None for those of
            ``POPTORCH_POD``, by default mk2:64.

    Raises:
        poptorch.Error: there is no such system, it has fewer chips than the model needs, or the
            model cannot be captured.
    """
    _check_wrapped(executor, "estimate")
    return executor.estimate(*args, system=system, **kwargs)


def what_if(
    executor: PoplarExecutor,
    *args: Any,
    system: str | None = None,
    vary: Mapping[str, Sequence[Any]],
    progress: bool = True,
    **kwargs: Any,
) -> WhatIf:
    """Return what a wrapped model would cost on IPUs with other settings: all combinations.

    Each line is what ``poptorch.estimate`` says of the changed options, one of the options as they
    are; combinations that cannot be, such as samples that do not divide, are left out with a
    warning.

    The samples of a call, and so of an update, stay those of the arguments: ``accumulation``
    follows from ``micro_batch`` and ``replicas``, or ``micro_batch`` from ``accumulation`` and
    ``replicas``; in inference the device iterations follow. They are others with
    ``device_iterations``, and with both ``micro_batch`` and ``accumulation``. The model is captured
    once for all variants that it is the same for.

    Args:
        executor: from ``trainingModel`` or ``inferenceModel``; it stays as it is.
        args, kwargs: as for a call of the executor: a combined batch, which may be on the ``meta``
            device.
        system: the chips, ``kind:number`` with a kind of mk1, mk2, bow, c600; None for those of
            ``POPTORCH_POD``, by default mk2:64.
        vary: values by setting: ``micro_batch`` (samples), ``accumulation`` (in training),
            ``device_iterations``, ``replicas`` (of this process), ``recomputation`` (bool),
            ``checkpoints`` (of so many that follow one another the last is one), ``half_partials``
            (bool), ``memory_proportion`` (share of a chip), ``activation_location``,
            ``weight_location``, ``optimizer_location``, ``accumulator_location`` ("on chip",
            "off chip", "on chip, sharded", "off chip, sharded"), ``precision`` ("float32",
            "float16", "bfloat16": of weights, buffers and inputs), ``ipus_per_replica`` (cut as
            ``autoplace`` cuts, whatever blocks there are; the strategy names none), ``chip`` (a
            kind). What is not named is as in the options and the model.
        progress: show a bar while it prices, on a terminal.

    Raises:
        poptorch.Error: a setting is unknown, or a value of it cannot be; and what
            ``poptorch.estimate`` raises.
    """
    _check_wrapped(executor, "what_if")
    training = executor._optimizer is not None
    variants.check(vary, training)
    with executor._session.lock():
        captures = executor._session.captures(args, kwargs)
        repricer = Repricer(executor._options, captures, system, training)
        combined = [dict(zip(vary, v, strict=True)) for v in itertools.product(*vary.values())]
        bar = tqdm(combined, "Pricing", leave=False, disable=None if progress else True)
        lines, errors = list[Variant](), list[Error]()
        for settings in bar:
            try:
                lines.append(Variant.of(settings, repricer.price(settings)))
            except Error as error:
                errors.append(error)
        if not lines:
            raise errors[0]
        with contextlib.suppress(Error):  # the system may have too few chips for it
            lines.append(Variant.of(dict.fromkeys(vary, PRESENT), repricer.price({})))
    if errors:
        log.python.warning(
            "what_if leaves out %d of %d combinations, which cannot be; the first: %s",
            len(errors), len(combined), errors[0].message,
        )  # fmt: skip
    return variants.ranked(lines)


def _check_wrapped(executor: object, name: str) -> None:
    if not isinstance(executor, PoplarExecutor):
        raise Error(
            f"{name} needs a wrapped model", got=type(executor).__name__,
            fix="poptorch.inferenceModel(model), or trainingModel(model, optimizer=...)",
        )  # fmt: skip
