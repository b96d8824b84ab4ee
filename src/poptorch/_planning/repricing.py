"""Estimate a wrapped model with other settings. Results that do not depend on the settings are
computed once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import _capture
from .._base.errors import Error
from .._cost.links import Link
from .._ipu_model import estimating
from .._ipu_model.advice import Adviser
from .._ipu_model.estimate import Estimate
from .._ipu_model.scaling import scaling
from .._ipu_model.subject import POD
from .._ipu_model.variants import LOCATIONS, PRECISIONS
from .._ipu_systems import parse, system_of
from .._session.reports import Captures
from ..options import Options, TensorLocationSettings
from ..options.freeze_options import freeze


class Repricer:
    def __init__(
        self, options: Options, captures: Captures, system: str | None, training: bool
    ) -> None:
        self._options, self._captures, self._system = options, captures, system_of(system)
        self._rows, self._training = captures.rows, training

    def advised(self, priced: Estimate) -> Estimate:
        spec = freeze(self._options, self._training)
        adviser = Adviser(spec, self._rows, self.price, self._checkpoints)
        return replace(priced, advice=adviser.advice(priced))

    def scaled(
        self, priced: Estimate, processes: Iterable[int], link: Link, took: Sequence[float]
    ) -> Estimate:
        """Return the estimate with a curve over processes; ``took`` contains the seconds of calls
        on this machine, if any.
        """
        spec = freeze(self._options, self._training)
        if spec.loops.processes > 1 or spec.target.parts > 1:
            raise Error(
                "An estimate for several processes must be computed in a single process",
                got=f"process {spec.target.process_id} of {spec.loops.processes}",
                fix="run the script without a launcher, or call options.Distributed.disable()",
            )
        exchanged = {}
        for count in processes:
            options = self._options.clone()
            options.Distributed.configureProcessId(0, count)
            spec = replace(freeze(options, self._training), recompute=False)
            exchanged[count] = estimating.exchanged(self._captures.capture(spec), spec, link)
        computing, source = priced.seconds, f"estimated for {priced.system}"
        if took:
            computing = statistics.median(took)
            source = f"measured here (the median of {len(took)})"
        return replace(priced, scaling=scaling(computing, source, link, exchanged))

    def _checkpoints(self) -> int:
        spec = freeze(self._options, self._training)
        captured = self._captures.capture(spec)
        return len(_capture.checkpoints(captured.micro.graph))

    def price(self, settings: Mapping[str, Any], guesses: bool = False) -> Estimate:
        options, chips, rows = self._options.clone(), self._system, self._rows
        for name, value in settings.items():
            if name in _CHANGES:
                _CHANGES[name](options, value)
        if settings.keys() & {"micro_batch", "accumulation", "replicas", "device_iterations"}:
            rows = self._divide(options, settings)
        if "chip" in settings:
            chips = parse(f"{settings['chip']}:{chips.chips}")
        spec = freeze(options, self._training)
        dtype = PRECISIONS.get(settings.get("precision", ""))
        held = self._rows * spec.loops.slices // rows // spec.loops.input_groups
        captured = self._captures.capture(
            replace(spec, loops=replace(spec.loops, iterations=held, accumulation=1)), dtype,
            chips.kind, settings.get("ipus_per_replica"), settings.get("checkpoints", 1),
        )  # fmt: skip
        priced = estimating.estimate(replace(captured, rows=rows), spec, chips, guesses)
        chips.check_size(priced.replicas, len(priced.chips))
        return priced

    def _divide(self, options: Options, settings: Mapping[str, Any]) -> int:
        """Set the counts, and return the number of samples in a call. Counts that are not given
        follow from the others.
        """
        usual, loops = (freeze(each, self._training).loops for each in (self._options, options))
        micro = settings.get("micro_batch", self._rows / usual.slices)
        at_once, rows = loops.input_groups, self._rows
        if self._training:
            at_once, rows = at_once * loops.iterations, rows // usual.iterations * loops.iterations
        steps = settings.get("accumulation" if self._training else "device_iterations")
        if steps is None:
            steps = rows / (at_once * micro)
        elif "micro_batch" in settings or not self._training:
            rows = int(at_once * steps * micro)
        else:
            micro = rows / (at_once * steps)
        if steps % 1 or micro % 1 or self._rows % (loops.input_groups * micro):
            raise Error(
                "what_if cannot divide the samples of a call by these values",
                got=(
                    f"{steps:g} steps of {micro:g} samples on {loops.replicas} replicas, but "
                    f"the call has {self._rows} samples"
                ),
                fix=f"choose values in vary whose product divides {self._rows}",
            )
        if self._training:
            options.Training.gradientAccumulation(int(steps))
        else:
            options.deviceIterations(int(steps))
        return rows


def _located(setter: str) -> Callable[[Options, Any], object]:
    def change(options: Options, where: str) -> object:
        on_chip, sharded = LOCATIONS[where]
        settings = TensorLocationSettings().useOnChipStorage(on_chip)
        settings.useReplicatedTensorSharding(sharded)
        return getattr(options.TensorLocations, setter)(settings)

    return change


_CHANGES: Mapping[str, Callable[[Options, Any], object]] = {
    "replicas": Options.replicationFactor,
    "device_iterations": Options.deviceIterations,
    "recomputation": lambda options, do: options._Popart.set("autoRecomputation", int(do)),
    "half_partials": lambda options, half: options.Precision.setPartialsType(
        torch.float16 if half else torch.float32
    ),
    "memory_proportion": lambda options, share: options.setAvailableMemoryProportion(
        {f"IPU{chip}": share for chip in range(POD)}
    ),
    "activation_location": _located("setActivationLocation"),
    "weight_location": _located("setWeightLocation"),
    "optimizer_location": _located("setOptimizerLocation"),
    "accumulator_location": _located("setAccumulatorLocation"),
}
