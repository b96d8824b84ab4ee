"""Decide after which calls (1, 2, 4, 8 and so on) a running model writes its profile, and measure
these calls.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ... import _compile
from ..._base import log, processes, safe_files, source
from ..._base.errors import Error
from ..._ipu_model import estimating, profile, report_page
from ..._ipu_model.estimate import Estimate
from ..._ipu_systems import KINDS, ChipKind, System, system_of
from ..._ir.block_labels import product_settings
from ..._ir.spec import Spec
from ...backends import Stopwatch, timing
from ..calls import CallMoments
from ..programs import Model, Specialization
from .captures import Captures
from .loss_watch import LossWatch

_T = TypeVar("_T")

FIRST = 64
"""The number of latest calls that are recorded individually."""
OLD_NAME = "profile.pop"
"""Scripts expect the report under this name. Its content is that of ``profile.json``."""


class Reports:
    """The reports about one wrapped model.

    Attributes:
        loss_watch: warns of losses that are not finite.
    """

    advise: Callable[[Captures, Estimate], Estimate] | None = None

    def __init__(self, model: Model) -> None:
        self._model = model
        self.loss_watch = LossWatch()
        self._now: Specialization | None = None  # the program that the report is about
        self._began = self._ended = 0.0
        self._unwritten = False
        self._process = processes.forks
        self._reset()
        weakref.finalize(model, _finish, weakref.ref(self))  # mainly for the end of the process

    def _reset(self) -> None:
        self._estimate: Estimate | None = None
        self._calls: list[profile.CallTimes] = []
        self._count = self._written = 0
        self._watch = Stopwatch()

    def compiled(self, now: Specialization) -> None:
        self._reset()
        if now.spec.runtime.report is not None:
            self._now = now
            log.python.info(
                ("A profile report is written. The first %d calls are timed operator by "
                 "operator, which makes them slower"), profile.TIMED,
            )  # fmt: skip
            self._write(now)

    def run(self, spec: Spec, do: Callable[..., _T], *args: object) -> _T:
        """Run a call, and measure its parts if a report needs this and it is one of the
        first calls.
        """
        if spec.runtime.report is None or self._count >= profile.TIMED:
            return do(*args)
        watch = Stopwatch()
        with timing(watch):
            results = do(*args)
        self._watch = watch
        return results

    def called(self, now: Specialization, moments: CallMoments) -> None:
        """Record how long the last call took, and write the report after some calls."""
        self._now = now
        if now.spec.runtime.cycle_count:
            log.engine.debug("Total number of IPU cycles: %d (estimated)", self.cycles(now))
        if now.spec.runtime.report is None:
            return
        started, taken, ready, ended = moments
        if not self._count:
            self._began = self._ended = started
        self._count += 1
        if len(self._calls) < FIRST:
            call = profile.CallTimes(
                started - self._began, started - self._ended, taken - started, ready - taken,
                ended - ready,
            )  # fmt: skip
            self._calls.append(call)
        if self._count & (self._count - 1) == 0:  # a power of two
            self._write(now)
        self._ended = ended

    def finish(self) -> None:
        """Write the report of a program that is being removed, if some calls are not in the report
        yet.
        """
        if self._now is not None and self._count != self._written:
            self._write(self._now)
        self._now = None
        self._reset()

    def cycles(self, now: Specialization) -> int:
        """Return the cycles of one call of the compiled program according to the cost model."""
        return max(1, round(self.priced(now).cycles))

    def priced(self, now: Specialization) -> Estimate:
        """Estimate the compiled program, by capturing one micro-batch again, without data."""
        if self._estimate is None:
            spec = now.spec
            captures = Captures(self._model, now.inputs.bound)
            captured = captures.capture(spec)
            kind = modelled(spec)
            needed = estimating.subject(captured, spec, System(kind, 1))
            chips = needed.per_replica * needed.replicas
            system = System(kind, max(system_of().chips, 1 << (chips - 1).bit_length()))
            self._estimate = estimating.estimate(captured, spec, system, guesses=True)
            if spec.runtime.report is not None and self.advise is not None:
                self._estimate = self.advise(captures, self._estimate)
        return self._estimate

    def _write(self, now: Specialization) -> None:
        self._written = self._count
        spec = now.spec
        name = spec.runtime.model_name or ("training" if spec.training else "inference")
        directory = Path(str(spec.runtime.report)) / safe_files.name_from(name)
        try:
            estimate = self.priced(now)
        except Error as error:
            log.python.warning("No profile report is written: %s", error)
            return
        ran = now.compiled.executable.report()
        measured = profile.Measured(
            ran.tier, ran.compile_seconds, self._count, tuple(self._calls),
            1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, *_timed(self._watch),
        )  # fmt: skip
        content = profile.profile(
            dataclasses.asdict(estimate), modelled(spec), measured,
            {
                **_compile.flat_fields(spec),
                **product_settings(now.compiled.plan.layout.graph.module.graph),
            },
        )  # fmt: skip
        spans = [
            (name, start - self._began, seconds, is_action)
            for name, start, seconds, is_action in self._watch.spans
        ]
        text, of_trace = json.dumps(content), json.dumps(profile.trace(content, spans))
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for file in (profile.NAME, OLD_NAME):
                safe_files.write_text(directory / file, text)
            safe_files.write_text(directory / "trace.json", of_trace)
            safe_files.write_text(directory / "report.html", report_page.html(content))
        # for example a full disk; the run is more important than its report
        except OSError as error:
            if not self._unwritten:
                log.python.warning("The profile report cannot be written: %s", error)
            self._unwritten = True


def _finish(reports: weakref.ref[Reports]) -> None:
    """Write the reports of this process that still exist."""
    own = reports()
    if own is not None and own._process == processes.forks:
        own.finish()


def check_report_settings(spec: Spec) -> None:
    if spec.runtime.cycle_count and spec.target.device == "model":
        raise Error(
            "The IPU model has no cycle counts",
            got="logCycleCount(True) with the simulated device",
            fix="remove logCycleCount(True), or call options.useIpuModel(False)",
        )


def modelled(spec: Spec) -> ChipKind:
    """Return the chips to estimate for: those for which the program is compiled, or the
    system's.
    """
    if spec.target.generation is None:
        return system_of().kind
    kind = next(k for k in KINDS.values() if k.generation == spec.target.generation)
    return dataclasses.replace(kind, tiles=spec.target.tiles or kind.tiles)


def _timed(
    watch: Stopwatch,
) -> tuple[tuple[profile.ActionTime, ...], tuple[profile.OperatorTime, ...]]:
    actions = [profile.ActionTime(n, own.count, own.seconds) for n, own in watch.actions.items()]
    operators = [
        profile.OperatorTime(
            kind.direction, kind.name, kind.module,
            source.describe(*kind.line) if kind.line else "", own.count, own.seconds,
        )
        for kind, own in watch.operators.items()
    ]  # fmt: skip
    return tuple(actions), tuple(sorted(operators, key=lambda row: -row.seconds))
