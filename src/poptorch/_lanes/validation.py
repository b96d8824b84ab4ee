"""Compare a graph of several micro-batches with the graph of one, which is run for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from .._ir import slots
from .._ir.closeness import Difference, coarsest, difference, movement
from .._ir.graph import Graph
from .._ir.micro_batches import Lanes
from .._ir.slots import Kind, Slot
from .._ir.tensors import TensorsByKey
from .._ops import random_streams

_NUDGE = 1e-6  # a small change of inputs; its effect shows how far rounding errors can grow

ValuesByKey = Mapping[
    str, Sequence[torch.Tensor]
]  # for each slot key, the value of each micro-batch


def differences(
    one: Graph, several: Graph, lanes: Lanes, given: TensorsByKey, rows: ValuesByKey | None = None
) -> list[Difference]:
    """Run both graphs on the same micro-batches, and compare each output, gradient and buffer.

    Args:
        one: the graph of one micro-batch.
        several: the graph of several.
        lanes: how micro-batches become lanes.
        given: by slot key, values that are not random, such as those of constants.
        rows: the micro-batches, in the order of the lanes; None for random ones.
    """
    generator = torch.Generator().manual_seed(0)
    state = {s.key: given.get(s.key, _random(s, generator)) for s in one.inputs if not _is_batch(s)}
    if rows is None:
        batch = filter(_is_batch, one.inputs)
        rows = {s.key: [_random(s, generator) for _ in range(lanes.count)] for s in batch}
    seeds = [*range(1, lanes.count + 1)]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        expected = _one_after_another(one, lanes, several, state, rows, seeds)
        random_streams.begin(seeds)
        found = several(dict(_side_by_side(several, state, rows)))
        share = _share(coarsest(one))
        compared = [
            _compared(slot, found[slot.key], value, size, share)
            for slot, (value, size) in _by_slot(several, expected)
        ]
        if not any(compared):
            return []
        nudged = {key: [_nudged(row, generator) for row in each] for key, each in rows.items()}
        moved = {key: _nudged(value, generator) for key, value in state.items()}
        near = _one_after_another(one, lanes, several, moved, nudged, seeds)
        compared = [
            _compared(slot, found[slot.key], value, size, share, movement(value, near[slot.key][0]))
            for slot, (value, size) in _by_slot(several, expected)
        ]
    return [each for each in compared if each is not None]


def _compared(
    slot: Slot,
    found: torch.Tensor,
    expected: torch.Tensor,
    size: torch.Tensor,
    share: float,
    moved: float = 0.0,
) -> Difference | None:
    if found.dtype != expected.dtype:
        types = f"is {found.dtype} instead of {expected.dtype}"
        return Difference(str(slot), float("inf"), 0.0, types)
    return difference(str(slot), found, expected, share, moved, size)


def _by_slot(
    graph: Graph, results: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[tuple[Slot, tuple[torch.Tensor, torch.Tensor]]]:
    for slot in graph.outputs:
        yield slot, results[slot.key]


def _share(rounding: float) -> float:
    """Return the relative tolerance for sums whose order differs, as a share of the summed
    magnitudes.
    """
    return max(16 * rounding, min(256 * rounding, 1e-3))


def _nudged(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if value.is_complex():
        return torch.view_as_complex(_nudged(torch.view_as_real(value), generator))
    if not value.is_floating_point():
        return value
    signs = torch.randn(value.shape, generator=generator).sign().to(value.dtype)
    return value + value * signs * max(_NUDGE, torch.finfo(value.dtype).eps)


def _is_batch(slot: Slot) -> bool:
    return slot.kind is Kind.BATCH


def _random(slot: Slot, generator: torch.Generator) -> torch.Tensor:
    if slot.dtype.is_complex:
        pairs = replace(slot, shape=(*slot.shape, 2), dtype=slot.dtype.to_real())
        return torch.view_as_complex(_random(pairs, generator))
    if not slot.dtype.is_floating_point:
        return torch.randint(0, 2, slot.shape, generator=generator).to(slot.dtype)
    if slot.kind in (Kind.BUFFER, Kind.HYPER, Kind.OPTSTATE):  # variances and scales are positive
        return torch.rand(slot.shape, generator=generator).add(0.5).to(slot.dtype)
    return torch.randn(slot.shape, generator=generator).mul(0.3).to(slot.dtype)


def _side_by_side(
    graph: Graph, state: TensorsByKey, rows: ValuesByKey
) -> Iterator[tuple[str, torch.Tensor]]:
    for slot in graph.inputs:
        if slot.key in rows:
            yield slot.key, torch.stack(list(rows[slot.key]))
        elif slot == slots.REPLICA:
            yield slot.key, torch.zeros(())
        else:
            value = state[slot.key]
            yield slot.key, value.expand(slot.shape).clone() if slot.lanes else value


def _one_after_another(
    graph: Graph,
    lanes: Lanes,
    several: Graph,
    state: TensorsByKey,
    rows: ValuesByKey,
    seeds: list[int],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return by key the results, and the magnitude of what was summed."""
    own = {slot.key for slot in several.inputs if slot.lanes and not _is_batch(slot)}
    states = [dict(state) for _ in range(lanes.replicas)]
    types = {slot.key: slot.dtype for slot in several.outputs}
    gradients = {slot.key for slot in graph.gradients}
    results: dict[str, list[torch.Tensor]] = {slot.key: [] for slot in graph.outputs}
    sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # sums, and the sums of magnitudes
    for lane in range(lanes.count):
        replica = lane % lanes.replicas
        values = states[replica] | {key: each[lane] for key, each in rows.items()}
        values[slots.REPLICA.key] = torch.tensor(float(replica))
        random_streams.begin(seeds[lane : lane + 1])
        for key, value in graph(values).items():
            if key in gradients:
                sums[key] = _added(sums.get(key), value.to(types[key]))
                continue
            results[key].append(value)
            for each in [states[replica]] if key in own else states:
                if key in each:
                    each[key] = value
    expected = dict(sums)
    for slot in graph.outputs:
        if slot.key in gradients:
            continue
        stacked = torch.stack(results[slot.key])
        if slot.key in own:
            stacked = stacked[-lanes.replicas :]
        elif slot.key in state:
            stacked = stacked[-1]
        expected[slot.key] = stacked, stacked.abs()
    return expected


def _added(
    before: tuple[torch.Tensor, torch.Tensor] | None, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of a gradient and of its magnitude, over one micro-batch after another."""
    if before is None:
        return value.clone(), value.abs()
    total, size = before
    return total.add_(value), size.add_(value.abs())
