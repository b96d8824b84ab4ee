"""A wrapped model priced with other settings; what does not depend on them is found out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from .. import _compile, _session
from .._base.errors import Error
from .._ipu_model.estimate import Estimate
from .._ipu_model.links import POD
from .._systems import System, parse
from ..options import Options, TensorLocationSettings
from ..options.freeze import freeze

LOCATIONS = {
    "on chip": (True, False),
    "off chip": (False, False),
    "on chip, sharded": (True, True),
    "off chip, sharded": (False, True),
}


def _located(setter: str) -> Callable[[Options, Any], object]:
    def change(options: Options, where: str) -> object:
        on_chip, sharded = LOCATIONS[where]
        settings = TensorLocationSettings().useOnChipStorage(on_chip)
        settings.useReplicatedTensorSharding(sharded)
        return getattr(options.TensorLocations, setter)(settings)

    return change


def _recomputing(options: Options, recompute: bool) -> object:
    return options._Popart.set("autoRecomputation", int(recompute))


def _partials(options: Options, half: bool) -> object:
    return options.Precision.setPartialsType(torch.float16 if half else torch.float32)


def _proportion(options: Options, share: float) -> object:
    return options.setAvailableMemoryProportion({f"IPU{chip}": share for chip in range(POD)})


CHANGES: Mapping[str, Callable[[Options, Any], object]] = {
    "replicas": Options.replicationFactor,
    "recomputation": _recomputing,
    "half_partials": _partials,
    "memory_proportion": _proportion,
    "activation_location": _located("setActivationLocation"),
    "weight_location": _located("setWeightLocation"),
    "optimizer_location": _located("setOptimizerLocation"),
    "accumulator_location": _located("setAccumulatorLocation"),
}
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SETTINGS = (
    "micro_batch", "accumulation", *CHANGES, "checkpoints", "precision", "ipus_per_replica", "chip",
)  # fmt: skip


def session_of(executor: Any, name: str) -> _session.Session:
    """Return the session of what was given to a function that prices.

    Args:
        executor: from ``trainingModel`` or ``inferenceModel``.
        name: of the function.

    Raises:
        Error: it is something else.
    """
    session = getattr(executor, "_session", None)
    if not isinstance(session, _session.Session):
        raise Error(
            f"{name} needs a wrapped model", got=type(executor).__name__,
            fix="poptorch.inferenceModel(model), or trainingModel(model, optimizer=...)",
        )  # fmt: skip
    return session


class Repricer:
    """Prices of one wrapped model for one combined batch.

    Args:
        session: of the wrapped model.
        options: its own, which stay as they are.
        args, kwargs: as for a call of it.
        system: the chips.
        captures: of the model for a batch; in the place of the arguments.

    Attributes:
        rows: of the combined batch.
        training: whether gradients are computed.
    """

    def __init__(
        self,
        session: _session.Session,
        options: Options,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        system: System,
        captures: _session.Captures | None = None,
    ) -> None:
        self._options, self._system = options, system
        self._captures = captures or _session.Captures(session, args, kwargs)
        self.rows = self._captures.rows
        self.training = session.optimizer is not None

    @property
    def options(self) -> Options:
        """A copy of the wrapped model's options."""
        return self._options.clone()

    def checkpoints(self) -> int:
        """Return how many checkpoints the model has for recomputation."""
        spec = freeze(self._options, self.training)
        return _compile.checkpoints(self._captures.capture(replace(spec, recompute=False)))

    def price(self, settings: Mapping[str, Any], guesses: bool = False) -> Estimate:
        """Return the estimate for changed settings.

        Args:
            settings: values by the names of ``SETTINGS``; what is not named stays.
            guesses: find out how much each guess decides.

        Raises:
            Error: the samples do not divide, or the system has too few chips.
        """
        options, chips = self._options.clone(), self._system
        micro = self.rows / freeze(options, self.training).loops.slices
        for name, value in settings.items():
            if name in CHANGES:
                CHANGES[name](options, value)
        if settings.keys() & {"micro_batch", "accumulation", "replicas"}:
            share = settings.get("accumulation", settings.get("micro_batch", micro))
            _divide(options, self.rows, share, "accumulation" in settings, self.training)
        if "chip" in settings:
            chips = parse(f"{settings['chip']}:{chips.chips}")
        spec = freeze(options, self.training)
        dtype = PRECISIONS.get(settings.get("precision", ""))
        captured = self._captures.capture(
            spec, dtype, chips.kind, settings.get("ipus_per_replica"),
            settings.get("checkpoints", 1),
        )  # fmt: skip
        priced = _compile.estimate(captured, spec, chips, guesses=guesses)
        _refuse_too_few(priced, chips)
        return priced


def _divide(options: Options, rows: int, share: float, steps_given: bool, training: bool) -> None:
    """Share the rows of a call out over micro-batches.

    Args:
        options: get the steps.
        rows: of the combined batch.
        share: steps if they are given, else samples of a micro-batch.
        steps_given: which of the two.
        training: steps accumulate gradients; in inference they are device iterations.
    """
    loops = freeze(options, training).loops
    at_once = loops.input_groups * (loops.iterations if training else 1)
    if share % 1 or rows % (at_once * share):
        unit = "accumulation steps" if steps_given else "samples per micro-batch"
        per = rows // loops.iterations if training else rows
        raise Error(
            "The samples do not divide",
            got=f"{share:g} {unit} on {loops.replicas} replicas, {per} samples",
            fix=f"values in vary whose product with the replicas divides {per}",
        )
    steps = int(share if steps_given else rows // (at_once * share))
    if training:
        options.Training.gradientAccumulation(steps)
    else:
        options.deviceIterations(steps)


def _refuse_too_few(priced: Estimate, chips: System) -> None:
    """Refuse a system that has fewer chips than the model needs.

    Raises:
        Error: it has.
    """
    needed = len(priced.chips) * priced.replicas
    if needed > chips.chips:
        raise Error(
            "The model needs more IPUs than the system has",
            got=f"{priced.replicas} replicas of {len(priced.chips)} IPUs on {chips.text}",
            fix=f'system="{chips.kind.name}:{1 << (needed - 1).bit_length()}", or fewer replicas',
        )
