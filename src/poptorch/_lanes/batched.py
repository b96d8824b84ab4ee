"""What an operator computes over lanes: its rule, or what ``vmap`` makes of this one operator.

Lanes are the first dimension of a value that differs between them; other values are shared.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._base import private, source
from .._ir import blocks
from .._ir.operators import Operator
from .._ops import exchanges
from .._ops.traceable import lstm_layer, lstm_layer_backward
from .recorder import Writes

aten = torch.ops.aten
_batch_norm = aten._native_batch_norm_legit_functional.default


class NotVectorisable(Exception):  # noqa: N818 (not a failure: micro-batches run one by one)
    """Which node keeps micro-batches from running side by side, and why."""

    named = False  # the text says which node it is


def named(node: fx.Node, why: str) -> NotVectorisable:
    line = blocks.line_of(node)
    where = f" ({source.describe(*line)})" if line else ""
    error = NotVectorisable(f"{node.target}: {why}{where}")
    error.named = True
    return error


class Call:
    """A node, with the values of its arguments over lanes."""

    def __init__(
        self,
        node: fx.Node,
        values: Mapping[fx.Node, Any],
        varies: Callable[[fx.Node], bool],
        count: int,
    ) -> None:
        self.node, self.count = node, count
        self.value: Callable[[fx.Node], Any] = values.get
        self.inputs = [each for each in values if varies(each)]
        own = set(self.inputs)
        self.args: tuple[Any, ...] = fx.map_arg(node.args, values.get)
        self.kwargs: dict[str, Any] = fx.map_arg(node.kwargs, values.get)
        self.varying = tuple(not own.isdisjoint(nodes_in(arg)) for arg in node.args)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result in one lane."""
        return tuple(self.node.meta["val"].shape)

    def get(self, at: int, default: Any = None) -> Any:
        return self.args[at] if at < len(self.args) else default

    def shared(self, *at: int) -> bool:
        return not any(self.varying[each] for each in at if each < len(self.args))

    def lanes(self, at: int) -> torch.Tensor:
        value: torch.Tensor = self.args[at]
        return value if self.varying[at] else value.expand(self.count, *value.shape)

    def rows(self, at: int, dim: int = 0) -> Any:
        """The argument with its lanes side by side in one of its dimensions."""
        if self.get(at) is None:
            return None
        value = self.lanes(at).movedim(0, dim)
        return value.reshape(*value.shape[:dim], -1, *value.shape[dim + 2 :])

    def unflatten(self, value: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Undo ``rows``."""
        shape = value.shape
        return value.reshape(*shape[:dim], self.count, -1, *shape[dim + 1 :]).movedim(dim, 0)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the node's operator; arguments that are not given are the node's."""
        rest = self.args[len(args) :]
        return self.node.target(*args, *rest, **{**self.kwargs, **kwargs})  # type: ignore[operator]


Rule = Callable[[Call], Any]


def nodes_in(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return found


def batched(call: Call) -> Any:
    """Return the results of a node in which something varies, each with lanes in front."""
    target = call.node.target
    if target is operator.getitem:
        return call.args[0][call.args[1]]
    if not isinstance(target, Operator):
        raise NotVectorisable("loops and branches run one micro-batch at a time")
    rule = RULES.get(target)
    result = NotImplemented if rule is None else rule(call)
    if result is NotImplemented and torch.Tag.pointwise in target.tags:
        result = _pointwise(call)
    return vectorised(call) if result is NotImplemented else result


def vectorised(call: Call) -> Any:
    several: list[Any] = []

    def one(*own: torch.Tensor) -> Any:
        given = dict(zip(call.inputs, own, strict=True))

        def value(node: fx.Node) -> Any:
            return given[node] if node in given else call.value(node)

        args, kwargs = (fx.map_arg(each, value) for each in (call.node.args, call.node.kwargs))
        result = call.node.target(*args, **kwargs)  # type: ignore[operator, arg-type]
        several[:] = result if isinstance(result, list | tuple) else [result]
        return [part for part in several if part is not None]

    try:
        results = iter(_over_lanes(one, [call.value(node) for node in call.inputs]))
    except Exception as error:
        text = next(iter(str(error).splitlines()), type(error).__name__)
        raise NotVectorisable(text) from error
    found = [None if part is None else next(results) for part in several]
    return found if isinstance(call.node.meta["val"], list | tuple) else found[0]


def _over_lanes(function: Callable[..., Any], values: list[torch.Tensor]) -> Any:
    vectorising: Any = torch.func.vmap(function)
    with _without_unrolling():
        try:
            return vectorising(*values)
        except Writes:
            return torch.func.functionalize(vectorising, remove="mutations")(*values)


@contextlib.contextmanager
def _without_unrolling() -> Iterator[None]:
    """Where torch has no rule it would call an operator for each lane by itself."""
    enabled = private.optional("is_vmap_fallback_enabled")
    enable = private.optional("set_vmap_fallback_enabled")
    if enabled is None or enable is None:
        yield
        return
    before = enabled()
    enable(False)
    try:
        yield
    finally:
        enable(before)


def _pointwise(call: Call) -> Any:
    rank = len(call.shape)
    tensors = [each for each in call.args if isinstance(each, torch.Tensor)]
    varying = [each for each, own in zip(call.args, call.varying, strict=True) if own]
    if any(each.dim() == 1 for each in varying) and len({each.dtype for each in tensors}) > 1:
        return NotImplemented  # numbers without dimensions promote to other types
    args = (
        with_rank(arg, rank, [call.count]) if own else arg
        for arg, own in zip(call.args, call.varying, strict=True)
    )
    return call.node.target(*args, **call.kwargs)  # type: ignore[operator]


def with_rank(value: torch.Tensor, rank: int, lead: Sequence[int]) -> torch.Tensor:
    """Put dimensions of one after the leading ones, until there are so many after these."""
    shape = value.shape[len(lead) :]
    missing = rank - len(shape)
    return value.reshape(*lead, *[1] * missing, *shape) if missing > 0 else value


def _shaped(call: Call) -> Any:
    return call.args[0].reshape(call.count, *call.shape)


def _expanded(call: Call) -> Any:
    return with_rank(call.args[0], len(call.shape), [call.count]).expand(call.count, *call.shape)


def _copied(call: Call) -> Any:
    layout = call.kwargs.get("memory_format")
    plain = layout in (None, torch.contiguous_format, torch.preserve_format)
    return call.run(memory_format=layout if plain else torch.preserve_format)


def _checked(call: Call) -> Any:
    return call.run()


def _along(*places: int) -> Rule:
    """The rule of operators that take dimensions at some places: they are one further behind."""

    def rule(call: Call) -> Any:
        tensors = [each for each in call.args if isinstance(each, torch.Tensor)]
        ranks = {each.dim() - 1 for each in tensors}
        if len(ranks) > 1 or 0 in ranks or sum(call.varying) < len(tensors):
            return NotImplemented
        args, rank = list(call.args), ranks.pop()
        for at in places:
            if at >= len(args):
                args.append(0)  # the first dimension, where none is given
            if args[at] is None or args[at] == []:
                args[at] = list(range(rank))
            args[at] = _behind(args[at])
        return call.node.target(*args, **call.kwargs)  # type: ignore[operator]

    return rule


def _behind(dims: Any) -> Any:
    return [_behind(dim) for dim in dims] if isinstance(dims, list | tuple) else dims + (dims >= 0)


def _permuted(call: Call) -> Any:
    value, dims = call.args
    rank = value.dim() - 1
    return value.permute(0, *(dim % rank + 1 for dim in dims))


def _transposed(call: Call) -> Any:
    return call.args[0].transpose(1, 2) if len(call.shape) == 2 else call.args[0]


def _mm(call: Call) -> Any:
    if call.shared(0):
        return NotImplemented
    if call.shared(1):
        return call.unflatten(torch.mm(call.rows(0), call.args[1]))
    return torch.bmm(call.args[0], call.args[1])


def _addmm(call: Call) -> Any:
    bias, _, b = call.args
    if call.kwargs or not call.shared(0, 2):
        return NotImplemented
    return call.unflatten(torch.mm(call.rows(1), b)) + bias


def _convolution(call: Call) -> Any:
    if not call.shared(1, 2):
        return NotImplemented
    return call.unflatten(call.run(call.rows(0)))


def convolution_backward(call: Call) -> Any:
    """Gradients of the weights are then sums over lanes."""
    inputs, *of_weights = call.run(call.rows(0), call.rows(1))
    return [inputs if inputs is None else call.unflatten(inputs), *of_weights]


def _layer_norm(call: Call) -> Any:
    return call.run() if call.shared(2, 3) else NotImplemented


def layer_norm_backward(call: Call) -> Any:
    """The same: only the last dimensions are normalized."""
    inputs, *of_weights = call.run(*map(call.lanes, (0, 1)), call.args[2], *map(call.lanes, (3, 4)))
    return [inputs, *of_weights]


def _group_norm(call: Call) -> Any:
    if not call.shared(1, 2):
        return NotImplemented
    _, weight, bias, rows, *rest = call.args
    return [*map(call.unflatten, call.run(call.rows(0), weight, bias, rows * call.count, *rest))]


def group_norm_backward(call: Call) -> Any:
    weight, rows = call.args[4:6]
    given = [call.rows(at) for at in range(4)]
    inputs, *of_weights = call.run(*given, weight, rows * call.count)
    return [inputs if inputs is None else call.unflatten(inputs), *of_weights]


def _lookup(call: Call) -> Any:
    return call.run() if call.shared(0) else NotImplemented


# Channels of all lanes side by side are normalized each by itself.


def _repeated(call: Call, at: int) -> Any:
    return None if call.get(at) is None else call.lanes(at).reshape(-1)


def _batch_norm_in_training(call: Call) -> Any:
    """The last two results are this batch's own statistics, not the running ones."""
    if not call.args[5]:
        return NotImplemented
    x, eps = call.rows(0, 1), call.args[7]
    dtype = call.node.args[3].meta["val"].dtype  # type: ignore[union-attr]
    none = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
    y, *statistics = _batch_norm(
        x, _repeated(call, 1), _repeated(call, 2), none, none, True, 1.0, eps
    )
    return [call.unflatten(y, 1), *map(call.unflatten, statistics)]


def _batch_norm_without_statistics(call: Call) -> Any:
    x = call.rows(0, 1)
    y, *statistics = call.run(x, _repeated(call, 1), _repeated(call, 2))
    return [call.unflatten(y, 1), *map(call.unflatten, statistics)]


def _batch_norm_with_running(call: Call) -> Any:
    if not call.shared(1, 2, 3, 4):
        own = (_repeated(call, at) for at in range(1, 5))
        y, *nothing = call.run(call.rows(0, 1), *own)
        return [call.unflatten(y, 1), *nothing]
    y, *nothing = call.run(call.rows(0))
    return [call.unflatten(y), *nothing]


def _batch_norm_backward(call: Call) -> Any:
    given = [call.rows(0, 1), call.rows(1, 1), *(_repeated(call, at) for at in range(2, 5))]
    own_statistics = (_repeated(call, at) if call.args[7] else call.args[at] for at in (5, 6))
    inputs, *of_weights = call.run(*given, *own_statistics)
    own = [None if each is None else call.unflatten(each) for each in of_weights]
    return [None if inputs is None else call.unflatten(inputs, 1), *own]


def batch_norm_backward_with_running(call: Call) -> Any:
    inputs, *of_weights = call.run(call.rows(0), call.rows(1))
    return [inputs if inputs is None else call.unflatten(inputs), *of_weights]


def _attention(call: Call) -> Any:
    mask = _mask_in_rows(call)
    if call.get(3):
        raise NotVectorisable("it cannot drop out for each micro-batch by itself")
    if mask is NotImplemented:
        return NotImplemented
    out, weights = call.run(*map(call.rows, range(3)), attn_mask=mask)
    return [call.unflatten(out), call.unflatten(weights)]


def _attention_backward(call: Call) -> Any:
    mask = _mask_in_rows(call)
    if mask is NotImplemented:
        return NotImplemented
    return [*map(call.unflatten, call.run(*map(call.rows, range(6)), attn_mask=mask))]


def _mask_in_rows(call: Call) -> Any:
    mask = call.kwargs.get("attn_mask")
    if mask is None:
        return None
    own = call.node.kwargs["attn_mask"] in call.inputs
    size = call.args[1].shape[1] if call.varying[1] else call.args[1].shape[0]
    if not own:
        return mask if mask.dim() == 2 or mask.shape[0] == 1 else NotImplemented
    if mask.dim() == 3:
        mask = mask[:, None, None]
    mask = mask.expand(call.count, size, *mask.shape[2:])
    return mask.reshape(-1, *mask.shape[2:])


def _lstm(call: Call) -> Any:
    """Lanes that share their weights are more rows of the batch; the workspace is of all."""
    if not call.shared(1, 2, 3, 4):
        return NotImplemented
    weights = call.args[1:5]
    *results, workspace = call.run(call.rows(0, 1), *weights, call.rows(5, 1), call.rows(6, 1))
    return [*(call.unflatten(each, 1) for each in results), workspace]


def _lstm_weights_apart(call: Call) -> Any:
    if not call.shared(4, 5, 6, 7):
        return NotImplemented
    raise NotVectorisable("it adds the gradients of its weights up over micro-batches")


def lstm_backward(call: Call) -> Any:
    """The gradients of the weights are then sums over lanes."""
    rows = [call.rows(at, 1) for at in (0, 1, 2, 3, 8, 9, 10, 11, 12)]
    found = call.run(*rows[:4], *call.args[4:8], *rows[4:])
    return [each if at in (1, 2, 3) else call.unflatten(each, 1) for at, each in enumerate(found)]


def _exchanged(call: Call) -> Any:
    return exchanges.over_lanes(call.lanes(0), *call.args[1:])


RULES: dict[Any, Rule] = {
    aten.view.default: _shaped, aten._unsafe_view.default: _shaped, aten.reshape.default: _shaped,
    aten.unsqueeze.default: _shaped, aten.squeeze.default: _shaped, aten.squeeze.dim: _shaped,
    aten.squeeze.dims: _shaped, aten.expand.default: _expanded, aten.clone.default: _copied,
    aten._to_copy.default: _copied, aten.permute.default: _permuted, aten.t.default: _transposed,
    aten.transpose.int: _along(1, 2), aten.slice.Tensor: _along(1), aten.select.int: _along(1),
    aten.sum.dim_IntList: _along(1), aten.mean.dim: _along(1), aten.amax.default: _along(1),
    aten.cumsum.default: _along(1), aten._softmax.default: _along(1),
    aten._log_softmax.default: _along(1), aten._softmax_backward_data.default: _along(2),
    aten._log_softmax_backward_data.default: _along(2),
    aten.mm.default: _mm, aten.addmm.default: _addmm, aten.convolution.default: _convolution,
    aten.native_layer_norm.default: _layer_norm, aten.native_group_norm.default: _group_norm,
    aten.embedding.default: _lookup, aten._linalg_check_errors.default: _checked,
    aten._native_batch_norm_legit_functional.default: _batch_norm_in_training,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_statistics,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_with_running,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    exchanges.exchange: _exchanged, lstm_layer: _lstm, lstm_layer_backward: _lstm_weights_apart,
}  # fmt: skip
