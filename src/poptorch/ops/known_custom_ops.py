"""Provide operators that public programs ship as compiled plug-ins. They are found by name, without
a library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .._base import source
from .._ops import exchanges
from .._ops.context import Replicas, listener
from .._ops.identities import with_surrogate_gradient
from . import operand_checks

DOMAIN, VERSION = "ai.graphcore", 1
_MANTISSA, _BIAS = 23, 127  # of the float32 format


@dataclass(frozen=True, eq=False)
class _KnownCall:
    name: str
    inputs: Sequence[torch.Tensor]
    attributes: Mapping[str, Any]
    examples: Sequence[torch.Tensor]

    def floats(self, count: int) -> Sequence[torch.Tensor]:
        if len(self.inputs) != count or not all(x.is_floating_point() for x in self.inputs):
            self.refuse_inputs(f"pass {count} floating-point tensor{'s' * (count > 1)}")
        return self.inputs

    def exchanged(self) -> torch.Tensor:
        if len(self.inputs) != 1 or self.inputs[0].dtype == torch.bool:
            self.refuse_inputs("pass one tensor that is not of type bool")
        return self.inputs[0]

    def integer(self, key: str, low: int, high: float = math.inf, default: Any = None) -> int:
        value = self.attributes.get(key, default)
        if not isinstance(value, int) or not low <= value <= high:
            span = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
            self.refuse(key, value, f"an integer {span}")
        return value

    def choice(self, key: str, *among: str, default: Any = None) -> str:
        value = self.attributes.get(key, default)
        if value not in among:
            self.refuse(key, value, " or ".join(map(repr, among)))
        return str(value)

    def list(self, key: str, *kinds: type, default: Any = None) -> Any:
        value = self.attributes.get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, kinds) for item in value):
            self.refuse(key, value, f"a list of {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    def places(self, key: str, block: int, size: int) -> Sequence[int]:
        places = self.list(key, int)
        for place in places:
            if place % block or not 0 <= place < size:
                self.refuse(key, place, f"multiples of {block} from 0 to {size - block}")
        return [place // block for place in places]

    def refuse(self, key: str, value: Any, remedy: str) -> NoReturn:
        given = repr(value)
        operand_checks.refuse(
            f"Custom operator {self.name} cannot take its attribute '{key}'",
            given if len(given) < 80 else f"{given[:80]}...",
            f"pass {remedy}",
        )

    def refuse_inputs(self, fix: str) -> NoReturn:
        got = operand_checks.describe(operand_checks.kinds_of(self.inputs))
        operand_checks.refuse(f"Custom operator {self.name} cannot take its inputs", got, fix)


def call(name: str, *given: Any) -> torch.Tensor:
    """Compute an operator from inputs, attributes and example outputs."""
    return _OPERATORS[name](_KnownCall(name, *given))


def versions(name: str, domain: str) -> list[int]:
    return [VERSION] if domain == DOMAIN and name in _OPERATORS else []


def _proxy(call: _KnownCall) -> torch.Tensor:
    value, proxy = call.floats(2)
    if value.shape != proxy.shape:
        call.refuse_inputs("pass a value and a proxy of the same shape")
    return with_surrogate_gradient(value, proxy, lambda gradient: gradient.to(proxy.dtype))


def _distance(norm: float) -> Callable[[_KnownCall], torch.Tensor]:
    """Return the norms of all ``a[i] - b[j]``, computed in float32: (M, K), (N, K) to (M, N)."""

    def operator(call: _KnownCall) -> torch.Tensor:
        a, b = call.floats(2)
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or a.dtype != b.dtype:
            call.refuse_inputs("pass two matrices of shapes (M, K) and (N, K) and the same dtype")
        # Matrix products would be faster, but would lose digits of small distances.
        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(a.float(), b.float(), norm, compute_mode=exact).to(a.dtype)

    return operator


def _quant(call: _KnownCall) -> torch.Tensor:
    (x,) = call.floats(1)
    exponent = call.integer("exponent_bits", 2, 5)
    mantissa = call.integer("mantissa_bits", 0, 10)
    stochastic = call.choice("rounding", "nearest", "stochastic") == "stochastic"
    in_forward = call.integer("fwd", 0, 1)
    backward = call.choice("bwd", "quantise", "ste", "stop")

    def quantised(value: torch.Tensor) -> torch.Tensor:
        return _quantised(value, exponent, mantissa, stochastic)

    value = quantised(x.detach()) if in_forward else x
    if backward == "stop":
        return value.detach()
    return with_surrogate_gradient(value, x, quantised if backward == "quantise" else lambda g: g)


def _quantised(x: torch.Tensor, exponent: int, mantissa: int, stochastic: bool) -> torch.Tensor:
    """Round to a smaller IEEE 754 format, whose largest exponent is not used for numbers. The dtype
    of ``x`` does not change.
    """
    bias = 2 ** (exponent - 1) - 1
    largest = 2.0**bias * (2 - 2.0**-mantissa)
    wide = x.float().clamp(-largest, largest)
    own = (wide.view(torch.int32) >> _MANTISSA & 255) - _BIAS
    step = own.clamp(min=1 - bias) - mantissa
    # A power of two, made from its bits. It is exact, and therefore the division and the product
    # are, too.
    unit = (step + _BIAS << _MANTISSA).view(torch.float32)
    count = wide / unit
    whole = torch.floor(count + torch.rand_like(count)) if stochastic else count.round()
    return (whole * unit).to(x.dtype)


def _sparse(call: _KnownCall) -> torch.Tensor:
    (dense,) = call.floats(1)
    left = call.choice("mode", "sparse_dense", "dense_sparse") == "sparse_dense"
    n_rows, n_cols, block = (call.integer(key, 1) for key in ("n_rows", "n_cols", "block_size"))
    if n_rows % block or n_cols % block:
        call.refuse("block_size", block, f"a divisor of n_rows={n_rows} and n_cols={n_cols}")
    rows, cols = call.places("rows", block, n_rows), call.places("cols", block, n_cols)
    values = call.list("values", int, float)
    if len(rows) != len(cols):
        call.refuse("cols", f"{len(cols)} blocks", f"{len(rows)} blocks, the length of 'rows'")
    if len(values) != len(rows) * block**2:
        expected = f"{len(rows)} blocks of {block**2} numbers"
        call.refuse("values", f"{len(values)} numbers", expected)
    at, size = (-2, n_cols) if left else (-1, n_rows)
    if dense.dim() < 2 or dense.shape[at] != size:
        call.refuse_inputs(f"pass a matrix whose dimension {at} is {size}")
    blocks = torch.tensor(values, dtype=dense.dtype).view(-1, block, block)
    if left:
        return _block_product(blocks, rows, cols, n_rows, dense)
    return _block_product(blocks.mT, cols, rows, n_cols, dense.mT).mT


def _block_product(
    blocks: torch.Tensor, to: Sequence[int], source: Sequence[int], size: int, dense: torch.Tensor
) -> torch.Tensor:
    read, written = torch.tensor(source, dtype=torch.int64), torch.tensor(to, dtype=torch.int64)
    edge = blocks.shape[-1]
    *batch, length, width = dense.shape
    stacked = dense.reshape(*batch, length // edge, edge, width)
    parts = blocks @ stacked.index_select(-3, read)
    shape = (*batch, size // edge, edge, width)
    return torch.zeros(shape, dtype=dense.dtype).index_add(-3, written, parts).flatten(-3, -2)


def _gather(call: _KnownCall) -> torch.Tensor:
    x, count = call.exchanged(), _replicas().total
    shapes: list[tuple[int, ...]] = [(count, *x.shape), (count * x.numel(),)]
    if x.dim():
        shapes.append((count * x.shape[0], *x.shape[1:]))
    remedy = tuple(call.examples[0].shape) if call.examples else None
    if len(call.examples) != 1 or remedy not in shapes:
        operand_checks.refuse(
            f"Custom operator {call.name} cannot return its example outputs",
            f"{[list(e.shape) for e in call.examples]}, input {list(x.shape)}, {count} replicas",
            f"pass one example output of shape {list(shapes[0])} or {list(shapes[1])}: "
            f"example_outputs=[torch.zeros({list(shapes[0])})]",
        )
    return _exchange(call, "all_gather").reshape(remedy)


def _reduce(call: _KnownCall) -> torch.Tensor:
    call.exchanged()
    call.choice("op", "sum", default="sum")
    in_backward = bool(call.integer("backwards", 0, 1, default=0))
    count, key = _replicas().total, "__collectiveReplicaGrouping"
    grouping = call.list(key, int, default=[count, 1, count])
    if len(grouping) != 3 or grouping[2] != count or min(grouping) < 1:
        call.refuse(key, grouping, f"[size of a group, stride, {count}], for {count} replicas")
    size, stride, _ = grouping
    if count % (size * stride):
        call.refuse(key, grouping, f"a size and a stride whose product divides {count} replicas")
    return _exchange(call, "all_reduce", size, stride, in_backward)


def _all_to_all(call: _KnownCall) -> torch.Tensor:
    x, count = call.exchanged(), _replicas().total
    if not x.dim() or x.shape[0] % count:
        call.refuse_inputs(
            f"pass a tensor whose dimension 0 is a multiple of {count}, the number of replicas"
        )
    return _exchange(call, "all_to_all")


_OPERATORS: dict[str, Callable[[_KnownCall], torch.Tensor]] = {
    "AutogradProxy": _proxy,
    "L1Distance": _distance(1.0),
    "L2Distance": _distance(2.0),
    "SimulatedQuant": _quant,
    "StaticSparseMatmul": _sparse,
    "ReplicatedAllGather": _gather,
    "ReplicatedAllReduceTP": _reduce,
    "AllToAll": _all_to_all,
    "ReplicatedAllToAll": _all_to_all,
}


def _replicas() -> Replicas:
    capture = listener()
    return Replicas() if capture is None else capture.together()


def _exchange(call: _KnownCall, kind: str, *settings: int) -> torch.Tensor:
    x, name, replicas = call.inputs[0], call.name, _replicas()
    if replicas.count == 1:
        return exchanges.alone(x, kind, settings, replicas.processes)
    where = source.calling_line() or ""
    return exchanges.exchange(  # type: ignore[no-any-return]
        x, kind, settings, replicas.count, replicas.processes, False, name, where
    )
