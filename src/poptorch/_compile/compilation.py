"""Define ``Compilation``: what a compilation was given, and what its passes have made so far."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import _capture
from .._eager import EagerOptimizer
from .._ir.plan import Layout, Plan, Staged
from .._ir.program import Program
from .._ir.spec import OptimSpec, Spec
from .bundled_weights import FlatParameters
from .eager_check_policy import EagerCheck
from .lanes import Batched
from .remainder import CheckOf, Remainder
from .size_proof import EarlierProgram
from .stage_graphs import OptimizerGraphs, SplitStep

_NOT_YET: Any = None


@dataclass(frozen=True, eq=False)
class Compilation:
    """The fields after ``earlier`` are made by passes and are None until then."""

    request: _capture.Request
    spec: Spec
    optim: OptimSpec | None  # None in inference
    by_stages: bool  # whether the backend runs stage by stage, one micro-batch at a time
    check: EagerCheck
    eager_optimizer: EagerOptimizer | None = None
    remainder: Remainder | None = None  # what is captured instead of the request, if anything
    check_of: CheckOf = EagerCheck.off
    earlier: EarlierProgram | None = None  # for symbolic sizes: what differs in sizes alone
    micro: _capture.Micro = _NOT_YET  # a single micro-batch, as it was captured
    batched: Batched = _NOT_YET
    layout: Layout = _NOT_YET  # its graph is the batched one, with stages in its labels
    flat: FlatParameters = _NOT_YET
    program: Program = _NOT_YET
    # What backends need that run stage by stage; None for the others.
    optimizer_graphs: OptimizerGraphs | None = _NOT_YET
    split_step: SplitStep | None = _NOT_YET
    staged: Staged | None = _NOT_YET

    def having(self, name: str, value: Any) -> Compilation:
        return dataclasses.replace(self, **{name: value})

    def plan(self) -> Plan:
        return Plan(self.program, self.spec, self.layout, self.staged)
