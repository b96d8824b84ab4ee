"""Advice: what to change so that a model fits, each change priced like the model itself.

A change that is enough alone comes before one that is not, the cheaper one first. Where none is
enough, those that save most are joined. A model that fits is given what makes it faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .._base import log
from .._machine.constants import DEFAULT
from .._machine.estimate import Advice, Estimate
from ..options.freeze import freeze
from .repricing import Repricer

MOST = 5
"""So many changes are named."""
MOST_JOINED = 3
_USUAL, _LEAST = DEFAULT.memory_proportion, 0.05

_SETTINGS = "poptorch.TensorLocationSettings()"
_OFF, _SHARDED = ".useOnChipStorage(False)", ".useReplicatedTensorSharding(True)"


class Change(NamedTuple):
    """What to write, and what it sets."""

    text: str
    settings: Mapping[str, Any]


class Tried(NamedTuple):
    """A change and what it comes to."""

    change: Change
    priced: Estimate


def advice(repricer: Repricer, before: Estimate) -> tuple[Advice, ...]:
    """Return the changes that help, the best first.

    Args:
        repricer: prices the model with other settings.
        before: its estimate as it is.
    """
    tried = [Tried(change, repricer.price(change.settings)) for change in _changes(repricer)]
    if before.fits:
        faster = [t for t in tried if t.priced.fits and t.priced.seconds < 0.995 * before.seconds]
        best = sorted(faster, key=lambda t: t.priced.seconds)
    else:
        saving = [t for t in tried if _bytes(t.priced) < _bytes(before)]
        if not any(t.priced.fits for t in saving):
            saving += _joined(repricer, sorted(saving, key=lambda t: _bytes(t.priced)))
        if not any(t.priced.fits for t in saving):
            saving += _smaller(repricer, before)
        best = sorted(saving, key=_rank)
    return tuple(
        Advice(
            change.text, _bytes(before) - _bytes(priced), priced.seconds - before.seconds,
            priced.fits,
        )
        for change, priced in best[:MOST]
    )  # fmt: skip


def _rank(tried: Tried) -> tuple[bool, float]:
    """Enough first, the quickest of it first; then by what is still needed."""
    fits = tried.priced.fits
    return not fits, tried.priced.seconds if fits else _bytes(tried.priced)


def _bytes(priced: Estimate) -> float:
    return max(chip.bytes for chip in priced.chips)


def _changes(repricer: Repricer) -> list[Change]:
    """Everything that could be changed without capturing the model for another micro-batch."""
    spec = freeze(repricer.options, repricer.training)
    where, several = spec.locations, spec.loops.all_replicas > 1
    made = []
    if not all(spec.runtime.half_partials):
        text = "options.Precision.setPartialsType(torch.half)"
        made.append(Change(text, {"half_partials": True}))
    smaller = min((share for _, share in spec.runtime.memory_proportions), default=_USUAL) / 2
    if smaller >= _LEAST:
        text = f'options.setAvailableMemoryProportion({{"IPU0": {smaller:g}}})'
        made.append(Change(text, {"memory_proportion": smaller}))
    if not repricer.training:
        return made + _moved("weight", where.weight.on_chip, False)
    if not spec.recompute:
        text = 'options._Popart.set("autoRecomputation", 1)'
        made.append(Change(text, {"recomputation": True}))
    made += _moved("optimizer", where.optimizer.on_chip, several and not where.optimizer.sharded)
    made += _moved("activation", where.activation.on_chip, False)
    made += _moved("accumulator", where.accumulator.on_chip, False)
    return made


def _moved(kind: str, on_chip: bool, shared: bool) -> list[Change]:
    setter = f"options.TensorLocations.set{kind.capitalize()}Location"
    places = {"off chip": _OFF} if on_chip else {}
    if shared:
        places |= {"on chip, sharded": _SHARDED} if on_chip else {}
        places |= {"off chip, sharded": _OFF + _SHARDED}
    return [
        Change(f"{setter}({_SETTINGS}{calls})", {f"{kind}_location": place})
        for place, calls in places.items()
    ]


def _joined(repricer: Repricer, singles: list[Tried]) -> list[Tried]:
    """Changes that save most, joined until they are enough."""
    made: list[Tried] = []
    joined = singles[0].change if singles else None
    for single in singles[1:]:
        assert joined is not None
        if single.change.settings.keys() & joined.settings.keys():
            continue
        text = f"{joined.text}; {single.change.text}"
        joined = Change(text, {**joined.settings, **single.change.settings})
        made.append(Tried(joined, repricer.price(joined.settings)))
        if made[-1].priced.fits or len(made) + 1 == MOST_JOINED:
            break
    return made


def _smaller(repricer: Repricer, before: Estimate) -> list[Tried]:
    """Fewer samples in a micro-batch, and more of them: half, a quarter, an eighth."""
    loops = freeze(repricer.options, repricer.training).loops
    micro = repricer.rows // loops.slices
    steps = loops.accumulation if repricer.training else loops.iterations
    name = "Training.gradientAccumulation" if repricer.training else "deviceIterations"
    made: list[Tried] = []
    for parts in (2, 4, 8):
        if micro % parts or (made and made[-1].priced.fits):
            break
        text = f"options.{name}({steps * parts})  # {micro // parts} samples per micro-batch"
        change = Change(text, {"micro_batch": micro // parts})
        try:
            made.append(Tried(change, repricer.price(change.settings)))
        except Exception as error:  # forward may need the size of its batch, and raise anything
            log.python.info(
                "Advice: %d samples per micro-batch are not priced: %s",
                micro // parts,
                error,
            )
            break
    return [each for each in made if _bytes(each.priced) < _bytes(before)]
