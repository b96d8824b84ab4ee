"""``poptorch.Options``: every setting of a wrapped model (PopTorch user guide, "Options")."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any, Self

from .._base import env, log
from .._base.errors import AssertionFailure
from ..enums import OutputMode
from .container import merge
from .distributed import _DistributedOptions
from .files import apply_json, load_from_file
from .general import GeneralOptions, is_on
from .groups import _JitOptions, _PrecisionOptions, _TrainingOptions
from .locations import _TensorLocationOptions
from .overview import changes, idle
from .popart import _PopartOptions
from .progress import CompilationProgressBar
from .strategies import PipelinedExecution, ShardedExecution
from .table import deprecated, expect, show, show_pairs

GROUPS = ("Distributed", "Jit", "Precision", "TensorLocations", "Training", "_Popart")
NO_SETTINGS = "{}"
_RENAMED = {"anchor_mode": "output_mode", "anchor_return_period": "output_return_period"}


class Options(GeneralOptions):
    """Settings of a model wrapper and of a DataLoader.

    Setters return the object that they belong to, so that calls chain. Giving the options to a
    wrapper or a loader freezes them; ``clone`` returns a copy that can be changed.

    At construction the environment applies: rank and size of OpenMPI or torchrun,
    POPTORCH_CACHE_DIR, then POPTORCH_DEFAULT_OPTIONS.

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
        self._progress_bar = CompilationProgressBar()
        super().__init__()
        self._apply_environment()

    def _apply_environment(self) -> None:
        cache = env.get("POPTORCH_CACHE_DIR")
        if cache:
            log.python.info("From POPTORCH_CACHE_DIR environment variable: caching in %s", cache)
            self.enableExecutableCaching(cache)
        settings = env.get("POPTORCH_DEFAULT_OPTIONS")
        if settings != NO_SETTINGS:
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

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Apply the option calls of a file, one per line.

        A line is written as in Python without the leading ``options.``; blank lines and comments
        are skipped. Later lines and later files win. The file is parsed, never executed.

        Raises:
            ConfigFileError: a line is no option call; then no line is applied.
            AttributeError, AssertionError, ValueError: what a setter raised, or there is none of
                that name; the lines before it took effect, and a note names the line.
            FileNotFoundError: there is no such file.
        """
        load_from_file(self, filepath)
        return self

    def from_json(self, string: str) -> Self:
        """Apply a JSON object of ``{"dotted.setter": argument or [arguments]}``.

        A string ``"Enum.Member"`` that is the only argument becomes that member.

        Raises:
            json.JSONDecodeError: the string is no JSON (a ``ValueError``).
            InvalidAttribute: an unknown setter (an ``AttributeError``).
        """
        expect("string", string, str)
        apply_json(self, string)
        return self

    def withoutEffect(self) -> list[str]:
        """List the options that were changed and have no effect here, sorted.

        Not a PopTorch option. They are kept and shown; the log says so of each when a model is
        wrapped, and ``poptorch options`` says what each stands for.
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
        """Show in a notebook what differs from the defaults; ``repr`` has every setting."""
        printer.text(changes(self))

    # Spellings of earlier releases; each warns.

    def anchorMode(self, anchor_mode: OutputMode, anchor_return_period: int | None = None) -> Self:
        """Set the output mode. Deprecated: ``outputMode``."""
        deprecated("anchorMode", "outputMode")
        return self.outputMode(anchor_mode, anchor_return_period)

    def defaultAnchorMode(self) -> bool:
        """Tell whether the output mode is the default. Deprecated: ``defaultOutputMode``."""
        deprecated("defaultAnchorMode", "defaultOutputMode")
        return self.defaultOutputMode()

    @property
    def Popart(self) -> _PopartOptions:
        """The backend compiler's settings. Deprecated: ``_Popart``."""
        deprecated("Options.Popart", "Options._Popart")
        return self._popart

    @property
    def GraphProcessing(self) -> _PrecisionOptions:
        """Number formats. Deprecated: ``Precision``."""
        deprecated("Options.GraphProcessing", "Options.Precision")
        return self._precision

    def enablePipelining(self, enabled: bool) -> Self:
        """Choose pipelined or sharded execution. Deprecated: ``setExecutionStrategy``."""
        deprecated("enablePipelining", "setExecutionStrategy")
        return self.setExecutionStrategy(
            PipelinedExecution() if is_on(enabled) else ShardedExecution()
        )

    def profile(self, enabled: bool) -> Self:
        """Switch profiling on. Deprecated: ``enableProfiling``."""
        deprecated("profile", "enableProfiling")
        return self.enableProfiling() if is_on(enabled) else self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(_current_name(name))

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(_current_name(name), value)

    def __repr__(self) -> str:
        groups = [f"{name}={show(getattr(self, name))}" for name in GROUPS]
        return f"{type(self).__name__}({', '.join([show_pairs(self._ordered()), *groups])})"


def _current_name(name: str) -> str:
    if name not in _RENAMED:
        return name
    deprecated(name, _RENAMED[name])
    return _RENAMED[name]
