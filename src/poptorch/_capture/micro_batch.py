"""Capture one micro-batch of the user's module as a graph: forward, loss, backward, buffer updates.
Refuses weights that overlap in memory.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .._base import log, nested_values, source
from .._base.errors import Error
from .._base.thread_safety import holding
from .._ir import block_labels, slots
from .._ir.block_labels import Label, Visit
from .._ir.conditions import Conditions
from .._ir.graph import Graph, graph_module, remove_dead_nodes
from .._ir.operators import storage_root, written_by
from .._ir.slots import Kind, Slot, narrowed
from .._ir.symbolic import LONGEST_CONDITIONS, NotSymbolic, Symbols, settled, sizes_of
from .._ops import annotate
from .._ops.context import Replicas
from . import recorded_hints, trace
from .capture_context import CaptureContext
from .failures import explained
from .forward import GRADIENT, ForwardResult, Request, TensorNames, run_forward
from .host_draws import HostDraws
from .inner_gradients import NeedsGradient
from .kept_in_model import kept_of_changes, refuse_new_layers
from .kept_outside_model import TensorsKeptOutside
from .python_state import ModuleAttribute, PythonState
from .recorded import storage_of, values_read
from .recorded_draws import Draws, Unsettled
from .replaced_tensors import ModelTensor
from .sized_calls import SizedCalls, sized_calls
from .symbolic_sizes import as_numbers, refuse_kept, refuse_returned
from .value_reads import BranchOnData, ValueReads
from .written_constants import WrittenConstant, written_constants

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Decision:
    path: str
    line: str | None
    value: torch.Tensor
    shapes: bool = False  # whether it decided a shape, and not a branch


@dataclass(frozen=True, eq=False)
class Micro:
    """The graph from state, constants and batch to loss, outputs, gradients and new state."""

    graph: Graph
    constants: Mapping[str, torch.Tensor]  # tensors that the module uses in other ways, by slot key
    outputs: nested_values.Structure  # the structure that forward returned, without tensors
    # returned tensors that were not computed, by index among all
    host_outputs: Mapping[int, torch.Tensor]
    names: tuple[str, ...]  # names of the tensors that can be anchored
    overlaps: Mapping[str, str]  # by slot key, the mode of transfers that overlap with computation
    # visits of blocks, in order; the labels of nodes contain indices of this list
    visits: tuple[Visit, ...] = (Visit(),)
    exchanging: bool = False  # replicas exchange tensors, so they must run side by side
    decided: tuple[Decision, ...] = ()  # state whose values decided a Python branch
    drawn: int = 0  # number of random tensors that forward and backward drew
    marked: int | None = None  # index of the loss in ``Capture.losses``, if it is one of them
    kept: tuple[
        ModuleAttribute, ...
    ] = ()  # attributes whose values were computed from what changes
    lost: bool = False  # forward stored tensors without values in attributes, which were restored
    written: tuple[WrittenConstant, ...] = ()  # constants that forward changes in place
    conditions: Conditions | None = None  # conditions on symbolic sizes, if there are such sizes
    read: tuple[torch.Tensor, ...] = ()  # other constants that decided branches or shapes
    sized: tuple[bool, ...] = ()  # which calls were replaced, because sizes may be symbolic


@functools.cache
def report_narrowed(dtype: torch.dtype) -> None:
    if narrowed(dtype) is not dtype:
        log.python.info(
            "%s is not supported natively: results of this type come back as %s "
            "(options.Precision.narrow64Bit(False) keeps them)",
            dtype,
            narrowed(dtype),
        )


class _Recording:
    done: ForwardResult
    blocks: annotate.Recorder

    def __init__(
        self, request: Request, reads: ValueReads, draws: Draws, outside: TensorsKeptOutside
    ) -> None:
        self.request = request
        self.slots: list[Slot] = []
        self.overlaps: dict[str, str] = {}
        self.kept: tuple[ModuleAttribute, ...] = ()
        self.written: tuple[WrittenConstant, ...] = ()
        self.context = CaptureContext(
            request.training,
            request.differentiates,
            stochastic=request.precision.stochastic_rounding,
            reads=reads,
            draws=draws,
            outside=outside,
            replicas=Replicas(request.replicas, request.processes),
        )

    def lower_hints(self, graph: fx.Graph) -> None:
        inputs = zip(graph.find_nodes(op="placeholder"), self.request.inputs, strict=True)
        state = {slot.path for slot in self.request.state} - self.request.trained
        fixed = {node for node, slot in inputs if slot in self.request.state and slot.path in state}
        fixed -= {storage_root(each) for node in graph.nodes for each in written_by(node)}
        self.written = tuple(written_constants(graph, fixed))
        self.overlaps = recorded_hints.lower(
            graph, self.request.inputs, self.slots, self.context.groups
        )

    def __call__(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        failed = True
        try:
            results = self._recorded(flat)
            failed = False
            return results
        finally:
            self.context.outside.find_values(failed)
            self.context.constants.restore()

    def _recorded(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        request = self.request
        values = dict(zip((slot.key for slot in request.inputs), flat, strict=True))
        leaves = {
            slot.path: values[slot.key].detach().requires_grad_(_needs_gradient(request, slot.path))
            for slot in request.state
        }
        batch = [values[slot.key] for slot in request.batch]
        grads = request.training or request.differentiates
        grad = torch.enable_grad() if grads else torch.no_grad()
        recording, drawing = annotate.recording(request.module), self.context.draws.noticed()
        with recording as self.blocks, grad, drawing, HostDraws(request.module).noticed():
            seen = self._seen(leaves, values)
            _register_hooks(request, seen)
            self.done = done = run_forward(request, self.context, batch, seen)
            results = self._outputs(done)
            if done.loss is not None:
                self.blocks.set(Label(backward=True))
                done.names.add("loss", done.loss)
                results += self._gradients(done.loss, leaves, values)
            for tensor in batch:
                done.names.add("input", tensor)
            for slot in request.state:
                done.names.add(slot.path, leaves[slot.path])
            results += self._anchors(done.names)
            after = done.leaves() | {path: leaves[path] for path in request.grouped}
            self.slots += [*request.state, *request.batch]
            self.kept = tuple(kept_of_changes(request, after))
            results += [
                leaves[path] if after[path] is leaves[path] else after[path].detach()
                for path in (slot.path for slot in request.state)
            ]
        return results + batch

    def _seen(
        self, leaves: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        seen = dict(leaves)
        with torch.enable_grad():
            for path, of_replica in self.request.grouped.items():
                replica = values[slots.REPLICA.key].to(torch.int64).reshape(1)
                group = torch.tensor(of_replica, dtype=torch.int64).index_select(0, replica)
                seen[path] = leaves[path].index_select(0, group).squeeze(0)
        return seen

    def _outputs(self, done: ForwardResult) -> list[torch.Tensor]:
        results = []
        for index, tensor in enumerate(done.tensors):
            if index in done.hosts:
                warnings.warn(
                    f"Output expected to be on the IPU: {done.structure.paths[index]} was not "
                    "computed by the model and is returned as it is",
                )
                continue
            result = tensor.detach()
            if self.request.precision.narrow_64bit:
                report_narrowed(result.dtype)
                if result.is_floating_point():  # integers are narrowed and checked elsewhere
                    result = result.to(narrowed(result.dtype))
            self.slots.append(slots.result(index, result, tensor is done.loss))
            results.append(result)
        return results

    def _gradients(
        self,
        loss: torch.Tensor,
        leaves: Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        trained = [slot for slot in self.request.state if leaves[slot.path].requires_grad]
        if not trained or not loss.requires_grad:
            return []
        annotate.follow_backward(loss)
        seed = torch.ones_like(loss)
        for scaling in self.request.loss_scaling:
            factor = values[scaling.key].to(loss.dtype) if isinstance(scaling, Slot) else scaling
            if not isinstance(factor, float) or factor != 1.0:
                seed = seed * factor
        if any(isinstance(s, Slot) and s.kind is Kind.OPTSTATE for s in self.request.loss_scaling):
            self.done.names.add("finalLossScale", seed.reshape(-1)[0])
        gradients = []
        differentiated = [leaves[slot.path] for slot in trained]
        inputs = self.request.inputs_text
        with explained(self.request.module, inputs, backward=True), self.done.in_backward():
            found = torch.autograd.grad(loss, differentiated, seed, allow_unused=True)
        found = self.context.held.traced(found)
        for slot, outer in zip(trained, found, strict=True):
            # The gradient that backward() in forward computed, without the scale of the loss.
            inner = leaves[slot.path].grad
            scaled = None if inner is None else inner * seed.reshape(()).to(inner.dtype)
            gradient = scaled if outer is None else outer if scaled is None else outer + scaled
            if gradient is not None:
                # Updates read complex numbers as pairs, which a lazy conjugate is not.
                dense = gradient.to_dense() if gradient.is_sparse else gradient.resolve_conj()
                self.slots.append(slots.gradient(slot, dense.dtype))
                self.done.names.add(f"{GRADIENT}{slot.path}", dense)
                gradients.append(dense)
        return gradients

    def _anchors(self, names: TensorNames) -> list[torch.Tensor]:
        results = []
        for short, long in self.request.anchors:
            tensor = names.find(long)
            if tensor is not None:
                result = tensor.detach()
                self.slots.append(slots.anchor(short, tuple(result.shape), result.dtype))
                results.append(result)
        return results


def _needs_gradient(request: Request, path: str) -> bool:
    """Return whether a parameter requires a gradient. In inference, forward sees the flags as in
    eager torch.
    """
    if request.training:
        return path in request.trained
    return request.tensors[path].tensor.requires_grad


def capture(request: Request, before: PythonState | None = None) -> Micro:
    """Capture one micro-batch; ``before``: the attributes of the model, if they are known.

    Changes that forward makes to attributes stay, unless it fails or leaves tensors without values.
    """
    if request.training and torch.is_inference_mode_enabled():
        raise Error(
            (
                "A training program cannot be compiled under torch.inference_mode, which "
                "disables gradients"
            ),
            fix="call the model outside of torch.inference_mode",
        )
    before = PythonState([request.module, request.users]) if before is None else before
    kept = _StoredValues(before)
    done = False
    try:
        micro = _settled(request, kept)
        refuse_new_layers(request)
        lost = _leaves_no_values(request, micro, before)
        done = not lost
        return replace(micro, lost=lost)
    finally:
        if not done:
            before.restore()
        kept.outside.give_values()


def _leaves_no_values(request: Request, micro: Micro, before: PythonState) -> bool:
    """Return whether forward stored tensors without values in attributes."""
    if micro.conditions is not None:
        refuse_kept(request.module)
    return before.lost_values(before.now())


@dataclass(frozen=True, eq=False)
class _StoredValues:
    """What user code stores during a capture, in the model and elsewhere."""

    before: PythonState
    outside: TensorsKeptOutside = field(default_factory=TensorsKeptOutside)

    def restore(self) -> None:
        self.before.restore()
        self.outside.give_values()


def _settled(request: Request, kept: _StoredValues) -> Micro:
    try:
        return _differentiated(request, None, kept)
    except Unsettled as unsettled:
        kept.restore()
        return _differentiated(request, unsettled, kept)


def _differentiated(request: Request, earlier: Unsettled | None, kept: _StoredValues) -> Micro:
    try:
        return _converted(request, earlier, kept)
    except NeedsGradient:
        kept.restore()
        return _converted(replace(request, differentiates=True), earlier, kept)


def _converted(request: Request, earlier: Unsettled | None, kept: _StoredValues) -> Micro:
    try:
        return _captured(request, earlier, kept)
    except TypeError:
        if not any(slot.symbols for slot in request.batch):
            raise
        kept.restore()  # torch takes Python's own float and int as types, and nothing like them
        return _captured(request, earlier, kept, converting=False)


def _captured(
    request: Request, earlier: Unsettled | None, kept: _StoredValues, converting: bool = True
) -> Micro:
    attributes = (value for part in request.module.modules() for value in vars(part).values())
    users = [value for value in attributes if isinstance(value, torch.Generator)]
    symbols = _symbols(request)
    inputs = _without_values(request) if symbols is None else [*map(symbols.tensor, request.inputs)]
    try:
        reads = ValueReads(state=constant_state(request))
        draws = Draws(users, earlier)
        plain = contextlib.nullcontext()
        with plain if symbols is None else as_numbers(request.module, converting):
            micro = _capture(request, inputs, reads, draws, kept.outside, symbols)
        if reads.relied.keys().isdisjoint(_changed_state(request, micro)):
            return _with_decisions(request, reads, micro)
    except BranchOnData:
        if symbols is not None:
            raise NotSymbolic("forward branches on the values of tensors") from None
    kept.restore()
    reads = ValueReads(real=True, state=constant_state(request))
    with torch.random.fork_rng(devices=[]):
        draws = Draws(users, earlier)
        micro = _capture(request, real_inputs(request), reads, draws, kept.outside)
    reads.warn()
    return _with_decisions(request, reads, micro)


def _changed_state(request: Request, micro: Micro) -> set[int]:
    written = {slot.key for slot in micro.graph.outputs}
    return {at for at, slot in enumerate(request.state) if slot.key in written}


def _with_decisions(request: Request, reads: ValueReads, micro: Micro) -> Micro:
    """Add the state whose values decided branches or shapes."""
    reads.refuse_shapes(_changed_state(request, micro))
    shaping = ((at, line, True) for at, (_, line) in reads.shaping.items())
    decided = []
    for at, line, shapes in (*((at, line, False) for at, line in reads.relied.items()), *shaping):
        path = request.state[at].path
        value = request.tensors[path].tensor.detach().clone()
        decided.append(Decision(path, line, value, shapes))
    return replace(micro, decided=tuple(decided))


def _symbols(request: Request) -> Symbols | None:
    """Return symbols for the sizes that the request leaves open, if it does."""
    sizes = sizes_of(request.batch, (slot.shape for slot in request.batch))
    assert sizes is not None
    return Symbols(sizes, longest=LONGEST_CONDITIONS) if sizes else None


def _without_values(request: Request) -> list[torch.Tensor]:
    mode = trace.fake_mode()
    return trace.fake_tensors(mode, ((slot.shape, slot.dtype) for slot in request.inputs))


def constant_state(request: Request) -> dict[int, torch.Tensor]:
    """Return the state that only the user changes, as far as is known."""
    held = ((at, slot, request.tensors[slot.path].tensor) for at, slot in enumerate(request.state))
    return {
        at: tensor.detach().to(slot.dtype)
        for at, slot, tensor in held
        if slot.path not in request.trained
        and slot.path not in request.grouped
        and tensor.shape == slot.shape
        and not trace.without_data(tensor)
    }


def real_inputs(request: Request) -> list[torch.Tensor]:
    assert request.examples is not None, (
        "forward branches on tensor values, which do not exist while the model is captured"
    )
    state = [request.tensors[s.path].tensor.detach().to(s.dtype, copy=True) for s in request.state]
    batch = [tensor.detach().clone() for tensor in request.examples()]
    rest = request.inputs[len(state) + len(batch) :]
    return [*state, *batch, *(torch.ones(slot.shape, dtype=slot.dtype) for slot in rest)]


def _without_unchanged(graph: Graph) -> Graph:
    given = {slot.key: node for node, slot in graph.arguments.items()}
    kept = [(slot, node) for slot, node in graph.results if given.get(slot.key) is not node]
    fxgraph = graph.module.graph
    fxgraph.output_node().args = (tuple(node for _, node in kept),)
    remove_dead_nodes(fxgraph)
    inputs, outputs = [], tuple(slot for slot, _ in kept)
    written = {slot.key for slot in outputs}
    for node, slot in graph.arguments.items():
        if node.users or slot.kind is Kind.BATCH or slot.key in written:
            inputs.append(slot)
        else:
            fxgraph.erase_node(node)
    fxgraph.lint()
    return Graph(graph.name, graph_module(graph.module, fxgraph), tuple(inputs), outputs)


def _capture(
    request: Request,
    inputs: list[torch.Tensor],
    reads: ValueReads,
    draws: Draws,
    outside: TensorsKeptOutside,
    symbols: Symbols | None = None,
) -> Micro:
    recording = _Recording(request, reads, draws, outside)
    stochastic = request.precision.stochastic_rounding and not request.priced
    replaces = symbols is not None or request.sized
    calls = SizedCalls(request.sized) if replaces else None
    read: dict[int, torch.Tensor] = {}
    with holding(sized_calls, calls), holding(values_read, read):
        module, constants = trace.trace(
            recording, inputs, recording.lower_hints, reads.real, stochastic, not request.priced
        )
    tied = request.tensors
    trained = {path: tied[path].tensor for path in sorted(request.trained)}
    constant_slots = tuple(slots.constant(index, value) for index, value in enumerate(constants))
    graph = Graph("micro", module, (*request.inputs, *constant_slots), tuple(recording.slots))
    graph = _without_unchanged(graph)
    conditions = None
    if symbols is not None:
        refuse_returned(recording.done.structure)
        graph, conditions = settled(graph, symbols)
    held = {slot.key: value for slot, value in zip(constant_slots, constants, strict=True)}
    _refuse_views(graph, held, trained | {path: tied[path].tensor for path in _changed(graph)})
    _refuse_overlaps(tied, graph)
    _refuse_mixed(graph.module.graph)
    done = recording.done
    return Micro(
        graph,
        held,
        done.structure,
        {at: tensor.detach() for at, tensor in done.hosts.items()},
        tuple(done.names.tensors),
        recording.overlaps,
        tuple(recording.blocks.visits),
        recording.context.exchanging,
        drawn=recording.context.draws.count,
        kept=recording.kept,
        written=recording.written,
        marked=next(
            (at for at, each in enumerate(recording.context.losses) if each.tensor is done.loss),
            None,
        ),
        conditions=conditions,
        sized=() if calls is None else tuple(calls.found),
        read=tuple(read.values()),
    )


def hooks_of(parameter: torch.Tensor) -> tuple[Callable[..., Any], ...]:
    both = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return tuple(hook for hooks in both for hook in (hooks or {}).values())


def _register_hooks(request: Request, leaves: Mapping[str, torch.Tensor]) -> None:
    for path in sorted(request.trained & leaves.keys()):
        parameter = request.tensors[path].tensor
        if parameter._post_accumulate_grad_hooks:
            raise Error(
                "A hook that runs after gradient accumulation cannot be compiled",
                got=f"register_post_accumulate_grad_hook on '{path}': a compiled program does not "
                "set .grad, so a hook could not read it",
                fix=(
                    (
                        "use a hook that changes the gradient of each micro-batch: "
                        "parameter.register_hook(function)"
                    ),
                    "or remove the hook: call remove() on what registering the hook returned",
                ),
            )
        if parameter.requires_grad and _has_hooks_where_it_accumulates(parameter):
            raise Error(
                "A hook on the node that accumulates a gradient cannot be compiled",
                got=f"register_hook or register_prehook on the node of '{path}': "
                "a compiled program has no such node",
                fix=(
                    "use a hook that changes the gradient of each micro-batch: "
                    "parameter.register_hook(function)"
                ),
            )
        for hook in list((parameter._backward_hooks or {}).values()):
            if "register_multi_grad_hook.<locals>" in getattr(hook, "__qualname__", ""):
                raise Error(
                    "A hook on the gradients of several parameters cannot be compiled",
                    got=f"register_multi_grad_hook on '{path}'",
                    fix=("register a hook for each parameter: parameter.register_hook(function)"),
                )
            leaves[path].register_hook(hook)  # type: ignore[no-untyped-call]


def _has_hooks_where_it_accumulates(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's accumulation node has hooks. They are in a dict that torch
    passes to the handle of a new hook.
    """
    with trace.untraced(), torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        handles = node.register_hook(lambda *_: None), node.register_prehook(lambda *_: None)
        counts = [len(handle.hooks_dict_ref() or ()) for handle in handles]
        for handle in handles:
            handle.remove()
    return max(counts) > 1


