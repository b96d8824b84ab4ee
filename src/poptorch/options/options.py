"""Define ``poptorch.Options``: every setting of a wrapped model (PopTorch user guide,
"Options").
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from .._base import archive, env, log
from .._base.errors import AssertionFailure, InvalidValue
from .._base.keywords import also_called
from .._base.seeding import seed_host
from .._base.source import OURS
from .._ir.backend_names import known
from ..enums import CommGroupType, ConnectionType, OutputMode, SyncPattern
from .container import Container, merge
from .distributed import _DistributedOptions
from .files import apply_calls, apply_json
from .groups import _JitOptions, _PrecisionOptions, _TrainingOptions
from .locations import _TensorLocationOptions
from .option_table import (
    ESTIMATES,
    HINT,
    LOGS,
    MISSING,
    OF_FIELD,
    RESULTS,
    RULES,
    PopartKey,
    Private,
    Value,
    deprecated,
    expect,
    option,
    row,
)
from .overview import GROUPS, changes, idle
from .popart import _PopartOptions
from .progress import CompilationProgressBar
from .strategies import PipelinedExecution, ShardedExecution, _IExecutionStrategy

PROFILING_KEYS = ("autoReport.all", "autoReport.directory", "debug.allowOutOfMemory")


def is_on(enabled: Any) -> bool:
    """Return a bool, also for the 0 or 1 of older scripts."""
    expect("enabled", enabled, (bool, int))
    return bool(enabled)


def _texts(values: Any, name: str) -> list[str]:
    expect(name, values, (list, tuple))
    for part in values:
        expect(name, part, str)
    return list(values)


def _reaction(reaction: str) -> str:
    if reaction not in env.REACTIONS:
        raise InvalidValue(
            "Unknown argument of checkAgainstEager",
            got=repr(reaction),
            fix=f"use one of {', '.join(map(repr, env.REACTIONS))}",
        )
    return reaction


def _check_period(period: object) -> None:
    if not isinstance(period, int) or period < 1:
        raise AssertionFailure(
            "OutputMode.EveryN needs a positive output_return_period",
            got=repr(period),
            fix="for example outputMode(OutputMode.EveryN, 2)",
        )


def grouping_problem(replicas: int, size: int, kind: CommGroupType) -> str | None:
    if kind == CommGroupType.All:
        return "The input group type cannot be All"
    if replicas < size:
        return "The input group size cannot be larger than the replication factor"
    if size < 1 or replicas % size:
        return "The input group size must be a factor of the replication factor"
    return None


def _device_index(key: str) -> int:
    if not isinstance(key, str) or not key.startswith("IPU"):
        raise AssertionFailure(
            "Keys of the available memory proportion must start with IPU",
            got=repr(key),
            fix='for example setAvailableMemoryProportion({"IPU0": 0.5})',
        )
    try:
        return int(key.removeprefix("IPU"))
    except ValueError:
        raise InvalidValue(
            "The device index after IPU must be an integer",
            got=repr(key),
            fix='for example setAvailableMemoryProportion({"IPU0": 0.5})',
        ) from None


class Options(Container):
    """The settings of wrapped models and data loaders.

    Call the setters: ``options.deviceIterations(4)``. They return their object, so you can chain
    calls. A wrapper or loader freezes the options that you pass; to change them afterwards, change
    a ``clone()``. A setter raises an ``AssertionFailure`` (an ``AssertionError``) for a value of
    another type than in its signature. ``print`` shows which values were set.

    New options read the environment: rank and size from OpenMPI or torchrun, POPTORCH_CACHE_DIR,
    then POPTORCH_DEFAULT_OPTIONS.

    Raises:
        json.JSONDecodeError: POPTORCH_DEFAULT_OPTIONS is malformed.
        InvalidAttribute: it names an unknown setter (an ``AttributeError``).
    """

    replication_factor: int
    input_group_size: int
    input_cgt: CommGroupType
    broadcast_buffers: bool
    device_iterations: int
    log_dir: str
    max_repeat_logs: int
    auto_round_num_ipus: bool
    anchored_tensors: dict[str, list[Any]]
    output_mode: int
    output_return_period: int
    connection_type: int
    sync_pattern: int
    available_memory_proportion: dict[int, float]
    ipu_id: int
    ipu_version: int
    model_name: str
    random_seed: int
    use_model: bool
    lane_memory: int
    _execution_strategy: _IExecutionStrategy
    _relax_optimizer_checks: bool
    _show_compilation_progress_bar: bool
    _module_namescope_enabled: bool
    _source_location_excludes: list[str]
    _renamed = {
        "anchor_mode": "output_mode",
        "anchor_return_period": "output_return_period",
        "anchorMode": "outputMode",
        "defaultAnchorMode": "defaultOutputMode",
        "GraphProcessing": "Precision",
        "Popart": "_Popart",
    }

    def __init__(self) -> None:
        self._popart = _PopartOptions()
        self._training = _TrainingOptions(self._popart)
        self._precision = _PrecisionOptions(self._popart)
        self._distributed = _DistributedOptions()
        self._tensor_locations = _TensorLocationOptions()
        self._jit = _JitOptions()
        self._progress_bar = CompilationProgressBar()
        super().__init__()
        cache = env.get("POPTORCH_CACHE_DIR")
        if cache:
            log.python.info("From POPTORCH_CACHE_DIR environment variable: caching in %s", cache)
            self.enableExecutableCaching(cache)
        settings = env.get("POPTORCH_DEFAULT_OPTIONS")
        if settings != "{}":
            log.python.info("From POPTORCH_DEFAULT_OPTIONS environment variable: %s", settings)
            try:
                self.from_json(settings)
            except Exception as error:
                error.add_note(f"in POPTORCH_DEFAULT_OPTIONS: {settings}")
                raise

    @property
    def Training(self) -> _TrainingOptions:
        """Gradient accumulation and reduction."""
        return self._training

    @property
    def Precision(self) -> _PrecisionOptions:
        """Number formats, rounding and floating-point exceptions."""
        return self._precision

    @property
    def Distributed(self) -> _DistributedOptions:
        """The index of this process among those that train together."""
        return self._distributed

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Where tensors are stored, and the tiles for I/O."""
        return self._tensor_locations

    @property
    def Jit(self) -> _JitOptions:
        """The choice of tracer in old releases, which has no effect."""
        return self._jit

    @property
    def _Popart(self) -> _PopartOptions:
        """Settings passed through to the backend compiler."""
        return self._popart

    @option(RESULTS, "replication_factor", 1, decides="loops.replicas", least=1)
    def replicationFactor(self, replication_factor: int) -> Self:
        """Set the number of data-parallel copies in this process."""

    @row(
        RESULTS,
        Value("input_group_size", OF_FIELD, field="loops.input_group_size", least=1),
        Value("input_cgt", OF_FIELD, field="loops.input_group_type"),
    )
    def inputReplicaGrouping(
        self, input_group_size: int, input_group_type: CommGroupType = CommGroupType.Consecutive
    ) -> Self:
        """Give the replicas of a group the same inputs. Call ``replicationFactor`` first.

        Args:
            input_group_size: replicas per group; ignored with ``NoGrouping``.
            input_group_type: ``Consecutive``, ``Orthogonal`` or ``NoGrouping``.

        Raises:
            InvalidValue: the type is ``All``, or the size does not divide the replication factor
                (a ``ValueError``).
        """
        expect("input_group_type", input_group_type, CommGroupType)
        if input_group_type == CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, CommGroupType.Consecutive
        expect("input_group_size", input_group_size, int)
        problem = grouping_problem(self.replication_factor, input_group_size, input_group_type)
        if problem:
            raise InvalidValue(
                problem,
                got=f"a group size of {input_group_size}, with {self.replication_factor} replicas",
                fix=(
                    "use CommGroupType.Consecutive or CommGroupType.Orthogonal, with a group size "
                    "that divides the replication factor",
                    "call replicationFactor before inputReplicaGrouping",
                ),
            )
        return self.set(input_group_size=input_group_size, input_cgt=input_group_type)

    @option(RESULTS, "broadcast_buffers", OF_FIELD, field="broadcast_buffers")
    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Keep buffers equal in all replicas, or let each replica have its own values."""

    @option(RESULTS, "device_iterations", OF_FIELD, field="loops.iterations", least=1)
    def deviceIterations(self, device_iterations: int) -> Self:
        """Set how many optimizer steps one call runs; in inference, how many micro-batches."""

    @option(MISSING, "log_dir", ".", here=True)
    def logDir(self, log_dir: str) -> Self:
        """Set the folder of log files. poptorch writes only one log, and POPTORCH_LOG_DEST sets its
        destination.
        """

    @option(
        LOGS,
        "max_repeat_logs",
        OF_FIELD,
        check=lambda lines: 2**64 - 1 if lines is None else lines,
        least=0,
        field="runtime.max_repeat_logs",
    )
    def maxRepeatLogs(self, max_lines: int | None) -> Self:
        """Limit how often the same log line is repeated; None for no limit."""

    @option(RULES, "auto_round_num_ipus", OF_FIELD, field="target.auto_round")
    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Round the number of devices up to a power of two, and reserve that many."""

    @also_called(deprecated, anchor_mode="output_mode", anchor_return_period="output_return_period")
    @row(RESULTS, Value("anchored_tensors", {}, decides="anchors"))
    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> None:
        """Keep an intermediate tensor of each run, for ``executor.getAnchoredTensor``.

        Args:
            short_name: your name for it; it replaces an earlier anchor of that name.
            long_name: the tensor's name in the program, from ``executor.getTensorNames()``.
            output_mode: None for the model's own output mode.
            output_return_period: a positive number, for ``EveryN`` only.
        """
        self._check_writable("anchored_tensors")
        expect("short_name", short_name, str)
        expect("long_name", long_name, str)
        if output_mode is not None:
            expect("output_mode", output_mode, OutputMode)
        if output_mode == OutputMode.EveryN:
            _check_period(output_return_period)
        else:
            output_return_period = 1
        entry = [long_name, output_mode is None, output_mode, output_return_period]
        self.anchored_tensors[short_name] = entry

    @also_called(anchor_mode="output_mode", anchor_return_period="output_return_period")
    @row(
        RESULTS,
        Value("output_mode", int(OutputMode.Default), kind=OutputMode, decides="output.mode"),
        Value("output_return_period", 1, decides="output.period"),
    )
    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Choose which results a call returns. The default is the last one in training, and all in
        inference.

        Args:
            output_mode: ``Final``, ``EveryN``, ``All``, ``Sum`` or ``Default``.
            output_return_period: for ``EveryN`` only: return one result per this number of
                iterations. It must divide ``deviceIterations``; compiling checks this.
        """
        expect("output_mode", output_mode, OutputMode)
        if output_mode == OutputMode.EveryN:
            _check_period(output_return_period)
        elif output_return_period is not None:
            log.python.info(
                "The output return period %s is ignored: OutputMode.%s has none",
                output_return_period,
                output_mode.name,
            )
        period = 1 if output_return_period is None else output_return_period
        return self.set(output_mode=int(output_mode), output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Return whether the output mode is still ``OutputMode.Default``."""
        return self.output_mode == OutputMode.Default

    @option(
        RULES,
        "connection_type",
        int(ConnectionType.Always),
        kind=ConnectionType,
        field="runtime.connection",
        frozen=ConnectionType,
    )
    def connectionType(self, connection_type: ConnectionType) -> Self:
        """Choose when to acquire the device: before compiling, before running, or never."""

    @option(HINT, "sync_pattern", int(SyncPattern.Full), kind=SyncPattern)
    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Choose how chips and host synchronise."""

    @option(
        ESTIMATES,
        "available_memory_proportion",
        {},
        kind=dict,
        check=lambda parts: {_device_index(key): part for key, part in parts.items()},
        decides="runtime.memory_proportions",
    )
    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """Set the share of memory for temporary values on each device; replaces earlier settings.

        Args:
            available_memory_proportion: a share of the memory, 0 to 1, for each of the model's
                devices: ``{"IPU0": 0.5}``. Compiling checks the numbers.

        Raises:
            AssertionFailure: a key does not start with "IPU" (an ``AssertionError``).
            InvalidValue: the rest of a key is not an integer (a ``ValueError``).
        """

    @row(RESULTS, Value("random_seed", kind=int, field="target.seed"))
    def randomSeed(self, random_seed: int) -> Self:
        """Seed the random generator of the device, and immediately also torch's on the host.

        A second run with the same seed draws the same numbers. Its loss may still differ in the
        last digits, because interpreted and compiled code round differently.
        ``backend("optimise")`` uses compiled code from the first call on.
        """
        self._check_writable("random_seed")
        expect("random_seed", random_seed, int)
        if not -(1 << 63) <= random_seed < 1 << 64:  # torch's generators have 64 bits
            raise InvalidValue(
                "The random seed is out of range",
                got=repr(random_seed),
                fix="use a number from 0 to 2**64 - 1",
            )
        seed_host(random_seed)
        return self.createOrSet(random_seed=random_seed)

    @option(RULES, "use_model", kind=int, check=bool, decides="target.device")
    def useIpuModel(self, use_model: bool) -> Self:
        """Use the simulated device, which reserves no chips. Overrides POPTORCH_IPU_MODEL."""

    @option(RULES, "ipu_id", field="runtime.ipu_id")
    def useIpuId(self, ipu_id: int) -> Self:
        """Attach to this device. It needs at least as many chips as all replicas use."""

    @row(RULES, Value("ipu_version", decides="target.generation"))
    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Only compile, for one generation of chips; sets ``ConnectionType.Never``.

        Args:
            ipu_version: 1 (Mk1), 2 (Mk2) or 21 (Mk2 with FP8). Compiling checks it.
        """
        expect("ipu_version", ipu_version, int)
        self.createOrSet(ipu_version=ipu_version)
        return self.connectionType(ConnectionType.Never)

    @option(LOGS, "model_name", field="runtime.model_name")
    def modelName(self, name: str) -> Self:
        """Name the model, in printed plans and as the folder of its reports."""

    @option(
        RULES,
        "_execution_strategy",
        PipelinedExecution(),
        store=Private,
        kind=_IExecutionStrategy,
        field="placement",
        frozen=lambda strategy: strategy._frozen(),
    )
    def setExecutionStrategy(self, strategy: _IExecutionStrategy) -> Self:
        """Choose how annotated blocks become stages."""

    @option(HINT, "enableStableNorm", store=PopartKey)
    def enableStableNorm(self, enabled: bool) -> Self:
        """Compute variances of normalisation layers in two passes, which is always done here."""

    @option(
        RESULTS,
        "syntheticDataMode",
        store=PopartKey,
        check=lambda enabled: 2 if is_on(enabled) else 0,
        field="target.synthetic_data",
        frozen=bool,
    )
    def enableSyntheticData(self, enabled: bool | int) -> Self:
        """Skip host input and output, to time the device alone; the outputs are meaningless."""

    @option(
        RESULTS,
        "updatableNamedBuffers",
        store=PopartKey,
        check=lambda buffers: _texts(buffers, "buffers"),
        field="updatable_buffers",
        frozen=tuple,
    )
    def updatableNamedBuffers(self, buffers: Sequence[str]) -> Self:
        """Name the buffers that ``executor.copyNamedBuffersToDevice()`` copies."""

    @option(
        LOGS,
        "instrumentWithHardwareCycleCounter",
        OF_FIELD,
        store=PopartKey,
        check=is_on,
        field="runtime.cycle_count",
    )
    def logCycleCount(self, log_cycle_count: bool) -> Self:
        """Estimate the cycles of a call on IPUs, for ``executor.cycleCount()``."""

    @row(
        LOGS,
        *(
            PopartKey("engineOptions", part=key, here=True, decides="runtime.report")
            for key in PROFILING_KEYS
        ),
    )
    def enableProfiling(self, profile_dir: str | os.PathLike[str] | None = None) -> Self:
        """Write profile reports into a directory.

        They hold estimates for IPUs and what was measured here. This adds three keys to the engine
        options that you set before. POPLAR_ENGINE_OPTIONS has precedence.

        Args:
            profile_dir: the directory; None for the working directory.
        """
        expect("profile_dir", profile_dir, (str, os.PathLike, type(None)))
        directory = (os.fspath(profile_dir) if profile_dir is not None else "") or "."
        chosen = dict(zip(PROFILING_KEYS, ("true", directory, "true"), strict=True))
        before = self._popart.options.get("engineOptions", {})
        expect("engineOptions", before, dict)
        self._popart.setEngineOptions({**before, **chosen})
        text = env.get("POPLAR_ENGINE_OPTIONS")
        for key in PROFILING_KEYS:
            if key in text:
                log.python.warning(
                    "The profiling setting %s is overridden by POPLAR_ENGINE_OPTIONS", key
                )
        return self

    @option(
        LOGS,
        "_show_compilation_progress_bar",
        OF_FIELD,
        store=Private,
        field="runtime.shows_progress",
    )
    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Show a progress bar while compiling, and messages about compilation in the background.

        ``executor.compilationTime()`` needs this option.
        """

    @row(LOGS, Private("_module_namescope_enabled", OF_FIELD, field="module_scopes"))
    def disableModuleNamescope(self) -> Self:
        """Name operators without the path of their module, ``Op`` instead of ``layer/Op``."""
        self._module_namescope_enabled = False
        return self

    @option(
        LOGS,
        "_source_location_excludes",
        [OURS, "site-packages/torch", "site-packages/poptorch"],
        store=Private,
        check=lambda excludes: _texts(excludes, "excludes"),
        field="runtime.source_excludes",
        frozen=tuple,
        here=True,
    )
    def sourceLocationExcludes(self, excludes: Sequence[str]) -> Self:
        """Set parts of paths. Errors never name lines of files whose paths contain one of them.

        Files of this library, torch and Python are always excluded.
        """

    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Add path fragments to ``sourceLocationExcludes``."""
        return self.sourceLocationExcludes([*self._source_location_excludes, *excludes])

    @option(LOGS, "_relax_optimizer_checks", False, store=Private, reader="executor")
    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Log unknown optimizer attributes at DEBUG instead of WARNING."""

    @row(
        LOGS,
        PopartKey("cachePath", decides="runtime.cache_dir", here=True),
        PopartKey("enableEngineCaching", decides="runtime.cache_dir", here=True),
    )
    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Self:
        """Keep compiled programs in a directory and reuse them; None disables the cache."""
        if path is None:
            self._popart.set("enableEngineCaching", False)
            return self
        expect("path", path, (str, os.PathLike))
        self._popart.set("cachePath", os.fspath(path)).set("enableEngineCaching", True)
        return self

    @option(RESULTS, "backend", "auto", kind=str, check=known, decides="target.backend")
    def backend(self, name: str) -> Self:
        """Choose the backend that runs programs; overrides POPTORCH_BACKEND.

        Args:
            name: ``"optimise"`` compiles first: the first call already runs compiled code.
                ``"reference"`` always interprets operators one by one. ``"auto"`` follows
                POPTORCH_BACKEND. If that is not set, the interpreter runs the first calls, and
                compiled code takes over when it is ready. In inference, ONNX Runtime then takes
                over if it is installed and faster; ``"optimise"`` keeps compiled code.
                ``"onnxruntime"``, an extra, always evaluates models with ONNX Runtime. Other
                packages can register more backends.

        Raises:
            poptorch.Error: there is no such backend.
        """

    @option(RULES, "check_against_eager", "warn", check=_reaction, decides="runtime.check")
    def checkAgainstEager(self, reaction: str) -> Self:
        """Choose what happens if a compiled program disagrees with eager PyTorch.

        When a model is compiled for new inputs, it also runs once in eager PyTorch, on the first
        micro-batch. Outputs, loss, gradients and new values of buffers are compared with those of
        the program. Micro-batches that run side by side are compared with the same micro-batches
        one after another. The tolerance follows from rounding. ``forward`` runs once more for this;
        its changes to the model, to attributes and to random states are undone. An addition to
        PopTorch.

        Args:
            reaction: ``"warn"``, the default, shows one warning that names the first layer that
                differs; the environment variable POPTORCH_CHECK_AGAINST_EAGER may replace it.
                ``"error"`` raises a ``poptorch.Error`` instead. ``"off"`` compares nothing.

        Raises:
            InvalidValue: another word (a ``ValueError``).
        """

    @option(RESULTS, "lanes", OF_FIELD, least=0, field="lanes")
    def lanes(self, count: int) -> Self:
        """Fix how many micro-batches of a call run side by side; 0 lets the library choose.

        Args:
            count: 1 runs one micro-batch after another. A larger number is rounded down until it
                divides the accumulation steps (in inference, the iterations) times the replicas. By
                default, the library runs micro-batches with 64 rows together, and more if their
                intermediate values fit the caches, within ``laneMemory``. In training it chooses
                fewer if their memory exceeds 96 MiB and the last doubling would gain less than
                10 %.
        """

    @option(RESULTS, "lane_memory", OF_FIELD, least=0, field="lane_memory")
    def laneMemory(self, lane_memory: int) -> Self:
        """Limit the bytes of intermediate values of micro-batches that run side by side. 0 means 1
        GiB, or less if the free memory is below 4 GiB.
        """

    @option(RULES, "programs", OF_FIELD, least=0, field="runtime.programs")
    def programs(self, count: int) -> Self:
        """Set the largest number of compiled programs, one for each combination of input shapes and
        types. The default 0 allows inputs that differ only in sizes.

        With 0, inputs that do not match those of the first call raise an error, with two
        exceptions. A batch with fewer rows is divided into micro-batches of the usual size, and the
        last micro-batch may be smaller. If inputs differ only in sizes, one more program is
        compiled that accepts all sizes of the dimensions that changed. You get one warning when
        this happens, and an error with the reason if one program cannot serve all sizes.

        With 1, as in PopTorch, every other shape raises an error. With more than 1, another batch
        size, length or set of arguments gets another program. If only sizes differ, this program
        accepts all sizes of the dimensions that changed; ``executor.plan()`` says so, or gives the
        reason why each size needs its own program. A batch that does not divide into micro-batches
        is treated as with 0.

        All programs share weights, optimizer state and random numbers. Programs for ``train()``
        and for ``eval()`` are counted separately.
        """

    def clone(self) -> Self:
        """Return a deep copy that is not frozen."""
        return copy.deepcopy(self)

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Apply the option calls of a file, one per line: ``deviceIterations(4)``.

        Blank lines and comments are skipped. Later lines and later files win. The file is parsed,
        never executed.

        Raises:
            ConfigFileError: a line is not an option call. No line is applied.
            AttributeError, AssertionError, ValueError: there is no such setter, or it refuses the
                value. A note names the line; the lines before it have been applied.
            FileNotFoundError: there is no such file.
        """
        apply_calls(self, archive.read_text(filepath), Path(filepath).name)
        return self

    def from_json(self, string: str) -> Self:
        """Apply a JSON object of ``{"dotted.setter": argument or [arguments]}``.

        A string ``"Enum.Member"`` that is the only argument becomes that member.

        Raises:
            json.JSONDecodeError: the string is not valid JSON (a ``ValueError``).
            InvalidAttribute: an unknown setter (an ``AttributeError``).
        """
        expect("string", string, str)
        apply_json(self, string)
        return self

    def withoutEffect(self) -> list[str]:
        """Return the options that you changed and that have no effect here, sorted.

        The log names them when a model is wrapped. ``poptorch options`` explains each. An addition
        to PopTorch.
        """
        return [setting.option for setting in idle(self)]

    def toDict(self) -> dict[str, Any]:
        """Return one flat dictionary of every setting, for the backend.

        Raises:
            AssertionFailure: the output mode is still ``Default``, or two groups hold the same
                key (an ``AssertionError``).
        """
        if self.defaultOutputMode():
            raise AssertionFailure(
                "An output mode must be picked before using toDict",
                fix="call outputMode(...), or read the options of a wrapped model",
            )
        result = self._execution_strategy._backend_options()
        merge(result, self._popart.options)
        self.update(result)
        for group in (self._training, self._distributed, self._tensor_locations):
            group.update(result)
        if self._show_compilation_progress_bar:
            merge(result, {"compilation_progress_bar_fn": self._progress_bar})
        return result

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show in a notebook which values were set, under the names of the setters."""
        printer.text(changes(self))

    @also_called(enable_pipelining="enabled")
    def enablePipelining(self, enabled: bool) -> Self:
        """Choose pipelined or sharded execution. Deprecated: ``setExecutionStrategy``."""
        deprecated("enablePipelining", "setExecutionStrategy")
        return self.setExecutionStrategy(
            PipelinedExecution() if is_on(enabled) else ShardedExecution()
        )

    @also_called(profile="enabled")
    def profile(self, enabled: bool) -> Self:
        """Switch profiling on. Deprecated: ``enableProfiling``."""
        deprecated("profile", "enableProfiling")
        return self.enableProfiling() if is_on(enabled) else self

    def _changed(self) -> dict[str, Any]:
        groups = {name: getattr(self, name) for name in sorted((*GROUPS, "_Popart"))}
        return super()._changed() | {n: group for n, group in groups.items() if group._changed()}

    def _candidates(self) -> list[str]:
        of_groups = [f"{name}.{each}" for name in GROUPS for each in dir(getattr(self, name))]
        return [f"options.{each}" for each in (*super()._candidates(), *of_groups)]
