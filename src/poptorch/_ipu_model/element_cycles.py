"""Cycles per element of the tiles' vector loops, while all six workers of a tile are busy.

From ``popopsCycleEstimators.hpp`` of PopLibs (MIT); what that lacks is composed of its rows.
"""

from __future__ import annotations

# Cycles per element (float32, 16 bits): cycles of one iteration over its elements, with the four
# more that rows marked * in the source need.
_READ: dict[str, tuple[float, float]] = {
    "add": (5 / 2, 5 / 4),
    "div": (10 / 2, 21 / 4),
    "maximum": (3 / 2, 4 / 4),
    "lt": (14 / 4, 9 / 4),
    "pow": (312, 325),
    "exp": (6 / 2, 4 / 4),
    "log": (12 / 2, 4 / 4),
    "tanh": (12 / 2, 4 / 4),
    "sigmoid": (12 / 2, 6 / 4),
    "sqrt": (10 / 2, 23 / 4),
    "rsqrt": (8 / 2, 19 / 4),
    "reciprocal": (6 / 2, 15 / 4),
    "relu": (3 / 2, 3 / 4),
    "neg": (2 / 2, 2 / 4),
    "round": (6 / 2, 6 / 4),
    "erf": (41, 13),
    "sin": (2304, 25),
    "tan": (5100, 5700),
    "int_add": (7, 7),
    "int_div": (277, 277),
    "pool": (5 / 2, 5 / 4),
    "nll_loss": (9, 9),
}

_SAME = {
    "sub": "add", "mul": "add", "rsub": "add", "add_": "add", "mul_": "add", "where": "add",
    "masked_fill": "add", "addcmul": "add", "lerp": "add", "_to_copy": "relu", "clone": "neg",
    "minimum": "maximum", "clamp": "maximum", "clamp_min": "maximum", "clamp_max": "maximum",
    "gt": "lt", "ge": "lt", "le": "lt", "eq": "lt", "ne": "lt", "logical_not": "lt",
    "logical_and": "lt", "logical_or": "lt", "bitwise_and": "lt", "bitwise_not": "lt",
    "cos": "sin", "floor": "round", "ceil": "round", "trunc": "round", "square": "neg",
    "abs": "neg", "log2": "log", "log1p": "log", "expm1": "exp", "leaky_relu": "relu",
    "hardtanh": "maximum", "threshold_backward": "maximum", "remainder": "div", "fmod": "div",
    "detach": "neg", "alias": "neg", "clip": "maximum", "fmax": "maximum", "fmin": "maximum",
    "relu6": "maximum", "threshold": "maximum", "bitwise_or": "lt", "bitwise_xor": "lt",
    "logical_xor": "lt", "isnan": "lt", "isinf": "lt", "isfinite": "lt", "sign": "lt", "sgn": "lt",
    "signbit": "lt", "heaviside": "lt", "any": "lt", "all": "lt", "true_divide": "div",
    "floor_divide": "div", "exp2": "exp", "log10": "log", "erfc": "erf", "copysign": "add",
    "positive": "neg", "frac": "round", "deg2rad": "add", "rad2deg": "add", "tril": "add",
    "triu": "add", "fill": "neg", "masked_select": "add", "native_dropout_backward": "add",
    "sum": "neg", "mean": "neg", "amax": "maximum", "amin": "maximum", "min": "max",
    "argmax": "max", "var_mean": "var", "celu": "selu", "hardsigmoid_backward": "hardtanh_backward",
    "hardshrink": "hardtanh_backward", "_prelu_kernel": "leaky_relu_backward", "cosh": "sinh",
    "acos": "asin", "acosh": "asinh", "smooth_l1_loss_backward": "_prelu_kernel_backward",
    "huber_loss": "smooth_l1_loss", "huber_loss_backward": "_prelu_kernel_backward", "prod": "add",
    "cumprod": "cumsum", "std": "var", "argmin": "max", "silu": "glu",
    "silu_backward": "glu_backward", "hardswish": "hardsigmoid",
    "sigmoid_backward": "tanh_backward", "_safe_softmax": "_softmax", "_log_softmax": "_softmax",
    "mse_loss_backward": "cumsum", "nll_loss_backward": "neg", "native_dropout": "cumsum",
    "bernoulli": "add", "rand": "add", "upsample": "add",
}  # fmt: skip

