"""Suggest changes that make a model fit or make it faster, each with its own estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .._base import log
from .._ipu_systems import parse
from .._ir.spec import Spec
from .constants import DEFAULT
from .estimate import Estimate
from .parts import Advice

MOST = 5  # largest number of suggestions
MOST_JOINED = 3
_USUAL, _LEAST, _MOST_SHARE = DEFAULT.memory_proportion, 0.05, 0.9

_SETTINGS = "poptorch.TensorLocationSettings()"
_OFF, _SHARDED = ".useOnChipStorage(False)", ".useReplicatedTensorSharding(True)"


class SettingChange(NamedTuple):
    text: str
    settings: Mapping[str, Any]


class PricedChange(NamedTuple):
    change: SettingChange
    priced: Estimate
    group: int  # suggestions of an earlier group come first

    @property
    def bytes(self) -> float:
        return self.priced.fullest_bytes

    @property
    def rank(self) -> tuple[int, float]:
        return self.group, 1 / self.priced.items_per_second


class Adviser(NamedTuple):
    spec: Spec
    rows: int  # rows of the combined batch
    # estimates changed settings, in the form of ``what_if``
    price: Callable[[Mapping[str, Any]], Estimate]
    checkpoints: Callable[[], int]  # returns the model's number of recomputation checkpoints

    def advice(self, before: Estimate) -> tuple[Advice, ...]:
        if before.fits:
            tried = list(self._priced(*self._faster(before)))
            enough = before.items_per_second / 0.995
            faster = [t for t in tried if t.priced.fits and t.priced.items_per_second > enough]
            best = sorted(faster, key=lambda t: t.rank)
        else:
            tried = list(self._priced(*self._smaller(before)))
            saving = [t for t in tried if t.bytes < before.fullest_bytes]
            if not any(t.priced.fits for t in saving):
                saving += self._joined(sorted(saving, key=lambda t: t.bytes))
            saving += self._until_one_fits(before, self._over_more_chips(before))
            if not any(t.priced.fits for t in saving):
                saving += self._until_one_fits(before, self._divided())
            fitting = sorted((t for t in saving if t.priced.fits), key=lambda t: t.rank)
            rest = sorted((t for t in saving if not t.priced.fits), key=lambda t: t.bytes)
            best = fitting + rest
        return tuple(
            Advice(
                one.change.text, before.fullest_bytes - one.bytes,
                before.seconds * (before.items_per_second / one.priced.items_per_second - 1),
                one.priced.fits, one.priced.seconds / before.seconds,
            )
            for one in best[:MOST]
        )  # fmt: skip

    def _priced(self, *groups: Iterable[SettingChange]) -> Iterator[PricedChange]:
        for at, change in ((at, change) for at, group in enumerate(groups) for change in group):
            try:
                yield PricedChange(change, self.price(change.settings), at)
            # forward may need the size of its batch, and raise any error
            except Exception as error:
                log.python.info(
                    "There is no advice about '%s', because it could not be estimated: %s",
                    change.text,
                    error,
                )

    def _steps(self) -> tuple[int, int]:
        """Return the micro-batches of a replica per update, or per call in inference, and their
        samples.
        """
        loops = self.spec.loops
        steps = loops.accumulation if self.spec.training else loops.iterations
        return steps, self.rows // loops.slices

    def _stepping(self, count: int) -> str:
        name = "Training.gradientAccumulation" if self.spec.training else "deviceIterations"
        return f"options.{name}({count})"

    def _faster(self, before: Estimate) -> tuple[list[SettingChange], ...]:
        spec, where, share = self.spec, self.spec.locations, _share(self.spec)
        made = _partials(spec)
        larger = min(_MOST_SHARE, 2 * share)
        if larger > share:
            made.append(_proportion(larger, len(before.chips)))
        # pipelines recompute unless the user disables it
        if spec.training and spec.recompute is not False:
            made.append(_recomputation(False))
        for kind in ("weight", "activation", "optimizer", "accumulator"):
            location = getattr(where, kind)
            if not location.on_chip and (spec.training or kind == "weight"):
                made.append(_resting(kind, True, location.sharded))
        steps, micro = self._steps()
        if steps % 2 == 0:
            text = f"{self._stepping(steps // 2)}  # {2 * micro} samples per micro-batch"
            made.append(SettingChange(text, {"micro_batch": 2 * micro}))
        more = parse(before.system).chips // (len(before.chips) * before.replicas)
        more = math.gcd(1 << more.bit_length() - 1, steps)
        if more > 1 and spec.loops.processes == 1:
            count = more * spec.loops.replicas
            text = f"options.replicationFactor({count}); {self._stepping(steps // more)}"
            made.append(SettingChange(text, {"replicas": count}))
        pipeline = [*self._fewer_bubbles(before), *self._balanced(before)]
        return self._fewer_calls(before), pipeline, made

    def _fewer_calls(self, before: Estimate) -> list[SettingChange]:
        """If the host's calls take more than a third of the time, suggest fewer calls, so that they
        take a tenth.
        """
        share, loops = before.bound["host call"], self.spec.loops
        if share <= 1 / 3:
            return []
        factor = 1 << math.ceil(math.log2(9 * share / (1 - share)))
        count, samples = factor * loops.iterations, factor * self.rows * loops.processes
        text = f"options.deviceIterations({count})  # {samples:,} samples per call"
        return [SettingChange(text, {"device_iterations": count})]

    def _fewer_bubbles(self, before: Estimate) -> list[SettingChange]:
        """If chips wait for one another, suggest more micro-batches between two times that a
        pipeline fills.
        """
        steps, micro = self._steps()
        made = []
        for count in (2 * steps, 4 * steps) if before.bound["bubble"] > 0.1 else ():
            settings = {"device_iterations": count}
            if self.spec.training:
                settings = {"accumulation": count, "micro_batch": micro}
            samples = count * micro * self.spec.loops.input_groups * self.spec.loops.processes
            per = "update" if self.spec.training else "call"
            made.append(
                SettingChange(f"{self._stepping(count)}  # {samples:,} samples per {per}", settings)
            )
        return made

    def _balanced(self, before: Estimate) -> list[SettingChange]:
        """Let the chips have equal shares of the work, where a model has several."""
        chips = len(before.chips)
        if chips == 1:
            return []
        change = _placed(chips)
        return [change._replace(text=f"{change.text}  # in place of your own blocks")]

    def _smaller(self, before: Estimate) -> tuple[list[SettingChange], ...]:
        """Suggest recomputation, storage in streaming memory, and other ways to save memory."""
        spec, where = self.spec, self.spec.locations
        other = _partials(spec)
        if _share(spec) / 2 >= _LEAST:
            other.append(_proportion(_share(spec) / 2, len(before.chips)))
        if not spec.training:
            return [], _moved("weight", where.weight.on_chip, False), other
        recomputation = [] if spec.recompute else [_recomputation(True)]
        does = spec.recompute or (spec.recompute is None and len(before.chips) > 1)
        if does and self.checkpoints() > 1:
            text = "# poptorch.recomputationCheckpoint at every {}. place only, in the model"
            recomputation += [
                SettingChange(text.format(every), {"checkpoints": every}) for every in (2, 4)
            ]
        shared = spec.loops.all_replicas > 1 and not where.optimizer.sharded
        made = _moved("optimizer", where.optimizer.on_chip, shared)
        made += _moved("activation", where.activation.on_chip, False)
        made += _moved("accumulator", where.accumulator.on_chip, False)
        return recomputation, made, other

    def _joined(self, singles: list[PricedChange]) -> list[PricedChange]:
        made: list[PricedChange] = []
        joined = singles[0].change if singles else None
        for single in singles[1:]:
            assert joined is not None
            if single.change.settings.keys() & joined.settings.keys():
                continue
            text = f"{joined.text}; {single.change.text}"
            joined = SettingChange(text, {**joined.settings, **single.change.settings})
            made.append(PricedChange(joined, self.price(joined.settings), MOST))
            if made[-1].priced.fits or len(made) + 1 == MOST_JOINED:
                break
        return made

    def _over_more_chips(self, before: Estimate) -> list[SettingChange]:
        chips, all_chips = len(before.chips), parse(before.system).chips // before.replicas
        counts = (chips << doublings for doublings in range(1, all_chips.bit_length()))
        return [_placed(count) for count in counts if count <= all_chips]

    def _divided(self) -> list[SettingChange]:
        steps, micro = self._steps()
        return [
            SettingChange(
                f"{self._stepping(steps * parts)}  # {micro // parts} samples per micro-batch",
                {"micro_batch": micro // parts},
            )
            for parts in (2, 4, 8)
            if micro % parts == 0
        ]

    def _until_one_fits(
        self, before: Estimate, changes: Iterable[SettingChange]
    ) -> list[PricedChange]:
        """Price changes until one makes the model fit; they come after those that keep its form."""
        made: list[PricedChange] = []
        for tried in self._priced(changes):
            made.append(tried._replace(group=MOST))
            if tried.priced.fits:
                break
        return [each for each in made if each.bytes < before.fullest_bytes]


def _placed(chips: int) -> SettingChange:
    text = f"poptorch.autoplace(model, example, options, num_ipus={chips})"
    return SettingChange(text, {"ipus_per_replica": chips})


def _partials(spec: Spec) -> list[SettingChange]:
    if all(spec.runtime.half_partials):
        return []
    return [SettingChange("options.Precision.setPartialsType(torch.half)", {"half_partials": True})]


def _share(spec: Spec) -> float:
    return min((share for _, share in spec.runtime.memory_proportions), default=_USUAL)


def _proportion(share: float, chips: int) -> SettingChange:
    own = ", ".join(f'"IPU{chip}": {share:g}' for chip in range(chips))
    if chips > 4:
        own = f'f"IPU{{chip}}": {share:g} for chip in range({chips})'
    text = f"options.setAvailableMemoryProportion({{{own}}})"
    return SettingChange(text, {"memory_proportion": share})


def _recomputation(recompute: bool) -> SettingChange:
    text = f'options._Popart.set("autoRecomputation", {recompute:d})'
    return SettingChange(text, {"recomputation": recompute})


def _moved(kind: str, on_chip: bool, shared: bool) -> list[SettingChange]:
    made = [_resting(kind, False, False)] if on_chip else []
    if shared:
        made += [_resting(kind, place, True) for place in ((True, False) if on_chip else (False,))]
    return made


def _resting(kind: str, on_chip: bool, sharded: bool) -> SettingChange:
    calls = ("" if on_chip else _OFF) + (_SHARDED if sharded else "")
    place = ("on chip" if on_chip else "off chip") + (", sharded" if sharded else "")
    setter = f"options.TensorLocations.set{kind.capitalize()}Location"
    return SettingChange(f"{setter}({_SETTINGS}{calls})", {f"{kind}_location": place})
