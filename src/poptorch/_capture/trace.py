"""Trace a Python function over tensors, and return a pure ATen graph.

The function runs once on fake tensors while autograd records, so that hooks, ``autograd.Function``
and in-place updates mean the same as in torch. ``purity`` then removes mutation.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx

from .._base import log, private
from .._base.source import is_user_file
from .._base.thread_safety import holding, one_at_a_time
from .._ir.graph import lazily
from .._ir.known_results import KnownResults
from .._ir.operators import Operator
from .._ir.tensors import Tensors
from .._ops import annotate, effects
from . import purity, recorded_again
from .recorded_calls import recorded_calls

aten = torch.ops.aten


def fake_mode() -> Any:
    # Control flow operators need an environment for sizes, although all sizes here are plain
    # numbers.
    sizes = private.ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return private.FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)


def fake_tensor(mode: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    (tensor,) = fake_tensors(mode, [(shape, dtype)])
    return tensor


def fake_tensors(
    mode: Any, kinds: Iterable[tuple[Sequence[int], torch.dtype]]
) -> list[torch.Tensor]:
    results = KnownResults.of(mode)
    if results is not None:
        return [results.fresh(*each) for each in kinds]
    with mode:
        return [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in kinds]


@contextlib.contextmanager
def _attention_in_products() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cuda = torch.backends.cuda  # this setting applies to all devices
    before = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(before)


@one_at_a_time()  # estimates lower their updates only when they are asked for
def trace(
    function: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    inputs: Tensors,
    edit: Callable[[fx.Graph], object] | None = None,
    real: bool = False,
    stochastic: bool = False,
    runs: bool = True,
    plain: bool = False,
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Trace a function of flat lists. Also return the constants, which are its last arguments.

    Args:
        function: the function.
        inputs: its inputs.
        edit: may change the recorded graph before mutation is removed from it.
        real: whether tensors have values.
        stochastic: the graph rounds to float16 at random.
        runs: the graph will be run, and not only inspected.
        plain: the function usually only calls operators, as an update of weights does.
    """
    mode = mode_of(inputs)
    if plain:
        with torchs_settings():
            recorded = recorded_calls(function, inputs, mode, _corrected_operators())
        if recorded is not None:
            return purity.pure(recorded, mode, stochastic, runs), []
    without_values = contextlib.nullcontext() if real else mode
    with (
        lazily(),
        fx_traceback.preserve_node_meta(),
        torchs_settings(),
        contextlib.nullcontext() if runs else _attention_in_products(),
        _noting_lines(),
        without_values,
        recorded_again.reusing_recorded_calls(mode),
        holding(_active_mode, mode),
    ):
        recorded = private.traced(function, [list(inputs)], _corrected_operators())
    _remove_failed(recorded.graph)
    if edit is not None:
        edit(recorded.graph)
    annotate.copy_to_backward(recorded.graph)
    constants = _lift_constants(recorded)
    _give_values(recorded.graph, [*inputs, *constants], mode)
    pure = purity.pure(recorded, mode, stochastic, runs)
    effects.chain(pure.graph)
    return pure, constants


def _remove_failed(graph: fx.Graph) -> None:
    """Remove operators that raised an error. The tracer records an operator before it runs, and
    ``forward`` may have caught the error.
    """
    for node in reversed(graph.nodes):
        fails = isinstance(node.target, Operator) and "val" not in node.meta and not node.users
        if fails and node.target._schema.returns:
            graph.erase_node(node)


def _give_values(graph: fx.Graph, inputs: Tensors, mode: Any) -> None:
    """Give all inputs fake tensors of one mode. Most inputs already have one from the tracer."""
    for placeholder, tensor in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if getattr(placeholder.meta.get("val"), "fake_mode", None) is not mode:
            placeholder.meta["val"] = mode.from_tensor(tensor.detach())


def without_data(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "fake_mode") or tensor.is_meta or private.is_batchedtensor(tensor)


def fill_in_values(
    module: fx.GraphModule, inputs: Sequence[tuple[Sequence[int], torch.dtype]]
) -> None:
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = fake_mode()
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fake_tensors(mode, inputs))


def untraced() -> contextlib.AbstractContextManager[None]:
    """Do real work within the block, even while a capture is in progress."""
    outside = private.optional("disable_current_modes") or contextlib.nullcontext
    return outside()


@contextlib.contextmanager
def torchs_settings() -> Iterator[None]:
    # oneDNN's fused LSTM keeps a workspace only while autograd records, which it does not when the
    # graph runs. If our form of the layer does not apply, the layer is divided into its steps.
    (enabled,) = torch.backends.mkldnn.set_flags(_enabled=False)[:1]  # type: ignore[no-untyped-call]
    try:
        with log.without_failures_of_fake_tensors():
            yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=enabled)  # type: ignore[no-untyped-call]


