"""What every option does here: one table, read by ``withoutEffect`` and by the printed overview.

Tags: N changes the values or shapes that users see; V is stored, validated and
raises the documented errors; H is a hint to hardware that is not here, kept for the machine model;
L changes logs, progress bars, report files or caching.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .defaults import private_defaults
from .popart import INITIAL
from .popart_keys import BOOL_KEYS, DICT_KEYS, FLOAT_KEYS, INT_KEYS, LIST_KEYS, STR_KEYS
from .show import show

if TYPE_CHECKING:
    from .options import Options


@dataclass(frozen=True)
class Effect:
    """One option.

    Attributes:
        option: the setter as users write it after ``options.``.
        tag: N, V, H or L.
        stored: where its value is kept: ``name``, ``Group.name``, ``_Popart[key]``, or a private
            name of the Options object.
        summary: what it does, in a few words.
    """

    option: str
    tag: str
    stored: str
    summary: str


def _row(line: str) -> Effect:
    option, tag, stored, summary = (part.strip() for part in line.split("|"))
    return Effect(option, tag, stored, summary)


TABLE = tuple(
    map(
        _row,
        """
deviceIterations | N | device_iterations | iterations of the device loop per call
replicationFactor | N | replication_factor | data-parallel copies in this process
inputReplicaGrouping | N | input_group_size | replicas that read the same input
broadcastBuffers | N | broadcast_buffers | replicas share one value of each buffer
outputMode | N | output_mode | which results come back
autoRoundNumIPUs | V | auto_round_num_ipus | reserve a power of two of devices
setExecutionStrategy | V | _execution_strategy | how blocks become stages
setAvailableMemoryProportion | H | available_memory_proportion | temporary memory per device
useIpuModel | V | use_model | simulate the device
useIpuId | V | ipu_id | attach to one device id
connectionType | V | connection_type | when the device is acquired
useOfflineIpuTarget | V | ipu_version | compile only, for a generation
syncPattern | H | sync_pattern | synchronisation of devices and host
backend | N | backend | what runs the programs
lanes | N | lanes | micro-batches that run side by side
laneMemory | N | lane_memory | memory that they may use
randomSeed | N | random_seed | seed of device and host generators
enableStableNorm | H | _Popart[enableStableNorm] | variance of norms in two passes, as always
enableSyntheticData | N | _Popart[syntheticDataMode] | no host input and output
modelName | L | model_name | directory of the profile report
logDir | L | log_dir | where log files go
maxRepeatLogs | L | max_repeat_logs | limit of repeated log lines
logCycleCount | L | _Popart[instrumentWithHardwareCycleCounter] | count cycles
enableProfiling | L | _Popart[engineOptions] | write a profile report
showCompilationProgressBar | L | _show_compilation_progress_bar | progress bar while compiling
disableModuleNamescope | L | _module_namescope_enabled | module paths in operator names
sourceLocationExcludes | L | _source_location_excludes | paths that are not the user's code
relaxOptimizerAttributesChecks | L | _relax_optimizer_checks | unknown optimiser attributes
enableExecutableCaching | L | _Popart[cachePath] | keep and reuse executables
anchorTensor | N | anchored_tensors | intermediate tensors kept for the host
updatableNamedBuffers | N | _Popart[updatableNamedBuffers] | buffers that can be updated
Training.gradientAccumulation | N | Training.gradient_accumulation | micro-batches per step
Training.accumulationAndReplicationReductionType | N \
| Training.accumulation_and_replication_reduction_type | how gradients combine
Training.setMeanAccumulationAndReplicationReductionStrategy | N \
| Training.meanAccumulationAndReplicationReductionStrategy | where a mean divides
Training.setAutomaticLossScaling | N | _Popart[automaticLossScalingSettings.enabled] \
| adapt the loss scale
Training.setConvolutionDithering | H | _Popart[convolutionOptions][enableConvDithering] \
| start tiles of convolutions
Precision.enableFloatingPointExceptions | N | _Popart[enableFloatingPointChecks] \
| fail on invalid floating-point operations
Precision.enableStochasticRounding | N | _Popart[enableStochasticRounding] | random rounding
Precision.setPartialsType | H | _Popart[partialsTypeMatMuls] | type of intermediate sums
Precision.halfFloatCasting | N | Precision.half_float_downcast | type of mixed half and float
Precision.autocastEnabled | N | Precision.autocast_enabled | whether autocast has an effect
Precision.autocastPolicy | N | Precision.autocast_policy | functions that autocast casts for
Precision.narrow64Bit | N | Precision.narrow_64bit | 64-bit results come back as 32-bit
Distributed.configureProcessId | N | Distributed.num_distributed_processes | processes together
TensorLocations.numIOTiles | V | TensorLocations.numIOTiles | tiles kept for I/O
TensorLocations.setActivationLocation | H | TensorLocations.location_activation | where they rest
TensorLocations.setWeightLocation | H | TensorLocations.location_weight | where they rest
TensorLocations.setOptimizerLocation | H | TensorLocations.location_optimizer | where it rests
TensorLocations.setAccumulatorLocation | H | TensorLocations.location_accumulator | where they rest
""".strip().splitlines(),
    )
)
_POPART_TAGS = {
    "accumulationAndReplicationReductionType": "N",
    "enableEngineCaching": "L",
    "groupNormStridedChannelGrouping": "N",
    "logDir": "L",
    "meanAccumulationAndReplicationReductionStrategy": "N",
    "saveInitializersToFile": "V",
}
_ALL_KEYS = BOOL_KEYS | INT_KEYS | FLOAT_KEYS | STR_KEYS | LIST_KEYS | DICT_KEYS


def popart_rows() -> Iterator[Effect]:
    """The keys of ``_Popart`` that no other option sets."""
    covered = {row.stored for row in TABLE}
    for key in sorted(_ALL_KEYS):
        if f"_Popart[{key}]" not in covered:
            tag = _POPART_TAGS.get(key, "H")
            yield Effect(f'_Popart.set("{key}")', tag, f"_Popart[{key}]", "backend compiler")


class _Unset:
    def __repr__(self) -> str:
        return "unset"


_UNSET = _Unset()
_CONVOLUTION_SETTERS = {"enableConvDithering", "partialsType"}


def changed(options: Options, row: Effect) -> bool:
    """Tell whether an option no longer has its default."""
    value, default = _value_and_default(options, row.stored)
    if row.stored == "_Popart[convolutionOptions]" and isinstance(value, dict):
        return not value.keys() <= _CONVOLUTION_SETTERS  # these have rows of their own
    return show(value) != show(default)


def _value_and_default(options: Options, stored: str) -> tuple[Any, Any]:
    group, _, name = stored.partition(".") if not stored.startswith("_") else ("", "", stored)
    values: dict[str, Any]
    if stored.startswith("_Popart["):
        name, _, part = stored.removeprefix("_Popart[").partition("]")
        values, defaults = options._Popart.options, INITIAL
        if part:
            values, name = values.get(name, {}), part.strip("[]")
    elif stored.startswith("_"):
        values, defaults = vars(options), private_defaults()
    else:
        container = getattr(options, group) if name else options
        name = name or group
        values, defaults = container._values, container._declared
    return values.get(name, _UNSET), defaults.get(name, _UNSET)


def without_effect(options: Options) -> list[str]:
    """Sorted setters of the hints that were changed from their defaults."""
    rows = [*TABLE, *popart_rows()]
    return sorted(row.option for row in rows if row.tag == "H" and changed(options, row))


def describe(options: Options, every: bool = False) -> str:
    """Return a text table of options: tag, setter, value, what it does; ``*`` marks changes.

    Args:
        options: whose values to show.
        every: show the keys of ``_Popart`` that were not set, too.
    """
    rows = [*TABLE, *(row for row in popart_rows() if every or changed(options, row))]
    lines = ["N: changes results  V: checked  H: a hint, no effect here  L: logs, files, caching"]
    for row in rows:
        value = show(_value_and_default(options, row.stored)[0])
        mark = "*" if changed(options, row) else " "
        lines.append(f"{mark} {row.tag} {row.option} = {value}  # {row.summary}")
    return "\n".join(lines)