_OPERANDS = {
    aten.mm.default: 2, aten.mv.default: 2, aten.dot.default: 2,
    aten.addmm.default: 3, aten.addmv.default: 3,
}  # fmt: skip


def _refuse_mixed(graph: fx.Graph) -> None:
    for node in graph.nodes:
        count = _OPERANDS.get(node.target, 0)
        values = [arg.meta["val"] for arg in node.args[:count] if isinstance(arg, fx.Node)]
        if len({value.dtype for value in values}) > 1:
            line = block_labels.line_of(node)
            shown = " and ".join(f"{value.dtype} {list(value.shape)}" for value in values)
            raise Error(
                "The operands of a matrix product must have the same type",
                got=f"{shown} in {node.target}",
                where=source.describe(*line) if line else None,
                fix=(
                    "convert the input in forward: x.to(weight.dtype)",
                    "or pass inputs that have the type of the model's weights",
                ),
            )


def _refuse_overlaps(tensors: Mapping[str, ModelTensor], graph: Graph) -> None:
    """Refuse weights in overlapping memory. Weights in the same memory are updated one after
    another if all are trained.
    """
    with_gradient = {slot.path for slot in graph.gradients}
    for path, other in _overlaps(tensors) if with_gradient else ():
        gradients = with_gradient & {path, other}
        one, two = (_region(tensors[each].tensor) for each in (path, other))
        if gradients and (len(gradients) < 2 or one != two):
            raise Error(
                "A trained weight shares memory with another tensor",
                got=(
                    f"'{path}' and '{other}': on several chips, updates of one would not "
                    "reach the other"
                ),
                fix=("make them one parameter: b.weight = a.weight instead of b.weight.data = ..."),
            )
    changed = _changed(graph)
    for path, other in _overlaps(tensors) if changed else ():
        written = next((each for each in (path, other) if each in changed), None)
        if written is not None and {path, other} - with_gradient:
            raise Error(
                "forward changes a tensor that shares memory with another one",
                got=(
                    f"'{path}' and '{other}': in a program each of them has its own memory, "
                    "so changes of one would not reach the other"
                ),
                where=changed[written],
                fix=(
                    "register only one of them, and create the other in forward: part = "
                    "self.whole[:2]"
                ),
            )


