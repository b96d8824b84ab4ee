"""List the passes of a compilation in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .. import _capture, _place
from .._base import log, timing
from .._base.errors import Error
from .._base.tables import table
from .._eager import EagerOptimizer
from .._ir import verify
from .._ir.bundle import Bundle
from .._ir.graph import Graph
from .._ir.loops import Lanes
from .._ir.plan import Layout, Plan, Staged
from .._ir.program import Program, Shard
from .._ir.slots import Kind
from .._ir.spec import OptimSpec, Spec, Strategy
from ..enums import OutputMode
from . import build, lanes, sizes, staged, weights
from .eager import EagerCheck
from .remainder import CheckOf, Remainder
from .remainder import capture as capture_remainder


@dataclass(eq=False)
class Draft:
    request: _capture.Request
    spec: Spec
    optim: OptimSpec | None  # None in inference
    by_stages: bool  # whether the backend runs stage by stage, one micro-batch at a time
    check: EagerCheck
    eager_optimizer: EagerOptimizer | None = None
    remainder: Remainder | None = None  # what is captured instead of the request, if anything
    check_of: CheckOf = EagerCheck.off
    earlier: sizes.Earlier | None = None  # for symbolic sizes: what differs in sizes alone
    one: _capture.Micro = field(init=False)  # a single micro-batch, as it was captured
    micro: _capture.Micro = field(init=False)  # the single micro-batch, or several side by side
    lanes: Lanes | None = None  # what runs side by side in ``micro``
    layout: Layout = field(init=False)  # its graph is that of ``micro``, with stages in its labels
    # the graph of the layout, over bundles of small weights if these save time
    graph: Graph = field(init=False)
    bundled: OptimSpec | None = None  # the optimizer over these bundles
    bundles: tuple[Bundle, ...] = ()  # the weights that share a storage
    shards: tuple[Shard, ...] = ()  # the bundles of which each process updates a part
    program: Program = field(init=False)
    staged: Staged | None = None  # the program cut into stages, for backends that run these

    def plan(self) -> Plan:
        return Plan(self.program, self.spec, self.layout, self.staged)


@dataclass(frozen=True)
class Pass:
    name: str
    room: str  # the room that does the work
    changes: tuple[str, ...]  # attributes of the draft; empty for a check
    run: Callable[[Draft], None]

    @property
    def does(self) -> str:
        sentence = " ".join((self.run.__doc__ or "").split()).rstrip(".")
        return sentence[:1].lower() + sentence[1:]


def capture(draft: Draft) -> None:
    """Trace forward, loss and backward of one micro-batch."""
    if draft.remainder is None:
        draft.one = _capture.capture(draft.request, draft.check.before_capture())
    else:
        draft.one = capture_remainder(draft.remainder, draft.spec, draft.check_of)


def check_sizes(draft: Draft) -> None:
    """Check that symbolic sizes lead to the same operators as numbers."""
    if draft.one.conditions is not None:
        sizes.prove(draft.one, draft.request, draft.earlier)


def check_against_eager(draft: Draft) -> None:
    """Compare the graph and the update with eager PyTorch, on the first micro-batch of the call."""
    draft.check.micro_batch(sizes.at_hand(draft.one, draft.request))
    draft.check.update(draft.optim, draft.eager_optimizer)


def put_side_by_side(draft: Draft) -> None:
    """Turn the graph into several micro-batches side by side, if this is correct and saves time."""
    if draft.one.conditions is not None:
        draft.micro = lanes.one_by_one(draft.one, draft.spec, "their sizes are symbolic")
    elif draft.by_stages:
        stages = "blocks on chips run one micro-batch at a time"
        draft.micro = lanes.one_by_one(draft.one, draft.spec, stages)
    else:
        draft.micro, draft.lanes = lanes.choose(draft.one, draft.request, draft.spec, draft.check)


def check_overlap(draft: Draft) -> None:
    """Check that the settings allow overlapped inputs and outputs."""
    spec = draft.spec
    if not draft.micro.overlaps:
        return
    if spec.placement.strategy is Strategy.PIPELINED:
        raise Error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution",
            got="the default execution strategy; this rule also applies to a single device",
            fix="use options.setExecutionStrategy(poptorch.ShardedExecution())",
        )
    if not spec.locations.io_tiles:
        raise Error(
            "No IO tiles allocated",
            got="overlapped inputs and outputs need separate IO tiles",
            fix="allocate tiles: options.TensorLocations.numIOTiles(32)",
        )
    if spec.output.mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            "Unsupported output mode for overlapped IO",
            got=f"OutputMode.{spec.output.mode.name}",
            fix="use options.outputMode(poptorch.OutputMode.All) or OutputMode.Sum",
        )


def place(draft: Draft) -> None:
    """Assign blocks to stages and chips. Labels of operators then say in which pass they run."""
    draft.layout = _place.place(draft.micro.graph, draft.micro.visits, draft.spec)
    _place.log_layout(draft.layout, draft.spec)


def shard(draft: Draft) -> None:
    """Let each of several processes keep a part of the optimizer's state, if the options say so."""
    draft.graph, draft.bundled = draft.layout.graph, draft.optim
    if draft.optim is not None:
        draft.bundled, draft.shards = weights.sharded(
            draft.graph, draft.spec, draft.optim, draft.by_stages
        )
        draft.bundles = tuple(each.whole for each in draft.shards)


