"""List the passes of a compilation in the order in which they run, and run them.

Compiling, estimating and dividing a program into stages run the same list, up to different points.
The result of every pass is verified.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar

from .. import _capture, _place
from .._base import log, timing
from .._base.errors import Error
from .._base.tables import table
from .._base.thread_safety import holding
from .._eager import EagerOptimizer
from .._ir.compiler_pass import Pass, is_left_out, parameters
from .._ir.plan import Layout, Staged
from .._ir.program import Program
from .._ir.slots import Kind
from .._ir.spec import OptimSpec, Spec, Strategy
from ..enums import OutputMode
from . import build, bundled_weights, lanes, sharded_weights, size_proof, stage_graphs
from .bundled_weights import FlatParameters
from .compilation import Compilation
from .eager_check_policy import EagerCheck
from .lanes import Batched
from .remainder import CheckOf, Remainder
from .remainder import capture as capture_remainder
from .stage_graphs import OptimizerGraphs, SplitStep
from .verifying import graphs_in, verify_made


def capture(
    request: _capture.Request,
    spec: Spec,
    earlier: size_proof.EarlierProgram | None,
    check: EagerCheck,
    remainder: Remainder | None,
    check_of: CheckOf,
) -> _capture.Micro:
    """Trace forward, loss and backward of one micro-batch."""
    if remainder is None:
        return size_proof.capture(request, earlier, check.before_capture())
    return capture_remainder(remainder, spec, check_of)


def check_sizes(
    micro: _capture.Micro, request: _capture.Request, earlier: size_proof.EarlierProgram | None
) -> None:
    """Check that symbolic sizes lead to the same operators as numbers."""
    if micro.conditions is not None:
        size_proof.prove(micro, request, earlier)


def check_against_eager(
    micro: _capture.Micro,
    request: _capture.Request,
    earlier: size_proof.EarlierProgram | None,
    check: EagerCheck,
) -> _capture.Micro:
    """Compare the graph with eager PyTorch, on the first micro-batch of the call."""

    def recapture() -> _capture.Micro:
        made = size_proof.capture(request, earlier, check.before)
        check_sizes(made, request, earlier)
        return made

    return check.micro_batch(micro, recapture, lambda each: size_proof.for_sizes_of(each, request))


def put_side_by_side(
    micro: _capture.Micro,
    request: _capture.Request,
    spec: Spec,
    check: EagerCheck,
    by_stages: bool,
) -> Batched:
    """Turn the graph into several micro-batches side by side, if this is correct and saves time."""
    if by_stages:
        return lanes.one_by_one(micro, spec, "blocks on chips run one micro-batch at a time")
    return lanes.choose(micro, request, spec, check)


def one_after_another(micro: _capture.Micro, spec: Spec) -> Batched:
    return lanes.one_by_one(micro, spec, "the pass is left out")


def check_overlap(batched: Batched, spec: Spec) -> None:
    """Check that the settings allow overlapped inputs and outputs."""
    if not batched.micro.overlaps:
        return
    if spec.placement.strategy is Strategy.PIPELINED:
        raise Error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution",
            got="PipelinedExecution, which is the default strategy, also on a single device",
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


def place(batched: Batched, spec: Spec) -> Layout:
    """Assign blocks to stages and chips. Labels of operators then say in which pass they run."""
    layout = _place.place(batched.micro.graph, batched.micro.visits, spec)
    _place.log_layout(layout, spec)
    return layout


def shard(layout: Layout, spec: Spec, optim: OptimSpec | None, by_stages: bool) -> FlatParameters:
    """Let each of several processes keep a part of the optimizer's state, if the options say so."""
    if optim is None:
        return FlatParameters(layout.graph, None)
    over, shards = sharded_weights.sharded(layout.graph, spec, optim, by_stages)
    return FlatParameters(layout.graph, over, tuple(each.whole for each in shards), shards)


def whole_state(layout: Layout, optim: OptimSpec | None) -> FlatParameters:
    return FlatParameters(layout.graph, optim)


def bundle_weights(flat: FlatParameters, spec: Spec, by_stages: bool) -> FlatParameters:
    """Join small weights that are updated together in one storage."""
    if flat.optim is None or by_stages:  # on chips, they are stored separately
        return flat
    graph, optim, small = bundled_weights.bundled(flat.graph, spec, flat.optim)
    return FlatParameters(graph, optim, (*flat.bundles, *small), flat.shards)


def single_weights(flat: FlatParameters) -> FlatParameters:
    return flat


def build_program(flat: FlatParameters, batched: Batched, spec: Spec, by_stages: bool) -> Program:
    """Join forward, backward, accumulation and update, and add the loops around them."""
    if flat.optim is None:
        return build.inference_program(flat.graph, spec, batched.lanes)
    return build.training_program(
        flat.graph,
        spec,
        flat.optim,
        batched.lanes,
        flat.bundles,
        flat.shards,
        early=not (by_stages or batched.micro.exchanging),
    )


def check_update(
    program: Program,
    check: EagerCheck,
    optim: OptimSpec | None,
    eager_optimizer: EagerOptimizer | None,
) -> None:
    """Compare some updates with those of the user's optimizer in eager PyTorch."""
    check.update(optim, eager_optimizer, program.graphs)


