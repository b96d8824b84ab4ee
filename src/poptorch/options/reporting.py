"""Options about names, logs, profiles and caching (PopTorch user guide, "Options")."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from .._base import env, log
from .check import expect
from .container import Container
from .popart import _PopartOptions
from .progress import CompilationProgressBar

UNLIMITED_LOGS = 2**64 - 1
_PROFILING_KEYS = ("debug.allowOutOfMemory", "autoReport.directory", "autoReport.all")


class ReportingOptions(Container):
    """What is logged, shown, profiled and kept in files; no result depends on it."""

    log_dir: str
    max_repeat_logs: int
    model_name: str
    _popart: _PopartOptions
    _progress_bar: CompilationProgressBar
    _show_compilation_progress_bar: bool
    _module_namescope_enabled: bool
    _relax_optimizer_checks: bool
    _source_location_excludes: list[str]

    def modelName(self, name: str) -> Self:
        """Name the sub-directory of profile reports; by default "training" or "inference"."""
        return self.createOrSet(model_name=name)

    def logDir(self, log_dir: str) -> Self:
        """Set where log files go; default the working directory."""
        return self.set(log_dir=log_dir)

    def maxRepeatLogs(self, max_lines: int | None) -> Self:
        """Limit repeated identical log lines (default 4); None for no limit."""
        return self.set(max_repeat_logs=UNLIMITED_LOGS if max_lines is None else max_lines)

    def logCycleCount(self, log_cycle_count: bool) -> Self:
        """Count device cycles, for ``executor.cycleCount()``; default False."""
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def enableProfiling(self, profile_dir: str | os.PathLike[str] | None = None) -> Self:
        """Write a profile report under a directory; None for the working directory.

        Adds three keys to the engine options set before. POPLAR_ENGINE_OPTIONS beats them.
        """
        directory = os.fspath(profile_dir) if profile_dir else "."
        chosen = dict(zip(_PROFILING_KEYS, ("true", directory, "true"), strict=True))
        before = self._popart.options.get("engineOptions", {})
        self._popart.setEngineOptions({**before, **chosen})
        text = env.get("POPLAR_ENGINE_OPTIONS")
        for key in _PROFILING_KEYS:
            if key in text:
                log.python.warning(
                    "The profiling setting %s is overridden by POPLAR_ENGINE_OPTIONS", key
                )
        return self

    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Show a progress bar while compiling (the default); ``compilationTime()`` needs it."""
        expect("show", show, bool)
        self._show_compilation_progress_bar = show
        return self

    def disableModuleNamescope(self) -> Self:
        """Name operators without the path of their module: ``Op`` for ``layer/Op``."""
        self._module_namescope_enabled = False
        return self

    def sourceLocationExcludes(self, excludes: Sequence[str]) -> Self:
        """Replace the path fragments that are skipped when an operator's source line is sought."""
        self._check_writable("sourceLocationExcludes")
        expect("excludes", excludes, (list, tuple))
        for part in excludes:
            expect("excludes", part, str)
        self._source_location_excludes = list(excludes)
        return self

    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Add path fragments to :meth:`sourceLocationExcludes`."""
        return self.sourceLocationExcludes([*self._source_location_excludes, *excludes])

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Log unknown optimiser attributes at DEBUG instead of WARNING."""
        expect("relax", relax, bool)
        self._relax_optimizer_checks = relax
        return self

    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Self:
        """Keep executables in a directory and reuse them; None switches this off.

        With None the path of an earlier call stays stored.
        """
        if path is None:
            self._popart.set("enableEngineCaching", False)
            return self
        self._popart.set("cachePath", os.fspath(path)).set("enableEngineCaching", True)
        return self