def bundle_weights(draft: Draft) -> None:
    """Join small weights that are updated together in one storage."""
    if draft.bundled is not None and not draft.by_stages:  # on chips, they are stored separately
        draft.graph, draft.bundled, small = weights.bundled(draft.graph, draft.spec, draft.bundled)
        draft.bundles += small


def build_program(draft: Draft) -> None:
    """Join forward, backward, accumulation and update, and add the loops around them."""
    if draft.bundled is None:
        draft.program = build.inference_program(draft.graph, draft.spec, draft.lanes)
    else:
        draft.program = build.training_program(
            draft.graph, draft.spec, draft.bundled, draft.lanes, draft.bundles, draft.shards,
            early=not (draft.by_stages or draft.micro.exchanging),
        )  # fmt: skip


def check_broadcast(draft: Draft) -> None:
    """Check that replicas agree on the buffers that forward changes."""
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
                fix="let every replica keep its own values: options.broadcastBuffers(False)",
            )


def stage(draft: Draft) -> None:
    """Cut a graph for each pass and schedule the passes, for backends that run stage by stage."""
    if draft.by_stages:
        draft.staged = staged.stage(draft.layout, draft.spec, draft.optim)


def check_plan(draft: Draft) -> None:
    """Check the rules of programs and graphs."""
    verify.verify_plan(draft.plan())


PASSES = (
    Pass("capture", "_capture", ("one",), capture),
    Pass("check sizes", "_ir", (), check_sizes),
    Pass("check against eager", "_eager", (), check_against_eager),
    Pass("lanes", "_lanes", ("micro", "lanes"), put_side_by_side),
    Pass("check overlap", "_compile", (), check_overlap),
    Pass("place", "_place", ("layout",), place),
    Pass("shard", "_compile", ("graph", "bundled", "bundles", "shards"), shard),
    Pass("bundle", "_update", ("graph", "bundled", "bundles"), bundle_weights),
    Pass("build", "_update", ("program",), build_program),
    Pass("check broadcast", "_compile", (), check_broadcast),
    Pass("stage", "_place, _schedule", ("staged",), stage),
    Pass("check plan", "_ir", (), check_plan),
)


def run(draft: Draft) -> Iterator[float]:
    for number, each in enumerate(PASSES, 1):
        log.trace("Pass %s", each.name)
        with timing.part(each.name):
            each.run(draft)
        if "micro" in each.changes:
            log.trace("%s", draft.micro.graph)
        if "graph" in each.changes:
            log.trace("%s", draft.graph)
        yield number / len(PASSES)


def passes_text() -> str:
    head = ["", "pass", "room", "changes", "what it does"]
    rows = [
        [str(number), each.name, each.room, ", ".join(each.changes) or "-", each.does]
        for number, each in enumerate(PASSES, 1)
    ]
    return "\n".join(table([head, *rows]))