# Made of others: how often each.
_MADE: dict[str, dict[str, float]] = {
    "max": {"maximum": 1, "lt": 1},
    "cumsum": {"add": 2},
    "var": {"neg": 2, "add": 1},
    # GELU in PopTorch is the approximation with tanh.
    "gelu": {"add": 3, "tanh": 1},
    "gelu_backward": {"add": 6, "tanh": 1},
    "glu": {"sigmoid": 1, "add": 1},
    "glu_backward": {"sigmoid": 1, "add": 4},
    "mish": {"exp": 1, "log": 1, "tanh": 1, "add": 2},
    "mish_backward": {"exp": 1, "log": 1, "tanh": 1, "sigmoid": 1, "add": 5},
    "selu": {"exp": 1, "maximum": 1, "add": 2},
    "elu_backward": {"exp": 1, "lt": 1, "add": 3},
    "softplus_backward": {"sigmoid": 1, "lt": 1, "add": 1},
    "leaky_relu_backward": {"lt": 1, "add": 2},
    "hardtanh_backward": {"lt": 2, "add": 1},
    "hardsigmoid": {"maximum": 2, "add": 2},
    "softshrink": {"lt": 2, "add": 2},
    "log_sigmoid_forward": {"sigmoid": 1, "log": 1},
    "log_sigmoid_backward": {"sigmoid": 1, "add": 2},
    "_prelu_kernel_backward": {"lt": 1, "add": 3},
    "logit": {"div": 1, "log": 1, "add": 1},
    "sinh": {"exp": 2, "add": 2},
    "asin": {"sqrt": 1, "div": 1, "sin": 1},
    "atan": {"div": 1, "sin": 1},
    "atan2": {"div": 1, "sin": 1, "lt": 2},
    "asinh": {"sqrt": 1, "log": 1, "add": 2},
    "atanh": {"div": 1, "log": 1, "add": 2},
    "hypot": {"sqrt": 1, "add": 3},
    "xlogy": {"log": 1, "add": 1},
    "logaddexp": {"exp": 1, "log": 1, "add": 3},
    "nan_to_num": {"lt": 3, "add": 3},
    "smooth_l1_loss": {"lt": 1, "add": 4, "neg": 1},
    "binary_cross_entropy": {"log": 2, "add": 4},
    "binary_cross_entropy_backward": {"div": 1, "add": 3},
    "hardswish_backward": {"maximum": 2, "add": 3},
    "elu": {"exp": 1, "maximum": 1, "add": 1},
    "softplus": {"exp": 1, "log": 1, "add": 1},
    "tanh_backward": {"neg": 1, "add": 2},
    "_softmax": {"maximum": 1, "add": 2, "exp": 1, "neg": 1},
    "_softmax_backward_data": {"add": 3, "neg": 1},
    "_log_softmax_backward_data": {"add": 2, "exp": 1, "neg": 1},
    "norm": {"neg": 3, "add": 3},
    "norm_backward": {"neg": 3, "add": 5},
    "mse_loss": {"add": 1, "neg": 2},
    "addcdiv": {"div": 1, "add": 1},
    "normal": {"add": 3},
    "sort": {"lt": 16, "add": 16},
    "topk": {"lt": 8, "add": 8},
}


def cycles_per_element(name: str, itemsize: int, integers: bool = False) -> float:
    if integers:
        return _READ["int_div" if name in ("div", "remainder", "floor_divide") else "int_add"][0]
    row = _row(name) or "add"
    row = _SAME.get(row, row)
    if row in _MADE:
        parts = _MADE[row].items()
        return sum(often * cycles_per_element(part, itemsize) for part, often in parts)
    return _READ[row][1 if itemsize <= 2 else 0]


def is_known(name: str) -> bool:
    return _row(name) is not None


def _row(name: str) -> str | None:
    if name in _READ or name in _MADE or name in _SAME:
        return name
    if "norm" in name:
        return "norm_backward" if "backward" in name else "norm"
    for part in ("pool", "upsample", "nll_loss"):
        if part in name:
            return part
    plain = name.rstrip("_")
    return plain if plain in _READ or plain in _MADE or plain in _SAME else None
