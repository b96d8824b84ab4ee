"""How near two computations of one number have to be: by what rounds on the way, not by machine.

Between tiers, versions and processors three things differ: the order in which a sum is added up,
routines for ``exp`` and its like, and whether a product and a sum round once or twice. Each
changes a number by a certain number of units in the last place of the largest that took part.
"""

import torch

FUNCTION = 4
"""Roundings of an approximated function: vector routines promise one unit, scalar ones half a unit,
and the argument's own rounding arrives with it; so does the derivative's."""


def relative(terms: float, steps: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """How far apart two results may be, of the size of what was summed.

    Args:
        terms: roundings on the way: the length of the longest sum, of forward or backward, and
            ``FUNCTION`` for each approximated function before or after it.
        steps: updates one after another, each of which starts from what the last one made.
        dtype: in which it is rounded.
    """
    return terms * steps * torch.finfo(dtype).eps


def near(
    terms: float, steps: int = 1, *, size: float = 1.0, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """``relative`` for ``assert_close``; size: of the largest summand, if sums may be smaller."""
    share = relative(terms, steps, dtype)
    return {"rtol": share, "atol": share * size}
