"""The part of ``PoplarExecutor`` that only reads: costs, and the tensors inside."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from ._base.errors import AssertionFailure, Error
from ._ipu_model import Estimate
from ._ir.plan import Plan
from ._repricing import repricer_of
from ._session import counters
from ._session.counters import Latency, Stamps
from ._session.inputs import CompiledInputs
from ._session.session import Session
from .options import Options


class Inspection:
    """Reads a session; every method of it belongs to ``PoplarExecutor``."""

    _session: Session
    _options: Options

    def isCompiled(self) -> bool:
        """Tell whether the model is compiled."""
        return self._session.is_compiled

    def plan(self) -> Plan:
        """Return the compiled program with its placement; ``print`` shows it.

        Raises:
            poptorch.Error: not compiled, or destroyed.
        """
        return self._session.plan()

    def estimate(self, *args: Any, system: str = "bow:16", **kwargs: Any) -> Estimate:
        """Return what the program would cost on IPUs; see ``poptorch.estimate``."""
        with self._session.lock():
            repricer = repricer_of(self._session, self._options, args, kwargs, system)
            return repricer.advised(repricer.price({}, guesses=True))

    # What a call cost.

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compiling took.

        Raises:
            poptorch.Error: not compiled, or the progress bar is switched off.
        """
        if not self.isCompiled():
            raise Error("Please compile the model before asking for its compilation time")
        elapsed = self._options._progress_bar.elapsed
        if not self._options._show_compilation_progress_bar or elapsed is None:
            raise Error(
                "The compilation time is measured by the progress bar, which is off",
                fix="options.showCompilationProgressBar(True)",
            )
        return elapsed

    def cycleCount(self) -> int:
        """Return the cycles that a call would take on IPUs, as the cost model estimates them.

        Raises:
            poptorch.Error: ``logCycleCount`` is off, or the model has not run.
        """
        if not self._options._Popart.options.get("instrumentWithHardwareCycleCounter", False):
            raise Error("Cycle count logging is disabled", fix="options.logCycleCount(True)")
        if self._session.last is None:
            raise Error("Please run the model at least once before asking for its cycle count")
        with self._session.lock():
            return self._session.reports.cycles(self._session.now)

    def getPerfCounters(self) -> Stamps:
        """Return time stamps of the last call in seconds, by kind, per tensor.

        The kinds are ``input``, ``input_complete``, ``output`` and ``output_complete``.
        """
        return self._session.counters()

    def getLatency(self) -> Latency:
        """Return (min, max, mean) seconds from handing an input over to having the result."""
        return counters.latency(self.getPerfCounters(), "input", "output_complete")

    def getHostIpuLatency(self) -> Latency:
        """Return (min, max, mean) seconds that inputs travelled to the device."""
        return counters.latency(self.getPerfCounters(), "input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return (min, max, mean) seconds between the last input and the last output."""
        return counters.latency(self.getPerfCounters(), "input_complete", "output", first=max)

    def getIpuHostLatency(self) -> Latency:
        """Return (min, max, mean) seconds that outputs travelled to the host."""
        return counters.latency(self.getPerfCounters(), "output", "output_complete")

    # Tensors inside.

    def getTensorNames(self) -> list[str]:
        """Return the names of the tensors of the program, those that can be anchored first.

        Raises:
            AssertionError: not compiled.
        """
        session, optimizer = self._session, self._session.optimizer
        if not session.is_compiled:
            raise AssertionFailure("Tensor names are known once the model is compiled")
        return session.now.tensor_names() + (optimizer.names() if optimizer is not None else [])

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return the value that an anchored tensor had in the last call.

        Args:
            short_name: as in ``options.anchorTensor(short_name, long_name)``.

        Returns:
            A tensor shaped by the anchor's output mode.

        Raises:
            AssertionError: there is no such anchor, or no call was made.
        """
        last = self._session.last
        anchors = last.anchors if last is not None else {}
        if short_name not in anchors:
            raise AssertionFailure(
                f"No tensor with name {short_name}",
                got=f"anchored in the last call: {', '.join(anchors) or 'nothing'}",
                fix="options.anchorTensor(short_name, long_name) before wrapping, then one call",
            )
        return anchors[short_name]

    # What integrations read.

    @property
    def _executable(self) -> object | None:
        return self._session.now.compiled.executable if self.isCompiled() else None

    @property
    def _executable_inputs(self) -> CompiledInputs | None:
        return self._session.now.arguments() if self.isCompiled() else None

    def _debugGetPopartIR(self) -> str:
        return self.plan().describe()