def check_broadcast(program: Program, request: _capture.Request, spec: Spec) -> None:
    """Check that replicas agree on the buffers that forward changes."""
    alone = spec.loops.input_groups == 1 and not spec.trains_together
    if alone or not spec.broadcast_buffers:
        return
    changed = {
        slot.path
        for graph in program.graphs.values()
        for slot in graph.outputs
        if slot.kind is Kind.BUFFER and slot.key in graph.updates
    }
    for path, tied in request.tensors.items():
        if path in changed and not tied.is_statistic:
            raise Error(
                "PopTorch does not support broadcasting buffers that the model changes",
                got=f"forward changes buffer '{path}', and there are several replicas: "
                f"{spec.loops.all_replicas}",
                fix="let every replica keep its own values: options.broadcastBuffers(False)",
            )


def trace_update(
    request: _capture.Request,
    batched: Batched,
    spec: Spec,
    optim: OptimSpec | None,
    by_stages: bool,
) -> OptimizerGraphs | None:
    """Trace the accumulation and the update again, for backends that run stage by stage."""
    if not by_stages:
        return None
    return stage_graphs.trace_update(batched.micro.graph, spec, optim, request.priced)


def split(
    layout: Layout,
    optimizer_graphs: OptimizerGraphs | None,
    spec: Spec,
    optim: OptimSpec | None,
) -> SplitStep | None:
    """Split the micro-batch and the update into a graph for each stage pass."""
    if optimizer_graphs is None:
        return None
    made = stage_graphs.split(layout, optimizer_graphs, spec)
    stage_graphs.check_shared_memory(made, layout, optim)
    return made


def schedule(split_step: SplitStep | None, layout: Layout, spec: Spec) -> Staged | None:
    """Order the stage passes of all micro-batches, and find what chips send to each other."""
    return None if split_step is None else stage_graphs.schedule(split_step, layout, spec)


PASSES = (
    Pass("capture", "_capture", capture, "micro", parts=_capture.SHORTCUTS),
    Pass("check sizes", "_ir", check_sizes),
    Pass("check against eager", "_eager", check_against_eager, "micro"),
    Pass("lanes", "_lanes", put_side_by_side, "batched", without=one_after_another),
    Pass("check overlap", "_compile", check_overlap),
    Pass("place", "_place", place, "layout"),
    Pass("shard", "_compile", shard, "flat", without=whole_state),
    Pass("bundle", "_update", bundle_weights, "flat", without=single_weights),
    Pass("build", "_update", build_program, "program"),
    Pass("check update", "_eager", check_update),
    Pass("check broadcast", "_compile", check_broadcast),
    Pass("trace update", "_update", trace_update, "optimizer_graphs"),
    Pass("split", "_place", split, "split_step"),
    Pass("schedule", "_schedule", schedule, "staged"),
)

MADE = tuple(dict.fromkeys(each.makes for each in PASSES if each.makes is not None))
"""Values that passes make."""

PassObserver = Callable[[Pass, Compilation, Compilation], object]
_observer: ContextVar[PassObserver | None] = ContextVar("poptorch_observer", default=None)


def observed(seen: PassObserver) -> contextlib.AbstractContextManager[None]:
    """Within the block, call a function after each pass, with the values before and after it."""
    return holding(_observer, seen)


def run(
    compilation: Compilation,
    stop: str | None = None,
    progress: Callable[[float], object] = lambda share: None,
) -> Compilation:
    """Run the passes and return what they have made.

    Args:
        compilation: what is given. Values that it already has are not made again.
        stop: the name of the last pass; only it and what it needs runs. None for all passes.
        progress: called after each pass with the share of passes that have run.
    """
    chosen = PASSES if stop is None else [*_needed(compilation, stop)][::-1]
    verified = {graph for name in MADE for graph in graphs_in(getattr(compilation, name))}
    for number, each in enumerate(chosen, 1):
        log.trace("Pass %s", each.name)
        before = compilation
        with timing.part(each.name):
            compilation = _after(each, before)
            if each.makes is not None:
                for graph in verify_made(getattr(compilation, each.makes), verified):
                    log.trace("%s", graph)
        if (seen := _observer.get()) is not None:
            seen(each, before, compilation)
        progress(number / len(chosen))
    return compilation


def _after(each: Pass, before: Compilation) -> Compilation:
    left_out = each.without is not None and is_left_out(each.name)
    function = each.without if left_out and each.without is not None else each.function
    needs = parameters(function) if left_out else each.needs
    made = function(**{name: getattr(before, name) for name in needs})
    return before if each.makes is None else before.having(each.makes, made)


def _needed(compilation: Compilation, stop: str) -> Iterator[Pass]:
    """Yield the pass with this name and all that have to run before it, the last one first."""
    (last,) = (at for at, each in enumerate(PASSES) if each.name == stop)
    needs = set[str]()
    for each in reversed(PASSES[: last + 1]):
        is_made = each.makes is None or getattr(compilation, each.makes) is not None
        if each.name == stop or (each.makes in needs and not is_made):
            needs |= {*each.needs}
            yield each


def check_names(names: Collection[str]) -> None:
    """Raise an error unless passes with these names can be left out."""
    known = [name for each in PASSES for name in each.optional]
    for name in names:
        if name not in known:
            raise Error(
                "This pass cannot be left out",
                got=repr(name),
                fix=f"use one of {', '.join(known)}",
            )


def passes_text() -> str:
    head = ["", "pass", "package", "needs", "makes", "can be left out", "what it does"]
    made = {each.makes for each in PASSES}
    rows = [
        [
            str(number),
            each.name,
            each.package,
            ", ".join(name for name in each.needs if name in made) or "-",
            each.makes or "-",
            ", ".join(each.optional) or "-",
            each.does,
        ]
        for number, each in enumerate(PASSES, 1)
    ]
    return "\n".join(table([head, *rows]))
