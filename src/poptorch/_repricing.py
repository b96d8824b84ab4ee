"""A wrapped model priced with other settings; what does not depend on them is found out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from . import _capture, _compile
from ._base.errors import Error
from ._ipu_model.advice import Adviser
from ._ipu_model.estimate import Estimate
from ._ipu_model.subject import POD
from ._ipu_model.variants import LOCATIONS, PRECISIONS
from ._session.pricing import Captures
from ._systems import parse
from .options import Options, TensorLocationSettings
from .options.freeze import freeze


class Repricer:
    def __init__(self, options: Options, captures: Captures, system: str, training: bool) -> None:
        self._options, self._captures, self._system = options, captures, parse(system)
        self._rows, self._training = captures.rows, training

    def advised(self, priced: Estimate) -> Estimate:
        spec = freeze(self._options, self._training)
        adviser = Adviser(spec, self._rows, self.price, self._checkpoints)
        return replace(priced, advice=adviser.advice(priced))

    def _checkpoints(self) -> int:
        spec = freeze(self._options, self._training)
        captured = self._captures.capture(replace(spec, recompute=False))
        return len(_capture.checkpoints(captured.micro.graph))

    def price(self, settings: Mapping[str, Any], guesses: bool = False) -> Estimate:
        options, chips = self._options.clone(), self._system
        micro = self._rows / freeze(options, self._training).loops.slices
        for name, value in settings.items():
            if name in _CHANGES:
                _CHANGES[name](options, value)
        if settings.keys() & {"micro_batch", "accumulation", "replicas"}:
            share = settings.get("accumulation", settings.get("micro_batch", micro))
            self._divide(options, share, "accumulation" in settings)
        if "chip" in settings:
            chips = parse(f"{settings['chip']}:{chips.chips}")
        spec = freeze(options, self._training)
        dtype = PRECISIONS.get(settings.get("precision", ""))
        captured = self._captures.capture(
            spec, dtype, chips.kind, settings.get("ipus_per_replica"),
            settings.get("checkpoints", 1),
        )  # fmt: skip
        priced = _compile.estimate(captured, spec, chips, guesses)
        needed = len(priced.chips) * priced.replicas
        if needed > chips.chips:
            raise Error(
                "The model needs more IPUs than the system has",
                got=f"{priced.replicas} replicas of {len(priced.chips)} IPUs on {chips.text}",
                fix=f'system="{chips.kind.name}:{1 << (needed - 1).bit_length()}", or fewer '
                "replicas",
            )
        return priced

    def _divide(self, options: Options, share: float, steps_given: bool) -> None:
        rows, loops = self._rows, freeze(options, self._training).loops
        at_once = loops.input_groups * (loops.iterations if self._training else 1)
        if share % 1 or rows % (at_once * share):
            unit = "accumulation steps" if steps_given else "samples per micro-batch"
            per = rows // loops.iterations if self._training else rows
            raise Error(
                "The samples do not divide",
                got=f"{share:g} {unit} on {loops.replicas} replicas, {per} samples",
                fix=f"values in vary whose product with the replicas divides {per}",
            )
        steps = int(share if steps_given else rows // (at_once * share))
        if self._training:
            options.Training.gradientAccumulation(steps)
        else:
            options.deviceIterations(steps)


def _located(setter: str) -> Callable[[Options, Any], object]:
    def change(options: Options, where: str) -> object:
        on_chip, sharded = LOCATIONS[where]
        settings = TensorLocationSettings().useOnChipStorage(on_chip)
        settings.useReplicatedTensorSharding(sharded)
        return getattr(options.TensorLocations, setter)(settings)

    return change


_CHANGES: Mapping[str, Callable[[Options, Any], object]] = {
    "replicas": Options.replicationFactor,
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
