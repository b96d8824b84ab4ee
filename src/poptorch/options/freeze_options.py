"""Check options against each other, choose the device, and translate ``Options`` into the immutable
``Spec``. No package below this one uses ``Options``.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._base import env, log
from .._base.errors import Error
from .._ir.spec import Spec
from ..enums import ConnectionType, MeanReductionStrategy, OutputMode
from .distributed import data_share, replicas
from .locations import freeze_locations
from .option_table import UNSET, show
from .options import Options, grouping_problem
from .overview import report_idle, settings
from .popart import WANTS_REPORT, validate_popart
from .strategies import PipelinedExecution

STAGED = "staged"  # the backend that runs stages one by one, in one process or several
MODEL_VERSIONS = {"ipu1": 1, "ipu2": 2, "ipu21": 21}
_ANCHOR_MODES = {OutputMode.Final: "FINAL/1", OutputMode.All: "ALL/1", OutputMode.Sum: "Sum/1"}
_ENGINE_EXAMPLE = (
    """for example: export POPLAR_ENGINE_OPTIONS='{"debug.allowOutOfMemory": "true"}'"""
)
_EACH_RUNS_ALL = "let each process run all stages: options.Distributed.stageProcesses(1)"


def prepare(options: Options, training: bool) -> Options:
    """Return a frozen copy of the options for the executor, in which the output mode is
    resolved.
    """
    accumulation = options.Training.gradient_accumulation
    if not training and accumulation != 1:
        advice = "; use Options.deviceIterations to process several batches in a pipeline"
        pipelined = type(options._execution_strategy) is PipelinedExecution
        raise Error(
            "You must set gradientAccumulation to 1 for inference",
            got=f"Training.gradientAccumulation({accumulation})",
            fix=(
                "use a copy of the options: "
                f"options.clone().Training.gradientAccumulation(1){advice if pipelined else ''}"
            ),
        )
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
    own._freeze(False)
    own.Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
    own._freeze()


def resolved_output(options: Options, training: bool) -> tuple[OutputMode, int]:
    if options.output_mode not in list(OutputMode):
        raise Error(
            "output_mode must be a member of OutputMode",
            got=str(options.output_mode),
            fix="for example options.outputMode(poptorch.OutputMode.All)",
        )
    mode = OutputMode(options.output_mode)
    if mode == OutputMode.Default:
        mode = OutputMode.Final if training else OutputMode.All
    return mode, options.output_return_period if mode == OutputMode.EveryN else 1


def freeze(options: Options, training: bool) -> Spec:
    """Check the conditions of compiling, and translate options, either the user's or those from
    ``prepare``.
    """
    validate_popart(options._Popart.options)
    fields: dict[str, Any] = {"training": training}
    for option, group, row in settings(options):
        for value in row.values:
            stored, kind = value.read(group), value.kind
            if stored is UNSET:
                continue
            value.refuse_too_small(option, stored)
            # An assignment to an attribute accepts any integer.
            if kind is not None and issubclass(kind, enum.Enum) and stored not in list(kind):
                raise Error(
                    f"{value.name} must be a member of {kind.__name__}",
                    got=str(stored),
                    fix=f"use one of {', '.join(map(str, kind))}",
                )
            if not value.field:
                continue
            made, before = value.frozen(stored), fields.get(value.field, UNSET)
            # a key of ``_Popart`` has precedence over the option for the same field
            if before not in (UNSET, made):
                log.engine.warning("%s: forced by the user from %s to %s", option, before, made)
            fields[value.field] = made
    check(options)
    return assemble(fields | _decided(options, training, fields["placement"].phased))


def assemble(fields: Mapping[str, Any]) -> Spec:
    """Return the Spec with the given fields, by path: ``loops.replicas``, ``lanes``."""
    parts: dict[str, dict[str, Any]] = {}
    for path, value in fields.items():
        part, _, name = path.rpartition(".")
        parts.setdefault(part, {})[name] = value
    spec = Spec(**parts.pop(""))
    made = {name: dataclasses.replace(getattr(spec, name), **v) for name, v in parts.items()}
    return dataclasses.replace(spec, **made)


def _decided(options: Options, training: bool, phased: bool) -> dict[str, Any]:
    mode, period = resolved_output(options, training)
    choice = choose_device(options)
    backend = backend_name(options)
    parts = options.Distributed.stage_processes
    if parts > 1 and backend != STAGED:
        raise Error(
            "Only the staged backend runs the stages of a model on several processes",
            got=f"Distributed.stageProcesses with the backend {backend!r}",
            fix=(f"use options.backend({STAGED!r}), or do not choose a backend", _EACH_RUNS_ALL),
        )
    anchors = tuple(
        (short, long, mode if inherits else OutputMode(own), period if inherits else own_period)
        for short, (long, inherits, own, own_period) in options.anchored_tensors.items()
    )
    popart = options._Popart.options
    convolutions = popart.get("convolutionOptions", {})
    process, processes = data_share(options.Distributed)
    engine = engine_options(options)
    wants_report = any(engine.get(key) == "true" for key in WANTS_REPORT)
    folder = str(Path(engine.get("autoReport.directory", ".")).absolute())
    return {
        "loops.processes": processes,
        "loops.replicas": replicas(options),
        "target.process_id": process,
        "target.part": options.Distributed.processId % parts,
        "runtime.half_matmuls": popart.get("partialsTypeMatMuls") == "half",
        "runtime.half_convolutions": convolutions.get("partialsType") == "half",
        "runtime.memory_proportions": tuple(sorted(options.available_memory_proportion.items())),
        "output.mode": mode,
        "output.period": period,
        "loops.accumulation": options.Training.gradient_accumulation if training else 1,
        "target.backend": backend,
        "runtime.check": reaction(options),
        "target.device": choice.device,
        "target.generation": choice.generation,
        "target.tiles": choice.tiles,
        "runtime.report": folder if wants_report else None,
        "runtime.cache_dir": None if choice.device == "model" else cache_directory(options),
        "locations": freeze_locations(options, phased),
        "anchors": anchors,
    }


def reaction(options: Options) -> str:
    """Return what happens if a program disagrees with eager PyTorch."""
    chosen: str = options._values["check_against_eager"]
    return (env.get("POPTORCH_CHECK_AGAINST_EAGER") or chosen) if chosen == "warn" else chosen


def backend_name(options: Options) -> str:
    chosen: str = options._values["backend"]
    name = (env.get("POPTORCH_BACKEND") or chosen) if chosen == "auto" else chosen
    return STAGED if name == "auto" and options.Distributed.stage_processes > 1 else name


def cache_directory(options: Options) -> str | None:
    popart = options._Popart.options
    path: str | None = env.get("POPART_CACHE_DIR") or None
    enabled = popart.get("enableEngineCaching", path is not None)
    return popart.get("cachePath", path) if enabled else None


def engine_options(options: Options) -> dict[str, str]:
    chosen = options._Popart.options.get("engineOptions", {})
    text = env.get("POPLAR_ENGINE_OPTIONS") or "{}"
    try:
        forced = json.loads(text)
    except json.JSONDecodeError as error:
        raise Error(
            "POPLAR_ENGINE_OPTIONS is not valid JSON",
            got=f"{text}: {error}",
            fix=_ENGINE_EXAMPLE,
        ) from error
    if not isinstance(forced, dict) or not all(isinstance(v, str) for v in forced.values()):
        raise Error(
            "POPLAR_ENGINE_OPTIONS must be a JSON object of strings",
            got=text,
            fix=_ENGINE_EXAMPLE,
        )
    if not all(isinstance(value, str) for value in chosen.values()):
        raise Error(
            "The values of engine options must be strings",
            got=show(chosen),
            fix='write strings, also for bools: {"debug.allowOutOfMemory": "true"}',
        )
    return {**chosen, **forced}


# Conditions that setters do not check.


def check(options: Options) -> None:
    if not 0 <= options.Distributed.processId < options.Distributed.numProcesses:
        raise Error(
            "The process id must be smaller than the number of processes",
            got=f"process {options.Distributed.processId} of {options.Distributed.numProcesses}",
            fix=("pass the id first and then the count: Distributed.configureProcessId(id, count)"),
        )
    if options.Distributed.numProcesses % options.Distributed.stage_processes:
        raise Error(
            "The number of processes must be a multiple of options.Distributed.stageProcesses",
            got=f"Distributed.stageProcesses({options.Distributed.stage_processes}) in a job of "
            f"{options.Distributed.numProcesses} processes",
            fix=(
                (
                    f"start a multiple of {options.Distributed.stage_processes} processes with "
                    "poprun --num-instances, or torchrun --nproc-per-node"
                ),
                f"or {_EACH_RUNS_ALL}",
            ),
        )
    popart = options._Popart.options
    convolutions = popart.get("convolutionOptions", {})
    for name in (popart.get("partialsTypeMatMuls"), convolutions.get("partialsType")):
        if name not in (None, "float", "half"):
            raise Error(
                "The partials type must be float or half",
                got=repr(name),
                fix="call options.Precision.setPartialsType(torch.float) or (torch.half)",
            )
    for device, part in options.available_memory_proportion.items():
        if not isinstance(part, (int, float)) or not 0 <= part <= 1:
            raise Error(
                "Available memory proportions must be numbers from 0 to 1",
                got=f"IPU{device}: {part!r}",
                fix='for example setAvailableMemoryProportion({"IPU0": 0.5})',
            )
    problem = grouping_problem(
        options.replication_factor, options.input_group_size, options.input_cgt
    )
    if problem:
        raise Error(
            problem,
            got=(
                f"a group size of {options.input_group_size}, with {options.replication_factor} "
                "replicas"
            ),
            fix="call inputReplicaGrouping again after changing the replication factor",
        )
    check_return_period("outputMode", options.output_mode, options.output_return_period, options)
    for name, (_, _, mode, period) in options.anchored_tensors.items():
        check_return_period(f"anchorTensor({name!r})", mode, period, options)


def check_return_period(setter: str, mode: Any, period: int, options: Options) -> None:
    iterations = options.device_iterations
    if mode == OutputMode.EveryN and (period < 1 or period > iterations or iterations % period):
        raise Error(
            f"The output return period of {setter} must divide deviceIterations",
            got=f"a period of {period}, with {iterations} device iterations",
            fix=f"pass a period that divides {iterations}",
        )


# The kind of device that runs a model, from the options or, if they do not say, the environment.


class DeviceChoice(NamedTuple):
    device: str  # ``"ipu"``, ``"model"`` or ``"offline"``
    generation: int | None = None  # 1, 2 or 21; None for the generation of the system
    tiles: int | None = None  # per chip; None for the default of the generation
    reason: str | None = None  # for the log: ``From ...: Ipu model: Enabled``


def choose_device(options: Options) -> DeviceChoice:
    model = _choose_model(options)
    if options.connection_type != ConnectionType.Never:
        return model
    if model.device == "model":
        raise Error(
            "Offline compilation is not supported for the IPU model",
            got=model.reason,
            fix=("remove useOfflineIpuTarget or ConnectionType.Never, or call useIpuModel(False)"),
        )
    if options.exists("ipu_id"):
        raise Error(
            "An offline target cannot be combined with useIpuId",
            got=f"useIpuId({options.ipu_id})",
            fix=(
                "remove the call of useIpuId",
                "or remove useOfflineIpuTarget or ConnectionType.Never",
            ),
        )
    generation = options.ipu_version if options.exists("ipu_version") else None
    if generation is not None and generation not in MODEL_VERSIONS.values():
        raise Error(
            "Invalid offline IPU version",
            got=repr(generation),
            fix="pass 1, 2 or 21 to useOfflineIpuTarget",
        )
    return DeviceChoice("offline", generation)


def _choose_model(options: Options) -> DeviceChoice:
    variable: str | None = None
    if options.exists("use_model"):
        enabled, decided = options.use_model, "the user configuration"
    else:
        variable, enabled = model_from_environment()
        decided = f"{variable} environment variable" if variable else ""
    reason = f"From {decided}: Ipu model: {'Enabled' if enabled else 'Disabled'}"
    if not enabled:
        return DeviceChoice("ipu", reason=reason if decided else None)
    tiles = 4 if variable == "POPTORCH_SMALL_IPU_MODEL" else None
    version = env.get("POPTORCH_IPU_MODEL_VERSION")
    if version not in MODEL_VERSIONS:
        raise Error(
            "Invalid IPU model version",
            got=f"POPTORCH_IPU_MODEL_VERSION={version}",
            fix=f"use one of {', '.join(MODEL_VERSIONS)}",
        )
    return DeviceChoice("model", MODEL_VERSIONS[version], tiles, reason)


def model_from_environment() -> tuple[str | None, bool]:
    """Return the variable that decides whether the device is simulated, if any, and its value."""
    full, small = env.get("POPTORCH_IPU_MODEL"), env.get("POPTORCH_SMALL_IPU_MODEL")
    if full or (full is not None and not small):
        return "POPTORCH_IPU_MODEL", full
    if small is not None:
        return "POPTORCH_SMALL_IPU_MODEL", small
    return None, False


# DEBUG log lines in which users look up their settings (PopTorch user guide, "Options").


def log_options(options: Options) -> None:
    choice = choose_device(options)
    if choice.reason:
        log.python.info(choice.reason)
    if choice.device == "model" and cache_directory(options) is not None:
        log.python.warning("Executable caching does not work with the IPU model, and is disabled")
    if options._values["backend"] == "auto" and env.get("POPTORCH_BACKEND"):
        log.python.info(
            "From POPTORCH_BACKEND environment variable: %s", env.get("POPTORCH_BACKEND")
        )
    values = options.toDict()
    values.pop("compilation_progress_bar_fn", None)
    for name, value in values.items():
        for line in _lines(name, value):
            log.engine.debug("poptorch.Options %s", line)


def _lines(name: str, value: Any) -> Iterator[str]:
    if name == "anchored_tensors":
        for short, (long, _, mode, period) in value.items():
            yield f"set {name}[{short}] to {long} {_ANCHOR_MODES.get(mode, f'EVERYN/{period}')}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"set {name}[{key}] to {_text(item)}"
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in sorted(value, key=show) if isinstance(value, (set, frozenset)) else value:
            yield f"added {_text(item)} to {name}"
    else:
        yield f"set {name} to value {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(int(value))
    return value if isinstance(value, str) else show(value)
