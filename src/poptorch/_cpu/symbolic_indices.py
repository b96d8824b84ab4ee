"""Simplify quotients and remainders in indices whose sizes are symbolic.

Torch compares each variable of a loop with the divisor. That ``(128*a + 512*b) // (512*s)`` is zero
follows only from the largest value of the sum, ``512*s - 128``. Without quotients, loops are
joined, vectors are read at once, and compiling is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._base import private

LoopRanges = Mapping[Any, Any]  # for each variable, the number of its values, which begin with 0


def is_symbolic(index: Any, ranges: LoopRanges) -> bool:
    symbols = index.free_symbols.union(*(getattr(n, "free_symbols", ()) for n in ranges.values()))
    return any(map(_is_size, symbols.difference(ranges)))


def simplified(index: Any, ranges: LoopRanges) -> Any:
    """Return an index with as few quotients and remainders as possible."""
    args = [simplified(each, ranges) for each in index.args]
    if any(new is not old for new, old in zip(args, index.args, strict=True)):
        index = index.func(*args)
    if isinstance(index, private.FloorDiv):
        value, divisor = index.args
        return _quotient(value, divisor, ranges, index)
    if isinstance(index, private.ModularIndexing):
        value, divisor, modulus = index.args
        quotient = _quotient(value, divisor, ranges, value if divisor == 1 else None)
        if quotient is None:
            return index
        if _is_below(quotient, modulus, ranges):
            return quotient
        return private.ModularIndexing(quotient, 1, modulus)
    return index


def _quotient(value: Any, divisor: Any, ranges: LoopRanges, otherwise: Any) -> Any:
    """Divide the multiples of the divisor in a sum, if the other terms are too small to matter."""
    import sympy

    quotient = rest = sympy.S.Zero
    for term in _terms(value):
        share = term / divisor
        if share.is_integer and share.as_numer_denom()[1] == 1:
            quotient += share
        else:
            rest += term
    return quotient if _is_below(rest, divisor, ranges) else otherwise


def _terms(value: Any) -> Any:
    import sympy

    return sympy.Add.make_args(sympy.expand(value))


def _is_below(value: Any, limit: Any, ranges: LoopRanges) -> bool:
    """Return whether a value is never negative, and always less than a limit."""
    largest = [_largest(term, ranges) for term in _terms(value)]
    return None not in largest and _is_positive(limit - sum(largest))


def _largest(term: Any, ranges: LoopRanges) -> Any:
    """Return the largest value of a term; None if it may be negative, or has no known limit."""
    import sympy

    most = sympy.S.One
    for factor in sympy.Mul.make_args(term):
        if factor in ranges:
            most *= ranges[factor] - 1
        elif isinstance(factor, private.ModularIndexing) and _is_nonnegative(factor, ranges):
            most *= factor.args[2] - 1
        elif _is_product_of_sizes(factor) or (factor.is_Integer and factor >= 0):
            most *= factor
        else:
            return None
    return most


def _is_nonnegative(value: Any, ranges: LoopRanges) -> bool:
    if value in ranges or _is_product_of_sizes(value):
        return True
    if not value.args:
        return bool(value.is_Integer and value >= 0)
    kinds = private.FloorDiv, private.ModularIndexing
    is_known = value.is_Add or value.is_Mul or isinstance(value, kinds)
    return is_known and all(_is_nonnegative(each, ranges) for each in value.args)


def _is_positive(value: Any) -> bool:
    """Return whether a polynomial is at least 1 for all sizes, which are at least 1."""
    sizes = value.free_symbols
    if not all(map(_is_size, sizes)):
        return False
    parts = [each.as_coeff_Mul() for each in _terms(value.xreplace({n: n + 1 for n in sizes}))]
    return any(rest == 1 and number >= 1 for number, rest in parts) and all(
        number.is_Integer and number >= 0 and (rest == 1 or _is_product_of_sizes(rest))
        for number, rest in parts
    )


def _is_product_of_sizes(value: Any) -> bool:
    powers = value.as_powers_dict()
    return all(_is_size(size) and power.is_Integer and power > 0 for size, power in powers.items())


def _is_size(symbol: Any) -> bool:
    return bool(symbol.is_Symbol and symbol.is_positive and symbol.is_integer)
