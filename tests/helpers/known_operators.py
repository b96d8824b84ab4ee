"""Operators of public programs that PopTorch finds by name, and their formulas in plain torch."""

from collections.abc import Callable
from typing import Any

import torch

import poptorch

DOMAIN = "ai.graphcore"
X = torch.tensor([[0.3, -1.7], [2.0, 0.9], [-0.4, 3.1], [1.5, 0.6]])
BLOCKS: dict[str, Any] = {
    "n_rows": 4,
    "n_cols": 6,
    "block_size": 2,
    "rows": [2, 0, 0],
    "cols": [4, 0, 2],
}
VALUES = [float(v) for v in range(1, 13)]
QUANT: dict[str, Any] = {
    "exponent_bits": 4,
    "mantissa_bits": 3,
    "rounding": "nearest",
    "fwd": True,
    "bwd": "ste",
}
PRODUCT: dict[str, Any] = {"mode": "sparse_dense", "values": VALUES, **BLOCKS}

Function = Callable[[torch.Tensor], torch.Tensor]


def op(name: str, *inputs: torch.Tensor, out: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """Call the operator of this name, which returns one tensor like ``out``."""
    (result,) = poptorch.custom_op(inputs, name, DOMAIN, 1, [out], attributes)
    return result


def quantised(**attributes: Any) -> Function:
    """Return the operator that rounds to a small format, with some attributes changed."""
    return lambda a: op("SimulatedQuant", a, out=a, **QUANT | attributes)


def sparse(mode: str, like: Function) -> Function:
    """Return the product with the block-sparse matrix; ``like`` makes an example of its result."""
    return lambda a: op("StaticSparseMatmul", a, out=like(a), **PRODUCT | {"mode": mode})


def dense_matrix() -> torch.Tensor:
    """Return the block-sparse matrix with its zeros."""
    matrix = torch.zeros(4, 6)
    for at, (row, col) in enumerate(zip(BLOCKS["rows"], BLOCKS["cols"], strict=True)):
        block = torch.tensor(VALUES[4 * at : 4 * at + 4]).view(2, 2)
        matrix[row : row + 2, col : col + 2] += block
    return matrix


def distance(p: int) -> Function:
    """Return the operator of distances from three points in the norm ``p``."""
    out = torch.zeros(4, 3)
    return lambda a: op(f"L{p}Distance", a, X[:3], out=out, root_path="/nowhere")


def distance_formula(p: int) -> Function:
    """Return the definition of ``distance``."""
    return lambda a: (a[:, None] - X[None, :3]).abs().pow(p).sum(-1).pow(1 / p)


# By name: the operator, its formula, and an input.
CASES: dict[str, tuple[Function, Function, torch.Tensor]] = {
    "L1": (distance(1), distance_formula(1), X),
    "L2": (distance(2), distance_formula(2), X),
    "proxy": (
        lambda a: op("AutogradProxy", a.exp(), a * 3, out=a),
        lambda a: a.exp().detach() + 3 * a - (3 * a).detach(),
        X,
    ),
    "quantised": (
        quantised(exponent_bits=5, mantissa_bits=10),
        lambda a: a + (a.half().float() - a).detach(),
        X,
    ),
    "sparse @ dense": (
        sparse("sparse_dense", lambda a: a[:4]),
        lambda a: dense_matrix() @ a,
        torch.cat([X, X[:2]]),
    ),
    "dense @ sparse": (
        sparse("dense_sparse", lambda a: torch.zeros(2, 6)),
        lambda a: a @ dense_matrix(),
        X.t().contiguous(),
    ),
}
