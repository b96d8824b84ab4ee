"""The passes of a compilation as a flat list, in the order in which they run.

A pass reads the draft and fills in what its line names. Graphs are copied, never edited, so a
pass can be taken out, put elsewhere or compared with the one before it. To add one: write it in the
room that it belongs to, and add its line here. ``poptorch passes`` prints the list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from .. import _capture, _place
from .._base import log
from .._base.errors import Error
from .._base.tables import table
from .._ir import verify
from .._ir.bundle import Bundle
from .._ir.graph import Graph
from .._ir.loops import Lanes
from .._ir.plan import Layout, Plan, Staged
from .._ir.program import Program, Shard
from .._ir.slots import Kind
from .._ir.spec import OptimSpec, Spec, Strategy
from ..enums import OutputMode
from . import build, lanes, staged, weights


@dataclass(eq=False)
class Draft:
    """A plan in the making."""

    request: _capture.Request  # what is captured
    spec: Spec  # every setting
    optim: OptimSpec | None  # the optimizer's structure; None in inference
    by_stages: bool  # whether the backend runs stage by stage, one micro-batch at a time
    micro: _capture.Micro = field(init=False)  # what was captured
    lanes: Lanes | None = None  # what runs side by side in it, or None
    # the stages and chips; its graph is that of ``micro`` with the stages in its labels
    layout: Layout = field(init=False)
    # what the update is joined to: the layout's, over bundles of small weights if those pay
    graph: Graph = field(init=False)
    bundled: OptimSpec | None = None  # the optimizer over these bundles; None in inference
    bundles: tuple[Bundle, ...] = ()  # the weights that share a storage
    shards: tuple[Shard, ...] = ()  # those of them of which each process updates a part
    program: Program = field(init=False)  # the static step
    # the program cut into the passes of its stages, for backends that work so
    staged: Staged | None = None

    def plan(self) -> Plan:
        """Return what the passes made."""
        return Plan(self.program, self.spec, self.layout, self.staged)


@dataclass(frozen=True)
class Pass:
    """One line of the list."""

    name: str  # what the log calls it
    room: str  # where the work is done
    # attributes of the draft that it fills in or replaces; none for a check
    changes: tuple[str, ...]
    does: str  # one sentence, for people
    run: Callable[[Draft], None]  # does it


def capture(draft: Draft) -> None:
    """Trace one micro-batch, or as many side by side as are fast and fit."""
    request, spec = draft.request, draft.spec
    if spec.training and spec.recompute:
        request = replace(request, recompute=True)
    if draft.by_stages:
        stages = "blocks on chips run one micro-batch at a time"
        draft.micro = _capture.capture(replace(request, apart=stages))
    else:
        draft.micro, draft.lanes = lanes.capture(request, spec)


def check_overlap(draft: Draft) -> None:
    """Check the settings of a model that calls ``set_overlap_for_input`` or ``_output``.

    Raises:
        Error: the strategy, the I/O tiles or the output mode do not allow it.
    """
    spec = draft.spec
    if not draft.micro.overlaps:
        return
    if spec.placement.strategy is Strategy.PIPELINED:
        raise Error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution",
            got="the default execution strategy, also with one device",
            fix="options.setExecutionStrategy(poptorch.ShardedExecution())",
        )
    if not spec.locations.io_tiles:
        raise Error(
            "No IO tiles allocated",
            got="overlapped inputs and outputs travel through tiles of their own",
            fix="options.TensorLocations.numIOTiles(32)",
        )
    if spec.output.mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            "Unsupported output mode for overlapped IO",
            got=f"OutputMode.{spec.output.mode.name}",
            fix="options.outputMode(poptorch.OutputMode.All), or Sum",
        )


def place(draft: Draft) -> None:
    """Decide on the chip and the stage of everything."""
    draft.layout = _place.place(draft.micro.graph, draft.micro.visits, draft.spec)
    _place.log_layout(draft.layout, draft.spec)


def shard(draft: Draft) -> None:
    """Let each process keep a part of the optimizer's state of large weights."""
    draft.graph, draft.bundled = draft.layout.graph, draft.optim
    if draft.optim is not None:
        draft.bundled, draft.shards = weights.sharded(
            draft.graph, draft.spec, draft.optim, draft.by_stages
        )
        draft.bundles = tuple(each.whole for each in draft.shards)


