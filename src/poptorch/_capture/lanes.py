"""Lanes: several micro-batches side by side, as a vmap axis inside the traced step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._base import private, source, trees
from .._base.errors import Error
from .._base.threads import only_here
from .._ir.loops import Lanes
from .._ops.context import Replicas
from .capture_context import CaptureContext
from .forward import Forward, Request, run_forward
from .swap import BATCH_NORMS, Tied
from .trace import vectorising

_STATISTICS = ("running_mean", "running_var")
_COUNT = "num_batches_tracked"


class NotVectorisable(Exception):  # noqa: N818 (not a failure: the loop is taken instead)
    """The reason why a module cannot run as lanes."""


def run_lanes(
    request: Request,
    context: CaptureContext,
    batch: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
) -> Forward:
    """Run forward on all lanes at once."""
    lanes = request.lanes
    assert lanes is not None
    if request.grouped or request.anchors:
        raise NotVectorisable("weights per replica and anchored tensors need single micro-batches")
    statistics = {path: leaves[path] for path in batch_norm_statistics(request)}
    counts = {path: leaves[path] for path in _paths(request, _COUNT)}
    shared = {path: value for path, value in leaves.items() if path not in statistics}
    of_lane: dict[str, Any] = {}

    def one(rows: list[torch.Tensor], own: dict[str, torch.Tensor]) -> Any:
        context.replicas = _replicas(request, [*rows, *own.values()][0])
        done = run_forward(request, context, rows, {**shared, **own})
        if done.hosts:
            raise NotVectorisable("forward returns a tensor that it did not compute")
        of_lane["structure"], of_lane["leaves"] = done.structure, done.leaves
        of_lane["names"] = done.names
        of_lane["loss"] = _place(done)
        of_lane["tensors"] = len(done.tensors)
        extra = () if done.loss is None or of_lane["loss"] is not None else (done.loss,)
        return [*done.tensors, *extra], {path: done.leaves[path] for path in own}

    norms = {request.tensors[path].places[0][0] for path in statistics}
    calls = dict.fromkeys(norms, 0)
    batched = {path: _spread(value, request, path) for path, value in statistics.items()}
    for path in counts:
        shared[path] = shared[path].clone()
    try:
        with _counting(calls), vectorising():
            outputs, after = torch.func.vmap(one, randomness="different")(list(batch), batched)
    except (NotVectorisable, KeyboardInterrupt):
        raise
    except private.Gone as gone:
        private.go_on_without(gone)
        raise NotVectorisable(gone.args[0]) from gone
    except Exception as error:  # whatever it is, the loop will tell whether it is the user's
        raise NotVectorisable(reason_of(error)) from error
    final = dict(leaves)
    for path, value in after.items():
        owner = request.tensors[path].places[0][0]
        kept = (1.0 - _momentum(request.tensors[path])) ** calls[owner]
        final[path] = _fold(leaves[path], value, lanes, kept)
    for path, before in counts.items():
        step = of_lane["leaves"][path] - before
        final[path] = before + step * lanes.steps
    loss = None
    if request.training:
        loss = outputs[-1] if of_lane["loss"] is None else outputs[of_lane["loss"]]
    structure: trees.Structure = of_lane["structure"]
    tensors = list(outputs[: of_lane["tensors"]])
    return Forward(tensors, structure, loss, final, of_lane["names"], {})


def _replicas(request: Request, lane: torch.Tensor) -> Replicas:
    assert request.lanes is not None
    return Replicas(request.lanes.replicas, lane, processes=request.processes)


def batch_norm_statistics(request: Request) -> list[str]:
    """Paths of the running statistics that forward will update."""
    return [path for name in _STATISTICS for path in _paths(request, name)]


def folded(request: Request) -> set[str]:
    """Paths of the buffers whose changes in lanes are put together exactly."""
    return {*batch_norm_statistics(request), *_paths(request, _COUNT)}


def _paths(request: Request, name: str) -> list[str]:
    return [
        path
        for path, tied in request.tensors.items()
        if all(_is_tracked(owner) and name == own for owner, _, own in tied.places)
    ]


def _is_tracked(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORMS) and module.training and module.track_running_stats


def _momentum(tied: Tied) -> float:
    momentum = {owner.momentum for owner, _, _ in tied.places}
    if len(tied.places) > 1 or None in momentum:
        raise NotVectorisable("a batch norm averages over all batches, or shares its statistics")
    return float(momentum.pop())  # type: ignore[arg-type]


def _spread(value: torch.Tensor, request: Request, path: str) -> torch.Tensor:
    """Give every lane its copy of a statistic."""
    lanes = request.lanes
    assert lanes is not None
    _momentum(request.tensors[path])
    if lanes.replicas == 1:
        return value.expand(lanes.count, *value.shape).clone()
    spread = value.expand(lanes.steps, *value.shape).clone()
    return spread.reshape(lanes.count, *value.shape[1:])


def _fold(before: torch.Tensor, after: torch.Tensor, lanes: Lanes, kept: float) -> torch.Tensor:
    """Return the statistic after the lanes' updates one after another.

    Each lane computed ``kept * before + x_lane``; in sequence the result is
    ``kept^n * before + sum_l kept^(n - 1 - l) * x_l``.
    """
    steps = after.reshape(lanes.steps, *before.shape)
    ages = torch.arange(lanes.steps - 1, -1, -1, dtype=before.dtype)
    shares = (steps - kept * before) * (kept**ages).reshape(lanes.steps, *[1] * before.dim())
    return shares.sum(0) + kept**lanes.steps * before


def _place(done: Forward) -> int | None:
    """Which of the returned tensors is the loss."""
    places = (i for i, tensor in enumerate(done.tensors) if tensor is done.loss)
    return next(places, None)


@contextlib.contextmanager
def _counting(calls: dict[nn.Module, int]) -> Iterator[None]:
    """Count how often forward calls each module: so often its statistics are updated."""

    def count(module: nn.Module, _: Any) -> None:
        calls[module] += 1

    handles = [module.register_forward_pre_hook(only_here(count)) for module in calls]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def reason_of(error: Exception) -> str:
    """What could not be vectorised, and where the user wrote it."""
    cause = (error.__cause__ or error) if isinstance(error, Error) else error
    text = next(iter(str(cause).splitlines()), type(error).__name__)
    where = source.raising_line(cause) or source.raising_line(error)
    return f"{text} ({where})" if where else text
