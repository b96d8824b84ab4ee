"""Write an operator as Python, with a public name of torch if one computes exactly the same."""

from __future__ import annotations

import ast
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._base import source
from .._base.errors import Error
from .._ir.block_labels import line_of
from .._ir.operators import Operator, name_of
from . import quoting
from .simplify import entry

aten = torch.ops.aten
Text = Callable[[Any], str]  # returns the text of an operand

_INFIX = {
    aten.mul: "*", aten.div: "/", aten.mm: "@", aten.add: "+", aten.sub: "-", aten.eq: "==",
    aten.ne: "!=", aten.lt: "<", aten.le: "<=", aten.gt: ">", aten.ge: ">=",
}  # fmt: skip
_FUNCTIONAL = {aten.gelu, aten.silu, aten.elu, aten.leaky_relu, aten.hardtanh, aten.softplus}
_SPREAD = {aten.view: "reshape", aten._unsafe_view: "reshape", aten.reshape: "reshape",
           aten.permute: "permute", aten.expand: "expand"}  # fmt: skip
# arguments that have no effect if all tensors are on one device
NOISE = {"pin_memory", "device", "layout", "non_blocking"}
_LAST = (1 << 63) - 1  # the end of a slice that has no end
HELPERS = {
    "adam_step", "sgd_step", "draw", "lstm_layer", "lstm_layer_backward", "ctc_losses",
    "grouped_product", "stepwise_layer", "stepwise_layer_backward",
}  # fmt: skip
_IDENTITIES = {"nop", "hint", "after_gradient", "wait", "within"}
# the method, the number of its numeric arguments, and their type
_FILLS: Mapping[Any, tuple[str, int, type]] = {
    "shares": ("bernoulli_", 0, float), "bernoulli": ("bernoulli_", 1, float),
    "uniform": ("uniform_", 2, float), "normal": ("normal_", 2, float),
    "integers": ("random_", 2, int), "exponential": ("exponential_", 1, float),
}  # fmt: skip
# Methods that torch defines itself. functorch.dim, which parts of torch import, adds others to
# torch.Tensor: its "index" takes other arguments than the operator of this name.
_METHODS = frozenset(dir(torch.Tensor.__base__))


def tidy(text: str) -> str:
    """Return an expression without unnecessary brackets, with double quotes."""
    return ast.unparse(ast.parse(text, mode="eval")).replace("'", '"')


def constant(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(constant, value))}]"
    if isinstance(value, str | torch.device):
        return f'"{quoting.checked(str(value))}"'
    return str(value)


def expression(node: fx.Node, text: Text) -> str:
    if node.target is operator.getitem:
        return f"({text(node.args[0])})[{node.args[1]}]"
    target, name = node.target, name_of(node).rpartition(".")[2]
    if name in _IDENTITIES:
        return f"({text(node.args[0])}).clone()"
    if name == "draw":
        like, kind, *numbers = node.args
        fill, count, made = _FILLS[kind]
        more = "".join(f", {made(each)}" for each in numbers[:count])
        return f'draw({text(like)}, generators, "{fill}"{more})'
    if name in HELPERS:
        return f"{name}({', '.join(map(text, node.args))})"
    if not isinstance(target, Operator) or target.namespace != "aten":
        raise refusal(node)
    packet: Any = target.overloadpacket
    return (packet in _SPECIAL and _SPECIAL[packet](node, text)) or _general(node, packet, text)


def refusal(node: fx.Node) -> Error:
    line = line_of(node)
    return Error(
        "An operator cannot be exported as plain PyTorch",
        got=f"{name_of(node)}, which is not an operator of torch",
        where=source.describe(*line) if line is not None else None,
        fix=(
            "remove the operator from forward, or compute the same result with PyTorch's "
            'operators; to see the program in a browser: executor.export("step.html")'
        ),
    )


def _general(node: fx.Node, packet: Any, text: Text) -> str:
    arguments, name = _arguments(node, text), name_of(node).rpartition(".")[2]
    bare = len(arguments) == len(node.args) == 2
    if packet is aten.neg:
        return f"(-({arguments[0]}))"
    if packet is aten.rsub and bare:
        return f"(({arguments[1]}) - ({arguments[0]}))"
    if packet in _INFIX and bare:
        return f"(({arguments[0]}) {_INFIX[packet]} ({arguments[1]}))"
    if packet in _SPREAD and isinstance(node.args[1], list | tuple):
        sizes = ", ".join(map(str, node.args[1])) or "()"
        return f"({arguments[0]}).{_SPREAD[packet]}({sizes})"
    # Indices that skip dimensions: the public form does not accept None for these.
    some = any(isinstance(each, list | tuple) and None in each for each in node.args)
    public = None if some else getattr(torch, name, None)
    schema: Any = node.target._schema  # type: ignore[union-attr]
    is_view = bool(schema.returns) and schema.returns[0].alias_info is not None
    if not some and name in _METHODS and (is_view or public is None) and name[0] != "_":
        return f"({arguments[0]}).{name}({', '.join(arguments[1:])})"
    of_torch = isinstance(public, types.BuiltinFunctionType) and not name.startswith("_")
    if packet in _FUNCTIONAL:
        name = f"F.{name}"
    elif of_torch:
        name = f"torch.{name}"
    else:
        name = str(packet if str(node.target).endswith(".default") else node.target)
    return f"{name}({', '.join(arguments)})"


