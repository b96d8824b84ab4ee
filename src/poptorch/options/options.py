"""``poptorch.Options``: every setting of a wrapped model (PopTorch user guide, "Options")."""

from __future__ import annotations

import copy
import os
from typing import Any, Self

from .._base import env, log
from .._base.errors import AssertionFailure
from .check import expect
from .container import merge
from .distributed import _DistributedOptions
from .files import apply_json, load_from_file
from .jit import _JitOptions
from .legacy import LegacyOptions
from .locations import _TensorLocationOptions
from .overview import changes, idle
from .popart import _PopartOptions
from .precision import _PrecisionOptions
from .progress import CompilationProgressBar
from .show import show, show_pairs
from .training import _TrainingOptions

GROUPS = ("Distributed", "Jit", "Precision", "TensorLocations", "Training", "_Popart")
NO_SETTINGS = "{}"


class Options(LegacyOptions):
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

    def __repr__(self) -> str:
        groups = [f"{name}={show(getattr(self, name))}" for name in GROUPS]
        return f"{type(self).__name__}({', '.join([show_pairs(self._ordered()), *groups])})"
