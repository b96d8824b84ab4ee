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
from ._session import questions
from .executor import PoplarExecutor

__all__ = ["Estimate", "Variant", "WhatIf", "estimate", "what_if"]


def estimate(
    executor: PoplarExecutor, *args: Any, system: str | None = None, **kwargs: Any
) -> Estimate:
    """Return the cost of a wrapped model on IPUs, in memory and in time.

    Nothing is compiled and nothing runs. Weights and arguments may be on the ``meta`` device, so
    a model can have any size. The page "What it would cost on IPUs" explains the prices, and how
    far off they are.

    Args:
        executor: from ``trainingModel`` or ``inferenceModel``.
        args, kwargs: as for a call: a combined batch.
        system: the chips, ``kind:number`` with a kind of mk1, mk2, bow, c600; None for those of
            ``POPTORCH_POD``, by default mk2:64.

    Raises:
        poptorch.Error: there is no such system, it has too few chips, or the model cannot be
            captured.
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
    """Return the cost of a wrapped model on IPUs for all combinations of some settings.

    There is a line for each combination, and one for the settings as they are. Combinations that
    are not possible, such as samples that do not divide, are left out with a warning.

    A call keeps the samples of the arguments. If you vary ``micro_batch`` or ``accumulation``, the
    other one follows; in inference the device iterations follow. If you vary both, or
    ``device_iterations``, the number of samples changes.

    Args:
        executor: from ``trainingModel`` or ``inferenceModel``; it does not change.
        args, kwargs: as for a call: a combined batch, perhaps on the ``meta`` device.
        system: the chips, ``kind:number`` with a kind of mk1, mk2, bow, c600; None for those of
            ``POPTORCH_POD``, by default mk2:64.
        vary: a list of values for each of these settings; the others stay as they are.
            ``micro_batch`` (samples). ``accumulation`` (steps, in training).
            ``device_iterations``. ``replicas`` (of this process).
            ``ipus_per_replica`` (cut as ``autoplace`` does; the strategy must name no blocks).
            ``chip`` (a kind). ``precision`` ("float32", "float16", "bfloat16").
            ``recomputation`` (bool). ``checkpoints`` (n keeps every n-th one).
            ``half_partials`` (bool). ``memory_proportion`` (share of a chip, 0 to 1).
            ``activation_location``, ``weight_location``, ``optimizer_location``,
            ``accumulator_location`` ("on chip", "off chip", "on chip, sharded",
            "off chip, sharded").
        progress: show a bar on a terminal.

    Raises:
        poptorch.Error: there is no such setting or value; and as ``poptorch.estimate``.
    """
    _check_wrapped(executor, "what_if")
    training = executor._optimizer is not None
    variants.check(vary, training)
    with executor._session.lock():
        captures = questions.captures(executor._session, args, kwargs)
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