def _arguments(node: fx.Node, text: Text) -> list[str]:
    """Return the arguments of a call, without those that have no effect."""
    expected: Sequence[Any] = node.target._schema.arguments  # type: ignore[union-attr]
    given = list(node.args)
    while given and _says_nothing(expected[len(given) - 1], given[-1]):
        given.pop()
    by_name = {argument.name: argument for argument in expected}
    named = {
        name: value
        for name, value in node.kwargs.items()
        if name not in NOISE
        and not _says_nothing(by_name[name], value)
        and not (name == "dtype" and _is_usual(node, value))
    }
    return [*map(text, given), *(f"{name}={text(value)}" for name, value in named.items())]


def _says_nothing(argument: Any, value: Any) -> bool:
    if not argument.has_default_value() or isinstance(value, fx.Node):
        return False
    default = argument.default_value
    several = isinstance(value, list | tuple) and isinstance(default, list) and len(default) == 1
    return bool(value == default or (several and list(value) == default * len(value)))


def _is_usual(node: fx.Node, dtype: Any) -> bool:
    """Return whether an operator gives this type by default."""
    like = [each.meta["val"] for each in node.all_input_nodes[:1] if "val" in each.meta]
    if not like:
        return dtype is torch.float32 and node.target is not aten.arange.start_step
    return like[0].dtype is dtype and bool(dtype.is_floating_point)


# Operators whose public form takes other arguments. They return None if the general rule applies.


def _clone(node: fx.Node, text: Text) -> str:
    plain = node.kwargs.get("memory_format") is torch.contiguous_format
    return f"({text(node.args[0])}).{'contiguous' if plain else 'clone'}()"


def _to(node: fx.Node, text: Text) -> str:
    operand, dtype = node.all_input_nodes[0], node.kwargs.get("dtype")
    same = dtype is None or operand.meta["val"].dtype is dtype
    return f"({text(operand)}).{'clone()' if same else f'to({dtype})'}"


def _linear(node: fx.Node, text: Text) -> str | None:
    *bias, x, transposed = node.args
    of_weight = transposed.target is aten.t.default and entry(transposed.args[0])  # type: ignore
    if not of_weight or node.kwargs or (bias and bias[0].meta["val"].dim() != 1):  # type: ignore
        return None
    return f"F.linear({', '.join(map(text, (x, transposed.args[0], *bias)))})"  # type: ignore


def _convolution(node: fx.Node, text: Text) -> str | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    dims = weight.meta["val"].dim() - 2  # type: ignore[union-attr]
    if transposed or x.meta["val"].dim() != dims + 2:  # type: ignore[union-attr]
        return None
    named: Any = {"stride": (stride, 1), "padding": (padding, 0), "dilation": (dilation, 1)}
    named |= {"groups": ([groups], 1)}
    more = [
        f"{name}={values[0] if len(set(values)) == 1 else values}"
        for name, (values, usual) in named.items()
        if any(each != usual for each in values)
    ]
    operands = (x, weight) if bias is None else (x, weight, bias)
    return f"F.conv{dims}d({', '.join([*map(text, operands), *more])})"


def _slice(node: fx.Node, text: Text) -> str:
    given: list[Any] = list(node.args)
    x, dim, start, end, step = given + [0, None, None, 1][len(given) - 1 :]
    dim = dim if dim >= 0 else dim + x.meta["val"].dim()
    first = "" if start in (None, 0) else start
    last = "" if end in (None, _LAST) else end
    return f"({text(x)})[{':, ' * dim}{first}:{last}{'' if step == 1 else f':{step}'}]"


def _embedding(node: fx.Node, text: Text) -> str:  # its other arguments only affect the gradient
    return f"F.embedding({text(node.args[1])}, {text(node.args[0])})"


def _softmax(node: fx.Node, text: Text) -> str | None:
    x, dim, widens = node.args
    return None if widens else f"torch.{name_of(node).rpartition('._')[2]}({text(x)}, {dim})"


def _mse(node: fx.Node, text: Text) -> str:
    x, y, *how = map(text, node.args)
    reduction = {"0": ', reduction="none"', "2": ', reduction="sum"'}.get("".join(how), "")
    return f"F.mse_loss({x}, {y}{reduction})"


def _empty(node: fx.Node, text: Text) -> str | None:
    shape, strides = node.args
    usual = [*torch.empty(shape, device="meta").stride()] == strides  # type: ignore[arg-type]
    more = "".join(f", {each}" for each in _arguments(node, text)[2:])
    return f"torch.empty({shape}{more})" if usual else None


def _filled(node: fx.Node, text: Text) -> str | None:  # its argument only gives the shape
    like, name = text(node.args[0]), name_of(node).rpartition(".")[2].removesuffix("_like")
    plain = like.startswith("torch.empty(") and "dtype" not in like
    return like.replace("torch.empty(", f"torch.{name}(", 1) if plain else None


_SPECIAL: Mapping[Any, Callable[[fx.Node, Text], str | None]] = {
    aten.clone: _clone, aten._to_copy: _to, aten.slice: _slice, aten.mm: _linear,
    aten.addmm: _linear, aten.convolution: _convolution, aten.embedding: _embedding,
    aten._softmax: _softmax, aten._log_softmax.default.overloadpacket: _softmax,
    aten.mse_loss: _mse,
    aten.empty_strided: _empty, aten.ones_like: _filled, aten.zeros_like: _filled,
}  # fmt: skip