def bundle_weights(draft: Draft) -> None:
    """Put small weights together for the update."""
    if draft.bundled is not None and not draft.by_stages:  # on their chips they rest one by one
        draft.graph, draft.bundled, small = weights.bundled(draft.graph, draft.spec, draft.bundled)
        draft.bundles += small


def build_program(draft: Draft) -> None:
    """Join forward, backward, accumulation and update; put loops around them."""
    if draft.bundled is None:
        draft.program = build.inference_program(draft.graph, draft.spec, draft.lanes)
    else:
        draft.program = build.training_program(
            draft.graph, draft.spec, draft.bundled, draft.lanes, draft.bundles, draft.shards,
            early=not (draft.by_stages or draft.micro.exchanging),
        )  # fmt: skip


def check_broadcast(draft: Draft) -> None:
    """Replicas that read different inputs cannot agree on a buffer that forward changes.

    Raises:
        Error: one is changed while buffers are broadcast; batch norm's statistics are exempt.
    """
    spec = draft.spec
    alone = spec.loops.input_groups == 1 and not spec.trains_together
    if alone or not spec.broadcast_buffers:
        return
    changed = {
        slot.path
        for graph in draft.program.graphs.values()
        for slot in graph.outputs
        if slot.kind is Kind.BUFFER and slot.key in graph.updates
    }
    for path, tied in draft.request.tensors.items():
        if path in changed and not tied.is_statistic:
            raise Error(
                "PopTorch does not support broadcasting buffers that the model changes",
                got=f"buffer '{path}' with {spec.loops.all_replicas} replicas",
                fix="options.broadcastBuffers(False): every replica keeps a value of its own",
            )


def stage(draft: Draft) -> None:
    """Cut the program into the passes of its stages and schedule them."""
    if draft.by_stages:
        step = staged.step_graphs(draft.layout.graph, draft.spec, draft.optim, draft.program)
        draft.staged = staged.stage(step, draft.layout, draft.spec)


def check_plan(draft: Draft) -> None:
    """Check the rules of programs and graphs."""
    verify.verify_plan(draft.plan())


PASSES = (
    Pass("capture", "_capture", ("micro", "lanes"),
         "trace forward, loss and backward of one micro-batch or of several side by side", capture),
    Pass("check overlap", "_compile", (),
         "overlapped inputs and outputs need settings that allow them", check_overlap),
    Pass("place", "_place", ("layout",),
         "blocks to stages and chips; every operator's label says in which pass it runs", place),
    Pass("shard", "_compile", ("graph", "bundled", "bundles", "shards"),
         "several processes, if asked for: each keeps a part of the optimizer's state", shard),
    Pass("bundle", "_update", ("graph", "bundled", "bundles"),
         "training: small weights that are updated together share a storage", bundle_weights),
    Pass("build", "_update", ("program",),
         "join forward, backward, accumulation and update; loops, results", build_program),
    Pass("check broadcast", "_compile", (),
         "replicas must agree on the buffers that forward changes", check_broadcast),
    Pass("stage", "_place, _schedule", ("staged",),
         "backends that run stage by stage: a graph for each pass, and their schedule", stage),
    Pass("check plan", "_ir", (), "the rules of programs and graphs", check_plan),
)  # fmt: skip
"""All passes, in their order."""


def run(draft: Draft) -> Iterator[float]:
    """Run all passes on a draft; yield the share that is done after each."""
    for number, each in enumerate(PASSES, 1):
        start = time.perf_counter()
        each.run(draft)
        log.engine.debug("Pass %s: %.3f s", each.name, time.perf_counter() - start)
        yield number / len(PASSES)


def passes_text() -> str:
    """Return the list for people."""
    head = ["", "pass", "room", "changes", "what it does"]
    rows = [
        [str(number), each.name, each.room, ", ".join(each.changes) or "-", each.does]
        for number, each in enumerate(PASSES, 1)
    ]
    return "\n".join(table([head, *rows]))
