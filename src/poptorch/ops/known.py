"""Operators that public programs bring as compiled plug-ins: found by name, without a library.

Source: the page "Custom operators" of this repository.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .._base.errors import Error
from .._ops.context import Replicas, listener
from .._ops.identities import with_surrogate_gradient
from . import collectives
from .check import describe, kinds_of
from .collectives import Collective

DOMAIN, VERSION = "ai.graphcore", 1
Tensors = Sequence[torch.Tensor]
Attributes = Mapping[str, Any]
Operator = Callable[[str, Tensors, Attributes, Tensors], torch.Tensor]


def find(name: str, domain: str, version: int) -> Operator | None:
    """Return the operator, a function of name, inputs, attributes and examples; None if unknown."""
    return _OPERATORS.get(name) if (domain, version) == (DOMAIN, VERSION) else None


def versions(name: str, domain: str) -> list[int]:
    """Versions that an operator is known in."""
    return [VERSION] if domain == DOMAIN and name in _OPERATORS else []


def _proxy(name: str, inputs: Tensors, attributes: Attributes, examples: Tensors) -> torch.Tensor:
    value, proxy = _inputs(name, inputs, 2)
    if value.shape != proxy.shape:
        _refuse_shapes(name, inputs, "pass a value and a proxy of one shape")
    return autograd_proxy(value, proxy)


def _distance(norm: float) -> Operator:
    def operator(
        name: str, inputs: Tensors, attributes: Attributes, examples: Tensors
    ) -> torch.Tensor:
        a, b = _inputs(name, inputs, 2)
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or a.dtype != b.dtype:
            _refuse_shapes(name, inputs, "pass matrices M x K and N x K of one type")
        return distances(a, b, norm)

    return operator


def _quant(name: str, inputs: Tensors, attributes: Attributes, examples: Tensors) -> torch.Tensor:
    (x,) = _inputs(name, inputs, 1)
    exponent = _integer(name, attributes, "exponent_bits", 2, 5)
    mantissa = _integer(name, attributes, "mantissa_bits", 0, 10)
    rounding = _choice(name, attributes, "rounding", ("nearest", "stochastic"))
    in_forward = bool(_integer(name, attributes, "fwd", 0, 1))
    backward = _choice(name, attributes, "bwd", ("quantise", "ste", "stop"))
    form = Format(exponent, mantissa, rounding == "stochastic")
    return simulated_quantisation(x, form, in_forward, backward)


def _sparse(name: str, inputs: Tensors, attributes: Attributes, examples: Tensors) -> torch.Tensor:
    (dense,) = _inputs(name, inputs, 1)
    mode = _choice(name, attributes, "mode", ("sparse_dense", "dense_sparse"))
    sizes = [_integer(name, attributes, key, 1) for key in ("n_rows", "n_cols", "block_size")]
    n_rows, n_cols, block = sizes
    if n_rows % block or n_cols % block:
        _refuse(name, "block_size", block, f"a divisor of n_rows={n_rows} and n_cols={n_cols}")
    rows = _places(name, attributes, "rows", block, n_rows)
    cols = _places(name, attributes, "cols", block, n_cols)
    values = _list(name, attributes, "values", (int, float))
    if len(rows) != len(cols):
        _refuse(name, "cols", f"{len(cols)} blocks", f"as many as rows has, {len(rows)}")
    if len(values) != len(rows) * block**2:
        _refuse(name, "values", f"{len(values)} numbers", f"{len(rows)} blocks of {block**2}")
    matrix = BlockSparse((n_rows, n_cols), block, rows, cols, values)
    at, size = (-2, n_cols) if mode == "sparse_dense" else (-1, n_rows)
    if dense.dim() < 2 or dense.shape[at] != size:
        _refuse_shapes(name, inputs, f"pass a matrix whose dimension {at} is {size}")
    return matrix.times(dense) if mode == "sparse_dense" else matrix.behind(dense)


def _gather(name: str, inputs: Tensors, attributes: Attributes, examples: Tensors) -> torch.Tensor:
    (x,) = _exchanged(name, inputs)
    count = _replicas()
    shapes: list[tuple[int, ...]] = [(count, *x.shape), (count * x.numel(),)]
    if x.dim():
        shapes.append((count * x.shape[0], *x.shape[1:]))
    wanted = tuple(examples[0].shape) if examples else None
    if len(examples) != 1 or wanted not in shapes:
        raise Error(
            f"Custom operator {name} cannot return its example outputs",
            got=f"{[list(e.shape) for e in examples]}, input {list(x.shape)}, {count} replicas",
            fix=f"let example_outputs be one tensor {list(shapes[0])} or {list(shapes[1])}",
        )
    return _exchange(name, x, collectives.all_gather()).reshape(wanted)


def _reduce(name: str, inputs: Tensors, attributes: Attributes, examples: Tensors) -> torch.Tensor:
    (x,) = _exchanged(name, inputs)
    _choice(name, {"op": "sum", **attributes}, "op", ("sum",))
    in_backward = bool(_integer(name, {"backwards": 0, **attributes}, "backwards", 0, 1))
    count, key = _replicas(), "__collectiveReplicaGrouping"
    grouping = _list(name, {key: [count, 1, count], **attributes}, key, (int,))
    if len(grouping) != 3 or grouping[2] != count or min(grouping) < 1:
        _refuse(name, key, grouping, f"[replicas in a group, stride, {count} replicas in all]")
    size, stride, _ = grouping
    if count % (size * stride):
        _refuse(name, key, grouping, f"groups that divide {count} replicas")
    return _exchange(name, x, collectives.all_reduce(size, stride, in_backward))


def _all_to_all(
    name: str, inputs: Tensors, attributes: Attributes, examples: Tensors
) -> torch.Tensor:
    (x,) = _exchanged(name, inputs)
    count = _replicas()
    if not x.dim() or x.shape[0] % count:
        fix = f"pass a tensor whose leading dimension can be divided by {count}, the replicas"
        _refuse_shapes(name, inputs, fix)
    return _exchange(name, x, collectives.all_to_all())


_OPERATORS: dict[str, Operator] = {
    "AutogradProxy": _proxy,
    "L1Distance": _distance(1.0),
    "L2Distance": _distance(2.0),
    "SimulatedQuant": _quant,
    "StaticSparseMatmul": _sparse,
    "ReplicatedAllGather": _gather,
    "ReplicatedAllReduceTP": _reduce,
    "ReplicatedAllToAll": _all_to_all,
}


def _replicas() -> int:
    """How many there are; outside of a wrapped model a single one."""
    capture = listener()
    return 1 if capture is None else capture.together().total


def _exchange(name: str, x: torch.Tensor, collective: Collective) -> torch.Tensor:
    capture = listener()
    replicas = Replicas() if capture is None else capture.together()
    collective = collective.over(replicas.processes)
    if replicas.count == 1:
        return collectives.alone(x, collective)
    if replicas.lane is None:
        raise Error(
            f"Custom operator {name} needs all replicas side by side",
            got=f"{replicas.count} replicas one after another; {replicas.apart}",
            fix="change what keeps them apart (with options.lanes, at least as many as replicas), "
            "or use options.replicationFactor(1)",
        )
    return collectives.exchange(x, collective, replicas.count, replicas.lane)


def _exchanged(name: str, inputs: Tensors) -> Tensors:
    if len(inputs) != 1 or inputs[0].dtype == torch.bool:
        _refuse_shapes(name, inputs, "pass one tensor of numbers")
    return inputs


def _inputs(name: str, inputs: Tensors, count: int) -> Tensors:
    if len(inputs) != count or not all(tensor.is_floating_point() for tensor in inputs):
        _refuse_shapes(name, inputs, f"pass {count} floating-point tensor{'s' * (count > 1)}")
    return inputs


def _integer(name: str, attributes: Attributes, key: str, low: int, high: float = math.inf) -> int:
    value = attributes.get(key)
    if not isinstance(value, int) or not low <= value <= high:
        span = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
        _refuse(name, key, value, f"an integer {span}")
    return value


def _choice(name: str, attributes: Attributes, key: str, among: tuple[str, ...]) -> str:
    value = attributes.get(key)
    if value not in among:
        _refuse(name, key, value, " or ".join(map(repr, among)))
    return str(value)


def _list(name: str, attributes: Attributes, key: str, kinds: tuple[type, ...]) -> list[Any]:
    value = attributes.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kinds) for item in value):
        _refuse(name, key, value, f"a list of {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _places(name: str, attributes: Attributes, key: str, block: int, size: int) -> list[int]:
    """Where blocks begin, counted in blocks."""
    places = _list(name, attributes, key, (int,))
    for place in places:
        if place % block or not 0 <= place < size:
            _refuse(name, key, place, f"multiples of {block} from 0 to {size - block}")
    return [place // block for place in places]


def _refuse(name: str, key: str, value: Any, wanted: str) -> NoReturn:
    given = repr(value)
    raise Error(
        f"Custom operator {name} cannot take its attribute '{key}'",
        got=given if len(given) < 80 else f"{given[:80]}...",
        fix=f"pass {wanted}",
    )


def _refuse_shapes(name: str, inputs: Tensors, fix: str) -> NoReturn:
    raise Error(
        f"Custom operator {name} cannot take its inputs",
        got=describe(kinds_of(inputs)),
        fix=fix,
    )


_MANTISSA, _BIAS = 23, 127  # of float32


def autograd_proxy(value: torch.Tensor, proxy: torch.Tensor) -> torch.Tensor:
    """Return the value; its gradient goes to the proxy only."""
    return with_surrogate_gradient(value, proxy, lambda gradient: gradient.to(proxy.dtype))


def distances(a: torch.Tensor, b: torch.Tensor, norm: float) -> torch.Tensor:
    """Return the norm of each ``a[i] - b[j]``, computed in float32: (M, K), (N, K) to (M, N)."""
    # Products of matrices would be quicker, and lose the digits of small distances.
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(a.float(), b.float(), norm, compute_mode=exact).to(a.dtype)


@dataclass(frozen=True)
class Format:
    """A floating-point format, as IEEE 754 has them: the largest exponent is not for numbers."""

    exponent_bits: int
    mantissa_bits: int
    stochastic: bool

    @property
    def bias(self) -> int:
        """What is added to exponents; the largest one itself."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest number."""
        return float(2**self.bias * (2 - 2**-self.mantissa_bits))

    def quantised(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers of this format in the type that they came in; beyond it the largest."""
        wide = x.float().clamp(-self.largest, self.largest)
        exponent = (wide.view(torch.int32) >> _MANTISSA & 255) - _BIAS
        step = exponent.clamp(min=1 - self.bias) - self.mantissa_bits
        # A power of two by its bits: exact, as the division and the product then are.
        unit = (step + _BIAS << _MANTISSA).view(torch.float32)
        count = wide / unit
        whole = torch.floor(count + torch.rand_like(count)) if self.stochastic else count.round()
        return (whole * unit).to(x.dtype)


def simulated_quantisation(
    x: torch.Tensor, form: Format, in_forward: bool, backward: str
) -> torch.Tensor:
    """Quantise values, gradients, both or neither."""
    value = form.quantised(x.detach()) if in_forward else x
    if backward == "stop":
        return value.detach()
    return with_surrogate_gradient(
        value, x, form.quantised if backward == "quantise" else lambda gradient: gradient
    )


@dataclass(frozen=True)
class BlockSparse:
    """A constant matrix of which some square blocks are not zero."""

    shape: tuple[int, int]
    block: int
    rows: Sequence[int]
    cols: Sequence[int]
    values: Sequence[float]

    def times(self, dense: torch.Tensor) -> torch.Tensor:
        """Return ``matrix @ dense``: (..., columns, N) to (..., rows, N)."""
        blocks = torch.tensor(self.values, dtype=dense.dtype).view(-1, self.block, self.block)
        return self._product(blocks, self.rows, self.cols, self.shape[0], dense)

    def behind(self, dense: torch.Tensor) -> torch.Tensor:
        """Return ``dense @ matrix``: (..., N, rows) to (..., N, columns)."""
        blocks = torch.tensor(self.values, dtype=dense.dtype).view(-1, self.block, self.block)
        turned = dense.transpose(-1, -2)
        result = self._product(blocks.mT, self.cols, self.rows, self.shape[1], turned)
        return result.transpose(-1, -2)

    def _product(
        self,
        blocks: torch.Tensor,
        to: Sequence[int],
        source: Sequence[int],
        size: int,
        dense: torch.Tensor,
    ) -> torch.Tensor:
        """Every block times its part of the dense matrix, added up where it belongs."""
        read = torch.tensor(source, dtype=torch.int64)
        written = torch.tensor(to, dtype=torch.int64)
        *batch, length, width = dense.shape
        stacked = dense.reshape(*batch, length // self.block, self.block, width)
        parts = blocks @ stacked.index_select(-3, read)
        shape = (*batch, size // self.block, self.block, width)
        return torch.zeros(shape, dtype=dense.dtype).index_add(-3, written, parts).flatten(-3, -2)
