"""Lanes: micro-batches side by side as an axis of vmap; gradients of weights are sums over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from .._base import private, source
from .._base.errors import Error
from .._ir.graph import Graph
from .._ir.loops import Lanes
from .._ir.operators import draws
from .._ir.slots import Kind
from .._ops import annotate, streams
from .._ops.context import Replicas
from .capture_context import CaptureContext
from .forward import Forward, Request, run_forward
from .replaced import BATCH_NORMS, Tied
from .trace import vectorising

aten = torch.ops.aten


class NotVectorisable(Exception):  # noqa: N818 (not a failure: the loop is taken instead)
    """Why a module cannot run as lanes: a single micro-batch is captured instead."""


_STATISTICS = ("running_mean", "running_var")
_COUNT = "num_batches_tracked"


def run_lanes(
    request: Request,
    context: CaptureContext,
    batch: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
) -> Forward:
    lanes = request.lanes
    assert lanes is not None
    statistics = {path: leaves[path] for path in batch_norm_statistics(request)}
    counts = {path: leaves[path] for path in _paths(request, _COUNT)}
    apart = {*request.grouped, *request.anchored_gradients}
    weights = {path: leaves[path] for path in apart}
    shared = {path: leaves[path] for path in leaves.keys() - statistics.keys() - weights.keys()}
    anchored = [name for _, name in request.anchors]
    runs: list[Forward] = []

    def one(rows: list[torch.Tensor], own: dict[str, torch.Tensor]) -> Any:
        lane = [*rows, *own.values()][0]
        context.replicas = Replicas(lanes.replicas, lane, processes=request.processes)
        done = run_forward(request, context, rows, {**shared, **own})
        if done.hosts:
            raise NotVectorisable("forward returns a tensor that it did not compute")
        runs.append(done)
        losses = [] if done.loss is None else [done.loss]
        after = {path: done.leaves[path] for path in statistics}
        return [*done.tensors, *losses], after, done.names.found(anchored)

    kept = {path: 1.0 - _momentum(request.tensors[path]) for path in statistics}
    batched = {path: _spread(value, lanes) for path, value in statistics.items()} | weights
    for path in counts:
        shared[path] = shared[path].clone()
    try:
        with vectorising():
            function = torch.func.vmap(one, randomness="different")
            outputs, after, named = function(list(batch), batched)
    except (NotVectorisable, KeyboardInterrupt):
        raise
    except private.Gone as gone:
        private.go_on_without(gone)
        raise NotVectorisable(gone.args[0]) from gone
    except Exception as error:  # whatever it is, the loop will tell whether it is the user's
        raise NotVectorisable(reason_of(error)) from error
    (done,) = runs
    final = dict(leaves)
    recorder = annotate.recorder()
    assert recorder is not None
    for path, value in after.items():
        owner = request.tensors[path].places[0][0]
        final[path] = _fold(leaves[path], value, lanes, kept[path] ** recorder.calls[owner])
    for path, before in counts.items():
        final[path] = before + (done.leaves[path] - before) * lanes.steps
    done.names.tensors |= named
    returned = (at for at, tensor in enumerate(done.tensors) if tensor is done.loss)
    loss = outputs[next(returned, -1)] if request.training else None
    tensors = list(outputs[: len(done.tensors)])
    return Forward(tensors, done.structure, loss, final, done.names, {})


def batch_norm_statistics(request: Request) -> list[str]:
    return [path for name in _STATISTICS for path in _paths(request, name)]


def _paths(request: Request, name: str) -> list[str]:
    def tracked(owner: nn.Module) -> bool:
        return isinstance(owner, BATCH_NORMS) and owner.training and owner.track_running_stats

    return [
        path
        for path, tied in request.tensors.items()
        if all(tracked(owner) and name == own for owner, _, own in tied.places)
    ]


def _momentum(tied: Tied) -> float:
    momentum = {owner.momentum for owner, _, _ in tied.places}
    if len(tied.places) > 1 or None in momentum:
        raise NotVectorisable("a batch norm averages over all batches, or shares its statistics")
    return float(momentum.pop())  # type: ignore[arg-type]


def _spread(value: torch.Tensor, lanes: Lanes) -> torch.Tensor:
    if lanes.replicas == 1:
        return value.expand(lanes.count, *value.shape).clone()
    spread = value.expand(lanes.steps, *value.shape).clone()
    return spread.reshape(lanes.count, *value.shape[1:])


def _fold(before: torch.Tensor, after: torch.Tensor, lanes: Lanes, kept: float) -> torch.Tensor:
    """Lanes have ``kept * b + x_l``; the sequence ``kept^n * b + sum_l kept^(n - 1 - l) * x_l``."""
    steps = after.reshape(lanes.steps, *before.shape)
    ages = torch.arange(lanes.steps - 1, -1, -1, dtype=before.dtype)
    shares = (steps - kept * before) * (kept**ages).reshape(lanes.steps, *[1] * before.dim())
    return shares.sum(0) + kept**lanes.steps * before


def reason_of(error: Exception) -> str:
    cause = (error.__cause__ or error) if isinstance(error, Error) else error
    text = next(iter(str(cause).splitlines()), type(error).__name__)
    where = source.raising_line(cause) or source.raising_line(error)
    return f"{text} ({where})" if where else text


def lane_by_lane(request: Request, graph: Graph) -> Graph:
    """Let each lane draw what it would draw alone."""
    assert request.lanes is not None
    folded = {*batch_norm_statistics(request), *_paths(request, _COUNT)}
    for slot in graph.outputs:
        if slot.kind in (Kind.BUFFER, Kind.PARAM) and slot.path not in folded:
            raise NotVectorisable(f"{slot.kind} {slot.path} is changed in place")
    if not graph.random:
        return graph
    graph = graph.copy()
    fxgraph = graph.module.graph
    for number, node in enumerate([node for node in fxgraph.nodes if draws(node)]):
        _replace_draw(fxgraph, node, request.lanes.count, number)
    fxgraph.eliminate_dead_code()
    fxgraph.lint()
    graph.module.recompile()
    return graph


def _replace_draw(graph: fx.Graph, node: fx.Node, lanes: int, number: int) -> None:
    drawn = streams.lane_by_lane(node.target, node.args)
    value = node.meta["val"]
    if drawn is None or value.shape[:1] != (lanes,):
        raise NotVectorisable(f"{node.target} cannot draw for each micro-batch by itself")
    like = node.args[0]
    with graph.inserting_before(node):
        if drawn[0] != streams.SHARES:
            kind = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            where = [*value.shape], [*value.stride()]
            like = graph.call_function(aten.empty_strided.default, where, kind)
            like.meta = {**node.meta}
        new = graph.call_function(streams.draw, (like, *drawn, lanes, number))
        new.meta = node.meta
    node.replace_all_uses_with(new)
    graph.erase_node(node)
