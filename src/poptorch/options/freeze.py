"""From ``Options`` to the frozen Spec: the door behind which nobody knows ``Options``.

``prepare`` runs when a model is wrapped and gives the executor its own copy; ``freeze`` runs at
compile, checks what may only be checked then, and translates.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from .._base import env, log
from .._base.errors import Error
from .._ir.spec import (
    Hint,
    Loops,
    Output,
    Precision,
    Reduction,
    Runtime,
    Spec,
    Target,
)
from ..enums import ConnectionType, MeanReductionStrategy, OutputMode, ReductionType, SyncPattern
from .check import refuse
from .conditions import check, check_inference
from .device_choice import choose_device
from .options import Options
from .placement import freeze_locations, freeze_strategy
from .popart_keys import validate_popart
from .precision import AUTOCAST_RULES
from .show import show

RESOLVED_KEYS = frozenset(
    {
        "accumulationAndReplicationReductionType",
        "automaticLossScalingSettings.enabled",
        "cachePath",
        "enableEngineCaching",
        "enableFloatingPointChecks",
        "enableStableNorm",
        "enableStochasticRounding",
        "engineOptions",
        "groupNormStridedChannelGrouping",
        "instrumentWithHardwareCycleCounter",
        "logDir",
        "meanAccumulationAndReplicationReductionStrategy",
        "updatableNamedBuffers",
    }
)
_PARTIALS = {"float": torch.float32, "half": torch.float16}


def prepare(options: Options, training: bool) -> Options:
    """Freeze the caller's options and return the executor's own frozen copy.

    In the copy the default output mode is resolved (``Final`` for training, ``All`` for
    inference), and anchors without a mode take that mode and its period.

    Raises:
        Error: gradient accumulation other than 1 for inference, or no valid output mode.
    """
    if not training:
        check_inference(options)
    mode, period = resolved_output(options, training)
    options._freeze()
    own = options.clone()
    own.set(output_mode=int(mode))
    for entry in own.anchored_tensors.values():
        if entry[1]:
            entry[2:] = [mode, period if mode == OutputMode.EveryN else 1]
    own._freeze()
    return own


def use_running_mean(own: Options) -> None:
    """Make the executor's own options keep a running mean of gradients.

    Done for optimisers that accumulate in float16 (PopTorch user guide, "Options").
    """
    own._unfreeze()
    own.Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
    own._freeze()


def reopen(options: Options) -> None:
    """Make options that were read from a saved file usable here, in place.

    They are unfrozen; an offline target is forgotten, so that files compiled without a device run
    (PopTorch user guide, "Features").
    """
    options._unfreeze()
    options.deleteIfExists("ipu_version")
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)


def resolved_output(options: Options, training: bool) -> tuple[OutputMode, int]:
    """Return the output mode, never ``Default``, and its period.

    Raises:
        Error: an integer that is no mode was assigned.
    """
    if options.output_mode not in list(OutputMode):
        refuse(Error, "output_mode holds no OutputMode", got=str(options.output_mode))
    mode = OutputMode(options.output_mode)
    if mode == OutputMode.Default:
        mode = OutputMode.Final if training else OutputMode.All
    return mode, options.output_return_period if mode == OutputMode.EveryN else 1


def freeze(options: Options, training: bool) -> Spec:
    """Check the compile-time conditions and translate options, without changing them.

    Accepts both the user's options and those that :func:`prepare` returned.

    Raises:
        Error: a condition is broken, or a key or value of ``_Popart`` is not accepted.
    """
    check(options)
    validate_popart(options._Popart.options)
    popart = options._Popart.options
    mode, period = resolved_output(options, training)
    placement = freeze_strategy(options._execution_strategy)
    target = _target(options)
    return Spec(
        training=training,
        loops=Loops(
            iterations=options.device_iterations,
            accumulation=options.Training.gradient_accumulation if training else 1,
            replicas=options.replication_factor,
            input_group_size=options.input_group_size,
            input_group_type=options.input_cgt,
        ),
        output=Output(mode, period),
        reduction=_reduction(options),
        precision=_precision(options),
        target=target,
        placement=placement,
        lanes=options._values["lanes"],
        lane_memory=options.lane_memory,
        locations=freeze_locations(
            options.TensorLocations,
            phased=placement.phased,
            replicated=options.replication_factor > 1,
        ),
        runtime=_runtime(options, target.device),
        module_scopes=options._module_namescope_enabled,
        broadcast_buffers=options.broadcast_buffers,
        updatable_buffers=tuple(popart.get("updatableNamedBuffers", ())),
        anchors=_anchors(options, mode, period),
        hints=tuple(
            (key, freeze_value(value))
            for key, value in sorted(popart.items())
            if key not in RESOLVED_KEYS
        ),
    )


def _reduction(options: Options) -> Reduction:
    popart, training = options._Popart.options, options.Training
    kind = training.accumulation_and_replication_reduction_type
    strategy = training.meanAccumulationAndReplicationReductionStrategy
    forced = ReductionType(_forced(popart, "accumulationAndReplicationReductionType", kind))
    if forced == ReductionType.NoReduction:
        refuse(Error, "The reduction type must be set to ReductionType.Mean or ReductionType.Sum")
    return Reduction(
        type=forced,
        strategy=MeanReductionStrategy(
            _forced(popart, "meanAccumulationAndReplicationReductionStrategy", strategy)
        ),
        automatic_loss_scaling=bool(popart.get("automaticLossScalingSettings.enabled", False)),
    )


def _forced(popart: dict[str, Any], key: str, chosen: int) -> int:
    """Return the user's explicit backend setting where it overrides the library's choice."""
    value: int = popart.get(key, chosen)
    if value != chosen:
        log.engine.warning("%s forced by the user from %d to %d", key, chosen, value)
    return value


def _precision(options: Options) -> Precision:
    popart = options._Popart.options
    convolution = popart.get("convolutionOptions", {})
    return Precision(
        narrow_64bit=options.Precision.narrow_64bit,
        half_float_downcast=options.Precision.half_float_downcast,
        autocast=options.Precision.autocast_enabled,
        autocast_policy=tuple(
            tuple(options.Precision.autocast_policy[rule])
            for rule in AUTOCAST_RULES
            if options.Precision.autocast_policy
        ),
        floating_point_exceptions=popart.get("enableFloatingPointChecks", False),
        stochastic_rounding=popart.get("enableStochasticRounding", False),
        partials_dtype=_partials(popart.get("partialsTypeMatMuls", "float")),
        conv_partials_dtype=_partials(convolution.get("partialsType", "float")),
        stable_norm=popart.get("enableStableNorm", False),
        strided_group_norm=popart.get("groupNormStridedChannelGrouping", False),
    )


def _partials(name: str) -> torch.dtype:
    if name not in _PARTIALS:
        refuse(Error, "The partials type must be float or half", got=repr(name))
    return _PARTIALS[name]


def _target(options: Options) -> Target:
    choice = choose_device(options)
    backend = options._values["backend"]
    if backend == "auto":
        backend = env.get("POPTORCH_BACKEND") or "auto"
    return Target(
        backend=backend,
        seed=options.random_seed if options.exists("random_seed") else None,
        synthetic_data=options._Popart.options.get("syntheticDataMode", 0) != 0,
        processes=options.Distributed.numProcesses,
        process_id=options.Distributed.processId,
        device=choice.device,
        generation=choice.generation,
        tiles=choice.tiles,
        auto_round=options.auto_round_num_ipus,
        memory_proportions=tuple(sorted(options.available_memory_proportion.items())),
        sync_pattern=SyncPattern(options.sync_pattern),
    )


def _runtime(options: Options, device: str) -> Runtime:
    popart = options._Popart.options
    return Runtime(
        connection=ConnectionType(options.connection_type),
        ipu_id=options.ipu_id if options.exists("ipu_id") else None,
        model_name=options.model_name if options.exists("model_name") else None,
        log_dir=options.log_dir,
        max_repeat_logs=options.max_repeat_logs,
        progress_bar=options._show_compilation_progress_bar,
        cycle_count=popart.get("instrumentWithHardwareCycleCounter", False),
        cache_dir=None if device == "model" else cache_directory(options),
        engine_options=_engine_options(popart.get("engineOptions", {})),
        relaxed_optimizer_checks=options._relax_optimizer_checks,
        source_excludes=tuple(options._source_location_excludes),
    )


def cache_directory(options: Options) -> str | None:
    """Return where executables are kept: the options' directory, else POPART_CACHE_DIR, or None."""
    popart = options._Popart.options
    variable = env.get("POPART_CACHE_DIR") or None
    if not popart.get("enableEngineCaching", variable is not None):
        return None
    path: str | None = popart.get("cachePath", variable)
    return path


