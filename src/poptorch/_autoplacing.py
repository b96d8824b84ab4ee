"""``autoplace``: block boundaries chosen from the captured graph. An addition to PopTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ._base.errors import InvalidValue
from ._base.tables import size_text, table
from ._session import questions
from ._systems import parse
from .ops import BeginBlock, removeBlocks
from .options import Options
from .wrappers import inferenceModel, trainingModel


@dataclass(frozen=True)
class PlacedBlock:
    """One line of the table: the estimated load of one chip."""

    ipu: int  # index of the chip, and id of the block
    begins: str  # path of the module that begins the block; the model's own is empty
    cycles: float  # of one micro-batch, forward and backward, as poptorch.estimate prices them
    share: float  # of all chips' cycles, from 0 to 1
    weight_bytes: int  # parameters, gradients, optimizer state and buffers
    saved_bytes: int  # kept for the backward pass, of all micro-batches under way
    entering_bytes: int  # of one micro-batch, from the chips before


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


class Placement(NamedTuple):
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
) -> Placement:
    """Divide a model over chips: annotate it with one ``BeginBlock`` per chip.

    Nothing runs. Blocks begin where modules begin. Every part fits its chip, the slowest chip is
    as fast as possible, and then few bytes cross between chips. A model in training mode is
    placed for training, one in evaluation mode for inference.

    Args:
        model: annotated in place; earlier blocks are removed. ``removeBlocks`` undoes it.
        example: the arguments of one call, a combined batch: a tuple, a dict by name, or a tensor.
        options: the options that you will wrap the model with; they are not frozen.
        num_ipus: how many chips, at least 1.
        optimizer: the optimizer that you will train with; its state takes memory.
        memory_per_ipu: bytes for weights, state and what backward needs; None for the memory of
            the chips of ``POPTORCH_POD``.
        system: the chips, ``kind:number``. Then the whole estimate of each chip has to fit.

    Returns:
        The annotated model, and the table of the chips.

    Raises:
        ValueError: ``num_ipus`` is no positive integer, or both memory and system are given.
        poptorch.Error: the model cannot be captured, has too few modules to cut at, or does not
            fit. The model is unchanged then.
    """
    if not isinstance(num_ipus, int) or num_ipus < 1:
        raise InvalidValue("num_ipus must be a positive integer", got=repr(num_ipus))
    if memory_per_ipu is not None and system is not None:
        raise InvalidValue(
            "A system says how much memory its chips have", got="memory_per_ipu and system",
            fix="one of them",
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
            shares = questions.shares(session, args, kwargs, num_ipus, memory_per_ipu)
        else:
            captures = questions.captures(session, args, kwargs)
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
        PlacedBlock(
            share.ipu, share.begins or "", share.cycles, share.cycles / whole,
            share.weight_bytes, share.saved_bytes, share.entering_bytes,
        )
        for share in shares
    ]  # fmt: skip
    return Placement(model, PlacementTable(rows))