def _changed(graph: Graph) -> dict[str, str | None]:
    """Return the paths of weights and buffers that ``forward`` changes, each with a line."""
    return {
        slot.path: None if (line := block_labels.line_of(node)) is None else source.describe(*line)
        for slot, node in graph.results
        if slot.kind in (Kind.PARAM, Kind.BUFFER)
    }


def _overlaps(tensors: Mapping[str, ModelTensor]) -> Iterator[tuple[str, str]]:
    held = {path: tied.tensor for path, tied in tensors.items() if tied.tensor.numel()}
    paths = [path for path in held if not trace.without_data(held[path])]
    paths.sort(key=lambda path: held[path].data_ptr())
    for at, path in enumerate(paths):
        strides = zip(held[path].shape, held[path].stride(), strict=True)
        reach = 1 + sum((length - 1) * stride for length, stride in strides)
        end = held[path].data_ptr() + reach * held[path].element_size()
        for other in paths[at + 1 :]:
            if held[other].data_ptr() >= end:
                break
            if _share_elements(held[path], held[other]):
                yield path, other


def _share_elements(one: torch.Tensor, two: torch.Tensor) -> bool:
    if _region(one) == _region(two) or one.element_size() != two.element_size():
        return True
    return bool(torch.isin(_places(one), _places(two)).any())


def _places(tensor: torch.Tensor) -> torch.Tensor:
    places = torch.tensor([tensor.data_ptr()])
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = torch.arange(length) * stride * tensor.element_size()
        places = (places[:, None] + steps).reshape(-1)
    return places


def _region(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _refuse_views(
    graph: Graph, constants: Mapping[str, torch.Tensor], moving: Mapping[str, torch.Tensor]
) -> None:
    paths = {storage_of(tensor): path for path, tensor in moving.items() if tensor.numel()}
    for node, slot in graph.arguments.items():
        constant = constants.get(slot.key)
        if constant is None or not constant.numel() or storage_of(constant) not in paths:
            continue
        line = next(filter(None, map(block_labels.line_of, node.users)), None)
        raise Error(
            "forward uses a view of a weight or buffer that was made outside of it",
            got=(
                f"a tensor of shape {tuple(constant.shape)} that shares memory with "
                f"'{paths[storage_of(constant)]}': the compiled program would use its current "
                "values as constants and ignore later changes"
            ),
            where=source.describe(*line) if line else None,
            fix="create the view in forward, from the parameter or buffer",
        )
