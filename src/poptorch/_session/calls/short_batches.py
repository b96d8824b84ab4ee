"""Divide batches that are shorter than usual, such as the last one of an epoch, between programs.

Whole updates keep micro-batches of the usual size. The rest is one more update, with micro-batches
of the usual size and, if rows are left, a shorter one. In inference, iterations take the place of
updates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..._base import nested_values
from ..._base.errors import Error
from ..._ir.micro_batches import Loops, have_fewer_rows
from ..._ir.spec import Spec
from ...enums import OutputMode
from .inputs import Inputs
from .signature import BoundArguments

_WHOLE = (
    "pass as many rows as in the first call, or leave incomplete batches out: "
    "poptorch.DataLoader(..., drop_last=True)"
)


RowCounts = tuple[int, ...]  # rows of each tensor in one micro-batch; 0 without dimensions


@dataclass(frozen=True)
class Share:
    """What one program runs of a shorter batch: whole updates, or the last micro-batches."""

    updates: int = 0  # 0 for the remainder
    # sizes of the remainder's micro-batches, with the number of each
    sizes: tuple[tuple[RowCounts, int], ...] = ()

    def spec(self, spec: Spec) -> Spec:
        """Return the settings of its program, which treats a remainder as one micro-batch."""
        loops = Loops(processes=spec.loops.processes)
        if self.updates:
            loops = replace(spec.loops, iterations=self.updates)
        return replace(spec, loops=loops, placement=replace(spec.placement, fills=False))

    def parts(self, bound: BoundArguments) -> Iterator[tuple[BoundArguments, int]]:
        """Yield the parts of a remainder with micro-batches of one size, and their numbers."""
        starts = [0] * len(bound.tensors)
        for rows, count in self.sizes:
            ends = [start + count * own for start, own in zip(starts, rows, strict=True)]
            yield _between(bound, starts, ends), count
            starts = ends


def is_shorter(bound: BoundArguments, usual: BoundArguments, loops: Loops) -> bool:
    """Return whether all tensors of a call have fewer rows than usual, in proportion.

    Other sizes are equal, unless there are several micro-batches: the number of rows alone decides
    how a batch is divided between them, so that this does not depend on the length of the
    first batch.
    """
    parts = zip(usual.parts, bound.parts, strict=True)
    if any(nested_values.first_difference(expected, got) for (_, expected), (_, got) in parts):
        return False
    pairs = list(zip(bound.tensors, usual.tensors, strict=True))
    if any(now.is_nested or now.dtype is not then.dtype for now, then in pairs):
        return False
    shapes, before = ([each.shape for each in own.tensors] for own in (bound, usual))
    others = zip(shapes, before, strict=True)
    if loops.micro_batches == 1 and any(now[1:] != then[1:] for now, then in others):
        return False
    return have_fewer_rows(shapes, before)


def shares_of(
    bound: BoundArguments, usual: Inputs, spec: Spec
) -> list[tuple[Share, BoundArguments]]:
    """Return which program runs which part of a batch; empty if the batch is not such a shorter
    batch.

    Raises:
        Error: it is one, and the settings do not allow it.
    """
    loops = spec.loops
    pairs = list(zip(bound.tensors, usual.bound.tensors, strict=False))
    if len(bound.tensors) != len(usual.bound.tensors) or not _is_cut(pairs):
        return []
    rows = tuple(size // loops.slices for size in rows_of(usual.bound))
    sizes = [(given, own) for given, own in zip(rows_of(bound), rows, strict=True) if own]
    counts = {-(-given // own) for given, own in sizes}
    if len(counts) != 1:
        return []
    short = any(given % own for given, own in sizes)
    of_update = loops.accumulation * loops.input_groups
    (count,) = counts
    updates, left = divmod(count - short, of_update)
    _check(spec, updates, bool(left or short))
    result, ends = list[tuple[Share, BoundArguments]](), [updates * of_update * own for own in rows]
    if updates:
        result.append((Share(updates), _between(bound, [0] * len(rows), ends)))
    if left or short:
        rest = _between(bound, ends, rows_of(bound))
        last = tuple(given - left * own for given, own in zip(rows_of(rest), rows, strict=True))
        groups = ((rows, left), (last, int(short)))
        result.append((Share(sizes=tuple(group for group in groups if group[1])), rest))
    return result


def unequal_share(micro_batches: Sequence[BoundArguments]) -> Share:
    """Return the share for an update with micro-batches of these sizes."""
    groups = itertools.groupby(map(rows_of, micro_batches))
    return Share(sizes=tuple((rows, len(list(group))) for rows, group in groups))


def rows_of(bound: BoundArguments) -> RowCounts:
    return tuple(tensor.shape[0] if tensor.dim() else 0 for tensor in bound.tensors)


def _is_cut(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Return whether tensors that had equal numbers of rows still have equal numbers."""
    if not any(then.dim() for _, then in pairs):
        return False
    if any(bool(now.dim()) != bool(then.dim()) or 0 in now.shape for now, then in pairs):
        return False
    rows = {(then.shape[0], now.shape[0]) for now, then in pairs if then.dim()}
    return len({then for then, _ in rows}) == len(rows)