def _engine_options(chosen: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Merge POPLAR_ENGINE_OPTIONS over the engine options set in Python."""
    text = env.get("POPLAR_ENGINE_OPTIONS") or "{}"
    try:
        forced = json.loads(text)
    except json.JSONDecodeError as error:
        refuse(Error, "POPLAR_ENGINE_OPTIONS is not valid JSON", got=f"{text}: {error}")
    if not isinstance(forced, dict) or not all(isinstance(v, str) for v in forced.values()):
        refuse(Error, "POPLAR_ENGINE_OPTIONS must be a JSON object of strings", got=text)
    if not all(isinstance(value, str) for value in chosen.values()):
        refuse(Error, "The values of engine options must be strings", got=show(chosen))
    return tuple(sorted({**chosen, **forced}.items()))


def _anchors(
    options: Options, mode: OutputMode, period: int
) -> tuple[tuple[str, str, OutputMode, int], ...]:
    return tuple(
        (short, long, mode if inherits else OutputMode(own), period if inherits else own_period)
        for short, (long, inherits, own, own_period) in options.anchored_tensors.items()
    )


def freeze_value(value: Any) -> Hint:
    """Return a hashable form: dictionaries as sorted pairs, sequences as tuples."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return tuple((str(key), freeze_value(value[key])) for key in sorted(value, key=str))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted((freeze_value(item) for item in value), key=repr))
    if isinstance(value, (list, tuple)):
        return tuple(freeze_value(item) for item in value)
    return show(value)
