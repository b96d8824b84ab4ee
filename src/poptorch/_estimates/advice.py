"""Advice: what to change so that a model fits, each change priced like the model itself.

A change that is enough alone comes before one that is not, the cheaper one first. Where none is
enough, those that save most are joined. A model that fits is given what makes it faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .._base import log
from .._ipu_model.constants import DEFAULT
from .._ipu_model.estimate import Advice, Estimate
from .._ir.spec import Spec
from .._systems import parse
from ..options.freeze import freeze
from .repricing import Repricer

MOST = 5
"""So many changes are named."""
MOST_JOINED = 3
_USUAL, _LEAST, _MOST_SHARE = DEFAULT.memory_proportion, 0.05, 0.9

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
    if before.fits:
        tried = list(_priced(repricer, _faster(repricer, before)))
        faster = [t for t in tried if t.priced.fits and t.priced.seconds < 0.995 * before.seconds]
        best = sorted(faster, key=lambda t: t.priced.seconds)
    else:
        tried = list(_priced(repricer, _smaller(repricer, before)))
        saving = [t for t in tried if _bytes(t.priced) < _bytes(before)]
        if not any(t.priced.fits for t in saving):
            saving += _joined(repricer, sorted(saving, key=lambda t: _bytes(t.priced)))
        if not any(t.priced.fits for t in saving):
            saving += _divided(repricer, before)
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


def _priced(repricer: Repricer, changes: Iterable[Change]) -> Iterator[Tried]:
    """Price changes, those that the model and the system can take."""
    for change in changes:
        try:
            yield Tried(change, repricer.price(change.settings))
        except Exception as error:  # forward may need the size of its batch, and raise anything
            log.python.info("Advice: %s is not priced: %s", change.text, error)


def _faster(repricer: Repricer, before: Estimate) -> list[Change]:
    """What may be faster, and takes memory or chips that idle for it."""
    spec = freeze(repricer.options, repricer.training)
    where, loops = spec.locations, spec.loops
    made = _partials(spec)
    larger = min(_MOST_SHARE, 2 * _share(spec))
    if larger > _share(spec):
        made.append(_proportion(larger, len(before.chips)))
    resting = {"weight": where.weight}
    if repricer.training:
        resting |= {"activation": where.activation, "optimizer": where.optimizer}
        resting |= {"accumulator": where.accumulator}
        if spec.recompute is not False:  # pipelines do it unless they are told not to
            made.append(_recomputation(False))
    for kind, location in resting.items():
        if not location.on_chip:
            setter = f"options.TensorLocations.set{kind.capitalize()}Location"
            place, calls = ("on chip, sharded", _SHARDED) if location.sharded else ("on chip", "")
            made.append(Change(f"{setter}({_SETTINGS}{calls})", {f"{kind}_location": place}))
    steps = loops.accumulation if repricer.training else loops.iterations
    micro = repricer.rows // loops.slices
    if steps % 2 == 0:
        text = f"{_steps(repricer, steps // 2)}  # {2 * micro} samples per micro-batch"
        made.append(Change(text, {"micro_batch": 2 * micro}))
    more = parse(before.system).chips // (len(before.chips) * before.replicas)
    more = math.gcd(1 << more.bit_length() - 1, steps)
    if more > 1 and loops.processes == 1:
        count = more * loops.replicas
        text = f"options.replicationFactor({count}); {_steps(repricer, steps // more)}"
        made.append(Change(text, {"replicas": count}))
    return made


def _partials(spec: Spec) -> list[Change]:
    if all(spec.runtime.half_partials):
        return []
    return [Change("options.Precision.setPartialsType(torch.half)", {"half_partials": True})]


def _share(spec: Spec) -> float:
    """The least that a chip's products may use."""
    return min((share for _, share in spec.runtime.memory_proportions), default=_USUAL)


def _proportion(share: float, chips: int) -> Change:
    own = ", ".join(f'"IPU{chip}": {share:g}' for chip in range(chips))
    if chips > 4:
        own = f'f"IPU{{chip}}": {share:g} for chip in range({chips})'
    text = f"options.setAvailableMemoryProportion({{{own}}})"
    return Change(text, {"memory_proportion": share})


def _recomputation(recompute: bool) -> Change:
    text = f'options._Popart.set("autoRecomputation", {recompute:d})'
    return Change(text, {"recomputation": recompute})


def _checkpoints(every: int) -> Change:
    text = f"# poptorch.recomputationCheckpoint at every {every}. place only, in the model"
    return Change(text, {"checkpoints": every})


def _steps(repricer: Repricer, count: int) -> str:
    name = "Training.gradientAccumulation" if repricer.training else "deviceIterations"
    return f"options.{name}({count})"


def _smaller(repricer: Repricer, before: Estimate) -> list[Change]:
    """What may need less memory, without capturing the model for another micro-batch."""
    spec = freeze(repricer.options, repricer.training)
    where, several = spec.locations, spec.loops.all_replicas > 1
    made = _partials(spec)
    if _share(spec) / 2 >= _LEAST:
        made.append(_proportion(_share(spec) / 2, len(before.chips)))
    if not repricer.training:
        return made + _moved("weight", where.weight.on_chip, False)
    if not spec.recompute:
        made.append(_recomputation(True))
    again = spec.recompute or (spec.recompute is None and len(before.chips) > 1)
    if again and repricer.checkpoints() > 1:
        made += [_checkpoints(every) for every in (2, 4)]
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


def _divided(repricer: Repricer, before: Estimate) -> list[Tried]:
    """Fewer samples in a micro-batch, and more of them: half, a quarter, an eighth."""
    loops = freeze(repricer.options, repricer.training).loops
    micro = repricer.rows // loops.slices
    steps = loops.accumulation if repricer.training else loops.iterations
    changes = [
        Change(
            f"{_steps(repricer, steps * parts)}  # {micro // parts} samples per micro-batch",
            {"micro_batch": micro // parts},
        )
        for parts in (2, 4, 8)
        if micro % parts == 0
    ]
    made: list[Tried] = []
    for tried in _priced(repricer, changes):
        made.append(tried)
        if tried.priced.fits:
            break
    return [each for each in made if _bytes(each.priced) < _bytes(before)]
