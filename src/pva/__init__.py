"""The names of libpva over the profile reports and traces that poptorch writes.

Scripts that walk a report with ``pva`` run on ``profile.json`` (or ``profile.pop``, its copy). Its
figures are estimates for IPUs, and on traces that ``PVTI_OPTIONS`` has written, which were measured
here. What the cost model does not know is not made up.
Source: libpva's public documentation; PopVision tutorials.
"""

from __future__ import annotations

from ._names import (
    IPU,
    Event,
    OperationAnalysis,
    Process,
    Program,
    ProgramVisitor,
    Report,
    Thread,
    Trace,
    openReport,
    openTrace,
)

__all__ = [
    "IPU", "Event", "OperationAnalysis", "Process", "Program", "ProgramVisitor", "Report",
    "Thread", "Trace", "openReport", "openTrace",
]  # fmt: skip
