"""``poptorch.Options``: every setting of a wrapped model (spec/options.md sections 1 to 4)."""

from __future__ import annotations

import copy
from typing import Any, Self

from .._base import env, log
from .._base.errors import AssertionFailure
from .._base.source import OURS
from ..enums import CommGroupType, ConnectionType, OutputMode, SyncPattern
from .check import refuse
from .distributed import _DistributedOptions
from .jit import _JitOptions
from .legacy import LegacyOptions
from .locations import _TensorLocationOptions
from .popart import _PopartOptions
from .precision import _PrecisionOptions
from .progress import CompilationProgressBar
from .show import show, show_pairs
from .strategies import PipelinedExecution
from .training import _TrainingOptions

GROUPS = ("Distributed", "Jit", "Precision", "TensorLocations", "Training", "_Popart")


class Options(LegacyOptions):
    """Settings of a model wrapper and of a DataLoader.

    Setters return the object that they belong to, so that calls chain. Giving the options to a
    wrapper or a loader freezes them; :meth:`clone` returns a copy that can be changed.

    At construction the environment applies: OpenMPI's rank and size, POPTORCH_CACHE_DIR, then
    POPTORCH_DEFAULT_OPTIONS.

    Raises:
        json.JSONDecodeError: POPTORCH_DEFAULT_OPTIONS is malformed.
        InvalidAttribute: it names an unknown setter (an ``AttributeError``).
    """

    def __init__(self) -> None:
        self._popart = _PopartOptions()
        self._training = _TrainingOptions(self._popart)
        self._precision = _PrecisionOptions(self._popart)
        self._distributed = _DistributedOptions()
        self._tensor_locations = _TensorLocationOptions()
        self._jit = _JitOptions()
        self._execution_strategy = PipelinedExecution()
        self._relax_optimizer_checks = False
        self._show_compilation_progress_bar = True
        self._module_namescope_enabled = True
        self._source_location_excludes = [
            OURS,
            "site-packages/torch",
            "site-packages/poptorch",
        ]
        self._progress_bar = CompilationProgressBar()
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            input_cgt=CommGroupType.Consecutive,
            broadcast_buffers=True,
            device_iterations=1,
            log_dir=".",
            max_repeat_logs=4,
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=int(OutputMode.Default),
            output_return_period=1,
            connection_type=int(ConnectionType.Always),
            sync_pattern=int(SyncPattern.Full),
            available_memory_proportion={},
            backend="auto",
        )
        self._apply_environment()

    def _apply_environment(self) -> None:
        cache = env.get("POPTORCH_CACHE_DIR")
        if cache:
            log.python.info("From POPTORCH_CACHE_DIR environment variable: caching in %s", cache)
            self.enableExecutableCaching(cache)

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
        """The place of this process among those that train together."""
        return self._distributed

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Where tensors rest, and the tiles kept for I/O."""
        return self._tensor_locations

    @property
    def Jit(self) -> _JitOptions:
        """The tracer switch of old releases; without effect."""
        return self._jit

    @property
    def _Popart(self) -> _PopartOptions:
        """Settings passed through to the backend compiler."""
        return self._popart

    def clone(self) -> Self:
        """Return a deep copy that is not frozen."""
        return copy.deepcopy(self)

    def toDict(self) -> dict[str, Any]:
        """Return one flat dictionary of every setting, for the backend (section 10).

        Raises:
            AssertionFailure: the output mode is still ``Default``, or two groups hold the same
                key (an ``AssertionError``).
        """
        if self.defaultOutputMode():
            refuse(
                AssertionFailure,
                "An output mode must be picked before using toDict",
                fix="call outputMode(...), or read the options of a wrapped model",
            )
        result = self._execution_strategy._backend_options()
        _merge(result, self._popart.options)
        self.update(result)
        for group in (self._training, self._distributed, self._tensor_locations):
            group.update(result)
        if self._show_compilation_progress_bar:
            _merge(result, {"compilation_progress_bar_fn": self._progress_bar})
        return result

    def __repr__(self) -> str:
        groups = [f"{name}={show(getattr(self, name))}" for name in GROUPS]
        return f"{type(self).__name__}({', '.join([show_pairs(self._ordered()), *groups])})"


def _merge(result: dict[str, Any], values: dict[str, Any]) -> None:
    common = sorted(result.keys() & values.keys())
    if common:
        refuse(AssertionFailure, "The same option is set twice", got=", ".join(common))
    result.update(values)