def _corrected_operators() -> dict[Any, Callable[..., Any]]:
    def polygamma_(x: torch.Tensor, n: int) -> torch.Tensor:  # torch cannot make it functional
        return x.copy_(aten.polygamma.default(n, x))

    def multilabel_margin_loss(x: torch.Tensor, labels: torch.Tensor, reduction: int) -> Any:
        if x.dim() > 1:
            return NotImplemented
        loss, is_label = aten.multilabel_margin_loss_forward.default(
            x[None], labels[None], reduction
        )
        return loss.reshape(()), is_label.reshape(labels.shape)  # torch promises shape (1,)

    # Without values, torch leaves out an index without dimensions when it determines the shape of
    # the result.
    def index(x: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
        given = [each for each in indices if each is not None]
        if len(given) < 2 or not any(_is_number(each) for each in given):
            return NotImplemented
        rank = max(each.dim() for each in given)
        rows = [e.reshape([1] * rank) if e is not None and _is_number(e) else e for e in indices]
        return aten.index.Tensor(x, rows) if rank else NotImplemented

    return {
        aten.native_batch_norm.default: private.native_batch_norm_decomposition,
        aten.index.Tensor: index,
        **{each: functools.partial(_at_rows, each) for each in _AT_ROWS},
        aten.polygamma_.default: polygamma_,
        aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    }


# The third argument of these operators contains indices along one dimension. Neither torch's
# compiler nor ``vmap`` supports all of them with an index without dimensions.
_AT_ROWS = (
    aten.index_select.default, aten.index_add.default, aten.index_add_.default,
    aten.index_copy.default, aten.index_copy_.default, aten.index_reduce.default,
    aten.index_reduce_.default, aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor,
)  # fmt: skip


def _at_rows(
    operator: Any, x: torch.Tensor, dim: int, index: torch.Tensor, *rest: Any, **named: Any
) -> Any:
    if index.dim() or not x.dim():
        return NotImplemented
    return operator(x, dim, index.reshape(1), *rest, **named)


def _is_number(index: torch.Tensor) -> bool:
    return not index.dim() and index.dtype not in (torch.bool, torch.uint8)


def mode_of(inputs: Tensors) -> Any:
    of_inputs = (t.fake_mode for t in inputs if hasattr(t, "fake_mode"))
    return next(of_inputs, None) or _active_mode.get() or fake_mode()


# Parts without inputs are traced in the mode of the surrounding code.
_active_mode: ContextVar[Any] = ContextVar("poptorch_fake_mode", default=None)


def _lift_constants(module: fx.GraphModule) -> list[torch.Tensor]:
    reads: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(module, node.target, None), torch.Tensor):
            reads.setdefault(node.target, []).append(node)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    values: list[torch.Tensor] = []
    anchor = placeholders[-1] if placeholders else None
    for target, nodes in reads.items():
        with module.graph.inserting_after(anchor) if anchor else module.graph.inserting_before():
            anchor = module.graph.placeholder(f"constant_{len(values)}")
        for node in nodes:
            node.replace_all_uses_with(anchor)
            module.graph.erase_node(node)
        values.append(getattr(module, target))
    return values


def _noting_lines() -> contextlib.AbstractContextManager[object]:
    """Record lines. Torch's own method inspects about a hundred frames for each node, which is a
    sixth of a capture's time. This one only looks at those that the trace has called.
    """
    outermost = sys._getframe(1)
    thread, of_user = threading.get_ident(), functools.cache(is_user_file)

    @functools.cache
    def text(places: tuple[tuple[str, int], ...]) -> str | None:
        frames = [traceback.FrameSummary(*place, "forward") for place in places]
        return "".join(traceback.format_list(frames)).strip() or None

    def create_node(usual: Callable[..., fx.Node], self: Any, *args: Any, **named: Any) -> fx.Node:
        node = usual(self, *args, **named)
        if not node.stack_trace and threading.get_ident() == thread:
            places, frame = [], sys._getframe(1)
            while frame is not None and frame is not outermost:
                code = frame.f_code
                if code.co_name == "forward" and of_user(code.co_filename):
                    places.append((code.co_filename, frame.f_lineno))
                frame = frame.f_back  # type: ignore[assignment]
            if places:
                node.meta["stack_trace"] = text(tuple(reversed(places)))
        return node

    return private.replacing({"create_node": create_node})


@contextlib.contextmanager
def forgetting_sources() -> Iterator[None]:
    """Drop what was cached within the block, which is 0.1 MB for each wrapped model."""
    loader = private.optional("loader")
    kept: dict[str, str] = {} if loader is None else loader.eval_cache
    before = set(kept)
    try:
        yield
    finally:
        for key in kept.keys() - before:
            del kept[key]
            linecache.cache.pop(key, None)