def _check(spec: Spec, updates: int, remains: bool) -> None:
    modes = [(spec.output.mode, spec.output.period)]
    modes += [(mode, period) for _, _, mode, period in spec.anchors]
    got = f"a batch for {updates} whole updates" + (" and some micro-batches" if remains else "")
    for mode, period in modes:
        if mode is OutputMode.EveryN and (remains or updates % period):
            raise Error(
                "OutputMode.EveryN does not allow a shorter batch",
                got=f"{got}; results are kept every {period} iterations",
                fix=(_WHOLE, "or use another output mode: poptorch.OutputMode.All"),
            )
    if remains and spec.loops.input_group_size > 1:
        raise Error(
            "Replicas that share their inputs do not allow a shorter batch",
            got=f"{got}; options.inputReplicaGrouping({spec.loops.input_group_size}, ...)",
            fix=_WHOLE,
        )


class Emitted(NamedTuple):
    """A result of a program."""

    mode: OutputMode
    shape: tuple[int, ...]  # for a micro-batch
    are_several: bool  # whether a call returns several of them, which are joined


def check_results(usual: Sequence[Emitted], share: Sequence[Emitted]) -> None:
    """Check that the results of a share can be joined with those of whole batches."""
    if len(usual) != len(share):
        raise Error(
            "forward returns a different number or shape of results for a shorter batch",
            got=f"{len(share)} tensors for the shorter batch, {len(usual)} for a complete batch",
            fix=("let forward return the same results for any number of rows", f"or {_WHOLE}"),
        )
    for (mode, shape, _), (_, own, _) in zip(usual, share, strict=True):
        if mode is OutputMode.Sum and shape and (own[0] % shape[0] or own[1:] != shape[1:]):
            raise Error(
                "OutputMode.Sum cannot add results of micro-batches of different sizes",
                got=f"shape {shape} for a micro-batch of the usual size, {own} for a shorter one",
                fix=(_WHOLE, "or return results without a batch dimension"),
            )


def join_results(
    results: Sequence[Sequence[torch.Tensor]], usual: Sequence[Emitted]
) -> list[torch.Tensor]:
    """Join the results of all shares of a batch."""
    made = []
    for each, (mode, shape, are_several) in zip(zip(*results, strict=True), usual, strict=True):
        value = _joined(each, mode, not shape)
        # One value of several has the dimension in which they are joined, as a list of one has.
        made.append(value.reshape(1) if are_several and value.dim() == 0 else value)
    return made


def _joined(each: Sequence[torch.Tensor], mode: OutputMode, scalar: bool) -> torch.Tensor:
    if mode is OutputMode.Final or len(each) == 1:
        return each[-1]
    parts = [value.reshape(-1) if scalar else value for value in each]
    if mode is not OutputMode.Sum:
        return torch.cat(parts)
    total = parts[0].clone()
    for part in parts[1:]:
        total[: len(part)] += part  # fewer replicas than usual may have a micro-batch
    return total.reshape(each[0].shape)


def _between(bound: BoundArguments, starts: Sequence[int], ends: Sequence[int]) -> BoundArguments:
    tensors = [
        tensor[start:end] if tensor.dim() else tensor
        for tensor, start, end in zip(bound.tensors, starts, ends, strict=True)
    ]
    return replace(bound, tensors=tensors)
