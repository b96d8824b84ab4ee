"""Provide ``estimate``, ``what_if`` and ``autoplace``, which need no devices."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from .._base import log, terminal
from .._base.errors import Error, InvalidValue
from .._base.tables import size_text, table
from .._ipu_model import variants
from .._ipu_model.estimate import Estimate
from .._ipu_model.variants import PRESENT, Variant, WhatIf
from .._ipu_systems import parse
from .._session import questions
from ..executor import PoplarExecutor
from ..ops import BeginBlock, removeBlocks
from ..options import Options
from ..wrappers import inferenceModel, trainingModel
from .repricing import Repricer

__all__ = ["Estimate", "autoplace", "estimate", "what_if"]


def estimate(
    executor: PoplarExecutor,
    *args: Any,
    system: str | None = None,
    processes: Sequence[int] = (),
    latency: str | float | None = None,
    bandwidth: str | float | None = None,
    **kwargs: Any,
) -> Estimate:
    """Return the cost of a wrapped model on IPUs, in memory and in time.

    Nothing is compiled and nothing runs. Weights and arguments may be on the ``meta`` device, so a
    model can have any size. The page "What it would cost on IPUs" explains the estimates and their
    accuracy.

    Args:
        executor: from ``trainingModel`` or ``inferenceModel``.
        args, kwargs: as for a call: a combined batch.
        system: the chips, ``kind:number`` with a kind of mk1, mk2, bow, c600; None for those of
            ``POPTORCH_POD``, by default mk2:64.
        processes: numbers of processes, such as ``(8, 64, 1024)``, for which to estimate the time
            of a call. Each process has its own machine and a batch of this size. The curve starts
            from the median time of the model's latest calls on this machine, or, without any
            calls, from the estimate for the system.
        latency: one-way latency of the link between the processes: ``"20us"``, or seconds.
        bandwidth: bandwidth of the link: ``"100Gb"``, ``"10GB"``, or bytes per second.

    Raises:
        poptorch.Error: there is no such system, it has too few chips, or the model cannot be
            captured.
        ValueError: a number of processes, the latency or the bandwidth is not valid.
    """
    _check_wrapped(executor, "estimate")
    return executor.estimate(
        *args, system=system, processes=processes, latency=latency, bandwidth=bandwidth, **kwargs
    )


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
        captures = questions.captures(executor._session, (args, kwargs))
        repricer = Repricer(executor._options, captures, system, training)
        combined = [dict(zip(vary, v, strict=True)) for v in itertools.product(*vary.values())]
        disabled, stderr = None if progress else True, terminal.Stream("stderr")
        bar = tqdm(combined, "Pricing", leave=False, disable=disabled, file=stderr)
        lines, errors = list[Variant](), list[Error]()
        for settings in bar:
            try:
                lines.append(Variant.of(settings, repricer.price(settings)))
            except Error as error:
                errors.append(error)
        if not lines:
            raise errors[0]
        with contextlib.suppress(Error):  # the system may have too few chips for this combination
            lines.append(Variant.of(dict.fromkeys(vary, PRESENT), repricer.price({})))
    if errors:
        log.python.warning(
            ("what_if leaves out %d of %d combinations that are not possible. The first one: "
             "%s"),
            len(errors), len(combined), errors[0].message,
        )  # fmt: skip
    return WhatIf(sorted(lines, key=lambda each: (not each.fits, -each.items_per_second)))


def _check_wrapped(executor: object, name: str) -> None:
    if not isinstance(executor, PoplarExecutor):
        raise Error(
            f"{name} needs a wrapped model", got=type(executor).__name__,
            fix=("wrap the model first: poptorch.inferenceModel(model) or "
                 "poptorch.trainingModel(model, optimizer=...)"),
        )  # fmt: skip


@dataclass(frozen=True)
class PlacedBlock:
    """One row of the table: the estimated load of one chip."""

    ipu: int  # index of the chip, and id of the block
    begins: str  # path of the module with which the block begins; empty for the model itself
    cycles: float  # for one micro-batch, forward and backward, as estimated by poptorch.estimate
    share: float  # share of the cycles of all chips, from 0 to 1
    weight_bytes: int  # parameters, gradients, optimizer state and buffers
    saved_bytes: int  # stored for the backward pass, for all micro-batches in progress
    entering_bytes: int  # received from earlier chips, for one micro-batch


class PlacementTable(tuple[PlacedBlock, ...]):
    """The load of each chip; ``print`` shows a table."""

    def __str__(self) -> str:
        head = ["ipu", "begins at", "cycles", "share", "weights and state", "kept", "enters"]
        rows = [
            [
                str(block.ipu),
                block.begins or "(the model)",
                f"{block.cycles:,.0f}",
                f"{block.share:.0%}",
                *map(size_text, (block.weight_bytes, block.saved_bytes, block.entering_bytes)),
            ]
            for block in self
        ]
        slowest = max(block.share for block in self)
        lines = table([head, *rows])
        lines.append(f"balance: {1 / (len(self) * slowest):.0%} of an even division (estimated)")
        return "\n".join(lines)


class AutoPlacement(NamedTuple):
    """The result of ``autoplace``."""

    model: nn.Module
    table: PlacementTable


def autoplace(
    model: nn.Module,
    example: Any,
    options: Options | None = None,
    *,
    num_ipus: int,
    optimizer: torch.optim.Optimizer | None = None,
    memory_per_ipu: int | None = None,
    system: str | None = None,
) -> AutoPlacement:
    """Divide a model over chips: annotate it with one ``BeginBlock`` per chip.

    Nothing runs. Blocks begin where modules begin. Every part fits its chip, the slowest chip is as
    fast as possible, and then few bytes cross between chips. A model in training mode is placed for
    training, one in evaluation mode for inference.

    Args:
        model: annotated in place; earlier blocks are removed. ``removeBlocks`` undoes it.
        example: the arguments of one call, a combined batch: a tuple, a dict by name, or a tensor.
        options: the options that you will wrap the model with; they are not frozen.
        num_ipus: how many chips, at least 1.
        optimizer: the optimizer that you will train with; its state takes memory.
        memory_per_ipu: bytes for weights, state and what the backward pass needs; None for the
            memory of the chips of ``POPTORCH_POD``.
        system: the chips, ``kind:number``. In this case, the whole estimate of each chip must fit.

    Returns:
        The annotated model, and the table of the chips.

    Raises:
        ValueError: ``num_ipus`` is not a positive integer, or both memory and system are given.
        poptorch.Error: the model cannot be captured, has too few modules to cut at, or does not
            fit. The model is unchanged then.
    """
    if not isinstance(num_ipus, int) or num_ipus < 1:
        raise InvalidValue(
            "num_ipus must be a positive integer", got=repr(num_ipus), fix="for example num_ipus=2"
        )
    if memory_per_ipu is not None and system is not None:
        raise InvalidValue(
            "memory_per_ipu and system cannot be combined", got="memory_per_ipu and system",
            fix="pass only one of them: the system already determines the memory of its chips",
        )  # fmt: skip
    chosen = Options() if options is None else options.clone()
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    if model.training:
        executor = trainingModel(model, chosen, optimizer)
    else:
        executor = inferenceModel(model, chosen)
    try:
        session = executor._session
        if system is None:
            shares = questions.shares(session, (args, kwargs), num_ipus, memory_per_ipu)
        else:
            captures = questions.captures(session, (args, kwargs))
            shares = captures.fitting(session.settings(), parse(system), num_ipus)
    finally:
        executor.destroy()
    removeBlocks(model)
    for share in shares:
        if share.begins is not None:
            part = model.get_submodule(share.begins)
            BeginBlock(part, user_id=str(share.ipu), ipu_id=share.ipu)
    whole = sum(share.cycles for share in shares) or 1.0
    rows = [
        PlacedBlock(**vars(share) | {"begins": share.begins or "", "share": share.cycles / whole})
        for share in shares
    ]
    return AutoPlacement(model, PlacementTable(rows))
