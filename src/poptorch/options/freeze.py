"""From ``Options`` to the frozen Spec: the door behind which nobody knows ``Options``.

``prepare`` runs when a model is wrapped and gives the executor its own copy; ``freeze`` runs at
compile, checks what may only be checked then, and takes each field of the Spec from the row of the
option that it belongs to.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._base import env, log
from .._base.errors import Error
from .._ir.spec import Spec
from ..enums import MeanReductionStrategy, OutputMode
from .conditions import check, check_inference
from .device_choice import choose_device
from .distributed import data_share
from .options import Options
from .overview import report_idle, settings
from .placement import freeze_locations
from .popart_keys import WANTS_REPORT, validate_popart
from .show import show
from .table import UNSET

STAGED = "staged"
"""The backend that runs stages one by one, and on several processes."""


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
    report_idle(options)
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


def resolved_output(options: Options, training: bool) -> tuple[OutputMode, int]:
    """Return the output mode, never ``Default``, and its period.

    Raises:
        Error: an integer that is no mode was assigned.
    """
    if options.output_mode not in list(OutputMode):
        raise Error("output_mode holds no OutputMode", got=str(options.output_mode))
    mode = OutputMode(options.output_mode)
    if mode == OutputMode.Default:
        mode = OutputMode.Final if training else OutputMode.All
    return mode, options.output_return_period if mode == OutputMode.EveryN else 1


def freeze(options: Options, training: bool) -> Spec:
    """Check the compile-time conditions and translate options, without changing them.

    Accepts both the user's options and those that ``prepare`` returned.

    Raises:
        Error: a condition is broken, or a key or value of ``_Popart`` is not accepted.
    """
    validate_popart(options._Popart.options)
    check(options)
    engine_options(options)
    fields: dict[str, Any] = {"training": training}
    for setting in settings(options):
        for value in setting.row.values:
            stored = value.read(setting.group)
            if value.field and stored is not UNSET:
                _take(fields, value.field, value.frozen(stored), setting.option)
    return assemble(fields | _decided(options, training, fields["placement"].phased))


def _take(fields: dict[str, Any], field: str, value: Any, option: str) -> None:
    """Keep a field's value; a key of ``_Popart`` beats the option of the same field."""
    if value != fields.get(field, value):
        log.engine.warning("%s: forced by the user from %s to %s", option, fields[field], value)
    fields[field] = value


def assemble(fields: Mapping[str, Any]) -> Spec:
    """Return the Spec of fields by their paths: ``loops.replicas``, ``lanes``."""
    parts: dict[str, dict[str, Any]] = {}
    for path, value in fields.items():
        part, _, name = path.rpartition(".")
        parts.setdefault(part, {})[name] = value
    own = parts.pop("")
    spec = Spec(**own)
    for part, values in parts.items():
        spec = dataclasses.replace(
            spec, **{part: dataclasses.replace(getattr(spec, part), **values)}
        )
    return spec


def _decided(options: Options, training: bool, phased: bool) -> dict[str, Any]:
    """Return the fields that several values decide, or the environment too."""
    mode, period = resolved_output(options, training)
    choice = choose_device(options)
    backend = backend_name(options)
    parts = options.Distributed.stage_processes
    if parts > 1 and backend != STAGED:
        raise _not_by_stages(backend)
    anchors = tuple(
        (short, long, mode if inherits else OutputMode(own), period if inherits else own_period)
        for short, (long, inherits, own, own_period) in options.anchored_tensors.items()
    )
    popart = options._Popart.options
    convolutions = popart.get("convolutionOptions", {})
    process, processes = data_share(options.Distributed)
    return {
        "loops.processes": processes,
        "target.process_id": process,
        "target.part": options.Distributed.processId % parts,
        "runtime.half_matmuls": popart.get("partialsTypeMatMuls") == "half",
        "runtime.half_convolutions": convolutions.get("partialsType") == "half",
        "runtime.memory_proportions": tuple(sorted(options.available_memory_proportion.items())),
        "output.mode": mode,
        "output.period": period,
        "loops.accumulation": options.Training.gradient_accumulation if training else 1,
        "target.backend": backend,
        "target.device": choice.device,
        "target.generation": choice.generation,
        "target.tiles": choice.tiles,
        "runtime.report": report_directory(options),
        "runtime.cache_dir": None if choice.device == "model" else cache_directory(options),
        "locations": freeze_locations(options, phased),
        "anchors": anchors,
    }


def backend_name(options: Options) -> str:
    """Return what is asked for: by the options, else POPTORCH_BACKEND, or "auto".

    Where nothing is and the stages of a model run on several processes it is the one for that.
    """
    chosen: str = options._values["backend"]
    name = (env.get("POPTORCH_BACKEND") or chosen) if chosen == "auto" else chosen
    return STAGED if name == "auto" and options.Distributed.stage_processes > 1 else name


def _not_by_stages(backend: str) -> Error:
    return Error(
        "Only the staged backend runs the stages of a model on several processes",
        got=f"Distributed.stageProcesses with the backend {backend!r}",
        fix=(
            f"options.backend({STAGED!r}), or none",
            "options.Distributed.stageProcesses(1): each process runs all stages",
        ),
    )


def cache_directory(options: Options) -> str | None:
    """Return where executables are kept: the options' directory, else POPART_CACHE_DIR, or None."""
    popart = options._Popart.options
    variable = env.get("POPART_CACHE_DIR") or None
    if not popart.get("enableEngineCaching", variable is not None):
        return None
    path: str | None = popart.get("cachePath", variable)
    return path


def report_directory(options: Options) -> str | None:
    """Return where profile reports are written, or None if none are asked for."""
    chosen = engine_options(options)
    if not any(chosen.get(key) == "true" for key in WANTS_REPORT):
        return None
    return str(Path(chosen.get("autoReport.directory", ".")).absolute())


def engine_options(options: Options) -> dict[str, str]:
    """Return the engine options of the environment merged over those set in Python.

    Raises:
        Error: POPLAR_ENGINE_OPTIONS is no JSON object of strings, or other values were set.
    """
    chosen = options._Popart.options.get("engineOptions", {})
    text = env.get("POPLAR_ENGINE_OPTIONS") or "{}"
    try:
        forced = json.loads(text)
    except json.JSONDecodeError as error:
        raise Error("POPLAR_ENGINE_OPTIONS is not valid JSON", got=f"{text}: {error}") from error
    if not isinstance(forced, dict) or not all(isinstance(v, str) for v in forced.values()):
        raise Error("POPLAR_ENGINE_OPTIONS must be a JSON object of strings", got=text)
    if not all(isinstance(value, str) for value in chosen.values()):
        raise Error("The values of engine options must be strings", got=show(chosen))
    return {**chosen, **forced}
