"""Compare a captured micro-batch with what eager PyTorch computes with the user's own module."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from .._base import log, source
from .._base.errors import Error, described
from .._capture import Micro, ModuleAttribute, PythonState, Request
from .._ir import slots
from .._ir.block_labels import label_of, line_of
from .._ir.closeness import Difference, coarsest, difference, movement, share_of
from .._ir.graph import Graph
from .._ir.slots import RETURNED, Kind, Slot
from .._ops.effects import is_control_flow, is_effect
from . import eager_run
from .divergence import GraphSums, Values, first_divergence, sizes
from .eager_draws import Disagreement, EagerDraw, EagerDraws, counted, used
from .replay import replay
from .restored_state import having

_SHOWN = 4
_TRIED = 16  # attributes that are tried one by one to find those that affect the results

DrawsOf = Callable[[Graph, EagerDraws, int], list[EagerDraw]]
Written = tuple[torch.Tensor, torch.Tensor]  # a tensor, and its new value


@dataclass(frozen=True)
class Mismatch:
    """What a check found: the parts of a message."""

    got: str
    where: str | None
    layer: str | None = None  # the path of the first layer that differs
    at_padding: bool = False  # whether eager PyTorch only writes zeros at padded positions


class Skipped(Exception):  # noqa: N818 (nothing went wrong)
    """The check cannot be made. The message says why."""


def _assignment(root: nn.Module, changed: ModuleAttribute) -> str | None:
    """Return the line of the module's class that assigns to an attribute outside of
    ``__init__``.
    """
    kind = type(root.get_submodule(changed.path))
    try:
        lines, first = inspect.getsourcelines(kind.forward)
    except (OSError, TypeError):
        return None
    name = re.compile(rf"\.{re.escape(changed.name)}\b")
    at = next((at for at, line in enumerate(lines) if name.search(line)), 0)
    return source.describe(inspect.getsourcefile(kind.forward) or "", first + at)


def _other_values(kept: torch.Tensor) -> torch.Tensor:
    """Return other values, if there are numbers among them."""
    value = kept.detach()
    return value * 1.5 + 0.25 if value.is_floating_point() or value.is_complex() else value


def _why_not(request: Request, micro: Micro) -> str | None:
    nodes = list(micro.graph.module.graph.nodes)
    if request.sample is None:
        return "there is no batch yet"
    if request.grouped:
        return "groups of replicas have separate weights"
    if micro.exchanging:
        return "replicas exchange tensors in forward"
    if request.precision.stochastic_rounding:
        return "it uses stochastic rounding"
    if request.precision.strided_group_norm:
        return "the options select other groups of channels than PyTorch uses"
    if any(is_effect(node) and "host" in str(node.target) for node in nodes):
        return "it calls host functions"
    if any(map(is_control_flow, nodes)):
        return "it contains loops or branches, which eager PyTorch would compile"
    return None


class Check:
    """The comparison of one micro-batch. Its methods raise ``Skipped`` if it cannot be made.

    Args:
        before: the attributes of the model before it was captured.
    """

    def __init__(self, request: Request, micro: Micro, before: PythonState) -> None:
        self.request, self.micro, self.before = request, micro, before
        self.loss = self._loss()
        self.rounding = coarsest(micro.graph)
        self.attributes = before  # as forward left them in eager PyTorch
        self.written: Sequence[Written] = ()  # the tensors that it changed in place

    def micro_batch(self) -> Mismatch | None:
        """Compare outputs, loss, gradients, new state and draws."""
        reason = _why_not(self.request, self.micro)
        if reason:
            raise Skipped(reason)
        try:
            found = self.differences()
        except Disagreement as disagreement:
            node = disagreement.node
            return Mismatch(str(disagreement), _line([] if node is None else [node]))
        return (self._zeros_at_padding(found) or _finding(found, self)) if found else None

    def _zeros_at_padding(self, found: Sequence[Difference]) -> Mismatch | None:
        """Return a finding if results differ only because eager PyTorch writes zeros at padded
        positions, which only ``nn.TransformerEncoder`` does.
        """
        parts = self.request.module.named_modules()
        encoders = [path for path, part in parts if isinstance(part, nn.TransformerEncoder)]
        if self.request.training or not encoders:
            return None
        with _without_nested_tensors():
            if self.differences():
                return None
        names = ", ".join(f"'{path}'" for path in encoders if path)
        why = (
            f"without gradients, nn.TransformerEncoder {names}".rstrip()
            + " writes zeros in eager PyTorch where src_key_padding_mask is True; the program "
            "computes values there, as torch.compile does"
        )
        line = _line(list(self.micro.graph.module.graph.nodes))
        return Mismatch("\n".join([*_shown(found), why]), line, at_padding=True)

    def next_run(self) -> Mismatch | None:
        """Return a finding if ``forward`` changed attributes that affect what it computes next.

        If the first run changed attributes, or the values of tensors that are not registered, it
        runs once more from there. With the same inputs and weights it might compute the same from
        values that it stored, such as a copy of a weight. The second run therefore uses other
        values for those.
        """
        written = {id(tensor) for tensor, _ in self.written}
        changed = self.before.changed(self.attributes)
        holding = self.before.holding(lambda each: id(each) in written)
        changed += [place for place in holding if place not in changed]
        if not (changed or written) or self._agrees_after(changed, self.written):
            return None
        candidates = self.attributes.by_object(changed)
        if 1 < len(candidates) <= _TRIED:
            candidates = [each for each in candidates if self._decides(each)] or candidates
        if not candidates:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor, _ in self.written)
            definition = source.definition_line(type(self.request.module).forward)
            return Mismatch(f"tensors outside of the model, of shape {shapes}", definition)
        first = [places[0] for places in candidates]
        names = ", ".join(".".join(filter(None, each)) for each in first[:_SHOWN])
        if len(first) > _SHOWN:
            names += f" and {len(first) - _SHOWN} more"
        return Mismatch(names, _assignment(self.request.module, first[0]))

    def _decides(self, places: Sequence[ModuleAttribute]) -> bool:
        """Return whether a run differs or fails if only some attributes have changed."""
        try:
            return not self._agrees_after(places, self._written_in(places))
        except Skipped as skipped:
            log.engine.debug("The second run of forward: %s", skipped)
            return True

    def _written_in(self, places: Sequence[ModuleAttribute]) -> list[Written]:
        """Return the tensors in some attributes that the first run changed in place."""
        return [
            (tensor, value)
            for tensor, value in self.written
            if set(self.before.holding(lambda each, own=tensor: each is own)) & {*places}  # type: ignore[misc]
        ]

    def _agrees_after(self, changed: Sequence[ModuleAttribute], written: Sequence[Written]) -> bool:
        """Return whether a run from some of the attributes that the first run left agrees."""
        kept = [place for place in self.micro.kept if place in changed]
        left = self.attributes.with_tensors(kept, _other_values)
        # Weights and buffers have their first values, as the inputs of the graph have.
        start = self.before.with_changes(changed, left).without_registered()
        constants = self.micro.constants
        own = {id(tensor): tensor.detach().clone() for tensor, _ in written}
        micro = replace(
            self.micro, constants={key: own.get(id(t), t) for key, t in constants.items()}
        )
        try:
            with having([(tensor, self._next(tensor, value)) for tensor, value in written]):
                return not Check(self.request, micro, start).differences(used)
        except Disagreement as disagreement:
            log.engine.debug("The second run of forward: %s", disagreement)
            return False

    def _next(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return values that a tensor might have before the second run."""
        constant = next((each for each in self.micro.written if each.tensor is tensor), None)
        if constant is None or not constant.varies:
            return value
        other = _other_values(value)
        return other if constant.moves else torch.where(value == tensor, value, other)

    def _loss(self) -> eager_run.Loss | None:
        if not self.request.training:
            return None
        seed = torch.ones(())
        for factor in self.request.loss_scaling:
            seed = seed * (1.0 if isinstance(factor, Slot) else factor)
        outputs = (slot.index for slot in self.micro.graph.outputs if slot.kind is Kind.LOSS)
        return eager_run.Loss(next(outputs, None), self.micro.marked, seed)

    def run_in_default_modes(
        self, listener: eager_run.Listener | None = None
    ) -> eager_run.EagerResults:
        wide = any(tied.tensor.dtype == torch.float64 for tied in self.request.tensors.values())
        batch = [tensor.clone() for tensor in self.first_batch(narrow=not wide)]
        try:
            constants = self.micro.constants.values()
            return eager_run.run(self.request, self.before, batch, self.loss, listener, constants)
        except Exception as error:
            raise Skipped(f"eager PyTorch raises {described(error)}") from error

    def first_batch(self, narrow: bool) -> list[torch.Tensor]:
        """Return the first batch. A model with 64-bit weights gets its inputs unchanged."""
        assert self.request.sample is not None
        (batch,) = self.request.sample(1)
        pairs = zip(batch, self.request.batch, strict=True)
        return [tensor.to(slot.dtype) if narrow else tensor for tensor, slot in pairs]

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """Return the inputs of the graph by key: the host tensors themselves if the types match."""
        batch = self.first_batch(narrow=True)
        values: dict[str, torch.Tensor] = {slots.REPLICA.key: torch.zeros(())}
        values |= {slot.key: torch.ones(()) for slot in self.request.inputs if not slot.shape}
        values |= self.micro.constants
        for slot, tensor in zip(self.request.batch, batch, strict=True):
            values[slot.key] = tensor.contiguous()
        for slot in self.request.state:
            # Operators were recorded for the layout of the copies on the device.
            host = self.request.tensors[slot.path].tensor.detach()
            values[slot.key] = host.to(slot.dtype).contiguous()
        return values

    def differences(self, draws: DrawsOf = counted) -> list[Difference]:
        """Compare one run; ``draws`` returns which of its random values belong to the draws of the
        graph.
        """
        eager = self.run_in_default_modes()
        self.attributes, self.written = eager.attributes, eager.written
        drawn = draws(self.micro.graph, eager.drawn, self.micro.drawn)
        values = self.inputs()
        try:
            found = replay(self.micro.graph, values, drawn)
        except RuntimeError as error:
            if isinstance(error, Error):
                raise
            # The run names the operator and the user's line.
            raise Skipped(f"an operator of the program failed: {error}") from error
        first = self._compared(eager, found, values, None)
        if not first:
            return []
        near = replay(self.micro.graph, values, drawn, nudge=True)
        return self._compared(eager, found, values, near)

    def _compared(
        self,
        eager: eager_run.EagerResults,
        found: Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
        near: Mapping[str, torch.Tensor] | None,
    ) -> list[Difference]:
        share = share_of(self.rounding)
        differences = []
        for name, key, expected in self._pairs(eager, found):
            own = found.get(key, values.get(key))
            own = torch.zeros_like(expected) if own is None else own
            moved = 0.0 if near is None or key not in near else movement(own, near[key])
            differences.append(difference(name, own, expected, share, moved))
        return [each for each in differences if each is not None]

    def _pairs(
        self, eager: eager_run.EagerResults, found: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield a name, the key of a slot, and the value of eager PyTorch for it."""
        given = {slot.path: slot for slot in self.request.state}
        for slot in self.micro.graph.outputs:
            if slot.kind in RETURNED:
                name = "the loss" if slot.kind is Kind.LOSS else f"output {slot.index}"
                yield name, slot.key, eager.outputs[slot.index]
        for path, gradient in eager.gradients.items():
            key = slots.gradient(given[path]).key
            if gradient is not None or key in found:
                expected = torch.zeros_like(found[key]) if gradient is None else gradient
                yield f"the gradient of '{path}'", key, expected
        written = {slot.path for slot in self.request.state if slot.key in found}
        for path in sorted({*eager.state, *written}):
            tied = self.request.tensors[path]
            kind = "parameter" if tied.is_parameter else "buffer"
            expected = eager.state.get(path, tied.tensor.detach())
            yield f"the new value of {kind} '{path}'", given[path].key, expected


@contextlib.contextmanager
def _without_nested_tensors() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _shown(found: Sequence[Difference]) -> list[str]:
    lines = [str(each) for each in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"and {len(found) - _SHOWN} more")
    return lines


def _finding(found: Sequence[Difference], comparison: Check) -> Mismatch:
    lines = _shown(found)
    parting = _divergence(comparison)
    nodes = list(comparison.micro.graph.module.graph.nodes)
    if parting is None:
        return Mismatch("\n".join(lines), _line(nodes))
    path, in_backward = parting
    module = comparison.request.module.get_submodule(path)
    what = "the gradient of its result" if in_backward else "its result"
    lines.append(f"the first layer that differs is '{path}' ({type(module).__name__}), in {what}")
    inside = [node for node in nodes if f"{label_of(node).module}.".startswith(f"{path}.")]
    definition = source.definition_line(type(module).forward)
    return Mismatch("\n".join(lines), _line(inside) or definition or _line(nodes), path or None)


def _divergence(comparison: Check) -> tuple[str, bool] | None:
    values = Values()
    listener = eager_run.Listener(values.output, values.gradient)
    try:
        eager = comparison.run_in_default_modes(listener)
        found = GraphSums(sizes(values))
        graph = comparison.micro.graph
        drawn = counted(graph, eager.drawn, comparison.micro.drawn)
        replay(graph, comparison.inputs(), drawn, seen=found.see)
    except (Skipped, Disagreement) as error:
        log.engine.debug("The first layer that differs could not be determined: %s", error)
        return None
    return first_divergence(values, found, comparison.rounding)


def _line(nodes: Sequence[fx.Node]) -> str | None:
    lines: Callable[[fx.Node], tuple[str, int] | None] = line_of
    line = next(filter(None, map(lines, nodes)), None)
    return None if line is None else source.describe(*line)
