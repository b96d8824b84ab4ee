"""Whether a graph of several micro-batches computes what that of one does, so many times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from .._base import log
from .._base.errors import Error
from .._ir import slots
from .._ir.graph import Graph, Tensors
from .._ir.loops import Lanes
from .._ir.slots import Kind, Slot
from .._ops import streams

_TOLERANCE = 1e-4  # of the sum of what is added up: orders of summation differ
_NUDGE = 1e-6  # of inputs; what it changes is how far rounding inside may reach
_REACH = 30  # nudges that all rounding together may be


class Difference(NamedTuple):
    slot: Slot
    most: float  # of any element
    allowed: float

    def __str__(self) -> str:
        return f"{self.slot} differs by {self.most:.3g}, more than {self.allowed:.3g}"


def validate(one: Graph, several: Graph, lanes: Lanes, given: Tensors) -> None:
    """Raise an Error where they differ."""
    try:
        found = differences(one, several, lanes, given)
    except (RuntimeError, IndexError) as error:
        log.engine.debug("Lanes were not validated: the model refuses random inputs: %s", error)
        return
    if found:
        raise Error(
            "The graph of several micro-batches computes something else than that of one",
            got="\n".join(map(str, found)),
            fix=("options.lanes(1) runs one after another", "tell us: this is a defect of ours"),
        )


def differences(one: Graph, several: Graph, lanes: Lanes, given: Tensors) -> list[Difference]:
    """Run both on random inputs; compare each output, gradient and buffer.

    ``given``: by slot key the values that are not random, as those of constants.
    """
    generator = torch.Generator().manual_seed(0)
    state = {s.key: given.get(s.key, _random(s, generator)) for s in one.inputs if not _own(s)}
    batch = filter(_own, one.inputs)
    rows = {s.key: [_random(s, generator) for _ in range(lanes.count)] for s in batch}
    seeds = [*range(1, lanes.count + 1)]
    nudged = {key: [_nudged(row, generator) for row in each] for key, each in rows.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        expected = _one_after_another(one, lanes, several, state, rows, seeds)
        near = _one_after_another(one, lanes, several, state, nudged, seeds)
        streams.begin(seeds)
        found = several(dict(_side_by_side(several, state, rows)))
    precision = _precision(one)
    compared = (
        _compared(slot, found[slot.key], *expected[slot.key], near[slot.key][0], precision)
        for slot in several.outputs
    )
    return [difference for difference in compared if difference is not None]


def _nudged(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if value.is_complex():
        return torch.view_as_complex(_nudged(_parts(value), generator))
    if not value.is_floating_point():
        return value
    signs = torch.randn(value.shape, generator=generator).sign().to(value.dtype)
    return value + value * signs * max(_NUDGE, torch.finfo(value.dtype).eps)


def _parts(value: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _precision(graph: Graph) -> float:
    """Of the narrowest type in which the graph computes, over that of float32."""
    values = (node.meta.get("val") for node in graph.module.graph.nodes)
    types = {v.dtype.to_real() for v in values if isinstance(v, torch.Tensor)}
    types = {each for each in types if each.is_floating_point}
    return max((torch.finfo(each).eps for each in types), default=0.0) / 2**-23


def _own(slot: Slot) -> bool:
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
    graph: Graph, state: Tensors, rows: Mapping[str, list[torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for slot in graph.inputs:
        if slot.key in rows:
            yield slot.key, torch.stack(rows[slot.key])
        elif slot == slots.REPLICA:
            yield slot.key, torch.zeros(())
        else:
            value = state[slot.key]
            yield slot.key, value.expand(slot.shape).clone() if slot.lanes else value


def _one_after_another(
    graph: Graph,
    lanes: Lanes,
    several: Graph,
    state: Tensors,
    rows: Mapping[str, list[torch.Tensor]],
    seeds: list[int],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By key the results, and how large what was added up is."""
    own = {slot.key for slot in several.inputs if slot.lanes and not _own(slot)}
    states = [dict(state) for _ in range(lanes.replicas)]
    results: dict[str, list[torch.Tensor]] = {slot.key: [] for slot in graph.outputs}
    for lane in range(lanes.count):
        replica = lane % lanes.replicas
        values = states[replica] | {key: each[lane] for key, each in rows.items()}
        values[slots.REPLICA.key] = torch.tensor(float(replica))
        streams.begin(seeds[lane : lane + 1])
        for key, value in graph(values).items():
            results[key].append(value)
            for each in [states[replica]] if key in own else states:
                if key in each:
                    each[key] = value
    types = {slot.key: slot.dtype for slot in several.outputs}
    expected = {}
    for slot in graph.outputs:
        stacked = torch.stack(results[slot.key])
        if slot.kind is Kind.GRADIENT:
            size = _parts(stacked).double().abs().sum(0)
            expected[slot.key] = stacked.sum(0, dtype=types[slot.key]), size
            continue
        if slot.key in own:
            stacked = stacked[-lanes.replicas :]
        elif slot.key in state:
            stacked = stacked[-1]
        expected[slot.key] = stacked, _parts(stacked).abs()
    return expected


def _compared(
    slot: Slot,
    found: torch.Tensor,
    wanted: torch.Tensor,
    size: torch.Tensor,
    near: torch.Tensor,
    precision: float,
) -> Difference | None:
    alike = found.shape == wanted.shape and found.dtype == wanted.dtype
    found, wanted, near = map(_parts, (found, wanted, near))
    known = torch.isfinite(wanted)
    if not alike or not torch.equal(known, torch.isfinite(found)):
        return Difference(slot, float("inf"), 0.0)
    if not known.any():
        return None
    errors = (value.double() - wanted.double() for value in (found, near))
    most, moved, largest = (float(value.double()[known].abs().max()) for value in (*errors, size))
    share = _TOLERANCE * precision if wanted.dtype.is_floating_point else 0.0
    reach = _REACH * moved if moved < float("inf") else 0.0
    allowed = share * (1 + largest) + reach
    return Difference(slot, most, allowed) if most > allowed else None
